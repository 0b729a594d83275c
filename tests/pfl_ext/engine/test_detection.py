"""Detectors in the engine: layers that are used for several maps, samples, boxes as targets."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.models.classifier import ImageClassifier, build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.small import NETWORKS
from tests.pfl_ext.engine.setting import NoisyStore, Setting, distance, norm, rounding_of, without_noise
from tests.pfl_ext.samplings import local_sampling
from tests.pfl_ext.tiny_detector import TASKS, Tiny

CLASSES = 3
SIZES = [1, 3]
KINDS = tuple(TASKS)
STEP: dict[str, Any] = {"clipping": "global", "max_norm": 100.0, "learning_rate": 0.05}
ROUNDING = 0.01
"""Most that rounding, which layers and steps magnify, may change; a wrong layer changes the sum by 1."""


class Boxed(NoisyStore):
    """Image i has i boxes, at most four, the third of which is a crowd's."""

    def read(self, rows: Any) -> tuple[Any, Any]:
        images, targets = super().read(rows)[0], np.zeros((len(rows), 4, 6), np.float32)
        targets[..., 4] = -1
        for place, row in enumerate(rows):
            for box in range(min(int(row), 4)):
                targets[place, box] = [box, 1, 6 + box, 9 - box, box % CLASSES, box == 2]
        return images, targets

    def targets(self, rows: Any) -> Any:
        return self.read(rows)[1]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    NETWORKS.names()
    for kind in KINDS:
        monkeypatch.setitem(NETWORKS._things, f"tiny_{kind}", Tiny(kind))


def network(kind: str) -> nn.Module:
    config = ModelConfig(f"tiny_{kind}", input_size=10, groups=2)
    return build_backbone(config, CLASSES, torch.Generator().manual_seed(4))


def setting(kind: str, **options: Any) -> Setting:
    sampling = local_sampling(
        num_epochs=1, batch_size=2, flip="both", crop="padded", input_size=10, keys=kind == "fasterrcnn"
    )
    made = {**STEP, "task": TASKS[kind](CLASSES), **options}
    return Setting(SIZES, sampling, store=Boxed(SIZES), backbone=partial(network, kind), **made)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cohorts_sum_is_that_of_pfls_loop(kind: str) -> None:
    theirs, ours = setting(kind).run(False)[0], setting(kind).run(True, lanes=2)[0]
    assert distance(ours, theirs) <= rounding_of(setting(kind)) <= ROUNDING


@pytest.mark.parametrize("kind", KINDS)
def test_users_are_trained_one_by_one_where_heads_are_used_for_several_maps(kind: str) -> None:
    module = ImageClassifier(network(kind), task=TASKS[kind](CLASSES), input_size=10, exact_crops=True)
    assert CohortEngine(module, lanes=1)._fusable == (kind == "ssdlite")


@pytest.mark.parametrize("kind", KINDS)
def test_a_users_part_of_a_private_sum_is_as_long_as_the_bound_and_both_engines_clip_alike(kind: str) -> None:
    bound = 0.01

    def clipped() -> Setting:
        chosen = setting(kind, more=[without_noise(bound)], by_images=False)
        chosen.sizes, chosen.store = [3], Boxed([3])
        return chosen

    theirs, ours = clipped().run(False)[0], clipped().run(True, lanes=1)[0]
    assert bound * (1 - 1e-3) <= norm(ours) <= bound * (1 + 1e-5)
    assert distance(ours, theirs) <= ROUNDING
