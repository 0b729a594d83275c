"""Cutout: which square is hidden, by the image's key alone; and that both engines change images by keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from pfl_ext.data.sampling import LocalSampling
from pfl_ext.data.transforms import draw_crops, draw_keys
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.cutout import STREAM, cut_out
from pfl_ext.tasks.detection import Detection
from pfl_ext.tasks.segmentation import Segmentation
from pfl_ext.tasks.single_label import SingleLabel
from tests.pfl_ext.engine.setting import (
    LABELS,
    Setting,
    distance,
    rounding_of,
    small_backbone,
    wide_backbone,
    without_noise,
)

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
        stream = splitmix((splitmix(key) + STREAM) % WORD)
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


def test_an_image_loses_the_same_square_whoever_is_beside_it() -> None:
    x, crops = torch.ones(9, 3, 10, 10), crops_of(9)
    whole, rows = cut_out(x, crops, 4), [7, 2, 5]
    assert torch.equal(cut_out(x[rows], crops[rows], 4), whole[rows])
    assert len({tuple(image.flatten().tolist()) for image in whole}) > 1


def test_nothing_is_hidden_without_keys() -> None:
    x, crops = torch.ones(4, 3, 10, 10), crops_of(4)
    assert torch.equal(cut_out(x, None, 4), x)
    assert torch.equal(cut_out(x, crops[:, :6], 4), x)


@pytest.mark.parametrize("change", [{"cutout": 5}, {"color_jitter": 0.4}], ids=["cutout", "color_jitter"])
def test_loss_is_of_changed_images_and_evaluation_is_not(change: dict[str, Any]) -> None:
    images = torch.randint(0, 256, (4, 12, 12, 3), dtype=torch.uint8)
    crops, targets = crops_of(4), torch.eye(LABELS)[:4]
    model, plain = (
        ImageClassifier(small_backbone(), input_size=10, task=SingleLabel(), **changes)
        for changes in (change, {})
    )
    whole = plain.loss(images, targets, crops)
    assert model.loss(images, targets, crops) != whole
    if "cutout" in change:
        assert torch.equal(model.prepare(images, targets, crops)[0] == 0, _zeros(model, images, crops))
    assert model.loss(images, targets, crops[:, :6]) == whole
    assert model.metrics(images, targets, crops)["loss"].overall_value == pytest.approx(whole.item())
    assert torch.equal(model(images, crops), plain(images, crops))
    assert torch.equal(model.outputs(images, targets)[0], plain(images))


def _zeros(model: ImageClassifier, images: Tensor, crops: Tensor) -> Tensor:
    """Where the input is the mean colour, as no pixel of 0..255 is."""
    return cut_out(torch.ones(len(images), 3, model.input_size, model.input_size), crops, 5) == 0


@pytest.mark.parametrize("task", [Segmentation(3), Detection(3)], ids=lambda task: type(task).__name__)
def test_targets_with_a_place_are_refused(task: Any) -> None:
    with pytest.raises(
        ValueError, match=r"augment\.cutout is 4, but .* needs all parts of an image: set augment\.cutout to"
    ):
        ImageClassifier(nn.Conv2d(3, 3, 1), input_size=10, task=task, cutout=4)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"clipping": "none", "max_norm": 0.0, "learning_rate": 0.05, "momentum": 0.6},
        {"backbone": wide_backbone},
        {"more": [without_noise(0.3)], "by_images": False},
    ],
    ids=["plain", "momentum", "compiled", "private"],
)
@pytest.mark.parametrize(
    ("change", "exact"), [({"cutout": 5}, True), ({"cutout": 5}, False), ({"color_jitter": 0.5}, True)]
)
def test_the_engine_changes_images_as_pfls_loop_does(
    more: dict[str, Any], change: dict[str, Any], exact: bool
) -> None:
    """Users of one step, who go together, and of several; crops that the engine frames itself, and others."""
    crop: Any = "crop" if exact else "resized"
    sampling = LocalSampling(num_epochs=2, batch_size=4, straddle=True, input_size=10, crop=crop, keys=True)
    common: dict[str, Any] = {"backbone": small_backbone, "sampling": sampling, **more}
    setting = Setting([1, 2, 2, 9, 1, 5], exact_crops=exact, **common, **change)
    theirs = setting.run(False)[0]
    bound = rounding_of(setting)
    for lanes in (1, 2):
        assert distance(setting.run(True, lanes=lanes)[0], theirs) <= min(bound, 1e-4)
    without = Setting(setting.sizes, exact_crops=exact, **common)
    assert distance(without.run(True)[0], theirs) > 100 * bound, "and something changes"
