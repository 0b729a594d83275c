"""Convolutions that filter each channel by itself: the gradients of their weights are torch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pfl_ext.engine.cpu.choice import BY_PROCESSOR, FLOAT32
from pfl_ext.engine.cpu.depthwise import Depthwise
from pfl_ext.engine.cpu.kernels import Form
from pfl_ext.engine.cpu.layers import CpuLayers
from tests.pfl_ext.engine.cpu.roundings import (
    BFLOAT16,
    KERNELS,
    compiled,
    relative,
    rounding,
    threads,
    with_drawn_weights,
)
from tests.pfl_ext.engine.setting import Setting, distance, rounding_of


@compiled
@settings(max_examples=30)
@given(
    n=st.integers(1, 3),
    size=st.tuples(*[st.integers(1, 11)] * 2),
    channels=st.sampled_from([16, 48]),
    stride=st.integers(1, 3),
    padding=st.tuples(*[st.integers(0, 4)] * 2),
    whole=st.booleans(),
    count=st.sampled_from([1, 2]),
)
def test_the_gradients_of_the_weights_are_torchs(
    n: int,
    size: tuple[int, int],
    channels: int,
    stride: int,
    padding: tuple[int, int],
    whole: bool,
    count: int,
) -> None:
    """To the bit of whole numbers, whose sums nothing rounds."""
    assert KERNELS is not None
    high, wide = (max(side, 5 - 2 * p) for side, p in zip(size, padding))
    draw = torch.Generator().manual_seed(n)

    def drawn(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, generator=draw).float() + (0 if whole else 0.1)

    x, weight = drawn(n, channels, high, wide), drawn(channels, 1, 5, 5)
    with torch.enable_grad():
        leaf = weight.double().requires_grad_()
        y = F.conv2d(x.double(), leaf, None, stride, padding, groups=channels)
        e = drawn(*y.shape)
        (theirs,) = torch.autograd.grad(y, leaf, e.double())
    with threads(count):
        ours = KERNELS.depthwise_weights(x, e, Form(5, 5, stride, *padding))
    if whole:
        assert torch.equal(ours.double(), theirs)
    assert relative(ours, theirs) <= rounding(e[0, 0].numel() * n)


def deep_backbone() -> nn.Module:
    """With kernels of 5 x 5 that are compiled, one with a bias, and some of 3 x 3, which are torch's."""
    net = nn.Sequential(
        nn.Conv2d(3, 16, 1),
        nn.Conv2d(16, 16, 5, padding=2, groups=16, bias=False),
        nn.ReLU6(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.Conv2d(16, 16, 5, stride=2, padding=(1, 2), groups=16),
        nn.Flatten(),
        nn.Linear(16 * 4 * 5, 5),
    )
    return with_drawn_weights(net)


@compiled
@pytest.mark.parametrize("clipping", ["none", "global", "variable"])
def test_a_cohort_is_that_of_pfls_loop(clipping: str, calls: list[str]) -> None:
    """Some users have one step, whose gradients come out of one pass, and others several."""
    more: dict[str, Any] = {} if clipping == "none" else {"clipping": clipping, "max_norm": 0.3}
    setting = Setting([1, 2, 9, 5], learning_rate=0.05, backbone=deep_backbone, **more)
    theirs, ours = setting.run(False)[0], setting.run(True, lanes=2)[0]
    assert distance(ours, theirs) <= rounding_of(setting)
    assert calls.count("depthwise_weights") > 2 * 2


@compiled
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 7},
        {"kernel_size": (5, 3)},
        {"kernel_size": 5, "dilation": 2},
        {"kernel_size": 5, "stride": (1, 2)},
        {"kernel_size": 5, "padding_mode": "reflect", "padding": 2},
        {"kernel_size": 5, "padding": "same"},
        {"kernel_size": 5, "groups": 8},
        {"kernel_size": 5, "out_channels": 32},
        {"kernel_size": 5, "in_channels": 24, "out_channels": 24, "groups": 24},
    ],
    ids=str,
)
def test_other_convolutions_of_groups_stay_torchs(options: dict[str, Any]) -> None:
    assert KERNELS is not None
    layers = CpuLayers(KERNELS, FLOAT32)
    plain: dict[str, Any] = {"in_channels": 16, "out_channels": 16, "groups": 16}
    assert type(layers.replaced(nn.Conv2d(**plain, kernel_size=5))) is Depthwise
    assert type(layers.replaced(nn.Conv2d(**{**plain, **options}))) is nn.Conv2d


@compiled
@pytest.mark.parametrize("kernel, stride", [(3, 1), (3, 2), (5, 1), (5, 2)])
def test_under_autocast_it_computes_in_float32(kernel: int, stride: int) -> None:
    """From images that are bfloat16, to an output and an images' gradient that are rounded to it, once."""
    assert KERNELS is not None
    layer, draw = nn.Conv2d(16, 16, kernel, stride, 1, groups=16), torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, generator=draw)
    exact, ours = copy.deepcopy(layer).double(), Depthwise(layer, KERNELS)
    x = torch.randn(2, 16, 7, 7, generator=draw).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = ours(x)
    e = torch.randn(y.shape, generator=draw).bfloat16()
    found = [y, *torch.autograd.grad(y, (x, *layer.parameters()), e)]
    leaf = x.detach().double().requires_grad_()
    right = exact(leaf)
    expected = [right, *torch.autograd.grad(right, (leaf, *exact.parameters()), e.double())]
    half = BFLOAT16 + rounding(kernel**2)
    for mine, theirs, bound in zip(
        found, expected, [half] * 2 + [rounding(e[:, 0].numel())] * 2, strict=True
    ):
        assert mine.dtype == (torch.bfloat16 if bound == half else torch.float32)
        assert relative(mine, theirs) <= bound
    assert all(row.depthwise == FLOAT32.depthwise for row in BY_PROCESSOR.values())
