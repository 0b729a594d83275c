"""Random erasing: which rectangle is hidden, by the image's key alone. See also test_image_changes.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torchvision.transforms import RandomErasing

from pfl_ext.data.transforms import KEY_BITS
from pfl_ext.models.dropout import OF_RANDOM_ERASING, drawn, keys_in
from pfl_ext.models.random_erasing import AREA, RATIO, TRIES, erased
from tests.pfl_ext.models.test_cutout import crops_of


def rectangle(draws: list[float], size: int, probability: float) -> tuple[slice, slice]:
    """The rows and columns that numbers in 0..1 hide, one try after another."""
    whether, down, over, *tries = draws
    for area, ratio in zip(tries[:TRIES], tries[TRIES:], strict=True):
        area = size**2 * (AREA[0] + area * (AREA[1] - AREA[0]))
        ratio = RATIO[0] * (RATIO[1] / RATIO[0]) ** ratio
        height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if height < size and width < size and whether < probability:
            top, left = int(down * (size - height + 1)), int(over * (size - width + 1))
            return slice(top, top + height), slice(left, left + width)
    return slice(0), slice(0)


@pytest.mark.parametrize("size", [3, 10, 33])
@pytest.mark.parametrize("probability", [0.2, 1.0])
def test_the_rectangle_is_what_the_draws_say(size: int, probability: float) -> None:
    x, crops = torch.rand(60, 3, size, size) + 1, crops_of(60)
    keys = keys_in(crops)
    assert keys is not None
    expected = x.clone()
    for image, draws in zip(expected, drawn(keys, OF_RANDOM_ERASING, 3 + 2 * TRIES).tolist()):
        tall, wide = rectangle([draw / 2**KEY_BITS for draw in draws], size, probability)
        image[:, tall, wide] = 0
    assert torch.equal(erased(x, crops, probability), expected)


def test_rectangles_are_distributed_as_torchvisions() -> None:
    """Means of size and place, and of the squares, within five deviations; and how many images have one."""
    n, size, p = 5_000, 24, 0.3
    hidden = erased(torch.ones(n, 1, size, size), crops_of(n), p)[:, 0].numpy() == 0
    share = hidden.any((1, 2)).mean()
    assert abs(share - p) < 5 * (p * (1 - p) / n) ** 0.5
    ours = rows(erased(torch.ones(n, 1, size, size), crops_of(n, 1), 1.0)[:, 0].numpy() == 0)
    torchs = RandomErasing(p=1, scale=AREA, ratio=RATIO)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = rows(np.stack([torchs(torch.ones(1, size, size))[0].numpy() == 0 for _ in range(n)]))
    for power in (1, 2):
        a, b = ours**power, theirs**power
        assert (np.abs(a.mean(0) - b.mean(0)) < 5 * ((a.var(0) + b.var(0)) / n) ** 0.5).all()


def rows(hidden: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Top, left, height, width, area and height times left of each rectangle, ``[n, 6]``."""
    tall, wide = hidden.any(2), hidden.any(1)
    top, left, height, width = tall.argmax(1), wide.argmax(1), tall.sum(1), wide.sum(1)
    assert ((height * width) == hidden.sum((1, 2))).all(), "it is a rectangle"
    return np.stack([top, left, height, width, height * width, height * left], 1).astype(np.float64)
