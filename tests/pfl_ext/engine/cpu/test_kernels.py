"""The compiled functions compute what torch's compute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pfl_ext.engine.cpu import kernels as cpu_kernels
from pfl_ext.engine.cpu.kernels import Form
from pfl_ext.engine.cpu.narrow import After, few_channels, few_channels_backward, lay_out
from tests.pfl_ext.engine.cpu.roundings import (
    ALIKE,
    BFLOAT16,
    KERNELS,
    STORED,
    apart,
    compiled,
    drawn,
    exact,
    fitting,
    half_rounding,
    relative,
    rounding,
    roundings_of,
    threads,
    with_halves,
)


@compiled
@pytest.mark.parametrize("winograd", [True, False])
@settings(max_examples=40)
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
    by = -1e12 if winograd else 1e12
    with mock.patch.object(cpu_kernels, "WEIGHTS", by), threads(count):
        margins = roundings_of(x, e, form, winograd)
        assert relative(KERNELS.convolution(x, weight, form), y) < margins[0]
        ours = KERNELS.convolution_backward(x, e, weight, form, (True, True))
        assert relative(ours[0], dx) < margins[1]
        assert relative(ours[1], dw) < margins[2]
        only_x = KERNELS.convolution_backward(x, e, weight, form, (True, False))
        only_w = KERNELS.convolution_backward(x, e, weight, form, (False, True))
    assert only_x[1] is None
    assert only_w[0] is None
    assert only_x[0] is not None
    assert torch.equal(only_x[0], ours[0])  # type: ignore[arg-type]
    assert only_w[1] is not None
    assert torch.equal(only_w[1], ours[1])  # type: ignore[arg-type]


@compiled
@settings(max_examples=60)
@given(
    n=st.integers(1, 35),
    size=st.tuples(*[st.integers(1, 11)] * 2),
    channels=st.tuples(st.integers(1, 9), st.integers(1, 14)),
    kernel=st.tuples(*[st.integers(1, 6)] * 2),
    padding=st.tuples(*[st.integers(0, 2)] * 2),
    after=st.builds(After, st.booleans(), st.booleans()),
    bias=st.booleans(),
    laid=st.booleans(),
    count=st.sampled_from([1, 2]),
)
def test_a_convolution_of_few_channels_and_what_follows_it_are_torchs(
    n: int,
    size: tuple[int, int],
    channels: tuple[int, int],
    kernel: tuple[int, int],
    padding: tuple[int, int],
    after: After,
    bias: bool,
    laid: bool,
    count: int,
) -> None:
    assert KERNELS is not None
    size = tuple(max(a, b - 2 * p + after.pool) for a, b, p in zip(size, kernel, padding))  # type: ignore[assignment]
    draw = torch.Generator().manual_seed(n)

    def whole(*shape: int) -> Tensor:  # whole numbers, whose sums nothing rounds, and some of which are alike
        return torch.randint(-4, 5, shape, generator=draw).float()

    x, weight = whole(n, channels[0], *size), whole(channels[1], channels[0], *kernel)
    shift = whole(channels[1]) if bias else None
    with torch.enable_grad():
        leaves = [t.double().requires_grad_() for t in (x, weight, *([] if shift is None else [shift]))]
        theirs = F.conv2d(leaves[0], leaves[1], leaves[2] if bias else None, padding=padding)
        theirs = theirs.relu() if after.relu else theirs
        theirs = F.max_pool2d(theirs, 2) if after.pool else theirs
        e = whole(*theirs.shape)
        gradients = torch.autograd.grad(theirs, leaves, e.double())
    with threads(count):
        images = lay_out(KERNELS, x).permute(3, 0, 1, 2)[:n] if laid else x
        ours, kept = few_channels(KERNELS, images, weight, shift, padding, after)
        signals = lay_out(KERNELS, e).permute(3, 0, 1, 2)[:n] if laid else e
        found = few_channels_backward(KERNELS, signals, weight, padding, after, kept, (True, True))
        only_x = few_channels_backward(KERNELS, signals, weight, padding, after, kept, (True, False))
        only_w = few_channels_backward(KERNELS, signals, weight, padding, after, kept, (False, True))
    assert torch.equal(ours.double(), theirs)
    for mine, right in zip(found, gradients):
        assert mine is not None
        assert torch.equal(mine.double(), right)
    assert only_x[1] is only_x[2] is only_w[0] is None
    assert torch.equal(only_x[0], found[0])  # type: ignore[arg-type]
    assert torch.equal(only_w[1], found[1])  # type: ignore[arg-type]


@compiled
def test_what_stands_beside_the_images_of_a_vector_is_of_no_effect() -> None:
    assert KERNELS is not None
    draw = torch.Generator().manual_seed(1)
    weight, after = torch.randn(4, 3, 3, 3, generator=draw), After(relu=True, pool=True)
    most = torch.full((3, 8, 8, 64), torch.nan)
    most[..., :5] = torch.randn(3, 8, 8, 5, generator=draw)
    outcomes = []
    for x in (most.permute(3, 0, 1, 2)[:5], most[..., :5].permute(3, 0, 1, 2).contiguous()):
        out, laid = few_channels(KERNELS, x, weight, None, (0, 0), after)
        e = torch.full((4, 3, 3, 64), torch.nan)
        e[..., :5] = torch.cos(torch.arange(180.0)).view(4, 3, 3, 5)
        signals = e.permute(3, 0, 1, 2)[:5]
        outcomes.append(
            (out, *few_channels_backward(KERNELS, signals, weight, (0, 0), after, laid, (True, True)))
        )
    for with_more, alone in zip(*outcomes):
        assert torch.equal(with_more, alone)
        assert with_more.isfinite().all()


@with_halves
@pytest.mark.parametrize("way", ["Winograd", "direct"])
@settings(max_examples=40)
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
    form = Form(3, 3, 1 if way == "Winograd" else stride, 1, 1)
    x, weight, e = drawn(n, size, channels, form)
    x, weight, e = ((t * 2.0**power) for t, power in zip((x, weight, e), powers))
    draw = torch.Generator().manual_seed(n)
    x, e = x.bfloat16(), (e * torch.rand(e.shape, generator=draw) ** 8).bfloat16()  # most gradients are small
    y, dx, dw = exact(x, weight, e, form)
    winograd = way == "Winograd"
    margins = [half_rounding(depth, winograd) for depth in (channels[0], channels[1], x[:, 0].numel())]
    in_float32 = roundings_of(x, e, form)
    with threads(count), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_kernels, "WEIGHTS", -1e12 if winograd else 1e12)
        patch.setattr(Form, "halves_pay", lambda *_: True)
        out = KERNELS.convolution(x, weight, form)
        ours = KERNELS.convolution_backward(x, e, weight, form, (True, True))
        patch.setattr(Form, "halves_pay", lambda *_: False)
        plain = KERNELS.convolution(x, weight, form)
        in_floats = KERNELS.convolution_backward(x, e, weight, form, (True, True))
    assert out.dtype == plain.dtype == torch.bfloat16
    assert relative(out, y) < margins[0] + STORED
    assert relative(plain, y) < in_float32[0] + STORED
    assert ours[1] is not None
    assert ours[1].dtype == torch.float32
    assert 1e-6 < relative(ours[1], dw) < margins[2]
    assert relative(in_floats[1], dw) < in_float32[2]
    assert relative(ours[0], dx) < margins[1] + STORED
    assert relative(in_floats[0], dx) < in_float32[1] + STORED


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
            assert relative(found, y) < ALIKE + STORED


@with_halves
@pytest.mark.parametrize("stride", [1, 2])
def test_what_shares_a_vector_of_half_floats_does_not_share_its_numbers(stride: int) -> None:
    """An odd image is alone with its scale, not with what is left of another."""
    assert KERNELS is not None
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 32, 12, 12, generator=draw)
    x[:2] *= 2.0**40
    x = x.bfloat16()
    weight = torch.randn(32, 32, 3, 3, generator=draw)
    form = Form(3, 3, stride, 1, 1)
    e = torch.randn(3, 32, *form.output(12, 12), generator=draw).bfloat16()
    e[:2] = 0
    y = exact(x, weight, e, form)[0]
    with threads(1):
        out = KERNELS.convolution(x, weight, form)
        found = KERNELS.convolution_backward(x, e, weight, form, (False, True))[1]
    assert relative(out[:2], y[:2]) < half_rounding(32, stride == 1) + STORED
    assert out.isfinite().all()
    assert found is not None
    assert found.isfinite().all()


@compiled
@settings(max_examples=40)
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


WITHOUT_MEMORY = """
import resource
import torch
from pfl_ext.engine.cpu.kernels import CpuKernels, Form
kernels, form = CpuKernels(), Form(3, 3, 1, 1, 1)
x, weight = torch.ones(2, 32, 64, 64), torch.ones(512, 32, 3, 3)
torch.set_num_threads(THREADS)
small = x[:, :, :8, :8].contiguous(memory_format=torch.channels_last)
kernels.convolution(small, weight[:32], form)  # then threads have their stacks
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_stay_so(odd: float, dtype: torch.dtype) -> None:
    assert KERNELS is not None
    if dtype == torch.bfloat16 and not KERNELS.has_halves:
        pytest.skip("this processor does no arithmetic with half floats")
    x = torch.ones(2, 32, 8, 8, dtype=dtype)
    x[0, 0, 3, 3] = odd
    weight = torch.ones(32, 32, 3, 3)
    for form in (Form(3, 3, 1, 1, 1), Form(3, 3, 2, 1, 1)):
        out = KERNELS.convolution(x, weight, form)
        assert not out[0].isfinite().all()
        expected = F.conv2d(x[1:].float(), weight, stride=form.stride, padding=1)
        assert relative(out[1:], expected) < ALIKE + STORED, "one image's numbers do not reach another"
