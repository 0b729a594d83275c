# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""GroupNorm of channels-last images on a GPU in Triton, with the sum and the ReLU that may follow it.

torch's GroupNorm takes contiguous images and, under autocast, float32. So every image goes twice through each
of four conversions: on an H200 these and the norms took half of a step of ResNet-18 in bfloat16. Here images
are read as the convolutions write them, and all sums are float32.

Letters: N images, P positions of an image, C channels, G groups of channels. A tile is some positions of one
image with all their channels.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from pfl_ext.engine.gpu_small_images import backward, forward, signal, takes

TILE = 8192
"""Number of elements of a tile."""
SUMMED = 64
"""Channels of a program of `_over_images`, each of its steps for as many images."""


@triton.jit
def _tile(n, chunk, P, C, BP: tl.constexpr, BC: tl.constexpr):
    rows = chunk * BP + tl.arange(0, BP)
    columns = tl.arange(0, BC)
    inside = (rows[:, None] < P) & (columns[None, :] < C)
    return n * P * C + rows[:, None] * C + columns[None, :], inside, columns


@triton.jit
def _moments(x, means, squares, P, C, BP: tl.constexpr, BC: tl.constexpr):
    """Store for each channel of a tile its mean, and the sum of squared deviations from it."""
    chunk, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    places, inside, columns = _tile(n, chunk, P, C, BP, BC)
    v = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(v, 0) / tl.minimum(P - chunk * BP, BP)
    off = tl.where(inside, v - mean[None, :], 0.0)
    out = (n * tl.num_programs(0) + chunk) * C + columns
    tl.store(means + out, mean, mask=columns < C)
    tl.store(squares + out, tl.sum(off * off, 0), mask=columns < C)


@triton.jit
def _of_group(P, C, G, chunks, BP: tl.constexpr, BK: tl.constexpr, BG: tl.constexpr):
    g, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    chunk, channel = tl.arange(0, BK), tl.arange(0, BG)
    wide = C // G
    inside = (chunk[:, None] < chunks) & (channel[None, :] < wide)
    places = (n * chunks + chunk[:, None]) * C + g * wide + channel[None, :]
    counts = tl.where(inside, tl.minimum(P - chunk * BP, BP)[:, None].to(tl.float32), 0.0)
    return n * G + g, places, inside, counts, n * C + g * wide + channel, channel < wide


