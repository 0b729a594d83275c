"""One image's crop and flips for everything that belongs to it, by torchvision's v2 functions.

Image, mask and boxes are torchvision's tv_tensors, whose type says how each one moves. Nothing is drawn here:
crops are those of `pfl_ext.data.transforms.draw_crops`, so a task with masks or boxes sees the crops that a
task of labels sees.

Shape letters: H x W an image's stored size, S the side of the network's input, n boxes of one image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torchvision.transforms.v2.functional as TF
from torch import Tensor
from torchvision.tv_tensors import BoundingBoxes, Mask, TVTensor

from pfl_ext.data.transforms import CROP_COLUMNS, Padding, gathered


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


def masks_cropped(
    masks: Tensor, crops: Tensor, input_size: int, *, outside: int = 0, padding: Padding = "zero"
) -> Tensor:
    """The crops and flips of a batch for its masks: ``[B, H, W]`` -> ``[B, S, S]`` of the same type.

    This is `cropped_together` without a loop and without waiting for the device. In a scaled crop an output
    pixel has the class at its centre, so that a mask fits its image exactly. (torchvision takes the class at
    the output pixel's upper left corner.)

    Args:
        masks: classes, on the device of the crops.
        crops: ``[B, 6]`` of `pfl_ext.data.transforms.draw_crops`; keys that follow are not read.
        input_size: S.
        outside: see `cropped_together`.
        padding: see there.
    """
    return gathered(masks, crops, input_size, padding, outside)


def boxes_cropped(boxes: Tensor, crops: Tensor, input_size: int) -> Tensor:
    """The crops and flips of a batch for its boxes, cut off at the crop: ``[B, n, 4]`` float32.

    This is `cropped_together` without a loop and without waiting for the device.

    Args:
        boxes: left, top, right and bottom in pixels of the images, on the device of the crops.
        crops: ``[B, 6]`` of `pfl_ext.data.transforms.draw_crops`; keys that follow are not read.
        input_size: S.
    """
    top, left, height, width, flip_h, flip_v = crops[:, :CROP_COLUMNS].float()[:, :, None].unbind(1)
    moved = []
    for axis, (start, length, flip) in enumerate(((left, width, flip_h), (top, height, flip_v))):
        low, high = (
            ((boxes[..., end] - start) * (input_size / length)).clamp(0, input_size)
            for end in (axis, axis + 2)
        )
        is_flipped = flip > 0
        moved.append(torch.where(is_flipped, input_size - high, low))
        moved.append(torch.where(is_flipped, input_size - low, high))
    return torch.stack([moved[0], moved[2], moved[1], moved[3]], 2)
