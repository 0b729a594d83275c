"""The compiled layers compute what torch's compute."""

from __future__ import annotations

import copy
import math
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.engine.cpu import kernels as cpu_kernels
from pfl_ext.engine.cpu.choice import BY_PROCESSOR, FLOAT32
from pfl_ext.engine.cpu.kernels import CpuKernels, Form, Unavailable
from pfl_ext.engine.cpu.layers import Convolution, CpuLayers, GroupNorm, kernels_for
from pfl_ext.models.classifier import ImageClassifier, build_backbone
from tests.pfl_ext.engine.setting import (
    Setting,
    distance,
    in_float64,
    norm,
    rounding_of,
    wide_backbone,
    without_noise,
)

try:
    KERNELS: CpuKernels | None = CpuKernels()
except Unavailable:
    KERNELS = None
compiled = pytest.mark.skipif(KERNELS is None, reason="no C++ compiler here")
with_halves = pytest.mark.skipif(
    KERNELS is None or not KERNELS.has_halves, reason="this processor does no arithmetic with half floats"
)


@pytest.fixture
def threads() -> Iterator[None]:
    """As many torch threads afterwards as before."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def relative(ours: Tensor | None, theirs: Tensor) -> float:
    assert ours is not None
    assert ours.shape == theirs.shape
    theirs = theirs.detach()
    return float((ours.detach().double() - theirs).norm() / theirs.norm().clamp(min=1e-30))


UNIT, BFLOAT16 = 2.0**-24, 2.0**-9
"""Of rounding."""
WINOGRAD = 5.2
"""By how much the transforms magnify what is lost in the 36 products, with images and weights of independent
numbers: the root of the mean over outputs p of ``sum_i A_pi^2 |B_i|^2 |G_i|^2 / 3``, for both sides, where B
transforms windows, G taps and A products (`winograd.h`); 5.14, also for the gradient of the weights."""


def rounding(terms: int, winograd: bool = False) -> float:
    """Of sums of so many independent products, in any order: roundings go up as often as down.

    Twice the root of the count, and four more for what is rounded before and after. Winograd has a ninth
    of the terms or fewer, but three transforms of six terms each, and magnifies what all of them lose.
    """
    if winograd:
        return WINOGRAD * UNIT * (2 * math.sqrt(terms / 9) + 4 + 3 * math.sqrt(6))
    return UNIT * (2 * math.sqrt(terms) + 4)


def roundings_of(x: Tensor, e: Tensor, form: Form, winograd: bool = False) -> tuple[float, float, float]:
    """`rounding` of a convolution's output, and of the gradients of its images and weights."""
    taps, (_, k, down, across) = form.high * form.wide, e.shape
    terms = (x.shape[1] * taps, k * taps, len(e) * down * across)
    forward, to_images, to_weights = (rounding(count, winograd) for count in terms)
    return forward, to_images, to_weights


def apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.detach().double() - theirs.detach()).norm())


def drawn(n: int, size: tuple[int, int], channels: tuple[int, int], form: Form) -> list[Tensor]:
    """Images, weights and a gradient of the output."""
    draw = torch.Generator().manual_seed(n * 1000 + size[0] * 17 + size[1])
    shapes = (n, channels[0], *size), (channels[1], channels[0], form.high, form.wide)
    return [torch.randn(shape, generator=draw) for shape in (*shapes, (n, channels[1], *form.output(*size)))]


def exact(x: Tensor, weight: Tensor, e: Tensor, form: Form) -> tuple[Tensor, ...]:
    """The output and the gradients of images and weights by torch, float64."""
    leaves = [x.double().requires_grad_(), weight.double().requires_grad_()]
    y = F.conv2d(leaves[0], leaves[1], stride=form.stride, padding=(form.top, form.left))
    return (y.detach(), *torch.autograd.grad(y, leaves, e.double()))


def fitting(kernel: tuple[int, int], size: tuple[int, int], stride: int, padding: tuple[int, int]) -> Form:
    """A form whose kernel is no larger than the images with their padding."""
    high, wide = (min(k, s + 2 * p) for k, s, p in zip(kernel, size, padding))
    return Form(high, wide, stride, *padding)


