"""RandAugment: torchvision's operations, on each image by its key alone. See also test_image_changes.py."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from pfl_ext.data.transforms import KEY_BITS
from pfl_ext.models.dropout import OF_RAND_AUGMENT, drawn, keys_in
from pfl_ext.models.rand_augment import DRAWN, STRONGEST, operations, rand_augmented
from tests.pfl_ext.models.test_cutout import crops_of

CHOICES = 28
WITHOUT_SIDE = (0, 10, 11, 12, 13)
"""Numbers of the operations for which torchvision draws no side: identity, posterize and those after it."""


def choices_of(crops: Tensor) -> list[list[int]]:
    """For each image the numbers of its operations: twice torchvision's, and one more on the other side."""
    keys = keys_in(crops)
    assert keys is not None
    rows = drawn(keys, OF_RAND_AUGMENT, DRAWN).tolist()
    return [[draw * CHOICES >> KEY_BITS for draw in row] for row in rows]


def by_torchvision(image: Tensor, choices: list[int], magnitude: int) -> Tensor:
    """torchvision's RandAugment of uint8 ``[3, S, S]``, whose draws are these."""
    kinds = [torch.tensor(choice // 2) for choice in choices]
    coins = [torch.tensor(1.0 - choice % 2) for choice in choices if choice // 2 not in WITHOUT_SIDE]
    with mock.patch("torch.randint", side_effect=kinds), mock.patch("torch.rand", side_effect=coins) as coin:
        changed: Tensor = v2.RandAugment(DRAWN, magnitude)(image)
    assert coin.call_count == len(coins)
    return changed


@pytest.mark.parametrize("magnitude", [1, 9, 20, STRONGEST])
@pytest.mark.parametrize("size", [12, 32])
def test_an_image_changes_as_by_torchvision(magnitude: int, size: int) -> None:
    images = torch.randint(0, 256, (60, 3, size, size), dtype=torch.uint8)
    crops = crops_of(60, magnitude)
    got, choices = rand_augmented(images / 255, crops, magnitude), choices_of(crops)
    for image, result, own in zip(images, got, choices):
        assert torch.equal(result, by_torchvision(image, own, magnitude) / 255), own
    assert len({choice for own in choices for choice in own}) > CHOICES - 3, "nearly all were drawn"


def test_pixels_between_those_of_8_bits_are_rounded() -> None:
    images, crops = torch.randint(0, 256, (30, 3, 10, 10)) / 255, crops_of(30)
    off = images + (torch.rand(images.shape) - 0.5) * 0.9 / 255
    assert torch.equal(rand_augmented(off, crops, 9), rand_augmented(images, crops, 9))


def test_each_operation_is_drawn_as_often() -> None:
    """Chi-square of 28 choices for both places, and of all pairs, within five deviations."""
    assert len(operations(9, 10)) == CHOICES
    n = 30_000
    first, second = np.array(choices_of(crops_of(n))).T
    for counts in (
        np.bincount(first, minlength=CHOICES),
        np.bincount(second, minlength=CHOICES),
        np.bincount(first * CHOICES + second, minlength=CHOICES**2),
    ):
        free, mean = len(counts) - 1, n / len(counts)
        assert abs(((counts - mean) ** 2 / mean).sum() - free) < 5 * (2 * free) ** 0.5
