"""Equal crops move an image, its mask and its boxes alike, and the image as the batched path does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as TF
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.tv_tensors import BoundingBoxes, BoundingBoxFormat, Image, Mask, TVTensor

from pfl_ext.data.transforms import CROP_COLUMNS, Crop, Padding, boxes_cropped, cropped, draw_crops, gathered
from tests.closeness import assert_close_as_vector
from tests.pfl_ext.data.test_transforms import WEIGHTS, made_images, rng

SIZE = 40


def cropped_together(
    parts: Sequence[TVTensor],
    crop: Sequence[float] | Tensor,
    input_size: int,
    *,
    outside: int = 0,
    padding: Padding = "zero",
) -> list[Any]:
    """Cut one crop out of each part of an image, scale it to ``input_size`` and flip it.

    An image is resized bilinearly with antialiasing and a mask by the nearest pixel. Boxes are cut off at the
    crop, so a box that lies outside it has no area and is the task's to drop.

    Args:
        parts: `Image` ``[3, H, W]``, `Mask` ``[..., H, W]`` and `BoundingBoxes` ``[n, 4]`` of one image.
        crop: one row of `pfl_ext.data.transforms.draw_crops`, on the CPU, so that reading it waits for
        nothing.
        input_size: S in pixels.
        outside: the mask's class outside the image, where a padded crop of the image is black.
        padding: "reflect" mirrors image and mask there. Boxes cannot be mirrored.

    Returns:
        The same parts, of height and width S.

    Raises:
        ValueError: for boxes with reflected padding.
    """
    top, left, height, width, flip_h, flip_v = (int(value) for value in crop[:CROP_COLUMNS])
    moved = []
    for part in parts:
        rows, columns = TF.get_size(part)
        border = max(0, -top, -left, top + height - rows, left + width - columns)
        if border and padding == "reflect":
            if isinstance(part, BoundingBoxes):
                raise ValueError("boxes cannot be mirrored at an image's border: set augment.padding to zero")
            part = TF.pad(part, [border], padding_mode="reflect")
        elif border:
            part = TF.pad(part, [border], fill=outside if isinstance(part, Mask) else 0)
        size = [input_size, input_size]
        part = TF.resized_crop(part, top + border, left + border, height, width, size, antialias=True)
        part = TF.horizontal_flip(part) if flip_h else part
        moved.append(TF.vertical_flip(part) if flip_v else part)
    return moved


def as_image(image: Tensor) -> Image:
    return Image(image.permute(2, 0, 1).float() / 255)


@pytest.mark.parametrize("crop", ["crop", "padded", "resized"])
def test_an_image_is_cropped_as_by_the_batched_path(crop: Crop) -> None:
    images, crops = made_images(12, SIZE), torch.from_numpy(draw_crops(rng(3), 12, SIZE, 32, crop, "both"))
    batched = cropped(images, crops, 32)
    for image, row, expected in zip(images, crops, batched):
        (alone,) = cropped_together([as_image(image)], row, 32)
        assert_close_as_vector(alone.as_subclass(Tensor), expected, WEIGHTS)


@pytest.mark.parametrize("crop", ["crop", "padded"])
@settings(max_examples=20)
@given(seed=st.integers(0, 999))
def test_a_mask_keeps_its_pixels_under_crop_and_flips(crop: Crop, seed: int) -> None:
    """A mask that says of each pixel what the image shows there still does after the same crop."""
    images = made_images(3, SIZE, seed)
    masks = images[..., 0].long()
    crops = torch.from_numpy(draw_crops(rng(seed), 3, SIZE, 32, crop, "both"))
    pixels = (cropped(images, crops, 32)[:, 0] * 255).round().long()
    moved = gathered(masks, crops, 32, outside=300)
    inside = moved != 300
    assert moved.dtype == masks.dtype
    assert torch.equal(moved[inside], pixels[inside])
    assert not pixels[~inside].any()
    assert bool(inside.all()) == (crop == "crop" or bool(_within(crops).all()))


def _within(crops: Tensor) -> Tensor:
    return (crops[:, :2] >= 0).all(1) & ((crops[:, :2] + crops[:, 2:4]) <= SIZE).all(1)


@settings(max_examples=40)
@given(seed=st.integers(0, 9999), crop=st.sampled_from(["crop", "padded", "resized"]))
def test_a_box_stays_around_its_object(seed: int, crop: Crop) -> None:
    """After crop and flips, the box of a rectangle is the box of the rectangle's pixels in the mask."""
    draw = np.random.default_rng(seed)
    x, y = np.sort(draw.integers(0, SIZE, (2, 2)), axis=1)
    mask = torch.zeros(SIZE, SIZE, dtype=torch.uint8)
    mask[y[0] : y[1] + 1, x[0] : x[1] + 1] = 1
    corners = [[int(x[0]), int(y[0]), int(x[1]) + 1, int(y[1]) + 1]]
    canvas = (SIZE, SIZE)
    box = BoundingBoxes(torch.tensor(corners).float(), format=BoundingBoxFormat.XYXY, canvas_size=canvas)
    row = draw_crops(draw, 1, SIZE, 32, crop, "both")[0]
    moved, around = cropped_together([Mask(mask), box], torch.from_numpy(row), 32)
    assert around.canvas_size == (32, 32)
    left, top, right, bottom = around.as_subclass(Tensor)[0].tolist()
    found = moved.as_subclass(Tensor).nonzero()
    if not len(found):
        scale = 32 / row[2:4].min()
        assert right - left < scale or bottom - top < scale  # less than a pixel of the crop is left
        return
    (first_row, first_column), (last_row, last_column) = found.min(0).values, found.max(0).values + 1
    expected = torch.tensor([first_column, first_row, last_column, last_row]).float()
    assert (torch.tensor([left, top, right, bottom]) - expected).abs().max() <= 1  # the nearest pixel's half