@compiled
@pytest.mark.parametrize("winograd", [True, False])
@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 5),
    size=st.tuples(*[st.integers(1, 13)] * 2),
    channels=st.sampled_from([(32, 32), (32, 96), (64, 32)]),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 3),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    count=st.sampled_from([1, 2]),
)
def test_a_convolution_and_its_gradients_are_torchs(
    winograd: bool,
    n: int,
    size: tuple[int, int],
    channels: tuple[int, int],
    kernel: tuple[int, int],
    stride: int,
    padding: tuple[int, int],
    count: int,
) -> None:
    assert KERNELS is not None
    if winograd:
        kernel, stride, padding = (3, 3), 1, (1, 1)
    form = fitting(kernel, size, stride, padding)
    x, weight, e = drawn(n, size, channels, form)
    y, dx, dw = exact(x, weight, e, form)
    before, threads = cpu_kernels.WEIGHTS, torch.get_num_threads()
    cpu_kernels.WEIGHTS = -1e12 if winograd else 1e12
    torch.set_num_threads(count)
    try:
        margins = roundings_of(x, e, form, winograd)
        assert relative(KERNELS.convolution(x, weight, form), y) < margins[0]
        ours = KERNELS.convolution_backward(x, e, weight, form, (True, True))
        assert relative(ours[0], dx) < margins[1]
        assert relative(ours[1], dw) < margins[2]
        only_x = KERNELS.convolution_backward(x, e, weight, form, (True, False))
        only_w = KERNELS.convolution_backward(x, e, weight, form, (False, True))
    finally:
        cpu_kernels.WEIGHTS = before
        torch.set_num_threads(threads)
    assert only_x[1] is None
    assert only_w[0] is None
    assert only_x[0] is not None
    assert torch.equal(only_x[0], ours[0])  # type: ignore[arg-type]
    assert only_w[1] is not None
    assert torch.equal(only_w[1], ours[1])  # type: ignore[arg-type]


