"""Color jitter: torchvision's operations, on each image by its key alone. See also test_image_changes.py."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.transforms import v2

from pfl_ext.data.transforms import KEY_BITS
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.color_jitter import jittered
from pfl_ext.models.dropout import OF_COLOR_JITTER, drawn, keys_in
from pfl_ext.models.image_changes import ImageChanges
from pfl_ext.tasks.segmentation import Segmentation
from tests.pfl_ext.models.test_cutout import crops_of

CHANGES: Any = (
    v2.functional.adjust_brightness,
    v2.functional.adjust_contrast,
    v2.functional.adjust_saturation,
)
ORDERS = ((0, 1, 2), (1, 2, 0), (2, 0, 1), (0, 2, 1), (1, 0, 2), (2, 1, 0))


def draws_of(crops: Tensor) -> list[list[int]]:
    """The whole numbers of 24 bits of each image: three of its factors, and that of the order."""
    keys = keys_in(crops)
    assert keys is not None
    return drawn(keys, OF_COLOR_JITTER, 4).tolist()


@pytest.mark.parametrize("strength", [0.1, 0.4, 1.0])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_an_image_changes_as_by_torchvision(strength: float, memory_format: torch.memory_format) -> None:
    pixels = torch.rand(40, 3, 10, 10).contiguous(memory_format=memory_format)
    before, crops, seen = pixels.clone(), crops_of(40), set()
    got = jittered(pixels, crops, strength)
    for image, result, (*factors, order) in zip(pixels, got, draws_of(crops)):
        seen.add(ORDERS[order * 6 // 2**KEY_BITS])
        for change in ORDERS[order * 6 // 2**KEY_BITS]:
            image = CHANGES[change](image, 1 + strength * (factors[change] / 2 ** (KEY_BITS - 1) - 1))
        torch.testing.assert_close(result, image, rtol=0, atol=1e-5)
    assert seen == set(itertools.permutations(range(3))), "every order was drawn"
    assert torch.equal(pixels, before), "what was given stays"
    assert got.is_contiguous(memory_format=memory_format)


def test_orders_are_as_frequent_as_each_other_and_factors_uniform() -> None:
    """Chi-square of six orders, and means and deviations of uniform factors, each within five deviations."""
    n = 20_000
    draws = np.array(draws_of(crops_of(n)))
    counts = np.bincount(draws[:, 3] * 6 >> KEY_BITS, minlength=6)
    assert ((counts - n / 6) ** 2 / (n / 6)).sum() < 5 + 5 * 10**0.5
    uniform = draws[:, :3] / 2**KEY_BITS
    assert np.abs(uniform.mean(0) - 0.5).max() < 5 / (12 * n) ** 0.5
    assert np.abs(np.corrcoef(draws.T) - np.eye(4)).max() < 5 / n**0.5


def test_masks_stay_and_colors_change_before_they_are_normalised() -> None:
    images = torch.randint(0, 256, (4, 12, 12, 3), dtype=torch.uint8)
    masks = torch.randint(0, 3, (4, 12, 12), dtype=torch.uint8)
    scales: Any = ((0.4, {}), (None, {"mean": (0.0,) * 3, "std": (1.0,) * 3}))
    model, plain = (
        ImageClassifier(
            nn.Conv2d(3, 3, 1),
            input_size=10,
            task=Segmentation(3),
            changes=ImageChanges(color_jitter=strength),
            **scale,
        )
        for strength, scale in scales
    )
    (x, targets), (pixels, same) = (each.prepare(images, masks, crops_of(4)) for each in (model, plain))
    assert torch.equal(targets, same)
    by_hand = (jittered(pixels, crops_of(4), 0.4) - model.mean[:, None, None]) / model.std[:, None, None]
    torch.testing.assert_close(x, by_hand, rtol=0, atol=1e-5)