@settings(max_examples=30)
@given(seed=st.integers(0, 9999), crop=st.sampled_from(["crop", "padded", "resized"]))
def test_boxes_of_a_batch_move_as_those_of_one_image(seed: int, crop: Crop) -> None:
    draw = np.random.default_rng(seed)
    corners = np.sort(draw.uniform(0, SIZE, (3, 4, 2, 2)), axis=2).reshape(3, 4, 4).astype(np.float32)
    crops = torch.from_numpy(draw_crops(draw, 3, SIZE, 32, crop, "both"))
    moved = boxes_cropped(torch.from_numpy(corners), crops, 32)
    for boxes, row, found in zip(corners, crops, moved):
        canvas = {"format": BoundingBoxFormat.XYXY, "canvas_size": (SIZE, SIZE)}
        (alone,) = cropped_together([BoundingBoxes(torch.from_numpy(boxes), **canvas)], row, 32)
        expected = alone.as_subclass(Tensor)
        visible = (expected[:, :2] < expected[:, 2:]).all(1)
        assert torch.equal((found[:, :2] < found[:, 2:]).all(1), visible)
        torch.testing.assert_close(found[visible], expected[visible], rtol=0, atol=32 * SIZE * 2.0**-22)


def test_two_flips_are_none() -> None:
    mask = Mask(torch.arange(SIZE * SIZE).view(SIZE, SIZE))
    whole = [0.0, 0.0, SIZE, SIZE]
    (once,) = cropped_together([mask], [*whole, 1, 1], SIZE)
    assert torch.equal(once.as_subclass(Tensor), mask.as_subclass(Tensor).flip(0, 1))
    (twice,) = cropped_together([once], [*whole, 1, 1], SIZE)
    assert torch.equal(twice.as_subclass(Tensor), mask.as_subclass(Tensor))


def test_a_mask_is_mirrored_with_its_image_and_boxes_are_refused() -> None:
    images = made_images(20, 32)
    crops = torch.from_numpy(draw_crops(rng(5), 20, 32, 32, "padded", "both"))
    pixels = (cropped(images, crops, 32, padding="reflect")[:, 0] * 255).round().long()
    masks = gathered(images[..., 0], crops, 32, "reflect", 300)
    assert torch.equal(masks.long(), pixels)
    boxes = BoundingBoxes(torch.tensor([[1, 1, 5, 5]]), format="XYXY", canvas_size=(32, 32))
    with pytest.raises(ValueError, match=r"boxes cannot be mirrored .*: set augment\.padding to zero"):
        cropped_together([boxes], [-1, 0, 32, 32, 0, 0], 32, padding="reflect")
