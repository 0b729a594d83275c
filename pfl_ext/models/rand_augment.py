"""RandAugment: each training image goes through two operations that are drawn for it (Cubuk et al. 2020,
arXiv 1909.13719).

The operations, and what a magnitude from 0 to 30 means for each, are those of torchvision's RandAugment: on
pixels of 8 bits, with the nearest pixel where an image is moved, and black where nothing of it is left. Which
two an image has, and to which side they go, follows from the image's key (`pfl_ext.models.dropout`), a
function of (seed, round, user, step). So it is the same on any device and in any batch.

Shape letters: B images of a batch, S the side of the network's input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pfl_ext.data.transforms import KEY_BITS
from pfl_ext.models.dropout import OF_RAND_AUGMENT, drawn, keys_in

DRAWN = 2
"""Operations of an image, one after the other; the same may be drawn twice."""
STRONGEST = 30
"""The largest magnitude; torchvision has 31, from 0 on."""
Operation = Callable[[Tensor], Tensor]


def rand_augmented(pixels: Tensor, crops: Tensor | None, magnitude: int) -> Tensor:
    """Images after two operations each; pixels are rounded to multiples of 1/255 before.

    Images with the same operation and side go through it together. It waits for a GPU, so it cannot be part
    of a CUDA graph.

    Args:
        pixels: in 0..1, ``[B, 3, S, S]``.
        crops: ``[B, 9]`` or more, with keys; without keys, as in evaluation, nothing changes.
        magnitude: from 1 to `STRONGEST`.
    """
    keys = keys_in(crops)
    if keys is None:
        return pixels
    choices = operations(magnitude, pixels.shape[2])
    draws = drawn(keys, OF_RAND_AUGMENT, DRAWN)
    levels = (pixels * 255).round_().to(torch.uint8)
    for chosen in (draws * len(choices) >> KEY_BITS).unbind(1):
        for number in sorted(set(chosen.tolist())):
            rows = (chosen == number).nonzero()[:, 0]
            levels[rows] = choices[number](levels[rows])
    return levels.to(pixels.dtype).div_(255)


@cache
def operations(magnitude: int, size: int) -> tuple[Operation, ...]:
    """The 14 operations on uint8 ``[n, 3, S, S]``, each twice: with its magnitude, and with the opposite one.

    The two are the same where an operation has no side.
    """
    from torchvision.transforms.v2 import functional as tv  # takes long to import, and few runs need it

    def at(first: float, last: float) -> float:
        return float(torch.linspace(first, last, STRONGEST + 1)[magnitude])

    shear, shift, angle = math.degrees(math.atan(at(0, 0.3))), int(at(0, 150 / 331 * size)), at(0, 30)
    change, threshold, bits = at(0, 0.9), 255 * at(1, 0), 8 - round(4 * magnitude / STRONGEST)

    def of_side(side: int) -> tuple[Operation, ...]:
        def moved(x: Tensor, over: int, down: int) -> Any:
            return tv.affine(x, 0.0, [float(over), float(down)], 1.0, [0.0, 0.0])

        def sheared(x: Tensor, over: float, down: float) -> Any:
            return tv.affine(x, 0.0, [0.0, 0.0], 1.0, [over, down], center=[0.0, 0.0])

        return (
            lambda x: x,
            lambda x: sheared(x, side * shear, 0.0),
            lambda x: sheared(x, 0.0, side * shear),
            lambda x: moved(x, side * shift, 0),
            lambda x: moved(x, 0, side * shift),
            lambda x: tv.rotate(x, side * angle),
            lambda x: tv.adjust_brightness(x, 1 + side * change),
            lambda x: tv.adjust_saturation(x, 1 + side * change),
            lambda x: tv.adjust_contrast(x, 1 + side * change),
            lambda x: tv.adjust_sharpness(x, 1 + side * change),
            lambda x: tv.posterize(x, bits),
            lambda x: tv.solarize(x, threshold),
            tv.autocontrast,
            tv.equalize,
        )

    return tuple(operation for both in zip(of_side(1), of_side(-1)) for operation in both)
