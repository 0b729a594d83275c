"""Equal crops move an image, its mask and its boxes alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as TF
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.tv_tensors import BoundingBoxes, BoundingBoxFormat

from pfl_ext.data.transforms import CROP_COLUMNS, Crop, boxes_cropped, cropped, draw_crops, gathered
from tests.pfl_ext.data.test_transforms import made_images, rng

SIZE = 40


def torchvisions_boxes(boxes: Tensor, crop: Tensor, input_size: int) -> Tensor:
    """One image's boxes ``[n, 4]`` after a crop of `draw_crops`, by torchvision."""
    top, left, height, width, flip_h, flip_v = (int(value) for value in crop[:CROP_COLUMNS])
    border = max(0, -top, -left, top + height - SIZE, left + width - SIZE)
    canvas: dict[str, Any] = {"format": BoundingBoxFormat.XYXY, "canvas_size": (SIZE, SIZE)}
    part = TF.pad(BoundingBoxes(boxes, **canvas), [border])
    part = TF.resized_crop(part, top + border, left + border, height, width, [input_size, input_size])
    part = TF.horizontal_flip(part) if flip_h else part
    moved: Tensor = TF.vertical_flip(part) if flip_v else part
    return moved.as_subclass(Tensor)


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
    corners = torch.tensor([[[x[0], y[0], x[1] + 1, y[1] + 1]]]).float()
    crops = torch.from_numpy(draw_crops(draw, 1, SIZE, 32, crop, "both"))
    left, top, right, bottom = boxes_cropped(corners, crops, 32)[0, 0].tolist()
    found = gathered(mask[None], crops, 32)[0].nonzero()
    if not len(found):
        scale = 32 / float(crops[0, 2:4].min())
        assert right - left < scale or bottom - top < scale  # less than a pixel of the crop is left
        return
    (first_row, first_column), (last_row, last_column) = found.min(0).values, found.max(0).values + 1
    expected = torch.tensor([first_column, first_row, last_column, last_row]).float()
    assert (torch.tensor([left, top, right, bottom]) - expected).abs().max() <= 1  # the nearest pixel's half


@settings(max_examples=30)
@given(seed=st.integers(0, 9999), crop=st.sampled_from(["crop", "padded", "resized"]))
def test_boxes_move_as_torchvisions(seed: int, crop: Crop) -> None:
    draw = np.random.default_rng(seed)
    corners = np.sort(draw.uniform(0, SIZE, (3, 4, 2, 2)), axis=2).reshape(3, 4, 4).astype(np.float32)
    crops = torch.from_numpy(draw_crops(draw, 3, SIZE, 32, crop, "both"))
    moved = boxes_cropped(torch.from_numpy(corners), crops, 32)
    for boxes, row, found in zip(corners, crops, moved):
        expected = torchvisions_boxes(torch.from_numpy(boxes), row, 32)
        visible = (expected[:, :2] < expected[:, 2:]).all(1)
        assert torch.equal((found[:, :2] < found[:, 2:]).all(1), visible)
        torch.testing.assert_close(found[visible], expected[visible], rtol=0, atol=32 * SIZE * 2.0**-22)


def test_a_mask_is_mirrored_with_its_image() -> None:
    images = made_images(20, 32)
    crops = torch.from_numpy(draw_crops(rng(5), 20, 32, 32, "padded", "both"))
    pixels = (cropped(images, crops, 32, padding="reflect")[:, 0] * 255).round().long()
    masks = gathered(images[..., 0], crops, 32, "reflect", 300)
    assert torch.equal(masks.long(), pixels)
