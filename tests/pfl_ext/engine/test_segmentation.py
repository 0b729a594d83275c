"""Networks with a decoder in the engine: dilated pyramids, pooled maps, skips, masks as targets."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.models import segmentation
from pfl_ext.models.classifier import ImageClassifier, build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.weights import IMAGENET
from pfl_ext.tasks.losses import TrainingLoss
from pfl_ext.tasks.segmentation import VOID, Segmentation
from tests.pfl_ext.engine.setting import (
    LABELS,
    NoisyStore,
    Setting,
    distance,
    drawn,
    norm,
    rounding_of,
    without_noise,
)
from tests.pfl_ext.engine.shortened import short_encoder
from tests.pfl_ext.samplings import local_sampling

CLASSES = 3
SIZES = [1, 3]
TASK = Segmentation(CLASSES)
STEP: dict[str, Any] = {"clipping": "global", "max_norm": 100.0, "learning_rate": 0.1, "task": TASK}
CASES: dict[str, dict[str, Any]] = {
    "deeplabv3plus": {"pretrained": True, "dropout": True},
    "unet": {"pretrained": True},
}
HEAD = {"pretrained": True, "trained": "head"}
ROUNDING = 0.01
"""Most that rounding may change, through the layers and some steps; a wrong layer changes the sum by 1."""


class Masks(NoisyStore):
    """Each pixel's class is the quarter that its red value lies in, and the last one is void, or all are."""

    def __init__(self, sizes: list[int], void: bool = False) -> None:
        super().__init__(sizes)
        self._void = void

    def read(self, rows: Any) -> tuple[Any, Any]:
        images = super().read(rows)[0]
        masks = images[..., 0] // 64
        masks[masks == CLASSES] = VOID
        masks[(rows == 1) | self._void] = VOID
        return images, masks

    def targets(self, rows: Any) -> Any:
        return self.read(rows)[1]


def network(case: str) -> nn.Module:
    """A copy at each call."""
    return copy.deepcopy(_network(case))


@cache
def _network(case: str) -> nn.Module:
    decoder, options = ("deeplabv3plus", HEAD) if case == "head" else (case, CASES[case])
    config = ModelConfig(f"{decoder}_efficientnet_lite0", input_size=32, groups=4, **options)
    with mock.patch.multiple(segmentation, WIDE=16, LOW=8, UNET=(16, 16, 16, 8, 8)):
        network = build_backbone(config, CLASSES, torch.Generator().manual_seed(4), IMAGENET)
    return short_encoder(network)


def setting(case: str, **options: Any) -> Setting:
    keys = case == "deeplabv3plus"
    sampling = local_sampling(
        num_epochs=1, batch_size=2, flip="both", crop="padded", input_size=10, keys=keys
    )
    return Setting(SIZES, sampling, store=Masks(SIZES), backbone=lambda: network(case), **{**STEP, **options})


@pytest.mark.parametrize(
    "loss",
    [
        TrainingLoss(label_smoothing=0.2),
        TrainingLoss(focal_gamma=2, weights=torch.tensor([0.5, 2, 1])),
        TrainingLoss(dice=0.5),
    ],
)
def test_both_engines_learn_other_losses_of_pixels_alike(loss: TrainingLoss) -> None:
    def focal() -> Setting:
        return setting("head", task=TASK.trained_by(loss))

    theirs, ours = focal().run(False)[0], focal().run(True, lanes=1)[0]
    assert distance(ours, theirs) <= ROUNDING


@pytest.mark.parametrize("case", CASES)
def test_a_cohorts_sum_is_that_of_pfls_loop(case: str) -> None:
    theirs, ours = setting(case).run(False)[0], setting(case).run(True, lanes=2)[0]
    assert distance(ours, theirs) <= rounding_of(setting(case)) <= ROUNDING


def dilated() -> nn.Module:
    """With dilations that matter: the maps of the networks above are smaller than theirs."""
    layers = nn.Conv2d(3, 6, 3, padding=2, dilation=2), nn.Conv2d(6, 8, 3, stride=2, padding=3, dilation=3)
    net = nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, LABELS))
    return drawn(net, 0.2, torch.Generator().manual_seed(1))


def test_dilated_convolutions_are_trained_as_by_pfls_loop() -> None:
    plain = Setting([1, 2, 5], backbone=dilated)
    assert distance(plain.run(True, lanes=1)[0], plain.run(False)[0]) <= rounding_of(plain)


def test_users_with_one_step_go_through_the_network_together() -> None:
    module = ImageClassifier(network("deeplabv3plus"), task=TASK, input_size=10, exact_crops=True)
    assert CohortEngine(module, lanes=1)._fusable


def test_a_users_part_of_a_private_sum_is_as_long_as_the_bound_and_both_engines_clip_alike() -> None:
    """The user has two steps, in one of which a mask is all void."""
    bound = 0.01

    def clipped() -> Setting:
        chosen = setting("head", more=[without_noise(bound)], by_images=False)
        chosen.sizes, chosen.store = [3], Masks([3])
        return chosen

    theirs, ours = clipped().run(False)[0], clipped().run(True, lanes=1)[0]
    assert bound * (1 - 1e-3) <= norm(ours) <= bound * (1 + 1e-5)
    assert distance(ours, theirs) <= ROUNDING


def test_a_user_whose_masks_are_all_void_moves_nothing() -> None:
    chosen = setting("head")
    chosen.sizes, chosen.store = [1], Masks([1], void=True)
    updates, weight, _ = chosen.run(True, lanes=1)
    assert weight == 1
    assert norm(updates) == 0
