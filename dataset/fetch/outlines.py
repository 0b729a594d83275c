"""Objects' outlines in the form of COCO's JSON, and masks of classes made of them.

An outline is a list of polygons, each of them ``[x0, y0, x1, y1, ...]`` in pixels, or an object ``{"size":
[height, width], "counts": ...}`` with the lengths of runs of pixels outside and inside in turn, column by
column, as numbers or in pycocotools' text.

pycocotools fills polygons, as in COCO's own tools. It does not check runs, so these are decoded here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pycocotools import mask as coco_mask

from dataset.arrays import BoolArray, FloatArray, IntArray
from dataset.store.annotations import VOID, encoded_mask

MAX_PIXELS = 1 << 26
"""Most pixels of an image whose mask is drawn."""
LEAST_NUMBERS = 6
"""Fewest coordinates of a polygon; two points have no area."""
CROWD_CLASS = 0
"""The class of a group's outline, which is rough, instead of an object's class."""
_BITS, _MORE, _SIGN, _FIRST = 5, 0x20, 0x10, 48  # of a character of pycocotools' text

Outline = Sequence[FloatArray] | Mapping[str, Any]


def packed(value: Any) -> Any:
    """Polygons as arrays, in a quarter of the memory; anything else is unchanged for `checked` to refuse."""
    if not isinstance(value, list):
        return value
    is_plain = all(isinstance(part, list) and all(type(n) in (int, float) for n in part) for part in value)
    try:
        return [np.array(part, np.float64) for part in value] if is_plain else value
    except OverflowError:
        return value


def checked(value: Any, size: tuple[int, int], where: str) -> Outline:
    """An outline for an image of this width and height.

    Raises:
        ValueError: that names the place.
    """
    if isinstance(value, list):
        for part in value:
            if not isinstance(part, np.ndarray) or len(part) % 2 or not (np.abs(part) < 1e9).all():
                raise ValueError(f"{where} has a polygon that is not a list of pairs of numbers")
        return value
    if not isinstance(value, dict):
        raise ValueError(
            f"{where} has the segmentation {str(value)[:40]!r}; it must be polygons or run lengths (RLE)"
        )
    if value.get("size") != [size[1], size[0]]:
        raise ValueError(
            f"{where} has run lengths (RLE) of the size {str(value.get('size'))[:40]}, but the image "
            f"has [{size[1]}, {size[0]}]"
        )
    return value


def drawn(outline: Outline, size: tuple[int, int], where: str) -> BoolArray:
    """The pixels within an outline, ``[height, width]``, of an image of this width and height.

    Raises:
        ValueError: that names the place, for runs that are not those of such an image.
    """
    width, height = size
    if isinstance(outline, Mapping):
        counts = outline.get("counts")
    else:
        near = [_near(part, size).tolist() for part in outline if len(part) >= LEAST_NUMBERS]
        near = [part for part in near if len(part) >= LEAST_NUMBERS]
        if not near:
            return np.zeros((height, width), bool)
        counts = coco_mask.merge(coco_mask.frPyObjects(near, height, width))["counts"].decode()
    runs = _runs(counts, where)
    if int(runs.sum()) != width * height:
        raise ValueError(
            f"{where} has run lengths (RLE) whose sum is not the number of pixels, {width * height:,}"
        )
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(width, height).T


def _near(polygon: FloatArray, size: tuple[int, int]) -> FloatArray:
    """The part of a polygon within an image and its own width or height around it.

    pycocotools cuts polygons off at the image's border itself, but follows each edge to its end.
    """
    points = polygon.reshape(-1, 2)
    for axis, length in enumerate(size):
        for sign, least in ((1, -length), (-1, -2 * length)):
            after = np.roll(points, -1, axis=0)
            here, there = (sign * ends[:, axis] - least for ends in (points, after))
            crosses = (here < 0) != (there < 0)
            share = np.where(crosses, here / np.where(crosses, here - there, 1), 0)
            cuts = points + share[:, None] * (after - points)
            kept = np.stack([here >= 0, crosses], axis=1).ravel()
            points = np.stack([points, cuts], axis=1).reshape(-1, 2)[kept]
    return points.ravel()


def _runs(counts: Any, where: str) -> IntArray:
    """The lengths of runs, from numbers or from pycocotools' text."""
    if isinstance(counts, str):
        counts = _numbers_in(counts, where)
    if not isinstance(counts, list) or not all(type(n) is int and 0 <= n <= MAX_PIXELS for n in counts):
        raise ValueError(f"{where} has run lengths (RLE) that are not whole numbers from 0 to {MAX_PIXELS:,}")
    return np.array(counts, np.int64)


def _numbers_in(text: str, where: str) -> list[int]:
    """Numbers with 5 bits in a character, lowest first; from the fourth on, minus the number two before."""
    found: list[int] = []
    number, shift = 0, 0
    for character in text:
        bits = ord(character) - _FIRST
        if not 0 <= bits < 2 * _MORE or shift > 60:
            raise ValueError(f"{where} has compressed run lengths (RLE) that pycocotools cannot have written")
        number |= (bits & _MORE - 1) << shift
        shift += _BITS
        if bits & _MORE:
            continue
        if bits & _SIGN:
            number -= 1 << shift
        found.append(number + (found[-2] if len(found) > 2 else 0))
        number, shift = 0, 0
    if shift:
        raise ValueError(f"{where} has compressed run lengths (RLE) that are cut off")
    return found


def mask_png(objects: Sequence[tuple[int, Outline, str]], size: tuple[int, int]) -> bytes:
    """A mask of the classes of an image's objects, as a PNG.

    It is void where objects of several classes overlap, since COCO does not say which of them is in front. It
    is also void within a group's outline where no single object is.

    Args:
        objects: class, from 1 on, or `CROWD_CLASS`; outline; and place, for errors.
        size: width and height.

    Raises:
        ValueError: that names the place of an outline that cannot be drawn.
    """
    mask = np.zeros((size[1], size[0]), np.uint8)
    is_void, of_group = np.zeros_like(mask, bool), np.zeros_like(mask, bool)
    for number, outline, where in objects:
        inside = drawn(outline, size, where)
        if number == CROWD_CLASS:
            of_group |= inside
            continue
        is_void |= inside & (mask != 0) & (mask != number)
        mask[inside] = number
    mask[is_void | of_group & (mask == 0)] = VOID
    return encoded_mask(mask)
