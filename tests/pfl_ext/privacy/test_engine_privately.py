"""Clipping inside the fast engine, whose norms come from Gram matrices: the bound holds there as well."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from dataset.arrays import ByteArray, IntArray
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.engine.training import LocalTraining
from pfl_ext.models.classifier import ImageClassifier, build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.privacy.central import private_mean
from pfl_ext.randomness import stream, torch_stream
from pfl_ext.tasks.multi_label import MultiLabel
from tests.pfl_ext.privacy.test_central import calibration
from tests.pfl_ext.samplings import local_sampling
from tests.pfl_ext.stores import NumberedStore

SAMPLING = local_sampling(num_epochs=2, batch_size=8, max_images=16, input_size=16)
BOUND = 0.2


class Photos(NumberedStore):
    """Random pixels, of every row its own."""

    def read(self, rows: IntArray) -> tuple[ByteArray, ByteArray]:
        images = [stream(1, "photo", int(r)).integers(0, 256, (self.side, self.side, 3)) for r in rows]
        return np.stack(images).astype(np.uint8), super().read(rows)[1]


@pytest.fixture(scope="module")
def network() -> ImageClassifier:
    backbone = build_backbone(ModelConfig(init="keras"), 5, torch_stream(0, "network"))
    return ImageClassifier(backbone, task=MultiLabel(), input_size=16, exact_crops=True)


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("amp", [None, torch.bfloat16])
def test_no_users_share_of_the_engines_sum_is_longer_than_the_bound(
    clipping: Any, amp: torch.dtype | None, network: ImageClassifier
) -> None:
    """Alone in a cohort, with one step (2 and 4 images) or several (11); measured in float64."""
    data = FederatedImageDataset(Photos([2, 4, 11], side=16), SAMPLING, seed=0)
    engine = CohortEngine(network, lanes=1)
    local = LocalTraining(0.1, 2, 8, "variable", 10.0, 0.0, amp)
    mean = private_mean(calibration(cohort=1, mechanism="gaussian", clipping=clipping, clipping_bound=BOUND))
    lengths = []
    for member in data.members(3):
        done = engine.train(data, engine.tasks([member], local), local, lambda _: 1.0, mean)
        lengths.append(math.sqrt(sum(float(t.double().square().sum()) for t in done.update.values())))
        assert done.tally is not None
        assert done.tally[1] == 1  # clipped: the bound is tried
    assert max(lengths) <= BOUND
    assert clipping == "per_layer" or min(lengths) > BOUND * (1 - 2**-13)
