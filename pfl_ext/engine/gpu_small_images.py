# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""GroupNorm of small images on a GPU in Triton: a program holds all positions of some channels.

So one launch does what `gpu_kernels` does in three for images that are too large for it.

Letters: N images, P positions of an image, C channels, G groups of W channels.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

WHOLE = 16384
"""Greatest number of elements that a program holds of all positions of some channels."""
NARROW = 16
"""Fewest channels that are read together: 32 bytes of bfloat16, the least that a GPU fetches."""


@triton.jit
def signal(e, out, places, inside, v, m, r, w, b, RELU: tl.constexpr, ADDED: tl.constexpr):
    """The gradient before the ReLU. The outputs, or the inputs, tell which elements the ReLU set to zero."""
    d = tl.load(e + places, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        if ADDED:
            after = tl.load(out + places, mask=inside, other=0.0).to(tl.float32)
        else:
            after = (v - m) * r * w + b
        d = tl.where(after <= 0, 0.0, d)
    return tl.where(inside, d, 0.0)


@triton.jit
def _block(P, C, G, BP: tl.constexpr, BC: tl.constexpr, W: tl.constexpr):
    """All positions of ``BC`` channels of an image, which are whole groups of ``W`` channels."""
    n = tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, BP)
    columns = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = (rows[:, None] < P) & (columns[None, :] < C)
    groups = n * G + tl.program_id(0) * (BC // W) + tl.arange(0, BC // W)
    return n, n * P * C + rows[:, None] * C + columns[None, :], inside, columns, groups


@triton.jit
def _by_group(sums, BC: tl.constexpr, W: tl.constexpr):
    return tl.sum(tl.reshape(sums, (BC // W, W)), 1)


@triton.jit
def _by_channel(values, BC: tl.constexpr, W: tl.constexpr):
    return tl.reshape(tl.broadcast_to(values[:, None], (BC // W, W)), (BC,))[None, :]


@triton.jit
def _whole_forward(
    x,
    added,
    weight,
    bias,
    mean,
    rstd,
    out,
    eps,
    P,
    C,
    G,
    RELU: tl.constexpr,
    ADDED: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
    W: tl.constexpr,
):
    """`_moments`, `_statistics` and `_forward` for small images."""
    n, places, inside, columns, groups = _block(P, C, G, BP, BC, W)
    known = columns < C
    v = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    total = P * W * 1.0
    centre = _by_group(tl.sum(v, 0), BC, W) / total
    v = tl.where(inside, v - _by_channel(centre, BC, W), 0.0)
    r = 1.0 / tl.sqrt(_by_group(tl.sum(v * v, 0), BC, W) / total + eps)
    there = groups < (n + 1) * G
    tl.store(mean + groups, centre, mask=there)
    tl.store(rstd + groups, r, mask=there)
    w = tl.load(weight + columns, mask=known, other=0.0)[None, :]
    b = tl.load(bias + columns, mask=known, other=0.0)[None, :]
    v = v * _by_channel(r, BC, W) * w + b
    if ADDED:
        v += tl.load(added + places, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        v = tl.where(v < 0, 0.0, v)  # NaN stays NaN, which a private run must see
    tl.store(out + places, v.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _whole_backward(
    x,
    e,
    out,
    weight,
    bias,
    mean,
    rstd,
    shift,
    scale,
    dx,
    dz,
    P,
    C,
    G,
    RELU: tl.constexpr,
    ADDED: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
    W: tl.constexpr,
):
    """`_sums`, `_totals` and `_backward` for small images."""
    n, places, inside, columns, groups = _block(P, C, G, BP, BC, W)
    known, there = columns < C, groups < (n + 1) * G
    m = _by_channel(tl.load(mean + groups, mask=there, other=0.0), BC, W)
    r = _by_channel(tl.load(rstd + groups, mask=there, other=0.0), BC, W)
    w = tl.load(weight + columns, mask=known, other=0.0)
    b = tl.load(bias + columns, mask=known, other=0.0)[None, :]
    v = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    d = signal(e, out, places, inside, v, m, r, w[None, :], b, RELU, ADDED)
    normal = tl.where(inside, (v - m) * r, 0.0)
    a, c = tl.sum(d, 0), tl.sum(d * normal, 0)
    tl.store(shift + n * C + columns, a, mask=known)
    tl.store(scale + n * C + columns, c, mask=known)
    total = P * W * 1.0
    one = _by_channel(_by_group(a * w, BC, W) / total, BC, W)
    two = _by_channel(_by_group(c * w, BC, W) / total, BC, W)
    gradient = r * (w[None, :] * d - one - normal * two)
    tl.store(dx + places, gradient.to(dx.dtype.element_ty), mask=inside)
    if ADDED:
        tl.store(dz + places, d.to(dz.dtype.element_ty), mask=inside)


def _small(p: int, c: int, groups: int) -> dict[str, int] | None:
    """How one program holds all positions of some channels; None if they are too many, or no power of 2."""
    wide, high = c // groups, triton.next_power_of_2(p)
    most = WHOLE // high
    if wide & (wide - 1) or most < max(wide, min(NARROW, c)):
        return None
    channels = min(max(wide, NARROW, min(2 * NARROW, most)), max(wide, triton.next_power_of_2(c)))
    warps = min(max(high * channels // 1024, 4), 16)
    return {"BP": high, "BC": channels, "W": wide, "num_warps": warps}


def takes(p: int, c: int, groups: int) -> bool:
    """Whether images of P positions and C channels are small enough, and have groups of a power of 2."""
    return _small(p, c, groups) is not None


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, relu: bool, added: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`gpu_kernels.group_norm`."""
    n, c = x.shape[:2]
    p = x[0, 0].numel()
    small = _small(p, c, groups)
    assert small is not None
    mean, rstd = (x.new_empty(n, groups, dtype=torch.float32) for _ in range(2))
    out = torch.empty_like(x)
    _whole_forward[(triton.cdiv(c, small["BC"]), n)](
        x, x if added is None else added, weight, bias, mean, rstd, out, eps, p, c, groups,
        relu, added is not None, **small,
    )  # fmt: skip
    return out, mean, rstd


def backward(
    x: Tensor,
    e: Tensor,
    out: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dx: Tensor,
    dz: Tensor | None,
    relu: bool,
) -> tuple[Tensor, Tensor]:
    """Fill ``dx`` and ``dz`` with the gradients of ``x`` and of what was added.

    Returns those of each image's scale and shift, ``[N, C]`` float32.
    """
    n, c = x.shape[:2]
    p, groups = x[0, 0].numel(), mean.shape[1]
    small = _small(p, c, groups)
    assert small is not None
    shift, scale = (x.new_empty(n, c, dtype=torch.float32) for _ in range(2))
    _whole_backward[(triton.cdiv(c, small["BC"]), n)](
        x, e, out, weight, bias, mean, rstd, shift, scale, dx, dx if dz is None else dz, p, c, groups,
        relu, dz is not None, **small,
    )  # fmt: skip
    return scale, shift
