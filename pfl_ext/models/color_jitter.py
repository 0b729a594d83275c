"""Color jitter: each training image's brightness, contrast and saturation change at random.

The operations are those of torchvision's ColorJitter, without its hue. Factors and their order follow from
the image's key (`pfl_ext.models.dropout`), a function of (seed, round, user, step). So they are the same on
any device and in any batch.

Shape letters: B images of a batch, S the side of the network's input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pfl_ext.data.transforms import KEY_BITS
from pfl_ext.models.dropout import OF_COLOR_JITTER, drawn, keys_in

CONTRAST, SATURATION = 1, 2  # brightness is 0


def jittered(pixels: Tensor, crops: Tensor | None, strength: float) -> Tensor:
    """Images whose colors are scaled three times, in an order drawn for each image.

    Every factor is uniform in ``1 - strength .. 1 + strength``. Pixels go away from, or towards, black
    (brightness), the mean of the image's grays (contrast) and their own gray (saturation). Values outside of
    0..1 are cut off each time.

    Args:
        pixels: in 0..1, ``[B, 3, S, S]``.
        crops: ``[B, 9]`` or more, with keys; without keys, as in evaluation, nothing changes.
        strength: above 0, at most 1.
    """
    keys = keys_in(crops)
    if keys is None:
        return pixels
    draws = drawn(keys, OF_COLOR_JITTER, 4)
    factors = 1 + strength * (draws[:, :3].float() / (1 << KEY_BITS - 1) - 1)
    order = draws[:, 3] * 6 >> KEY_BITS
    first, turn = order % 3, order // 3
    for kind in (first, (first + 1 + turn) % 3, (first + 2 - turn) % 3):
        factor, which = factors.gather(1, kind[:, None]).view(-1, 1, 1, 1), kind.view(-1, 1, 1, 1)
        red, green, blue = pixels.unbind(1)
        gray = (0.2989 * red + 0.587 * green + 0.114 * blue)[:, None]
        origin = torch.where(which == SATURATION, gray, gray.mean((2, 3), keepdim=True) * (which == CONTRAST))
        pixels = torch.lerp(origin, pixels, factor).clamp_(0, 1)
    return pixels
