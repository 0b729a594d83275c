"""Turns stored uint8 images into a network's float input, on the device, each image by itself.

Random choices are made beforehand on the CPU (`draw_crops`, a pure function of a generator) and are passed on
with the images. So they depend neither on the device nor on the batch. Applying them (`cropped`) draws
nothing and never waits for the device. Each image has its own crop.

Shape letters: B images of a batch, H x W their stored size, S the side of the network's input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from dataset.arrays import Float32Array, FloatArray, IntArray
from pfl_ext.configs import STRICT

Crop = Literal["crop", "padded", "resized"]
Flip = Literal["none", "horizontal", "both"]
Padding = Literal["zero", "reflect"]
Alpha = Annotated[float, Field(ge=1e-6, le=1e6)]  # far beyond, numpy draws 0 alone

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

RESIZED_SCALE = (0.08, 1.0)  # share of the image's area
RESIZED_RATIO = (3 / 4, 4 / 3)  # width : height
RESIZED_TRIES = 10
PADDED_SHARE = 8  # the border of "padded" is the image's side over this: 4 pixels for CIFAR's 32
MOST_VIEWS = 256
CROP_COLUMNS = 6
KEY_BITS, KEY_COLUMNS = 24, 2
"""Bits in a column of `draw_keys`, and number of columns; float32 holds whole numbers of 24 bits."""


@dataclass(frozen=True, config=STRICT)
class AugmentConfig:
    """How a training image is changed at random, whenever it is used."""

    crop: Crop = "crop"
    """crop: a square of model.input_size; padded: from an image with a border; resized: any part, scaled."""
    flip: Flip = "none"
    """horizontal: flipped left to right with probability 1/2; both: also upside down with probability 1/2."""
    padding: Padding = "zero"
    """Border for padded crops. zero: black; reflect: the image mirrored at its outermost pixels."""
    views: Annotated[int, Field(ge=1, le=MOST_VIEWS)] | None = None
    """Number of views of an image, drawn once; each use takes one. none: each use draws a crop and flips."""
    noise_by_user: bool = False
    """Whether user i of U, with i from 0, has i / (U - 1) of augment.noise; false: each has all of it."""
    mixup: Alpha | None = None
    """Mixup: alpha of the Beta distribution of shares in which images of a batch are mixed; none: off."""
    cutmix: Alpha | None = None
    """CutMix: the same for a box of another image; none: off. With both keys, each batch has one of them."""

    @property
    def mixes(self) -> bool:
        """Whether images of a batch are mixed: see `pfl_ext.data.mixing`."""
        return self.mixup is not None or self.cutmix is not None


@dataclass(frozen=True, config=STRICT)
class Framing:
    """How images become the network's input.

    ``exact`` says that every crop is ``input_size`` pixels high and wide (see `cropped`). ``padding`` is what
    crops meet outside an image.
    """

    input_size: int
    exact: bool | None = None
    padding: Padding = "zero"


def draw_crops(
    rng: np.random.Generator, n: int, image_size: int, input_size: int, crop: Crop, flip: Flip
) -> Float32Array:
    """Draw one crop and two flips for each of ``n`` square images, independently.

    ``crop="crop"``: a random square of ``input_size`` pixels (the FLAIR paper; Keras RandomCrop).
    ``crop="padded"``: such a square of the image with a border of an eighth of its side, as is usual
    for CIFAR (He et al. 2016, Section 4.2; torchvision's RandomCrop with padding 4); crops reach outside.
    ``crop="resized"``: area 0.08-1 of the image and ratio 3/4-4/3, the distribution of torchvision's
    RandomResizedCrop with its ten tries and its fallback, the whole image (pfl-research's benchmark).
    ``flip="both"``: left-right and, independently, upside-down, each with probability 1/2.

    Returns ``[n, 6]`` float32: top, left, height, width in pixels of the image, flip_h, flip_v (0 or 1).
    Every image consumes the same number of draws, so the first k rows do not depend on ``n``; and the flips
    drawn do not depend on ``crop``. Raises ValueError where the crop is larger than the image.
    """
    u = rng.random((n, 4 + 2 * RESIZED_TRIES))
    border = image_size // PADDED_SHARE if crop == "padded" else 0
    if crop != "resized":
        if input_size > image_size + 2 * border:
            raise ValueError(
                f"input_size {input_size} is larger than the images ({image_size} pixels), so they "
                "cannot be cropped; lower input_size or set crop to resized"
            )
        height = width = np.full(n, input_size, np.int64)
    else:
        height, width = _resized_shapes(u[:, 4:], image_size)
    crops = np.zeros((n, CROP_COLUMNS), np.float32)
    crops[:, 0] = np.floor(u[:, 0] * (image_size + 2 * border - height + 1)) - border
    crops[:, 1] = np.floor(u[:, 1] * (image_size + 2 * border - width + 1)) - border
    crops[:, 2], crops[:, 3] = height, width
    crops[:, 4] = (u[:, 2] < 0.5) & (flip != "none")
    crops[:, 5] = (u[:, 3] < 0.5) & (flip == "both")
    return crops


def draw_crops_of(
    images: npt.NDArray[Any], rng: np.random.Generator, input_size: int, augment: AugmentConfig
) -> Float32Array:
    """`draw_crops` for some images ``[n, H, W, 3]``; zeros for features ``[n, D]``, which have no place."""
    if images.ndim == 2:
        return np.zeros((len(images), CROP_COLUMNS), np.float32)
    return draw_crops(rng, len(images), images.shape[1], input_size, augment.crop, augment.flip)


def draw_keys(rng: np.random.Generator, crops: Float32Array, level: float = 1.0) -> Float32Array:
    """Crops of `draw_crops`, ``[n, 6]``, with a key of 48 bits for each image and its level, ``[n, 9]``.

    Two columns hold 24 bits each, which `pfl_ext.models.dropout` reads; the last has ``level``, for
    `pfl_ext.models.pixel_noise`.
    """
    keys = rng.integers(1 << KEY_BITS, size=(len(crops), KEY_COLUMNS)).astype(np.float32)
    return np.concatenate([crops, keys, np.full((len(crops), 1), level, np.float32)], 1)


def _resized_shapes(u: FloatArray, image_size: int) -> tuple[IntArray, IntArray]:
    """Heights and widths ``[n]`` from uniforms ``[n, 2 * tries]``: the first try that fits into the image."""
    area = image_size**2 * (RESIZED_SCALE[0] + u[:, :RESIZED_TRIES] * (RESIZED_SCALE[1] - RESIZED_SCALE[0]))
    low, high = math.log(RESIZED_RATIO[0]), math.log(RESIZED_RATIO[1])
    ratio = np.exp(low + u[:, RESIZED_TRIES:] * (high - low))
    width = np.rint(np.sqrt(area * ratio)).astype(np.int64)
    height = np.rint(np.sqrt(area / ratio)).astype(np.int64)
    fits = (width > 0) & (width <= image_size) & (height > 0) & (height <= image_size)
    rows, first, found = np.arange(len(u)), fits.argmax(1), fits.any(1)
    return (np.where(found, height[rows, first], image_size), np.where(found, width[rows, first], image_size))


def cropped(
    images: Tensor,
    crops: Tensor,
    input_size: int,
    *,
    exact: bool | None = None,
    padding: Padding = "zero",
) -> Tensor:
    """Cut each image's crop out, scale it to ``input_size`` and flip it.

    torchvision's functions take one crop for a whole batch; here each image has its own crop, in one pass.
    Masks and boxes take the same crops, by `gathered` and `boxes_cropped`.

    ``images`` are uint8 ``[B, H, W, 3]``, and ``crops`` ``[B, 6]`` (from `draw_crops`; keys that follow are
    not read) on the same device. Returns float32 ``[B, 3, S, S]`` in 0..1, channels last in memory. ``exact``
    says that every crop is ``input_size`` pixels high and wide: then pixels are only gathered. Otherwise
    crops are resized bilinearly with antialiasing, as torchvision's ``resized_crop`` does for a single float
    image. With ``exact`` None, crops on the CPU are inspected. On other devices, where inspecting would have
    to wait, the general method is used; for exact crops it gives the same. With ``padding`` "reflect", which
    is for padded crops, all crops are exact.
    """
    _check(images)
    assert crops.shape[0] == len(images), "one crop per image"
    crops = crops[:, :CROP_COLUMNS].to(torch.float32)
    if padding == "reflect":
        return _gather(images, crops, input_size, padding)
    if exact is None:
        exact = crops.device.type == "cpu" and bool((crops[:, 2:4] == input_size).all())
    return _gather(images, crops, input_size, padding) if exact else _resample(images, crops, input_size)


def _check(images: Tensor) -> None:
    assert images.dtype == torch.uint8, f"images are uint8 until they are here, not {images.dtype}"
    assert images.ndim == 4, "images are [B, H, W, 3]"
    assert images.shape[3] == 3, "images are [B, H, W, 3]"


def _gather(images: Tensor, crops: Tensor, input_size: int, padding: Padding) -> Tensor:
    """`cropped` for crops of exactly the input's size: an index gather on uint8, then one conversion."""
    pixels = gathered(images, crops, input_size, padding)
    return pixels.permute(0, 3, 1, 2).to(torch.float32).div_(255)


def gathered(
    values: Tensor, crops: Tensor, input_size: int, padding: Padding = "zero", outside: int = 0
) -> Tensor:
    """Crops in which each output pixel has the value of the stored pixel at its centre, as classes need.

    Nothing here waits for the device. (torchvision takes the class at the output pixel's upper left corner,
    so that a scaled mask is half a pixel off its image.)

    Args:
        values: ``[B, H, W]`` or ``[B, H, W, 3]``, on the device of the crops.
        crops: ``[B, 6]``, as `cropped` takes them.
        input_size: S.
        padding: "zero" for ``outside`` beyond the values, or "reflect" for the values mirrored.
        outside: a number of the values' type.

    Returns:
        ``[B, S, S]`` or ``[B, S, S, 3]``, of the same type.
    """
    top, left, high, wide, flip_h, flip_v = crops[:, :CROP_COLUMNS].to(torch.int64)[:, :, None].unbind(1)
    steps = torch.arange(input_size, device=values.device)
    height, width = values.shape[1:3]
    rows, columns = (
        start + (2 * torch.where(flip > 0, input_size - 1 - steps, steps) + 1) * size // (2 * input_size)
        for start, size, flip in ((top, high, flip_v), (left, wide, flip_h))
    )  # each [B, S]
    if padding == "reflect":  # -1 is 1, and the height is the height - 2
        rows, columns = (
            (size - 1) - ((size - 1) - places.abs()).abs()
            for places, size in ((rows, height), (columns, width))
        )
    near_rows, near_columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    batch = torch.arange(len(values), device=values.device)[:, None, None]
    found = values[batch, near_rows[:, :, None], near_columns[:, None, :]]
    inside = (near_rows == rows)[:, :, None] & (near_columns == columns)[:, None, :]
    if padding == "zero" and (values.device.type != "cpu" or not bool(inside.all())):
        found.masked_fill_(~inside.view(*inside.shape, *[1] * (found.ndim - 3)), outside)
    return found


def _resample(images: Tensor, crops: Tensor, input_size: int) -> Tensor:
    """`cropped` for any crops: rows, then columns, each one batched product with per-image weights."""
    b, h, w, _ = images.shape
    top, left, height, width, flip_h, flip_v = crops.unbind(1)
    weights_y = _triangle_weights(top, height, flip_v, h, input_size)
    weights_x = _triangle_weights(left, width, flip_h, w, input_size)
    with torch.autocast(images.device.type, enabled=False):
        pixels = images.reshape(b, h, w * 3).to(torch.float32).div_(255)
        rows = torch.bmm(weights_y, pixels).view(b, input_size, w, 3)
        rows = rows.permute(0, 3, 1, 2).reshape(b, 3 * input_size, w)
        out = torch.bmm(rows, weights_x.transpose(1, 2)).view(b, 3, input_size, input_size)
    return out.contiguous(memory_format=torch.channels_last)


def _triangle_weights(start: Tensor, length: Tensor, flip: Tensor, size: int, out: int) -> Tensor:
    """``[B, out, size]``: each output pixel as a weighted mean of the pixels of ``[start, start + length)``.

    This is the antialiased bilinear filter: a triangle about the output pixel's centre that reaches one
    output pixel, but at least one input pixel, to each side. It is cut off at the crop and normalised
    (align_corners=False).
    """
    start, length = start[:, None, None], length[:, None, None]
    steps = torch.arange(out, device=start.device, dtype=torch.float32)[:, None]
    steps = torch.where(flip[:, None, None] > 0, out - 1 - steps, steps)  # [B, out, 1]
    scale = length / out
    pixels = torch.arange(size, device=start.device, dtype=torch.float32) - start  # [B, 1, size]
    distance = (pixels + 0.5 - scale * (steps + 0.5)).abs() / scale.clamp(min=1)
    inside = (pixels >= 0) & (pixels < length)
    weights = (1 - distance).clamp_(min=0) * inside
    total = weights.sum(-1, keepdim=True)
    return weights / total.where(total > 0, 1.0)  # 0 where a padded crop has no pixel


def resize(images: Tensor, input_size: int) -> Tensor:
    """The evaluation transform: the whole image, bilinear with antialiasing.

    uint8 ``[B, H, W, 3]`` -> float32 ``[B, 3, S, S]`` in 0..1, channels last in memory.
    """
    _check(images)
    pixels = images.permute(0, 3, 1, 2).to(torch.float32).div_(255)
    if pixels.shape[2:] != (input_size, input_size):
        pixels = F.interpolate(pixels, (input_size, input_size), mode="bilinear", antialias=True)
    return pixels.contiguous(memory_format=torch.channels_last)


def normalise(x: Tensor, mean: Tensor | Sequence[float], std: Tensor | Sequence[float]) -> Tensor:
    """``(x - mean) / std`` per channel, ``[B, 3, S, S]``, without the device sync of torchvision's."""
    return (x - _per_channel(mean, x)) / _per_channel(std, x)


def _per_channel(values: Tensor | Sequence[float], like: Tensor) -> Tensor:
    if not isinstance(values, Tensor):
        values = torch.tensor(tuple(values), dtype=like.dtype).to(like.device, non_blocking=True)
    return values.view(-1, 1, 1)


def boxes_cropped(boxes: Tensor, crops: Tensor, input_size: int) -> Tensor:
    """The crops and flips of a batch for its boxes, cut off at the crop: ``[B, n, 4]`` float32.

    Args:
        boxes: left, top, right and bottom in pixels of the images, on the device of the crops.
        crops: ``[B, 6]`` of `draw_crops`; keys that follow are not read.
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