@triton.jit
def _statistics(
    means, squares, mean, rstd, eps, P, C, G, chunks, BP: tl.constexpr, BK: tl.constexpr, BG: tl.constexpr
):
    """Store each group's mean and reciprocal deviation, from the moments of its tiles."""
    group, places, inside, counts, _, _ = _of_group(P, C, G, chunks, BP, BK, BG)
    m = tl.load(means + places, mask=inside, other=0.0)
    s = tl.load(squares + places, mask=inside, other=0.0)
    total = (P * (C // G)).to(tl.float32)
    centre = tl.sum(tl.sum(m * counts, 1), 0) / total
    off = tl.where(inside, m - centre, 0.0)
    variance = tl.sum(tl.sum(s + counts * off * off, 1), 0) / total
    tl.store(mean + group, centre)
    tl.store(rstd + group, 1.0 / tl.sqrt(variance + eps))


@triton.jit
def _of_channels(n, columns, weight, bias, mean, rstd, C, G):
    known = columns < C
    group = n * G + columns // (C // G)
    m = tl.load(mean + group, mask=known, other=0.0)
    r = tl.load(rstd + group, mask=known, other=0.0)
    w = tl.load(weight + columns, mask=known, other=0.0)
    b = tl.load(bias + columns, mask=known, other=0.0)
    return group, known, m[None, :], r[None, :], w[None, :], b[None, :]


@triton.jit
def _forward(
    x,
    added,
    weight,
    bias,
    mean,
    rstd,
    out,
    P,
    C,
    G,
    RELU: tl.constexpr,
    ADDED: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    chunk, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    places, inside, columns = _tile(n, chunk, P, C, BP, BC)
    _, _, m, r, w, b = _of_channels(n, columns, weight, bias, mean, rstd, C, G)
    v = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    v = (v - m) * r * w + b
    if ADDED:
        v += tl.load(added + places, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        v = tl.where(v < 0, 0.0, v)  # NaN stays NaN, which a private run must see
    tl.store(out + places, v.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sums(
    x,
    e,
    out,
    weight,
    bias,
    mean,
    rstd,
    shifts,
    scales,
    P,
    C,
    G,
    RELU: tl.constexpr,
    ADDED: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """Store each channel's sums over a tile: of the gradient, and of gradient times normalised value."""
    chunk, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    places, inside, columns = _tile(n, chunk, P, C, BP, BC)
    _, known, m, r, w, b = _of_channels(n, columns, weight, bias, mean, rstd, C, G)
    v = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    d = signal(e, out, places, inside, v, m, r, w, b, RELU, ADDED)
    normal = tl.where(inside, (v - m) * r, 0.0)
    to = (n * tl.num_programs(0) + chunk) * C + columns
    tl.store(shifts + to, tl.sum(d, 0), mask=known)
    tl.store(scales + to, tl.sum(d * normal, 0), mask=known)


@triton.jit
def _totals(
    shifts,
    scales,
    weight,
    shift,
    scale,
    first,
    second,
    P,
    C,
    G,
    chunks,
    BP: tl.constexpr,
    BK: tl.constexpr,
    BG: tl.constexpr,
):
    """Store these sums for each channel of an image, and the group means that the inputs' gradient needs."""
    group, places, inside, _, channels, known = _of_group(P, C, G, chunks, BP, BK, BG)
    a = tl.sum(tl.load(shifts + places, mask=inside, other=0.0), 0)
    c = tl.sum(tl.load(scales + places, mask=inside, other=0.0), 0)
    tl.store(shift + channels, a, mask=known)
    tl.store(scale + channels, c, mask=known)
    total = (P * (C // G)).to(tl.float32)
    w = tl.load(weight + tl.program_id(0) * (C // G) + tl.arange(0, BG), mask=known, other=0.0)
    tl.store(first + group, tl.sum(a * w, 0) / total)
    tl.store(second + group, tl.sum(c * w, 0) / total)


@triton.jit
def _backward(
    x,
    e,
    out,
    weight,
    bias,
    mean,
    rstd,
    first,
    second,
    dx,
    dz,
    P,
    C,
    G,
    RELU: tl.constexpr,
    ADDED: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    chunk, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    places, inside, columns = _tile(n, chunk, P, C, BP, BC)
    group, known, m, r, w, b = _of_channels(n, columns, weight, bias, mean, rstd, C, G)
    v = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    d = signal(e, out, places, inside, v, m, r, w, b, RELU, ADDED)
    one = tl.load(first + group, mask=known, other=0.0)[None, :]
    two = tl.load(second + group, mask=known, other=0.0)[None, :]
    tl.store(dx + places, (r * (w * d - one - (v - m) * r * two)).to(dx.dtype.element_ty), mask=inside)
    if ADDED:
        tl.store(dz + places, d.to(dz.dtype.element_ty), mask=inside)


@triton.jit
def _over_images(first, second, total, other, N, C, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Add up two ``[N, C]`` over the images."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.arange(0, BLOCK)
    a = tl.zeros((BLOCK,), tl.float32)
    b = tl.zeros((BLOCK,), tl.float32)
    for step in tl.static_range(STEPS):
        images = step * BLOCK + rows[:, None]
        inside = (images < N) & (columns[None, :] < C)
        places = images.to(tl.int64) * C + columns[None, :]
        a += tl.sum(tl.load(first + places, mask=inside, other=0.0), 0)
        b += tl.sum(tl.load(second + places, mask=inside, other=0.0), 0)
    tl.store(total + columns, a, mask=columns < C)
    tl.store(other + columns, b, mask=columns < C)


def over_images(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of two ``[N, C]`` float32 over their rows, ``[C]`` each, in the order of the rows."""
    n, c = first.shape
    total, other = torch.empty_like(first[0]), torch.empty_like(second[0])
    _over_images[(triton.cdiv(c, SUMMED),)](first, second, total, other, n, c, SUMMED, triton.cdiv(n, SUMMED))
    return total, other


def _sizes(x: Tensor) -> tuple[int, int, int, int, int, int]:
    """N, P, C, the number of tiles of an image, and the positions and channels of a tile."""
    n, c = x.shape[:2]
    p = x[0, 0].numel()
    wide = triton.next_power_of_2(c)
    high = min(max(1, TILE // wide), triton.next_power_of_2(p))
    return n, p, c, triton.cdiv(p, high), high, wide


def group_norm(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, relu: bool, added: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The output ``[N, C, H, W]``, and mean and 1 / standard deviation ``[N, G]`` float32.

    ``x`` and ``added`` are ``[N, C, H, W]`` in channels-last memory, of any floating type; ``weight`` and
    ``bias`` are ``[C]`` float32.
    """
    n, p, c, chunks, high, wide = _sizes(x)
    if takes(p, c, groups):
        return forward(x, weight, bias, groups, eps, relu, added)
    means, squares = (x.new_empty(n, chunks, c, dtype=torch.float32) for _ in range(2))
    mean, rstd = (x.new_empty(n, groups, dtype=torch.float32) for _ in range(2))
    out = torch.empty_like(x)
    _moments[(chunks, n)](x, means, squares, p, c, high, wide)
    inner = high, triton.next_power_of_2(chunks), triton.next_power_of_2(c // groups)
    _statistics[(groups, n)](means, squares, mean, rstd, eps, p, c, groups, chunks, *inner)
    _forward[(chunks, n)](
        x, x if added is None else added, weight, bias, mean, rstd, out, p, c, groups,
        relu, added is not None, high, wide,
    )  # fmt: skip
    return out, mean, rstd


def group_norm_backward(
    x: Tensor,
    e: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    relu: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of ``x``, of each image's scale and shift ``[N, C]`` float32, and of ``added``.

    ``out`` is the output; it is needed where something was added.
    """
    n, p, c, chunks, high, wide = _sizes(x)
    groups, added = mean.shape[1], out is not None
    after = x if out is None else out
    dx = torch.empty_like(x)
    dz = torch.empty_like(e) if added else None
    known = x, e, after, weight, bias, mean, rstd
    if takes(p, c, groups):
        scale, shift = backward(*known, dx, dz, relu)
        return dx, scale, shift, dz
    shift, scale = (x.new_empty(n, c, dtype=torch.float32) for _ in range(2))
    shifts, scales = (x.new_empty(n, chunks, c, dtype=torch.float32) for _ in range(2))
    first, second = torch.empty_like(mean), torch.empty_like(mean)
    _sums[(chunks, n)](*known, shifts, scales, p, c, groups, relu, added, high, wide)
    inner = high, triton.next_power_of_2(chunks), triton.next_power_of_2(c // groups)
    _totals[(groups, n)](shifts, scales, weight, shift, scale, first, second, p, c, groups, chunks, *inner)
    _backward[(chunks, n)](
        *known, first, second, dx, dx if dz is None else dz, p, c, groups, relu, added, high, wide
    )
    return dx, scale, shift, dz
