"""Cutout: which square is hidden, by the image's key alone. See also test_image_changes.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from pfl_ext.data.transforms import draw_crops, draw_keys
from pfl_ext.models.cutout import cut_out
from pfl_ext.models.dropout import OF_CUTOUT

WORD = 2**64


def crops_of(n: int, seed: int = 0) -> Tensor:
    """With keys, of images of 12 pixels, for an input of 10."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(draw_keys(rng, draw_crops(rng, n, 12, 10, "crop", "both")))


def splitmix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB % WORD
    return z ^ z >> 31


def expected(x: npt.NDArray[Any], crops: npt.NDArray[Any], side: int) -> npt.NDArray[Any]:
    """By whole numbers without a bound, image by image, pixel by pixel."""
    out, size = x.copy(), x.shape[2]
    for image, crop in zip(out, crops):
        key = (int(crop[6]) << 24) + int(crop[7])
        stream = splitmix((splitmix(key) + OF_CUTOUT) % WORD)
        top, left = (
            (splitmix((stream + unit * 0x9E3779B97F4A7C15) % WORD) >> 40) * size // 2**24 - side // 2
            for unit in (0, 1)
        )
        for row in range(size):
            for column in range(size):
                if 0 <= row - top < side and 0 <= column - left < side:
                    image[:, row, column] = 0
    return out


@pytest.mark.parametrize("side", [1, 4, 7, 10])
def test_the_square_is_what_whole_numbers_say(side: int) -> None:
    x, crops = torch.rand(30, 3, 10, 10) + 1, crops_of(30)
    got = cut_out(x, crops, side)
    np.testing.assert_array_equal(got.numpy(), expected(x.numpy(), crops.numpy(), side))
    assert got.is_contiguous(), "and the memory is as it was"
    last = x.contiguous(memory_format=torch.channels_last)
    assert cut_out(last, crops, side).is_contiguous(memory_format=torch.channels_last)


def test_every_pixel_is_a_centre_as_often() -> None:
    """A square of one pixel; chi-square of 100 pixels, whose deviation from 99 is 14."""
    images = 20_000
    hidden = (cut_out(torch.ones(images, 1, 10, 10), crops_of(images), 1) == 0).sum((0, 1)).double()
    assert hidden.sum() == images
    expectation = images / 100
    assert abs(float(((hidden - expectation) ** 2 / expectation).sum()) - 99) < 5 * 14
