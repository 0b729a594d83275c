"""Compares the compiled layers with torch's when they are loaded.

So an error of a compiler cannot get into a result. A process compares a library once.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pfl_ext.engine.cpu.build import Unavailable
from pfl_ext.engine.cpu.dense import Room, linear, linear_backward
from pfl_ext.engine.cpu.kernels import CHANNELS, CpuKernels, Form
from pfl_ext.engine.cpu.narrow import (
    After,
    few_channels,
    few_channels_backward,
    first,
    first_backward,
    pooled,
)

TOLERANCE, HALF_TOLERANCE = 1e-4, 0.02
"""Largest relative error of a compiled layer against torch's, in the norm, on float32 and bfloat16 images."""


def checked() -> CpuKernels:
    """The compiled functions, after they were compared with torch's.

    Raises:
        Unavailable: when they cannot be compiled or loaded, or compute something else than torch.
    """
    kernels = CpuKernels()
    _compare(kernels.path, TOLERANCE, HALF_TOLERANCE)
    return kernels


@functools.cache
def _compare(path: Path, tolerance: float, half_tolerance: float) -> None:
    """Compare the library that lies at ``path``."""
    kernels = CpuKernels()
    check(kernels, torch.float32, tolerance)
    check(kernels, torch.bfloat16, half_tolerance)


def check(kernels: CpuKernels, dtype: torch.dtype, tolerance: float) -> None:
    """Raise `Unavailable` if a function's relative error against torch's is above ``tolerance``."""
    draw = torch.Generator().manual_seed(1)
    x, e = torch.randn(2, 3, CHANNELS, 14, 28, generator=draw).to(dtype).unbind()
    weight = torch.randn(CHANNELS, CHANNELS, 3, 3, generator=draw)
    scale = weight[0, :, 0, 0].contiguous()
    found: list[Any] = []
    expected: list[Tensor] = []
    forms = Form(3, 3, 1, 1, 1), Form(3, 3, 2, 1, 1)
    for form in forms if dtype == torch.float32 or kernels.has_halves else ():
        error = e[:, :, :: form.stride, :: form.stride]
        found += [kernels.convolution(x, weight, form)]
        found += kernels.convolution_backward(x, error, weight, form, (True, True))
        with torch.enable_grad():
            leaves = [t.float().clone().requires_grad_() for t in (x, weight)]
            y = F.conv2d(leaves[0], leaves[1], stride=form.stride, padding=1)
            expected += [y, *torch.autograd.grad(y, leaves, error.float())]
    if dtype == torch.float32:
        apart = torch.randn(CHANNELS, 1, 5, 5, generator=draw).requires_grad_()
        error = e[:, :, ::2, ::2]
        found.append(kernels.depthwise_weights(x, error, Form(5, 5, 2, 2, 2)))
        with torch.enable_grad():
            y = F.conv2d(x, apart, stride=2, padding=2, groups=CHANNELS)
            expected += torch.autograd.grad(y, apart, error)
        small = _of_small_networks(kernels, x, e, weight)
        found, expected = found + small[0], expected + small[1]
    for relu, added in ((False, None), (True, None), (True, torch.cos(x))):
        out, mean, rstd = kernels.group_norm(x, scale, scale, 4, 1e-5, relu, added)
        kept = None if added is None else out
        dx, dscale, dshift, dz = kernels.group_norm_backward(x, e, scale, scale, mean, rstd, relu, kept)
        found += [out, dx, dscale.sum(0), dshift.sum(0), *([] if dz is None else [dz])]
        with torch.enable_grad():
            leaves = [t.float().clone().requires_grad_() for t in (x, scale, scale)]
            y = F.group_norm(leaves[0], 4, leaves[1], leaves[2])
            if added is not None:
                leaves.append(added.float().requires_grad_())
                y = y + leaves[3]
            y = y.relu() if relu else y
            expected += [y, *torch.autograd.grad(y, leaves, e.float())]
    for ours, theirs in zip(found, expected, strict=True):
        if not (ours - theirs).norm() <= tolerance * theirs.norm():
            raise Unavailable("what the compiler made of them does not compute what torch computes")


def _of_small_networks(
    kernels: CpuKernels, x: Tensor, e: Tensor, weight: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """The results of `narrow`, `dense` and `crops` for these inputs, and those of torch."""
    found: list[Tensor | None] = []
    expected: list[Tensor] = []
    scale, images, plain = weight[0, :, 0, 0].contiguous(), x[:, :3, :13], After(relu=True)
    both = After(relu=True, pool=True)
    for kernel, after, padding in (
        (weight[:5, :3], After(), (1, 0)),
        (weight[:5, :3], plain, (1, 0)),
        (weight[:5, :3], both, (1, 0)),
        (weight[:, :3], plain, (0, 1)),
        (weight, both, (0, 0)),
        (weight, both, (1, 1)),
    ):
        inputs, shift = (x if kernel is weight else images), scale[: len(kernel)]
        with torch.enable_grad():
            leaves = [t.clone().requires_grad_() for t in (inputs, kernel, shift)]
            y = F.conv2d(leaves[0], leaves[1], leaves[2], padding=padding)
            y = y.relu() if after.relu else y
            y = F.max_pool2d(y, 2) if after.pool else y
            error = e[:, : y.shape[1], : y.shape[2], : y.shape[3]].contiguous()
            gradients = torch.autograd.grad(y, leaves, error)
        if kernel.shape[0] == 5 or after.pool:
            computed = few_channels if kernel.shape[0] == 5 else pooled
            out, laid = computed(kernels, inputs, kernel, shift, padding, after)
            theirs = few_channels_backward(kernels, error, kernel, padding, after, laid, (True, True))
        else:
            out, padded = first(kernels, inputs, kernel, shift, padding, relu=True)
            theirs = None, *first_backward(kernels, padded, error, out, kernel, relu=True)
        found += [out, *theirs]
        expected += [y, *gradients]
    rows, units, errors = x[:, :, 0, 0], weight[:, 0, 0].repeat(1, 11)[:, :CHANNELS], e[:, :, 0, 0]
    units, errors = units.contiguous(), errors.contiguous()
    room = Room(units, torch.empty_like(units), 0.5)
    found += [linear(kernels, rows, units, scale, relu=False)]
    found += linear_backward(kernels, rows, errors, units, None, (True, True, True))
    linear_backward(kernels, rows, errors, units, None, (False, True, False), room)
    found += [room.after]
    step = errors.t() @ rows
    expected += [rows @ units.t() + scale, errors @ units, step, errors.sum(0), units - 0.5 * step]
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None]
    return [a for a, _ in pairs], [b for _, b in pairs]
