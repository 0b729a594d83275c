"""Arrays of numbers as pixels: those of LEAF's JSON and of TensorFlow Federated's HDF5.

Whole numbers are levels from 0 to 255; others are shares of the brightest level, from 0 to 1, and k / 255
becomes k exactly. Grey images get three equal channels.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataset.store.images import MAX_PIXELS, Pixels


def shape_of(shape: tuple[int, ...], where: str) -> tuple[int, int, int]:
    """Height, width and channels of an image of this shape: ``H x W``, ``H x W x 1``, ``H x W x 3``, or one
    list of a square's grey pixels or of its colours.

    Raises:
        ValueError: that says where, for another shape.
    """
    found: tuple[int, ...] = shape
    if len(shape) == 1:
        for channels in (1, 3):
            side = math.isqrt(shape[0] // channels)
            if side * side * channels == shape[0]:
                found = (side, side, channels)
    if len(shape) == 2:
        found = (*shape, 1)
    if len(found) != 3 or found[2] not in (1, 3) or not 0 < found[0] * found[1] <= MAX_PIXELS:
        raise ValueError(
            f"{where} has the shape {' x '.join(map(str, shape)) or '()'}, which is not an image with "
            "one or three channels"
        )
    return found[0], found[1], found[2]


def array_of(value: Any, where: str) -> npt.NDArray[Any]:
    """Nested lists of numbers as an array.

    Raises:
        ValueError: that says where, for lists of unequal lengths, and for what is no number.
    """
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        array = np.empty(0, object)
    if array.dtype.kind not in "iuf" or not array.size:
        raise ValueError(
            f"{where} is not an image: it has values that are not numbers, or rows of different lengths"
        )
    return array


class Scale:
    """Whether a source's numbers are levels to 255, or shares to 1, and how large its images are.

    Both are found out image by image.
    """

    def __init__(self) -> None:
        self.unit = self._has_images = False
        self._above_one = self._shares = ""
        self._sizes: set[tuple[int, int]] = set()

    def shape_of(self, shape: tuple[int, ...], where: str) -> tuple[int, int, int]:
        """`shape_of`, and note the size."""
        found = shape_of(shape, where)
        self._sizes.add(found[:2])
        return found

    def note(self, array: npt.NDArray[Any], where: str) -> None:
        """Take note of an image, or of several.

        Raises:
            ValueError: that says where, for a number out of range.
        """
        self._has_images = True
        low, high = array.min(), array.max()
        unit = array.dtype.kind == "f"
        if not (low >= 0 and high <= (1 if unit else 255)):
            bad = high if low >= 0 else low
            raise ValueError(
                f"{where} has the number {bad:g}, which is out of range: whole numbers must be from 0 "
                "to 255, other numbers from 0 to 1"
            )
        if unit and not self.unit:
            self.unit, self._shares = True, where
        if not unit and high > 1 and not self._above_one:
            self._above_one = where
        if self.unit and self._above_one:
            raise ValueError(
                f"{self._above_one} has whole numbers above 1, but {self._shares} has numbers from 0 to "
                "1: save all images in one of these two forms"
            )

    def side(self, source: Path) -> int:
        """The side of images that all are squares of one size; 0 for others.

        Raises:
            ValueError: where all images were black as levels: whole numbers, none of them above 1.
        """
        if self._has_images and not self.unit and not self._above_one:
            raise ValueError(
                f"{source} has only the whole numbers 0 and 1, so all images would be black: save them "
                "as 0.0 and 1.0, or as 0 and 255"
            )
        height, width = next(iter(self._sizes), (0, 0))
        return height if len(self._sizes) == 1 and height == width else 0

    def pixels(self, array: npt.NDArray[Any], shape: tuple[int, int, int]) -> Pixels:
        """``[H, W, 3]`` uint8."""
        levels = np.rint(np.asarray(array, np.float64) * 255) if self.unit else array
        image = np.asarray(levels).astype(np.uint8).reshape(shape)
        return np.ascontiguousarray(np.broadcast_to(image, (*shape[:2], 3)))
