"""Changes of training images by keys: what all have in common, on both engines."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pfl_ext.data.sampling import LocalSampling
from pfl_ext.engine.cpu.crops import Crops
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.color_jitter import jittered
from pfl_ext.models.cutout import cut_out
from pfl_ext.models.image_changes import KEYED, ImageChanges
from pfl_ext.models.pixel_noise import noisy
from pfl_ext.models.rand_augment import rand_augmented
from pfl_ext.models.random_erasing import erased
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
from tests.pfl_ext.models.test_cutout import crops_of

EACH: dict[str, Any] = {
    "rand_augment": 9,
    "color_jitter": 0.4,
    "noise": 0.2,
    "cutout": 5,
    "random_erasing": 0.7,
}
FUNCTIONS: dict[str, Any] = {
    "rand_augment": rand_augmented,
    "color_jitter": jittered,
    "noise": partial(noisy, std=torch.ones(3)),
    "cutout": cut_out,
    "random_erasing": erased,
}
each = pytest.mark.parametrize("key", EACH)


def test_each_key_is_tested_here() -> None:
    assert (*EACH,) == (*FUNCTIONS,) == KEYED


@each
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_an_image_changes_in_the_same_way_whoever_is_beside_it(
    key: str, memory_format: torch.memory_format
) -> None:
    x, crops = torch.rand(40, 3, 12, 12).contiguous(memory_format=memory_format), crops_of(40)
    change, before = FUNCTIONS[key], x.clone()
    whole = change(x, crops, EACH[key])
    assert torch.equal(x, before), "what was given stays"
    assert whole.is_contiguous(memory_format=memory_format)
    for rows in ([7, 2, 5], [9], [*range(1, 40)]):
        part = change(x[rows], crops[rows], EACH[key])
        torch.testing.assert_close(part, whole[rows], rtol=0, atol=1e-6)
    assert not torch.equal(change(x, crops_of(40, 1), EACH[key]), whole)
    for without in (None, crops[:, :6]):
        assert torch.equal(change(x, without, EACH[key]), x)


def test_changes_are_made_in_the_order_in_which_they_stand() -> None:
    images = torch.randint(0, 256, (6, 12, 12, 3), dtype=torch.uint8)
    crops, targets = crops_of(6), torch.eye(LABELS)[:6]
    model, plain = (
        ImageClassifier(small_backbone(), input_size=10, task=SingleLabel(), **more)
        for more in ({"changes": ImageChanges(**EACH)}, {"mean": (0,) * 3, "std": (1,) * 3})
    )
    x, _ = plain.prepare(images, targets, crops)
    x = jittered(rand_augmented(x, crops, 9), crops, 0.4)
    x = (x - model.mean[:, None, None]) / model.std[:, None, None]
    x = erased(cut_out(noisy(x, crops, 0.2, model.std), crops, 5), crops, 0.7)
    torch.testing.assert_close(model.prepare(images, targets, crops)[0], x, rtol=0, atol=1e-5)


@each
def test_loss_is_of_changed_images_and_evaluation_is_not(key: str) -> None:
    images = torch.randint(0, 256, (4, 12, 12, 3), dtype=torch.uint8)
    crops, targets = crops_of(4), torch.eye(LABELS)[:4]
    model, plain = (
        ImageClassifier(small_backbone(), input_size=10, task=SingleLabel(), changes=ImageChanges(**changes))
        for changes in ({key: EACH[key]}, {})
    )
    whole = plain.loss(images, targets, crops)
    assert model.loss(images, targets, crops) != whole
    assert model.loss(images, targets, crops[:, :6]) == whole
    assert model.metrics(images, targets, crops)["loss"].overall_value == pytest.approx(whole.item())
    assert torch.equal(model(images, crops), plain(images, crops))
    assert torch.equal(model.outputs(images, targets)[0], plain(images))


@each
def test_the_engine_frames_crops_itself_only_where_pixels_are_not_changed_before(key: str) -> None:
    changes = ImageChanges(**{key: EACH[key]})
    model = ImageClassifier(small_backbone(), input_size=10, task=SingleLabel(), changes=changes)
    assert Crops.know(model) == (key in ("noise", "cutout", "random_erasing"))


@pytest.mark.parametrize("task", [Segmentation(3), Detection(3)], ids=lambda task: type(task).__name__)
@each
def test_targets_with_a_place_are_refused_where_they_would_not_fit(key: str, task: Any) -> None:
    def build() -> ImageClassifier:
        changes = ImageChanges(**{key: EACH[key]})
        return ImageClassifier(nn.Conv2d(3, 3, 1), input_size=10, task=task, changes=changes)

    if key in ("color_jitter", "noise"):
        build()
        return
    message = rf"augment\.{key} is {EACH[key]}, but {type(task).__name__} .*: set augment\.{key} to none$"
    with pytest.raises(ValueError, match=message) as caught:
        build()
    assert "\n" not in str(caught.value)


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
    ("keys", "exact"),
    [
        (("noise", "cutout", "random_erasing"), True),
        (("noise", "cutout", "random_erasing"), False),
        (("rand_augment", "color_jitter"), True),
    ],
    ids=["hidden", "hidden in scaled crops", "pixels"],
)
def test_the_engine_changes_images_as_pfls_loop_does(
    more: dict[str, Any], keys: tuple[str, ...], exact: bool
) -> None:
    """Users of one step, who go together, and of several; crops that the engine frames itself, and others."""
    crop: Any = "crop" if exact else "resized"
    sampling = LocalSampling(num_epochs=2, batch_size=4, straddle=True, input_size=10, crop=crop, keys=True)
    common: dict[str, Any] = {"backbone": small_backbone, "sampling": sampling, **more}
    changes = {key: EACH[key] for key in keys}
    setting = Setting([1, 2, 2, 9, 1, 5], exact_crops=exact, changes=changes, **common)
    theirs = setting.run(False)[0]
    bound = rounding_of(setting)
    for lanes in (1, 2):
        assert distance(setting.run(True, lanes=lanes)[0], theirs) <= min(bound, 1e-4)
    without = Setting(setting.sizes, exact_crops=exact, **common)
    assert distance(without.run(True)[0], theirs) > 100 * bound, "and something changes"
