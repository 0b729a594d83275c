"""Cutout: a square of each training image is hidden (DeVries and Taylor 2017, arXiv 1708.04552).

Its position follows from the image's key (`pfl_ext.models.dropout`), a function of (seed, round, user, step).
So it is the same on any device and in any batch.

Shape letters: B images of a batch, S the side of the network's input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pfl_ext.data.transforms import KEY_BITS
from pfl_ext.models.dropout import OF_CUTOUT, drawn, keys_in


def cut_out(x: Tensor, crops: Tensor | None, side: int) -> Tensor:
    """A network's input with a square of zeros (the mean colour, after normalisation) in each image.

    The square's centre (for an even side, the pixel below and right of it) is drawn uniformly from the
    image's pixels, so that a part of the square may be outside, as in the authors' code.

    Args:
        x: normalised, ``[B, 3, S, S]``.
        crops: ``[B, 9]`` or more, with keys; without keys, as in evaluation, nothing is hidden.
        side: side of the square, in pixels.
    """
    keys = keys_in(crops)
    if keys is None:
        return x
    low = (drawn(keys, OF_CUTOUT, 2) * x.shape[2] >> KEY_BITS) - side // 2
    return with_zeros(x, low, low + side)


def with_zeros(x: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """A copy of images ``[B, 3, S, S]`` with zeros in rows and columns from ``start`` to before ``end``.

    ``start`` and ``end`` are ``[B, 2]``: a row and a column, which may be outside the image.
    """
    pixels = torch.arange(x.shape[2], device=x.device)
    inside = (pixels >= start[..., None]) & (pixels < end[..., None])
    return x.clone().masked_fill_((inside[:, 0, :, None] & inside[:, 1, None, :])[:, None], 0.0)
