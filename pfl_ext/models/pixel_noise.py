"""Gaussian noise on the values of training images.

The noise of an image follows from its key (`pfl_ext.models.dropout`), a function of (seed, round, user,
step). So it is the same on any device, up to rounding, and in any batch. Its deviation is multiplied by the
image's level, which `pfl_ext.data.transforms.draw_keys` puts beside its key. Users with different levels have
different distributions of images, as in NIID-Bench's feature skew (Li, Diao, Chen and He, arXiv 2102.02079).

Shape letters: B images of a batch, S the side of the network's input.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pfl_ext.data.transforms import CROP_COLUMNS, KEY_COLUMNS
from pfl_ext.models.dropout import OF_NOISE, drawn_twice, keys_in


def noisy(x: Tensor, crops: Tensor | None, deviation: float, std: Tensor) -> Tensor:
    """A network's input with noise on each value; nothing is cut off.

    Args:
        x: normalised by ``std``, ``[B, 3, S, S]``.
        crops: ``[B, 9]`` or more, with keys and levels; without, as in evaluation, nothing changes.
        deviation: of the noise, for pixels in 0..1 and an image of level 1.
        std: by which pixels in 0..1 were divided, ``[3]``.
    """
    keys = keys_in(crops)
    if crops is None or keys is None:
        return x
    first, second = drawn_twice(keys, OF_NOISE, -(-x[0].numel() // 2))
    # Box and Muller: two independent normal numbers from two uniform ones, the first of them above 0
    radius, angle = (-2 * (1 - first).log()).sqrt(), second * (2 * math.pi)
    normal = torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, : x[0].numel()]
    scale = deviation * crops[:, CROP_COLUMNS + KEY_COLUMNS].view(-1, 1, 1, 1) / std
    noise = normal.view(len(x), *x.shape[2:], 3) * scale
    return x + noise.permute(0, 3, 1, 2)
