"""Mixed images are trained alike by the engine and by pfl's loop, in groups, lanes and compiled layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pfl_ext.data.sampling import LocalSampling
from pfl_ext.tasks.losses import TrainingLoss
from pfl_ext.tasks.multi_label import MultiLabel
from pfl_ext.tasks.single_label import SingleLabel
from tests.pfl_ext.engine.setting import (
    BFLOAT16,
    LABELS,
    Setting,
    convolutions_sum_in_float32,
    distance,
    rounding_of,
    wide_backbone,
    without_noise,
)

SIZES = [1, 3, 4, 9, 2, 5]
"""With a batch of 4 and one epoch: users of one step, who go together; of several; and with one image."""
MIXES = TrainingLoss(mixes=True)
SMOOTHED = TrainingLoss(mixes=True, label_smoothing=0.2, weights=torch.arange(1.0, LABELS + 1))
TRAININGS: dict[str, dict[str, Any]] = {
    "several labels": {"task": MultiLabel().trained_by(MIXES)},
    "weighted images, weighted and smoothed classes": {"task": SingleLabel().trained_by(SMOOTHED)},
    "straddled batches, cutout": {
        "sampling": {"num_epochs": 2, "straddle": True},
        "changes": {"cutout": 4},
        "momentum": 0.5,
        "learning_rate": 0.05,
    },
    "compiled layers": {"backbone": wide_backbone},
    "private, scaled crops": {
        "more": [without_noise(0.3)],
        "by_images": False,
        "sampling": {"crop": "resized"},
        "exact_crops": False,
    },
    "gradients of all images": {"scaffold": ("I", "gradient"), "rounds": 2},
}


def setting(mixup: float | None = 0.5, cutmix: float | None = 1.0, **more: Any) -> Setting:
    words = {"batch_size": 4, "input_size": 10, "keys": True, "mixup": mixup, "cutmix": cutmix}
    sampling = LocalSampling(**{**words, **more.pop("sampling", {})})
    return Setting(SIZES, sampling, **{"task": SingleLabel().trained_by(MIXES), **more})


@pytest.mark.parametrize("name", TRAININGS)
def test_the_engine_mixes_as_pfls_loop_does(name: str) -> None:
    chosen = setting(**TRAININGS[name])
    theirs = chosen.run(False)[0]
    bound = rounding_of(setting(**TRAININGS[name]))
    for options in ({"lanes": 2}, {"lanes": 1, "fuse": False}):
        assert distance(setting(**TRAININGS[name]).run(True, **options)[0], theirs) <= bound
    plain = setting(mixup=None, cutmix=None, **TRAININGS[name])
    assert distance(plain.run(False)[0], theirs) > 100 * bound, "and images are mixed"


@pytest.mark.skipif(not convolutions_sum_in_float32(), reason="this CPU sums bfloat16 in bfloat16")
def test_mixed_images_are_trained_in_bfloat16() -> None:
    exact = setting(backbone=wide_backbone).run(False)[0]
    short = setting(backbone=wide_backbone, amp=torch.bfloat16)
    assert distance(short.run(True)[0], exact) <= rounding_of(short, *BFLOAT16)
