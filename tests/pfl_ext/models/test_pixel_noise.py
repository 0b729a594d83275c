"""Noise on pixels: its distribution, by the image's key and level alone. See also test_image_changes.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pfl_ext.data.transforms import draw_crops, draw_keys
from pfl_ext.models.pixel_noise import noisy


def crops_of(n: int, level: float = 1.0) -> torch.Tensor:
    rng = np.random.default_rng(0)
    return torch.from_numpy(draw_keys(rng, draw_crops(rng, n, 12, 10, "crop", "both"), level))


@pytest.mark.parametrize("side", [10, 11])  # of an odd number of values, one is drawn and left out
def test_noise_is_normal_and_independent(side: int) -> None:
    n, std = 400, torch.tensor([0.5, 1.0, 2.0])
    x = torch.zeros(n, 3, side, side)
    noise = (noisy(x, crops_of(n), 0.1, std) * std.view(3, 1, 1) / 0.1).double()
    count = noise.numel()
    # each bound is five standard deviations of the statistic
    for k, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((noise**k).mean()) - moment) <= 5 * math.sqrt(spread / count)
    below = float((noise < 1.0).double().mean())
    assert abs(below - 0.8413447) <= 5 * math.sqrt(0.8413 * 0.1587 / count)
    flat = noise.permute(0, 2, 3, 1).flatten(1)
    pairs = flat.shape[1] // 2  # the two numbers of a pair are so far apart
    others = (flat[:, 1:] * flat[:, :-1], flat[:, -pairs:] * flat[:, :pairs], flat[1:] * flat[:-1])
    squares = (flat[:, -pairs:] ** 2 - 1) * (flat[:, :pairs] ** 2 - 1)
    for product, spread in (*((other, 1) for other in others), (squares, 4)):
        assert abs(float(product.mean())) <= 5 * math.sqrt(spread / product.numel())


def test_the_level_multiplies_the_noise() -> None:
    x, std = torch.rand(5, 3, 10, 10), torch.ones(3)
    whole, half, none = (noisy(x, crops_of(5, level), 0.2, std) - x for level in (1.0, 0.5, 0.0))
    torch.testing.assert_close(half, whole / 2, rtol=0, atol=1e-6)
    assert not none.any()
    assert whole.abs().max() > 0.2
