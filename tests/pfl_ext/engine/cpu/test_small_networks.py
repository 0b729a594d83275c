"""What is compiled for small networks: pooled and first convolutions, linear layers, dropout, crops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pfl_ext.data.transforms import CROP_COLUMNS, KEY_BITS, KEY_COLUMNS, Flip, Padding, draw_crops
from pfl_ext.engine.cpu.choice import BY_PROCESSOR, FLOAT32
from pfl_ext.engine.cpu.convolutions import FewChannels, PooledConvolution
from pfl_ext.engine.cpu.crops import Crops
from pfl_ext.engine.cpu.dense import (
    FEW_IMAGES,
    Dropout,
    Linear,
    Room,
    gradients_into,
    linear,
    linear_backward,
)
from pfl_ext.engine.cpu.joining import Pooled
from pfl_ext.engine.cpu.kernels import CHANNELS, CpuKernels
from pfl_ext.engine.cpu.layers import CpuLayers
from pfl_ext.engine.cpu.narrow import After, few_channels_backward, first, first_backward, pooled
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.dropout import KeyedDropout, dropping
from pfl_ext.tasks.single_label import SingleLabel
from tests.pfl_ext.engine.cpu.roundings import KERNELS, UNIT, compiled, relative, threads, with_drawn_weights
from tests.pfl_ext.engine.setting import LABELS, Setting, distance, drawn, rounding_of
from tests.pfl_ext.samplings import local_sampling


def whole(draw: torch.Generator, *shape: int) -> Tensor:
    """Whole numbers, whose sums nothing rounds, and some of which are alike."""
    return torch.randint(-4, 5, shape, generator=draw).float()


def convolved(
    leaves: list[Tensor], padding: tuple[int, int], relu: bool, pool: bool, draw: torch.Generator
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """By torch in float64: the output, a gradient for it, and those of images, weights and bias."""
    with torch.enable_grad():
        exact = [t.double().requires_grad_() for t in leaves]
        y = F.conv2d(exact[0], exact[1], exact[2], padding=padding)
        y = y.relu() if relu else y
        y = F.max_pool2d(y, 2) if pool else y
        e = whole(draw, *y.shape)
        return y.detach(), e, torch.autograd.grad(y, exact, e.double())


KERNEL = st.tuples(*[st.integers(1, 6)] * 2)
PADDING = st.tuples(*[st.integers(0, 2)] * 2)


@compiled
@settings(max_examples=40)
@given(
    n=st.integers(1, 5),
    size=st.tuples(*[st.integers(1, 11)] * 2),
    channels=st.tuples(st.integers(1, 40), st.integers(16, 40)),
    kernel=KERNEL,
    padding=PADDING,
    relu=st.booleans(),
    order=st.booleans(),
    count=st.sampled_from([1, 2]),
)
def test_a_pooled_convolution_of_any_channels_and_its_gradients_are_torchs(
    n: int,
    size: tuple[int, int],
    channels: tuple[int, int],
    kernel: tuple[int, int],
    padding: tuple[int, int],
    relu: bool,
    order: bool,
    count: int,
) -> None:
    assert KERNELS is not None
    sides = [max(a, b - 2 * p + 1) for a, b, p in zip(size, kernel, padding)]
    draw = torch.Generator().manual_seed(n)
    x, weight = whole(draw, n, channels[0], *sides), whole(draw, channels[1], channels[0], *kernel)
    shift = whole(draw, channels[1])
    theirs, e, exact = convolved([x, weight, shift], padding, relu, True, draw)
    signals = e.contiguous(memory_format=torch.channels_last) if order else e
    with threads(count):
        after = After(relu, pool=True)
        out, laid = pooled(KERNELS, x, weight, shift, padding, after)
        found = few_channels_backward(KERNELS, signals, weight, padding, after, laid, (True, True))
        only_x = few_channels_backward(KERNELS, signals, weight, padding, after, laid, (True, False))
    assert torch.equal(out.double(), theirs)
    for mine, right in zip(found, exact, strict=True):
        assert mine is not None
        assert torch.equal(mine.double(), right)
    assert only_x[1] is only_x[2] is None
    assert torch.equal(only_x[0], found[0])  # type: ignore[arg-type]


@compiled
@pytest.mark.parametrize("padding", [0, 1])
def test_a_pooled_convolution_by_winograd_is_near_torchs(padding: int) -> None:
    assert KERNELS is not None
    draw = torch.Generator().manual_seed(1)
    x, weight, shift = (torch.randn(s, generator=draw) for s in ((6, 32, 19, 22), (64, 32, 3, 3), (64,)))
    sides = (padding, padding)
    out, _ = pooled(KERNELS, x, weight, shift, sides, After(relu=True, pool=True))
    assert relative(out, convolved([x, weight, shift], sides, True, True, draw)[0]) <= 16 * 288**0.5 * UNIT


@compiled
def test_a_gradient_that_is_no_number_stays_with_its_image() -> None:
    assert KERNELS is not None
    draw = torch.Generator().manual_seed(1)
    x, weight = torch.randn(3, 3, 8, 8, generator=draw), torch.randn(16, 3, 5, 5, generator=draw)
    after = After(pool=True)
    _, laid = pooled(KERNELS, x, weight, None, (0, 0), after)
    e = torch.randn(3, 16, 2, 2, generator=draw)
    e[1] = torch.nan
    dx = few_channels_backward(KERNELS, e, weight, (0, 0), after, laid, (True, False))[0]
    assert dx is not None
    assert dx[1].isnan().any()
    assert dx[[0, 2]].isfinite().all()


@compiled
@settings(max_examples=30)
@given(
    n=st.integers(1, 4),
    size=st.tuples(*[st.integers(1, 12)] * 2),
    c=st.integers(1, 15),
    k=st.integers(1, 3),
    kernel=KERNEL,
    padding=PADDING,
    relu=st.booleans(),
)
def test_a_first_convolution_and_its_gradients_are_torchs(
    n: int,
    size: tuple[int, int],
    c: int,
    k: int,
    kernel: tuple[int, int],
    padding: tuple[int, int],
    relu: bool,
) -> None:
    assert KERNELS is not None
    sides = [max(a, b - 2 * p) for a, b, p in zip(size, kernel, padding)]
    draw = torch.Generator().manual_seed(n)
    x, weight = whole(draw, n, c, *sides), whole(draw, k * CHANNELS, c, *kernel)
    shift = whole(draw, k * CHANNELS)
    theirs, e, exact = convolved([x, weight, shift], padding, relu, False, draw)
    out, images = first(KERNELS, x, weight, shift, padding, relu)
    assert torch.equal(out.double(), theirs)
    for mine, right in zip(first_backward(KERNELS, images, e, out, weight, relu), exact[1:], strict=True):
        assert torch.equal(mine.double(), right)


@compiled
@settings(max_examples=30)
@given(
    n=st.one_of(st.integers(1, 9), st.integers(FEW_IMAGES - 1, FEW_IMAGES + 1)),
    c=st.integers(1, 70),
    k=st.integers(1, 20),
    relu=st.booleans(),
    bias=st.booleans(),
    count=st.sampled_from([1, 2]),
)
def test_a_linear_layer_its_gradients_and_its_step_are_torchs(
    n: int, c: int, k: int, relu: bool, bias: bool, count: int
) -> None:
    assert KERNELS is not None
    draw = torch.Generator().manual_seed(n)
    x, weight, shift, e = whole(draw, n, c), whole(draw, k, c), whole(draw, k), whole(draw, n, k)
    with torch.enable_grad():
        leaves = [t.double().requires_grad_() for t in (x, weight, shift)]
        y = F.linear(leaves[0], leaves[1], leaves[2] if bias else None)
        y = y.relu() if relu else y
        exact = torch.autograd.grad(y, leaves[: 2 + bias], e.double())
    room = Room(torch.empty_like(weight), weight.clone(), 0.5)
    with threads(count):
        out = linear(KERNELS, x, weight, shift if bias else None, relu)
        after = out if relu else None
        found = linear_backward(KERNELS, x, e, weight, after, (True, True, bias))
        moved = linear_backward(KERNELS, x, e, weight, after, (True, True, False), room)
    assert torch.equal(out.double(), y)
    for mine, right in zip(found, exact):
        assert mine is not None
        assert torch.equal(mine.double(), right)
    assert torch.equal(moved[0], found[0])  # type: ignore[arg-type]
    assert room.done == (n <= FEW_IMAGES)
    result = room.after if room.done else weight - 0.5 * moved[1]  # type: ignore[operator]
    assert torch.equal(result.double(), weight - 0.5 * exact[1])  # type: ignore[union-attr]


@compiled
def test_a_linear_layer_may_move_its_weights_in_place() -> None:
    assert KERNELS is not None
    draw = torch.Generator().manual_seed(1)
    layer, x = Linear(nn.Linear(33, 7), KERNELS), whole(draw, 5, 33).requires_grad_()
    with torch.no_grad():
        layer.weight.copy_(whole(draw, 7, 33))
    before = layer.weight.detach().clone()
    room = Room(torch.empty_like(before), layer.weight.data, 0.25)
    with gradients_into({id(layer.weight): room}), torch.enable_grad():
        y = layer(x)
        y.sum().backward()
    assert room.done
    assert torch.equal(layer.weight, before - 0.25 * x.detach().sum(0))
    assert torch.equal(x.grad, before.sum(0).expand(5, 33))  # type: ignore[arg-type]


@compiled
@pytest.mark.parametrize("shape", [(7, 5), (7, 6, 3, 4), (7, 3, 5), (7, 2, 3, 2, 2)])
@pytest.mark.parametrize("wide", [0, 1, 2])
def test_dropout_drops_what_it_does_elsewhere_bit_by_bit(shape: tuple[int, ...], wide: int) -> None:
    assert KERNELS is not None
    draw = torch.Generator().manual_seed(0)
    crops = torch.randint(0, 1 << KEY_BITS, (7, CROP_COLUMNS + KEY_COLUMNS), generator=draw).float()
    x, e = (torch.randn(shape, generator=draw) for _ in range(2))
    forms = [torch.contiguous_format, *([torch.channels_last] if len(shape) == 4 else [])]
    for p, form in ((p, form) for p in (0.0, 0.05, 0.5, 1.0) for form in forms):
        results = []
        for kind in (KeyedDropout(p, 3, wide), Dropout(KeyedDropout(p, 3, wide), KERNELS)):
            leaf = x.clone(memory_format=form).requires_grad_()
            with torch.enable_grad(), dropping(crops):
                y = kind(leaf)
            results.append((y, torch.autograd.grad(y, leaf, e)[0] if y.requires_grad else e))
            assert torch.equal(kind(x), x), "without keys nothing is dropped"
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results))


@compiled
@pytest.mark.parametrize("padding", ["zero", "reflect"])
@pytest.mark.parametrize("flip", ["none", "both"])
@pytest.mark.parametrize("plain", [False, True])
def test_crops_are_those_of_torch_bit_by_bit(padding: Padding, flip: Flip, plain: bool) -> None:
    assert KERNELS is not None
    rng = np.random.default_rng(0)
    network = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    looks: dict[str, Any] = {"mean": (0, 0, 0), "std": (1, 1, 1)} if plain else {}
    model = ImageClassifier(network, task=SingleLabel(), input_size=14, padding=padding, **looks)
    images = torch.from_numpy(rng.integers(0, 256, (9, 16, 16, 3), np.uint8))
    crops = torch.from_numpy(draw_crops(rng, 9, 16, 14, "padded", flip))
    theirs = model.prepare(images, images, crops)[0]
    model.cropping = Crops(model, KERNELS)
    ours = model.prepare(images, images, crops)[0]
    assert torch.equal(ours, theirs)
    assert ours.stride() == theirs.stride()
    resized = crops.clone()
    resized[0, 2] = 13
    if padding == "zero":
        assert model.cropping(images, resized) is None, "they are resized, which is torch's"


def dropping_backbone() -> nn.Sequential:
    """A first convolution, a pooled one, dropout and linear layers, small and with few images."""
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 16, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        KeyedDropout(0.25, 0),
        nn.Flatten(),
        nn.Linear(16 * 9, 20),
        nn.ReLU(inplace=True),
        KeyedDropout(0.5, 1),
        nn.Linear(20, LABELS),
    )
    return drawn(net, 0.15, torch.Generator().manual_seed(4))


class Twice(nn.Module):
    """A network that uses one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Conv2d(3, 16, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 16))
        self.again, self.last = nn.Linear(16, 16), nn.Linear(16, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.last(self.again(self.again(x).relu()))  # type: ignore[no-any-return]


def twice() -> nn.Module:
    return with_drawn_weights(Twice())


BACKBONES: dict[str, Callable[[], nn.Module]] = {"dropping": dropping_backbone, "twice": twice}


@compiled
@pytest.mark.parametrize(
    "name, options",
    [
        ("dropping", {}),
        ("dropping", {"momentum": 0.6, "weight_decay": 0.05}),
        ("dropping", {"mu": 0.3}),
        ("dropping", {"clipping": "global", "max_norm": 0.3}),
        ("dropping", {"scaffold": ("I", "step")}),
        ("dropping", {"scaffold": ("II", "gradient"), "rounds": 2}),
        ("twice", {}),
    ],
    ids=str,
)
def test_a_cohort_of_small_networks_is_that_of_pfls_loop(name: str, options: dict[str, Any]) -> None:
    sampling = local_sampling(input_size=10, batch_size=4, keys=True)
    setting = Setting([1, 2, 9, 5], sampling, "none", learning_rate=0.1, backbone=BACKBONES[name])
    for key, value in options.items():
        setattr(setting, key, value)
    allowed = rounding_of(setting)
    theirs = setting.run(False)[0]
    for lanes in (1, 2):
        assert distance(setting.run(True, lanes=lanes)[0], theirs) <= allowed


@compiled
@pytest.mark.parametrize(
    "name, options, expected",
    [("dropping", {}, True), ("dropping", {"momentum": 0.6}, False), ("twice", {}, False)],
    ids=str,
)
def test_layers_make_steps_of_plain_gradient_descent_alone(
    name: str, options: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[bool] = []
    call = CpuKernels.call

    def noted(self: CpuKernels, function: str, tensors: Any, *numbers: float) -> None:
        if function == "linear_gradients" and numbers[0] == 4:
            steps.append(bool(numbers[3]))
        call(self, function, tensors, *numbers)

    monkeypatch.setattr(CpuKernels, "call", noted)
    setting = Setting([9], clipping="none", backbone=BACKBONES[name], **options)
    assert setting.sampling.batch_size == 4
    setting.run(True, lanes=1)
    assert len(steps) > 4
    assert all(step == expected for step in steps)


@compiled
def test_which_layers_are_taken_over() -> None:
    assert KERNELS is not None
    layers = CpuLayers(KERNELS, FLOAT32)
    kinds = [type(layer) for layer in layers.replaced(dropping_backbone()).children()]
    taken = [FewChannels, PooledConvolution, Pooled, Dropout, Linear, Dropout, Linear]
    assert [kind for kind in kinds if kind not in (nn.ReLU, nn.Flatten)] == taken
    half = CpuLayers(KERNELS, BY_PROCESSOR["AVX512-BF16"]).replaced(dropping_backbone())
    assert not any(isinstance(layer, PooledConvolution | Linear) for layer in half.modules())
