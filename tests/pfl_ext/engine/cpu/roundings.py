"""What tests of the compiled layers share: the layers, and how far rounding may move what they compute."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfl_ext.engine.cpu.build import Unavailable
from pfl_ext.engine.cpu.check import checked
from pfl_ext.engine.cpu.kernels import CpuKernels, Form

try:
    KERNELS: CpuKernels | None = checked()
except Unavailable:
    KERNELS = None


compiled = pytest.mark.skipif(KERNELS is None, reason="no C++ compiler here")


with_halves = pytest.mark.skipif(
    KERNELS is None or not KERNELS.has_halves, reason="this processor does no arithmetic with half floats"
)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Within, torch has so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def with_drawn_weights(net: nn.Module) -> nn.Module:
    """The network itself, with weights far from 0."""
    for parameter in net.parameters():
        nn.init.normal_(parameter, 0.0, 0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    return net


def relative(ours: Tensor | None, theirs: Tensor) -> float:
    assert ours is not None
    assert ours.shape == theirs.shape
    theirs = theirs.detach()
    return float((ours.detach().double() - theirs).norm() / theirs.norm().clamp(min=1e-30))


UNIT, BFLOAT16 = 2.0**-24, 2.0**-9
"""Units of rounding in float32 and in bfloat16."""


WINOGRAD = 5.2
"""By how much the transforms magnify what is lost in the 36 products, with images and weights of independent
numbers: the root of the mean over outputs p of ``sum_i A_pi^2 |B_i|^2 |G_i|^2 / 3``, for both sides, where B
transforms windows, G taps and A products (`winograd.h`); 5.14, also for the gradient of the weights."""


def rounding(terms: int, winograd: bool = False) -> float:
    """Rounding of a sum of ``terms`` independent products, in any order: up as often as down.

    Twice the root of the count, and four more for what is rounded before and after. Winograd has a ninth
    of the terms or fewer, but three transforms of six terms each, and magnifies what all of them lose.
    """
    if winograd:
        return WINOGRAD * UNIT * (2 * math.sqrt(terms / 9) + 4 + 3 * math.sqrt(6))
    return UNIT * (2 * math.sqrt(terms) + 4)


HALF, CHAIN, HELD = 2.0**-11, 64, 128
"""The unit of half floats, and how many terms a sum of them has: in `winograd.h`, whose chains are then added
as half floats, and in `direct.h`, where it then goes to float32."""
STORED = 2 * BFLOAT16
"""Rounding of a result in bfloat16, whichever way it is rounded."""


def half_rounding(depth: int, winograd: bool = False) -> float:
    """As `rounding`, of independent products that are added as half floats.

    Adding rounds by at most a unit of the whole sum, as often as a sum has terms; what is added was rounded
    twice. Winograd, which adds ``depth`` terms, magnifies what the sums and the three transforms lose; the
    mean square of a rounding to nearest is a third of a unit's square.
    """
    if winograd:
        sums = math.sqrt(min(depth, CHAIN)) + math.sqrt(depth / CHAIN)
        return WINOGRAD * HALF / math.sqrt(3) * (sums + 4 + 3 * math.sqrt(6))
    return HALF * (math.sqrt(HELD) + 2)


ALIKE = HALF * HELD / 2
"""Rounding of sums of equal numbers, which may all go in one direction: the k-th by a unit of k of them."""


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
