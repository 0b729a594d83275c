"""Convolutions of few channels, and those whose outputs are pooled, as functions of tensors.

Each computes the ReLU and the 2 x 2 max-pooling after it in the same pass. Everything is float32.

Shape letters: N images, C channels in, K channels out, H and W positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pfl_ext.engine.cpu.kernels import CHANNELS, CpuKernels, Form, empty, last


class Laid(NamedTuple):
    """What `few_channels` saves for its gradients."""

    images: Tensor
    """The padded images, ``[C, H, W, N']``. N' is N rounded up to whole vectors; numbers beyond N have no
    meaning. Where `pooled` made it, ``[N, H, W, C]``."""
    out: Tensor | None = None
    """The output ``[K, H', W', N']``; not needed without ReLU."""
    places: Tensor | None = None
    """``[N, K, H', W']``, uint8: which of the four pooled positions each output comes from, or 4 where the
    ReLU passes nothing. None if nothing was pooled."""


@dataclass(frozen=True)
class After:
    """What follows a convolution: a ReLU, and max-pooling of 2 x 2 positions."""

    relu: bool = False
    pool: bool = False


def few_channels(
    kernels: CpuKernels,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: tuple[int, int],
    after: After,
) -> tuple[Tensor, Laid]:
    """``[N, C, H, W]`` by ``[K, C, high, wide]`` with stride 1 -> ``[N, K, H', W']``, after ReLU and pooling.

    A vector holds numbers of several images, so that few channels suffice. Float32.
    """
    images, weight = lay_out(kernels, x, *padding), last(weight)
    c, h, w, n = images.shape
    k, _, high, wide = weight.shape
    shape = [k, h - high + 1, w - wide + 1, n]
    if after.pool:
        shape[1:3] = [side // 2 for side in shape[1:3]]
    out = torch.empty(shape)
    places = torch.empty(shape, dtype=torch.uint8) if after.pool else None
    sizes = (n, len(x), c, h, w, k, high, wide, after.relu, after.pool, *images.stride()[:3])
    kernels.call("few_channels", (images, weight, bias, out, places), *sizes)
    y = out.permute(3, 0, 1, 2)[: len(x)]
    if places is None:
        return y, Laid(images, out)
    return y, Laid(_padded(x, *padding), None, places.permute(3, 0, 1, 2)[: len(x)])


def few_channels_backward(
    kernels: CpuKernels,
    e: Tensor,
    weight: Tensor,
    padding: tuple[int, int],
    after: After,
    laid: Laid,
    wanted: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of ``x``, of weights and of bias, from the output's gradient ``e`` ``[N, K, H', W']``.

    ``wanted`` says whether to compute that of ``x``, and whether to compute the others.
    """
    if laid.places is not None:
        return _pooled_backward(kernels, e, weight, padding, laid, wanted)
    images, weight, e_laid = laid.images, last(weight), lay_out(kernels, e)
    c, h, w, n = images.shape
    k, _, high, wide = weight.shape
    both = torch.zeros(weight.numel() + k) if wanted[1] else None
    dx = torch.empty_strided(images.shape, images.stride()) if wanted[0] else None
    tensors = (images, e_laid, laid.out, weight, dx, both)
    sizes = (n, len(e), c, h, w, k, high, wide, after.relu)
    steps = (*images.stride()[:3], *e_laid.stride()[:3])
    kernels.call("few_channels_backward", tensors, *sizes, *steps)
    dx = None if dx is None else _inner(dx.permute(3, 0, 1, 2)[: len(e)], padding)
    return dx, *((None, None) if both is None else _divided(both, weight))


def lay_out(kernels: CpuKernels, x: Tensor, top: int = 0, left: int = 0) -> Tensor:
    """``[N, C, H, W]`` -> ``[C, H + 2 top, W + 2 left, N']`` of `Laid`; not copied if it is laid out so."""
    x = x.detach()
    n, c, h, w = x.shape
    most = -(-n // kernels.lanes) * kernels.lanes
    if not (top or left):
        room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        if x.stride() == (1, h * w * most, w * most, most) and room >= c * h * w * most:
            return x.as_strided((c, h, w, most), (h * w * most, w * most, most, 1))
        if x.is_contiguous():
            out = torch.empty(c, h, w, most)
            kernels.call("lay_images", (x, out), n, most, 1, c * h * w, 0)
            return out
    x, wide = last(x), w + 2 * left
    out = (torch.zeros if top or left else torch.empty)(h + 2 * top, wide, c, most)
    kernels.call("lay_images", (x, out[top:, left:]), n, most, h, w * c, wide * c)
    return out.permute(2, 0, 1, 3)


def first(
    kernels: CpuKernels, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int], relu: bool
) -> tuple[Tensor, Tensor]:
    """`few_channels` without pooling, for K a multiple of `CHANNELS`: the output, and the padded images."""
    images, weight = _padded(x, *padding), last(weight)
    (n, h, w, c), (k, _, high, wide) = images.shape, weight.shape
    out = empty((n, k, h - high + 1, w - wide + 1), torch.float32)
    kernels.call("first_layer", (images, weight, bias, out), n, h, w, c, k, high, wide, relu)
    return out, images


def first_backward(
    kernels: CpuKernels, images: Tensor, e: Tensor, out: Tensor, weight: Tensor, relu: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of weights and bias, from the gradient ``e`` of `first`'s output."""
    e, (n, h, w, c), (k, _, high, wide) = last(e), images.shape, weight.shape
    both = torch.zeros(weight.numel() + k)
    kernels.call("first_gradients", (images, e, out, both), n, h, w, c, k, high, wide, relu)
    return _divided(both, weight)


def pooled(
    kernels: CpuKernels,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: tuple[int, int],
    after: After,
) -> tuple[Tensor, Laid]:
    """`few_channels` with pooling, for any number of channels in and at least 16 out."""
    y = _plain(kernels, x, weight, padding)
    n, k, down, across = y.shape
    out = empty((n, k, down // 2, across // 2), torch.float32)
    places = torch.empty_like(out, dtype=torch.uint8)
    image, _, row, column = y.stride()
    sizes = (n, down // 2, across // 2, k, after.relu, image, row, column)
    kernels.call("pool_outputs", (y, bias, out, places), *sizes)
    return out, Laid(_padded(x, *padding), None, places)


def _plain(kernels: CpuKernels, x: Tensor, weight: Tensor, padding: tuple[int, int]) -> Tensor:
    """The convolution alone, without ReLU and pooling, in channels-last memory."""
    (n, c, h, w), (k, _, *kernel) = x.shape, weight.shape
    form = Form(3, 3, 1, *padding)
    if c % CHANNELS == k % CHANNELS == 0 and kernel == [3, 3] and form.pays(n, h, w):
        return kernels.convolution(x, weight, form)
    if c % CHANNELS == k % CHANNELS == 0 and kernel == [3, 3] and form.pays_without_padding(n, h, w):
        x, out = last(x), empty((n, k, h - 2, w - 2), torch.float32)
        kernels.call("conv3x3_inner", (x, last(weight), out), n, h, w, c, k)
        return out
    return F.conv2d(last(x), last(weight), padding=padding).contiguous(memory_format=torch.channels_last)


def _pooled_backward(
    kernels: CpuKernels,
    e: Tensor,
    weight: Tensor,
    padding: tuple[int, int],
    laid: Laid,
    wanted: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`few_channels_backward` where outputs were pooled."""
    images, places, weight, e = laid.images, laid.places, last(weight), e.detach()
    assert places is not None
    (n, h, w, c), (k, _, high, wide) = images.shape, weight.shape
    both = torch.zeros(weight.numel() + k) if wanted[1] else None
    dx = torch.empty_like(images) if wanted[0] else None
    sizes = (n, h, w, c, k, high, wide, *e.stride(), *places.stride())
    kernels.call("pooled_gradients", (images, e, places, weight, dx, both), *sizes)
    dx = None if dx is None else _inner(dx.permute(0, 3, 1, 2), padding)
    return dx, *((None, None) if both is None else _divided(both, weight))


def _divided(both: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of weights and of bias, which a kernel writes one after the other."""
    k, c, high, wide = weight.shape
    return both[:-k].view(k, high, wide, c).permute(0, 3, 1, 2), both[-k:]


def _inner(x: Tensor, padding: tuple[int, int]) -> Tensor:
    """Padded images without their padding."""
    (top, left), (h, w) = padding, x.shape[2:]
    return x[:, :, top : h - top, left : w - left]


def _padded(x: Tensor, top: int, left: int) -> Tensor:
    """``[N, C, H, W]`` -> ``[N, H + 2 top, W + 2 left, C]``."""
    x = x.detach().permute(0, 2, 3, 1)
    if not (top or left):
        return x.contiguous()
    n, h, w, c = x.shape
    out = torch.zeros(n, h + 2 * top, w + 2 * left, c)
    out[:, top : top + h, left : left + w] = x
    return out