@with_halves
@pytest.mark.parametrize("way", ["Winograd", "direct", "thin"])
@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 5),
    size=st.tuples(*[st.integers(5, 13)] * 2),
    channels=st.sampled_from([(32, 32), (32, 96), (64, 32), (512, 32)]),
    stride=st.integers(1, 3),
    powers=st.tuples(*[st.integers(-30, 30)] * 3),
    count=st.sampled_from([1, 2]),
)
def test_of_bfloat16_images_of_any_size_a_convolution_is_near_torchs(
    way: str,
    n: int,
    size: tuple[int, int],
    channels: tuple[int, int],
    stride: int,
    powers: tuple[int, int, int],
    count: int,
) -> None:
    assert KERNELS is not None
    if way == "thin":
        channels = (min(channels[0] // 32 * 3, 31), channels[1])
    form = Form(3, 3, 1 if way == "Winograd" else stride, 1, 1)
    x, weight, e = drawn(n, size, channels, form)
    x, weight, e = ((t * 2.0**power) for t, power in zip((x, weight, e), powers))
    draw = torch.Generator().manual_seed(n)
    x, e = x.bfloat16(), (e * torch.rand(e.shape, generator=draw) ** 8).bfloat16()  # most gradients are small
    y, dx, dw = exact(x, weight, e, form)
    margin = 0.02 if way == "Winograd" else 0.006
    threads = torch.get_num_threads()
    torch.set_num_threads(count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_kernels, "WEIGHTS", -1e12 if way == "Winograd" else 1e12)
        patch.setattr(Form, "halves_pay", lambda *_: True)
        out = KERNELS.convolution(x, weight, form)
        ours = KERNELS.convolution_backward(x, e, weight, form, (way != "thin", True))
        patch.setattr(Form, "halves_pay", lambda *_: False)
        plain = KERNELS.convolution(x, weight, form)
        in_floats = KERNELS.convolution_backward(x, e, weight, form, (way != "thin", True))
    torch.set_num_threads(threads)
    assert out.dtype == plain.dtype == torch.bfloat16
    assert relative(out, y) < margin
    assert relative(plain, y) < 0.004
    assert ours[1] is not None
    assert ours[1].dtype == torch.float32
    assert 1e-6 < relative(ours[1], dw) < margin
    assert relative(in_floats[1], dw) < 1e-5
    if way != "thin":
        assert relative(ours[0], dx) < margin
        assert relative(in_floats[0], dx) < 0.004


@with_halves
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("channels", [(1024, 64), (64, 1024)], ids=str)
def test_no_sum_of_half_floats_overflows(channels: tuple[int, int], stride: int) -> None:
    """All numbers as large as the largest, and of the signs that the transforms and the sums add up."""
    assert KERNELS is not None
    form = Form(3, 3, stride, 1, 1)
    for size in (0.99, 1.0, 1.01):
        for signs in (lambda i: 1, lambda i: (-1) ** i, lambda i: (-1) ** (i // 2)):
            row = torch.tensor([size * signs(i) for i in range(16)])
            x = (row[:, None] * row)[None, None].expand(8, channels[0], 16, 16).bfloat16()
            weight = (row[:3, None] * row[:3])[None, None].expand(*channels[::-1], 3, 3).contiguous()
            y = F.conv2d(x.float(), weight, stride=stride, padding=1)
            e = x[:, :1, ::stride, ::stride].repeat(1, channels[1], 1, 1)
            found = KERNELS.convolution(x, weight, form)
            dx, dw = KERNELS.convolution_backward(x, e, weight, form, (True, True))
            for made in (found, dx, dw):
                assert made is not None
                assert made.isfinite().all()
            assert relative(found, y) < 0.03


@with_halves
@pytest.mark.parametrize("channels", [3, 32])
@pytest.mark.parametrize("stride", [1, 2])
def test_what_shares_a_vector_of_half_floats_does_not_share_its_numbers(channels: int, stride: int) -> None:
    """An odd image is alone with its scale, not with what is left of another."""
    assert KERNELS is not None
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, channels, 12, 12, generator=draw)
    x[:2] *= 2.0**40
    x = x.bfloat16()
    weight = torch.randn(32, channels, 3, 3, generator=draw)
    form = Form(3, 3, stride, 1, 1)
    e = torch.randn(3, 32, *form.output(12, 12), generator=draw).bfloat16()
    e[:2] = 0
    y, _, dw = exact(x, weight, e, form)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out = KERNELS.convolution(x, weight, form)
    found = KERNELS.convolution_backward(x, e, weight, form, (False, True))[1]
    torch.set_num_threads(threads)
    assert relative(out[:2], y[:2]) < 0.02
    if channels == 3:  # whose frame is an image's own, or two images'
        assert relative(out[2:], y[2:]) < 0.02
        assert relative(found, dw) < 0.02
    assert out.isfinite().all()
    assert found is not None
    assert found.isfinite().all()


@with_halves
@pytest.mark.parametrize("norm", ["group", "frozen_batch"])
def test_in_bfloat16_a_networks_gradients_err_as_much_as_torchs(norm: str) -> None:
    assert KERNELS is not None
    network = resnet(norm)
    taken = CpuLayers(KERNELS, BY_PROCESSOR["AVX512-FP16"]).replaced(copy.deepcopy(network))
    draw = torch.Generator().manual_seed(4)
    x = F.interpolate(torch.rand(6, 3, 8, 8, generator=draw), size=(64, 64), mode="bicubic")
    targets = (torch.rand(6, 17, generator=draw) < 0.3).double()

    def gradients(module: nn.Module, x: Tensor) -> Tensor:
        loss = F.binary_cross_entropy_with_logits(module(x).double(), targets)
        return torch.cat([g.double().flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])

    exact = gradients(copy.deepcopy(network).double(), x.double())
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = (relative(gradients(module, x), exact) for module in (network, taken))
        assert taken.layer1(torch.zeros(1, 64, 8, 8)).dtype == torch.bfloat16  # type: ignore[operator]
    assert 1e-3 < ours < 1.3 * theirs < 0.3


@compiled
@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 3),
    size=st.tuples(*[st.integers(3, 13)] * 2),
    channels=st.sampled_from([(1, 32), (3, 64), (31, 32)]),
    kernel=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    stride=st.integers(1, 3),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_a_convolution_of_few_channels_is_torchs(
    n: int,
    size: tuple[int, int],
    channels: tuple[int, int],
    kernel: tuple[int, int],
    stride: int,
    padding: tuple[int, int],
) -> None:
    assert KERNELS is not None
    form = fitting(kernel, size, stride, padding)
    x, weight, e = drawn(n, size, channels, form)
    y, dx, dw = exact(x, weight, e, form)
    margins = roundings_of(x, e, form)
    assert relative(KERNELS.convolution(x, weight, form), y) < margins[0]
    assert relative(KERNELS.convolution_backward(x, e, weight, form, (False, True))[1], dw) < margins[2]
    with pytest.raises(ValueError, match="fewer than 32 channels"):
        KERNELS.convolution_backward(x, e, weight, form, (True, True))
    theirs = nn.Conv2d(*channels, kernel, stride, padding, bias=False)
    theirs.weight.data = weight
    layer = CpuLayers(KERNELS, FLOAT32).replaced(theirs)
    assert type(layer) is Convolution
    image = x.clone().requires_grad_()  # then torch does it
    assert relative(torch.autograd.grad(layer(image), image, e)[0], dx) < margins[1]


@compiled
@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 4),
    side=st.integers(1, 12),
    form=st.sampled_from([(32, 1), (32, 32), (64, 8), (96, 32)]),
    offset=st.sampled_from([0.0, 3.0, 100.0]),
    after=st.sampled_from(["nothing", "relu", "sum and relu"]),
    half=st.booleans(),
)
def test_a_group_norm_with_what_comes_after_it_and_their_gradients_are_torchs(
    n: int, side: int, form: tuple[int, int], offset: float, after: str, half: bool
) -> None:
    assert KERNELS is not None
    dtype = torch.bfloat16 if half else torch.float32
    channels, groups = form
    assume(channels // groups * side**2 > 1)  # torch refuses a lone number
    draw = torch.Generator().manual_seed(n + side)
    x = (torch.randn(n, channels, side, side, generator=draw) + offset).to(dtype)
    weight, bias = torch.randn(2, channels, generator=draw).unbind()
    e, z = torch.randn(2, *x.shape, generator=draw).to(dtype).unbind()
    leaves = [t.double().requires_grad_() for t in (x, weight, bias, z)]
    y = F.group_norm(leaves[0], groups, leaves[1], leaves[2]) + (leaves[3] if after[0] == "s" else 0)
    grouped = x.double().view(n, groups, -1)
    factor = (
        (grouped.var(2, correction=0) + 1e-5)
        .rsqrt()
        .repeat_interleave(channels // groups, 1)[..., None, None]
    )
    centre = grouped.mean(2).repeat_interleave(channels // groups, 1)[..., None, None]
    size = (x.double().abs() + centre.abs()) * factor  # what is subtracted to give the normalised images
    w, margin = weight.double().abs()[:, None, None], rounding(grouped.shape[2])
    lost = margin * (size * w + bias.double().abs()[:, None, None] + z.double().abs())
    edge = y.abs() < lost  # rounding decides on which side of ReLU
    assume(not (half and offset > 50))  # no digits are left
    e = torch.where(edge, 0, e)
    y = y if after == "nothing" else y.relu()
    dx, dw, db, dz = torch.autograd.grad(y, leaves, e.double(), allow_unused=True)
    relu, added = after != "nothing", z if after[0] == "s" else None
    out, mean, rstd = KERNELS.group_norm(x, weight, bias, groups, 1e-5, relu, added)
    kept = None if added is None else out
    ours = KERNELS.group_norm_backward(x, e, weight, bias, mean, rstd, relu, kept)
    assert out.dtype == ours[0].dtype == dtype
    errors, stored = e.double().abs(), 2 * BFLOAT16 if half else 0.0
    assert apart(out, y) <= lost.norm() + stored * y.norm()
    assert apart(ours[0], dx) <= margin * (factor * w * errors * (1 + size)).norm() + stored * dx.norm()
    sums = rounding(n * side**2) + margin
    assert apart(ours[1].sum(0), dw) <= sums * (errors * size).sum((0, 2, 3)).norm()
    assert apart(ours[2].sum(0), db) <= sums * errors.sum((0, 2, 3)).norm()
    assert (dz is None) == (ours[3] is None)
    assert dz is None or relative(ours[3], dz) < rounding(0)


@compiled
def test_winograd_is_taken_where_it_has_less_to_do() -> None:
    plain = Form(3, 3, 1, 1, 1)
    assert plain.pays(16, 56, 56)
    assert plain.pays(16, 7, 7)
    assert not plain.pays(1, 7, 7), "the weights' transforms are most of the work"
    assert not plain.pays(64, 2, 2), "three quarters of a tile are outside"
    assert not Form(3, 3, 2, 1, 1).pays(16, 56, 56)
    assert not Form(1, 1, 1, 0, 0).pays(16, 56, 56)


def resnet(norm: str) -> nn.Module:
    draw = torch.Generator().manual_seed(5)
    return build_backbone("resnet18", 17, norm=norm, weights=None, init="paper", generator=draw)  # type: ignore[arg-type]


def assert_same(ours: nn.Module, theirs: nn.Module, x: Tensor, margin: float = 0.0) -> None:
    """In what they compute and in their gradients; by default as `rounding_of` has it for a round."""

    def computed(network: nn.Module) -> list[Tensor]:
        y = network(x)
        return [y, *torch.autograd.grad(y.square().mean(), list(network.parameters()))]

    layers = [m for m in theirs.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    off = WINOGRAD / 3 * UNIT * max([9, *(layer.weight[0].numel() for layer in layers)]) ** 0.5
    with torch.autocast("cpu", enabled=False):
        exact, *moved = (
            computed(in_float64(copy.deepcopy(theirs), *how)) for how in ((0.0, 0), (off, 1), (off, 2))
        )
    for mine, right, *others in zip(computed(ours), exact, *moved, strict=True):
        assert relative(mine, right) <= max(margin, *(2 * relative(other, right) for other in others))


@compiled
@pytest.mark.parametrize("norm", ["group", "frozen_batch"])
def test_a_network_taken_over_computes_the_same(norm: str) -> None:
    theirs = resnet(norm)
    assert KERNELS is not None
    ours = CpuLayers(KERNELS, FLOAT32).replaced(copy.deepcopy(theirs))
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    kinds = [type(layer) for layer in ours.modules()]
    assert kinds.count(Convolution) == 20
    assert kinds.count(GroupNorm) == (20 if norm == "group" else 0)
    x = torch.randn(3, 3, 40, 40, generator=torch.Generator().manual_seed(1))
    assert_same(ours, theirs, x)
    again = copy.deepcopy(ours)
    assert again.layer1[0].conv1.kernels is KERNELS  # type: ignore[union-attr, index]
    again.requires_grad_(False).get_parameter("fc.weight").zero_()
    assert not torch.equal(again(x), ours(x)), "a copy has weights of its own"
    relus = [layer for layer in ours.modules() if isinstance(layer, nn.ReLU)]
    seen: list[nn.Module] = []
    for relu in relus:
        relu.register_forward_hook(lambda layer, *_: seen.append(layer))
    with torch.no_grad():
        ours(x)
        assert len(seen) == (0 if norm == "group" else 17)
        diverged = ours(torch.full_like(x, torch.nan))
    assert diverged.isnan().all(), "what has diverged must show"


class Odd(nn.Module):
    """Sums and ReLUs after norms that may not be joined to them, or only with care."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.GroupNorm(4, 32) for _ in range(3))
        self.fourth, self.fifth = (nn.GroupNorm(4, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        a = torch.add(self.first(x), x, alpha=3).relu()
        b = self.second(a)
        c = b.relu() * b
        d = F.relu(self.third(c) + c.mean((2, 3), keepdim=True))
        e = self.fourth(d)
        f = (e + e).relu() + (self.fifth(d) + 1.0).relu()
        return torch.relu(d + self.fifth(f))


@compiled
@pytest.mark.parametrize("half", [False, True])
def test_what_must_not_be_joined_is_not(half: bool) -> None:
    assert KERNELS is not None
    theirs = Odd()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, 0.5, 0.5, generator=torch.Generator().manual_seed(3))
    ours = CpuLayers(KERNELS, BY_PROCESSOR["AMX"]).replaced(copy.deepcopy(theirs))
    x = torch.randn(2, 32, 5, 5, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=half):  # where sums have terms of both types
        assert_same(ours, theirs, x, 0.1 if half else 0.0)


class Branching(nn.Sequential):
    """Whose way depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        return x.relu() if x.sum() > 0 else x


@compiled
def test_a_network_that_cannot_be_written_down_stays_as_it_is() -> None:
    assert KERNELS is not None
    network = Branching(nn.GroupNorm(4, 32))
    assert CpuLayers(KERNELS, FLOAT32).replaced(network) is network
    assert type(network[0]) is GroupNorm


def test_layers_that_are_not_plain_stay_torchs() -> None:
    odd = nn.Sequential(
        nn.Conv2d(32, 32, 3, groups=2),
        nn.Conv2d(32, 32, 3, dilation=2),
        nn.Conv2d(32, 32, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(32, 32, 3, padding="same"),
        nn.Conv2d(32, 32, 3, stride=(1, 2)),
        nn.Conv2d(32, 32, 5),
        nn.Conv2d(48, 32, 3),
        nn.Conv2d(3, 24, 3),
    )
    before = [type(layer) for layer in odd]
    assert kernels_for(ImageClassifier(odd, input_size=10)) is None
    CpuLayers(object(), FLOAT32).replaced(odd)  # type: ignore[arg-type]
    assert [type(layer) for layer in odd] == before


@compiled
@pytest.mark.parametrize("winograd", [True, False])
@pytest.mark.parametrize("more", [{}, {"momentum": 0.6}, {"weight_decay": 0.05}, {"mu": 0.3}], ids=str)
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_cohort_trained_by_compiled_layers_is_that_of_pfls_loop(
    lanes: int, more: dict[str, float], winograd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_kernels, "WEIGHTS", -1e12 if winograd else 1e12)
    calls: list[str] = []
    call = CpuKernels._call

    def counted(self: CpuKernels, name: str, *rest: Any) -> None:
        calls.append(name)
        call(self, name, *rest)

    monkeypatch.setattr(CpuKernels, "_call", counted)
    setting = Setting([1, 2, 9, 5, 20], max_norm=0.3, learning_rate=0.1, backbone=wide_backbone)
    for name, value in more.items():
        setattr(setting, name, value)
    theirs, ours = setting.run(False)[0], setting.run(True, lanes=lanes)[0]
    allowed = rounding_of(setting, roundings=WINOGRAD * (288 / 9) ** 0.5 if winograd else None)
    assert distance(ours, theirs) <= allowed
    assert ("conv3x3_backward" in calls) == winograd
    assert "convolve_backward" in calls
    assert "group_norm_backward" in calls
    without = setting.run(True, lanes=lanes, cpu_kernels=False)[0]
    assert 0 < distance(without, theirs) <= allowed


@compiled
def test_the_same_round_is_bitwise_the_same_again() -> None:
    setting = Setting([3, 12, 7], backbone=wide_backbone)
    first, second = (setting.run(True, lanes=2)[0] for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@with_halves
@pytest.mark.parametrize("size", [3, 40], ids=["one step", "more steps"])
def test_with_half_floats_no_users_part_of_a_private_sum_exceeds_the_bound(size: int) -> None:
    private = without_noise(0.01)
    setting = Setting([size], by_images=False, more=[private], backbone=wide_backbone, clipping="none")
    setting.amp = torch.bfloat16
    assert 0.0099 < norm(setting.run(True)[0]) <= 0.01


def engine() -> CohortEngine:
    return CohortEngine(ImageClassifier(wide_backbone(), input_size=10), lanes=1)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with nothing in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_without_a_compiler_torchs_layers_are_used(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(empty_cache))
    assert engine()._kernels is None
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "no C++ compiler" in told
    setting = Setting([3, 7], backbone=wide_backbone)
    assert distance(setting.run(True)[0], setting.run(False)[0]) <= rounding_of(setting)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'x.cpp:1: error: unknown type vec' >&2; exit 1", "unknown type vec"),
        ("exit 3", "no reason given"),
    ],
)
def test_a_compiler_that_fails_is_quoted(
    script: str,
    words: str,
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = empty_cache / "fake-compiler"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(fake.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("CXX", str(fake))
    assert engine()._kernels is None
    begun, told = capsys.readouterr().err.splitlines()
    assert begun.startswith("compiling")
    assert words in told
    assert "fake-compiler" in told


@compiled
@pytest.mark.parametrize("place", ["a file", "nowhere"])
def test_without_a_place_to_keep_them_torchs_layers_are_used(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file") if place == "a file" else "")
    monkeypatch.setattr(Path, "home", homeless)
    assert engine()._kernels is None
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert ("could not be used" if place == "a file" else "set XDG_CACHE_HOME") in told


@compiled
def test_the_library_is_compiled_once_and_again_for_another_source(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Any] = []
    run = cpu_kernels._run

    def counted(command: Any) -> Any:
        if "--version" not in command:
            runs.append(command)
        return run(command)

    monkeypatch.setattr(cpu_kernels, "_run", counted)
    first = cpu_kernels.compiled()
    assert cpu_kernels.compiled() == first
    assert len(runs) == 1
    assert list(first.parent.iterdir()) == [first], "nothing is left behind"
    first.write_bytes(first.read_bytes()[:-1] + b"?")
    assert cpu_kernels.compiled() == first
    assert len(runs) == 2, "a damaged file is made again"
    monkeypatch.setattr(cpu_kernels, "FLAGS", (*cpu_kernels.FLAGS, "-DOTHER"))
    assert cpu_kernels.compiled() != first
    assert len(runs) == 3


@compiled
def test_another_version_of_the_compiler_compiles_again(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = empty_cache / "compiler"
    found = []
    monkeypatch.setenv("CXX", str(compiler))
    for version in ("1.0", "1.1", "1.1"):
        compiler.write_text(
            "#!/bin/sh\n"
            f'[ "$1" = --version ] && echo {version} && exit\n'
            'while [ "$1" != -o ]; do shift; done; echo library > "$2"\n'
        )
        compiler.chmod(0o755)
        found.append(cpu_kernels.compiled())
    assert found[0] != found[1] == found[2]


WITHOUT_MEMORY = """
import resource
import torch
from pfl_ext.engine.cpu.kernels import CpuKernels, Form
kernels, form = CpuKernels(), Form(3, 3, 1, 1, 1)
x, weight = torch.ones(2, 32, 64, 64), torch.ones(512, 32, 3, 3)
torch.set_num_threads(THREADS)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 2**24 + 2**21, -1))  # room for the output and no more
try:
    kernels.convolution(x, weight, form)
except ValueError as error:
    print(error)
"""


@compiled
@pytest.mark.parametrize("count", ["1", "2"])
def test_without_memory_a_layer_says_so_and_the_process_lives(count: str) -> None:
    if not Path("/proc/self/statm").exists():
        pytest.skip("there is no size of a process to read here")
    script = WITHOUT_MEMORY.replace("THREADS", count)
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}  # else a thread has room that was reserved before
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "there is no memory to train on: use fewer --runtime.lanes\n"


@compiled
@pytest.mark.parametrize("flags", [("-mavx2", "-mfma"), ("-msse4.2",)], ids=str)
def test_narrower_vectors_compute_the_same(
    flags: tuple[str, ...], empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not {flag[2:].replace(".", "_") for flag in flags} <= set(cpu_kernels._processor().split()):
        pytest.skip("this processor has other vectors")
    kept = [flag for flag in cpu_kernels.FLAGS if flag != "-march=native"]
    monkeypatch.setattr(cpu_kernels, "FLAGS", (*kept, *flags))
    CpuKernels()  # which compares every function with torch's


def test_a_library_that_cannot_be_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged.so"
    damaged.write_text("no library")
    monkeypatch.setattr(cpu_kernels, "compiled", lambda: damaged)
    assert engine()._kernels is None
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "damaged.so cannot be loaded" in told


@compiled
def test_a_library_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "TOLERANCE", 0.0)
    with pytest.raises(Unavailable, match="does not compute what torch computes"):
        CpuKernels()


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_stay_so(threads: None, odd: float, dtype: torch.dtype) -> None:
    assert KERNELS is not None
    if dtype == torch.bfloat16 and not KERNELS.has_halves:
        pytest.skip("this processor does no arithmetic with half floats")
    torch.set_num_threads(1)
    x = torch.ones(2, 32, 8, 8, dtype=dtype)
    x[0, 0, 3, 3] = odd
    weight = torch.ones(32, 32, 3, 3)
    for form in (Form(3, 3, 1, 1, 1), Form(3, 3, 2, 1, 1)):
        out = KERNELS.convolution(x, weight, form)
        assert not out[0].isfinite().all()
        expected = F.conv2d(x[1:].float(), weight, stride=form.stride, padding=1)
        assert relative(out[1:], expected) < 0.02, "one image's numbers do not reach another"
