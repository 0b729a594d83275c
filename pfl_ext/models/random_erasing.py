"""Random erasing: a rectangle of some training images is hidden (Zhong et al. 2020, arXiv 1708.04896).

Whether, where and how large follows from the image's key (`pfl_ext.models.dropout`), a function of (seed,
round, user, step). So it is the same on any device and in any batch.

Shape letters: B images of a batch, S the side of the network's input.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pfl_ext.data.transforms import KEY_BITS
from pfl_ext.models.cutout import with_zeros
from pfl_ext.models.dropout import OF_RANDOM_ERASING, drawn, keys_in

AREA = (0.02, 0.33)  # share of the image's area
RATIO = (0.3, 3.3)  # height : width
TRIES = 10


def erased(x: Tensor, crops: Tensor | None, probability: float) -> Tensor:
    """A network's input with a rectangle of zeros (the mean color, after normalisation) in some images.

    Rectangles are distributed as in torchvision's RandomErasing, whose default value is zero as well: the
    first of ten that is smaller than the image in height and width, or none.

    Args:
        x: normalised, ``[B, 3, S, S]``.
        crops: ``[B, 9]`` or more, with keys; without keys, as in evaluation, nothing is hidden.
        probability: above 0, at most 1.
    """
    keys = keys_in(crops)
    if keys is None:
        return x
    # in float64, so that no processor's rounding moves an edge
    draws = drawn(keys, OF_RANDOM_ERASING, 3 + 2 * TRIES).double() / (1 << KEY_BITS)
    whether, place, area, ratio = draws.tensor_split((1, 3, 3 + TRIES), 1)
    size, (low, high) = x.shape[2], map(math.log, RATIO)
    area = size**2 * (AREA[0] + area * (AREA[1] - AREA[0]))
    ratio = (low + ratio * (high - low)).exp()
    sides = torch.stack([(area * ratio).sqrt(), (area / ratio).sqrt()], 1).round()  # [B, 2, TRIES]
    fits = (sides < size).all(1)
    first = fits.byte().argmax(1)[:, None, None].expand(-1, 2, 1)
    side = sides.gather(2, first)[..., 0] * ((whether < probability) & fits.any(1, keepdim=True))
    start = (place * (size + 1 - side)).floor()
    return with_zeros(x, start, start + side)
