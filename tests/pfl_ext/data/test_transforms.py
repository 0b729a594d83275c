"""Every image has its own crop and flip, and each equals what torchvision does to that image alone."""

from __future__ import annotations

import contextlib
import re
import warnings
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as TF
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models import ResNet18_Weights
from torchvision.transforms import RandomResizedCrop

from pfl_ext.data.transforms import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    AugmentConfig,
    Crop,
    cropped,
    draw_crops,
    normalise,
    resize,
)
from tests.closeness import assert_close_as_vector

WEIGHTS = 4 * 64
"""Roundings of interpolated pixels: a weight is the difference of two positions of up to 64 in float32, along
both axes of the image and on both sides of the comparison."""


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def made_images(n: int, size: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(rng(seed).integers(0, 256, (n, size, size, 3), np.uint8))


def drawn(n: int, size: int, input_size: int, crop: Crop, seed: int = 0) -> Tensor:
    return torch.from_numpy(draw_crops(rng(seed), n, size, input_size, crop, "both"))


def reference(image: Tensor, crop: Tensor, input_size: int) -> Tensor:
    """One image [H, W, 3] through torchvision's functional crop, resize and flips, as floats."""
    top, left, height, width = (int(v) for v in crop[:4])
    pixels = image.permute(2, 0, 1).float() / 255
    out = TF.resized_crop(pixels, top, left, height, width, [input_size, input_size], antialias=True)
    out = TF.horizontal_flip(out) if crop[4] else out
    out = TF.vertical_flip(out) if crop[5] else out
    assert isinstance(out, Tensor)
    return out


def assert_torchvisions(images: Tensor, crops: Tensor, input_size: int) -> None:
    """Each image comes out as torchvision makes it of that image alone."""
    for image, row, result in zip(images, crops, cropped(images, crops, input_size)):
        assert_close_as_vector(result, reference(image, row, input_size), WEIGHTS)


@pytest.mark.parametrize("crop", ["crop", "resized"])
@pytest.mark.parametrize(("image_size", "input_size"), [(40, 32), (33, 17), (32, 32)])
def test_a_crop_is_torchvisions_of_each_image_alone(crop: Crop, image_size: int, input_size: int) -> None:
    assert_torchvisions(made_images(24, image_size), drawn(24, image_size, input_size, crop, 1), input_size)


def test_augment_enlarges_boxes_smaller_than_the_input_like_torchvision() -> None:
    crops = torch.tensor([[0.0, 0, 5, 9, 0, 0], [59, 3, 5, 61, 1, 1], [0, 0, 64, 1, 0, 1]])
    assert_torchvisions(made_images(3, 64), crops, 32)


def test_identical_images_in_a_batch_get_distinct_crops_and_all_four_flips() -> None:
    images = made_images(1, 64).expand(64, -1, -1, -1)
    crops = drawn(64, 64, 24, "crop")
    out = cropped(images, crops, 24)
    assert len({row.numpy().tobytes() for row in out}) >= 60
    assert {(h, v) for h, v in crops[:, 4:].tolist()} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_an_image_is_augmented_the_same_in_any_batch() -> None:
    images, crops = made_images(6, 40), drawn(6, 40, 32, "resized")
    together = cropped(images, crops, 32)
    for i in range(6):
        alone = cropped(images[i : i + 1], crops[i : i + 1], 32)[0]
        assert_close_as_vector(alone, together[i], WEIGHTS)


@pytest.mark.parametrize("exact", [True, False])
def test_both_ways_of_an_exact_crop_give_the_stored_pixels(exact: bool) -> None:
    images = made_images(16, 40)
    crops = drawn(16, 40, 32, "crop")
    out = cropped(images, crops, 32, exact=exact)
    assert_close_as_vector(out, cropped(images, crops, 32), 8)
    assert (out * 255 - (out * 255).round()).abs().max() < 1e-4, "pixels are not mixed"


class Resampling(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which operations mix pixels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if re.search("mm|matmul|einsum|upsample|grid_sampler", name):
            self.seen.add(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("crop", ["crop", "padded"])
@pytest.mark.parametrize("exact", [True, None])
def test_exact_crops_and_flips_are_gathered_and_never_resampled(exact: bool | None, crop: Crop) -> None:
    """On a CPU, where resampling would end in the same numbers, but slower."""
    images, crops = made_images(16, 40), torch.from_numpy(draw_crops(rng(), 16, 40, 32, crop, "both"))
    with Resampling() as noted:
        cropped(images, crops, 32, exact=exact)
        assert not noted.seen
        crops[7, 2] = 31
        cropped(images, crops, 32)
        assert noted.seen, "one crop of another size is resampled, and it shows"


@pytest.mark.parametrize("exact", [True, False, None])
def test_a_padded_crop_is_that_of_the_image_with_a_black_border(exact: bool | None) -> None:
    images, crops = made_images(60, 32), drawn(60, 32, 32, "padded", 2)
    out = cropped(images, crops, 32, exact=exact)
    for image, row, result in zip(images, crops, out):
        bordered = torch.nn.functional.pad(image, (0, 0, 4, 4, 4, 4))
        expected = reference(bordered, row + torch.tensor([4, 4, 0, 0, 0, 0]), 32)
        assert_close_as_vector(result, expected, 8)
    for corner in (crops[:, 0], crops[:, 1]):
        assert set(corner.tolist()) == set(range(-4, 5)), "every position, edges included"


@pytest.mark.parametrize("exact", [True, False, None])
def test_a_reflected_border_is_the_image_mirrored_at_its_outermost_pixels(exact: bool | None) -> None:
    images, crops = made_images(60, 32), drawn(60, 32, 32, "padded", 2)
    bordered = torch.nn.functional.pad(images.permute(0, 3, 1, 2).float(), (4, 4, 4, 4), "reflect")
    out = cropped(images, crops, 32, exact=exact, padding="reflect")
    for image, row, result in zip(bordered, crops.long().tolist(), out):
        part = image[:, row[0] + 4 : row[0] + 36, row[1] + 4 : row[1] + 36]
        flips = [axis for axis, flipped in ((1, row[5]), (2, row[4])) if flipped]
        assert torch.equal(result, part.flip(flips) / 255)
    assert not torch.equal(out, cropped(images, crops, 32, exact=exact))


def test_images_stay_uint8_until_the_transform_and_leave_it_as_channels_last_float32() -> None:
    images, crops, resized = made_images(4, 40), drawn(4, 40, 32, "crop"), drawn(4, 40, 32, "resized")
    ways = [cropped(images, crops, 32), cropped(images, resized, 32), resize(images, 32), resize(images, 40)]
    for out in ways:
        assert out.dtype == torch.float32
        assert out.is_contiguous(memory_format=torch.channels_last)
        assert 0 <= out.min() <= out.max() <= 1 + 1e-6
    for wrong in (images.float(), images.permute(0, 3, 1, 2)):
        with pytest.raises(AssertionError, match="images are"):
            cropped(wrong, crops, 32)
        with pytest.raises(AssertionError, match="images are"):
            resize(wrong, 32)


def test_transforms_are_exact_under_autocast() -> None:
    images, crops = made_images(4, 40), drawn(4, 40, 32, "resized")
    with torch.autocast("cpu", torch.bfloat16):
        within = cropped(images, crops, 32)
        assert resize(images, 32).dtype == torch.float32
    assert torch.equal(within, cropped(images, crops, 32))


@pytest.mark.parametrize(("image_size", "input_size"), [(40, 32), (32, 48), (32, 32)])
def test_resize_equals_torchvision(image_size: int, input_size: int) -> None:
    images = made_images(3, image_size)
    expected = TF.resize(images.permute(0, 3, 1, 2).float() / 255, [input_size, input_size], antialias=True)
    assert_close_as_vector(resize(images, input_size), expected, WEIGHTS)


@pytest.mark.parametrize("exact", [None, True])
def test_nothing_waits_for_the_device(exact: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without data: any look at a value, which on a GPU would be a sync, raises."""
    monkeypatch.setattr("torch.autocast", lambda *_, **__: contextlib.nullcontext())  # knows no such device
    images, crops = (
        torch.empty(4, 40, 40, 3, dtype=torch.uint8, device="meta"),
        torch.empty(4, 6, device="meta"),
    )
    out = normalise(cropped(images, crops, 32, exact=exact), IMAGENET_MEAN, IMAGENET_STD)
    assert (out.shape, out.device.type) == ((4, 3, 32, 32), "meta")
    assert resize(images, 32).shape == (4, 3, 32, 32)


def test_normalise_equals_torchvision_with_constants_and_with_tensors() -> None:
    x = resize(made_images(3, 16), 16)
    published = ResNet18_Weights.IMAGENET1K_V1.transforms()
    assert (published.mean, published.std) == (list(IMAGENET_MEAN), list(IMAGENET_STD))
    expected = TF.normalize(x, published.mean, published.std)
    out = normalise(x, IMAGENET_MEAN, IMAGENET_STD)
    assert_close_as_vector(out, expected, 8)
    assert torch.equal(out, normalise(x, torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)))
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_crops_are_uniform_over_every_position_edges_included() -> None:
    crops = draw_crops(rng(), 20_000, 12, 8, "crop", "both")
    for column in (0, 1):
        values, counts = np.unique(crops[:, column], return_counts=True)
        assert values.tolist() == [0, 1, 2, 3, 4]
        assert np.abs(counts / 20_000 - 0.2).max() < 0.015
    assert (crops[:, 2:4] == 8).all()
    assert np.abs(np.corrcoef(crops[:, [0, 1, 4, 5]].T) - np.eye(4)).max() < 0.03, "draws are independent"


@pytest.mark.parametrize(
    ("flip", "expected"), [("none", (0.0, 0.0)), ("horizontal", (0.5, 0.0)), ("both", (0.5, 0.5))]
)
def test_flips_are_fair_and_only_where_asked_for(
    flip: Literal["none", "horizontal", "both"], expected: tuple[float, float]
) -> None:
    crops = draw_crops(rng(), 20_000, 12, 8, "crop", flip)
    assert crops[:, 4:].mean(0) == pytest.approx(expected, abs=0.015)


def test_resized_boxes_have_torchvisions_distribution() -> None:
    n, size = 20_000, 64
    crops = draw_crops(rng(), n, size, 32, "resized", "both")
    top, left, height, width = crops[:, :4].T
    assert ((top >= 0) & (left >= 0) & (top + height <= size) & (left + width <= size)).all()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        image = torch.empty(3, size, size)
        theirs = np.array(
            [RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(n)], np.float64
        )
    for ours, other in ((crops[:, :4], theirs), (crops[:, 2:4].prod(1), theirs[:, 2:].prod(1))):
        for q in (0.05, 0.25, 0.5, 0.75, 0.95):
            tolerance = 1.5 if ours.ndim == 2 else 60
            np.testing.assert_allclose(np.quantile(ours, q, 0), np.quantile(other, q, 0), atol=tolerance)


def test_ratios_of_resized_boxes_are_uniform_on_a_logarithmic_scale() -> None:
    crops = draw_crops(rng(), 20_000, 1000, 32, "resized", "none")
    small = crops[crops[:, 2:4].prod(1) < 0.5e6]  # where every ratio fits
    ratios = np.log(small[:, 3] / small[:, 2])
    assert ratios.mean() == pytest.approx(0, abs=0.008)
    assert ratios.std() == pytest.approx(2 * np.log(4 / 3) / np.sqrt(12), rel=0.02)


def test_the_whole_image_is_the_fallback_where_no_try_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfl_ext.data.transforms.RESIZED_SCALE", (4.0, 5.0))
    crops = draw_crops(rng(), 5, 64, 32, "resized", "none")
    assert (crops == [0, 0, 64, 64, 0, 0]).all()


@pytest.mark.parametrize("crop", ["crop", "padded", "resized"])
def test_a_box_depends_on_the_generator_and_its_place_only(crop: Crop) -> None:
    many = draw_crops(rng(), 10, 64, 32, crop, "both")
    assert np.array_equal(many[:4], draw_crops(rng(), 4, 64, 32, crop, "both"))
    assert not np.array_equal(many, draw_crops(rng(1), 10, 64, 32, crop, "both"))
    assert np.array_equal(many[:, 4], draw_crops(rng(), 10, 64, 32, crop, "horizontal")[:, 4])
    assert many.dtype == np.float32
    assert draw_crops(rng(), 0, 64, 32, crop, "both").shape == (0, 6)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="input_size 65 is larger than the images"):
        draw_crops(rng(), 1, 64, 65, "crop", "none")
    with pytest.raises(ValueError, match=r"crop\n.*'crop', 'padded' or 'resized'"):
        AugmentConfig(crop="random")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"flip\n.*'none', 'horizontal' or 'both'"):
        AugmentConfig(flip="vertical")  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_crops(rng(), 100, 1, 1, "resized", "both")
