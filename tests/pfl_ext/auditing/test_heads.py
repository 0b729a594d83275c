"""The audit of a private head: `CohortEngine` trains canaries among users with one row of features each."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
from torch import nn

from dataset.arrays import IntArray
from pfl_ext.auditing.audit import ClippedAfterAveraging, LessNoise, SameNoise, audit
from pfl_ext.auditing.canaries import CanaryUsers, MakeMechanism
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.privacy.accounting import PrivacyConfig
from pfl_ext.privacy.central import private_mean
from pfl_ext.randomness import stream
from tests.pfl_ext.auditing.heads import BiasNotClipped, ClippedTogether, HeadGame

pytestmark = pytest.mark.xdist_group("audit")

LABELS, WIDTH = 4, 8
CONFIG = PrivacyConfig(epsilon=4.0, delta=1e-5, mechanism="gaussian", sampler="poisson", clipping_bound=1.0)


class Clusters:
    """A row for each of many users, near the corner of its class."""

    def __init__(self, users: int) -> None:
        noise = stream(1, "features").standard_normal((users, WIDTH))
        self._features = (noise / 2 + np.eye(LABELS, WIDTH)[np.arange(users) % LABELS]).astype(np.float32)

    def targets(self, rows: IntArray) -> Any:
        return np.eye(LABELS, dtype=np.uint8)[rows % LABELS]

    def read(self, rows: IntArray) -> tuple[Any, Any]:
        return self._features[rows], self.targets(rows)


def head_game(canaries: int, others: int, cohort: int, rounds: int, rate: float, bound: float) -> HeadGame:
    calibration = replace(CONFIG, clipping_bound=bound).calibrate(canaries + others, cohort, rounds)
    head = nn.Linear(WIDTH, LABELS)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    store: Any = Clusters(others)
    return HeadGame(calibration, others=others, head=head, real=store, rates=(1.0, rate))


@cache
def among_others() -> HeadGame:
    return head_game(2000, 6000, cohort=800, rounds=8, rate=1.0, bound=1.0)


@cache
def beside_one() -> HeadGame:
    """At a bound that a bias can exceed nine times."""
    return head_game(1, 1, cohort=2, rounds=2, rate=0.01, bound=0.1)


def test_canaries_are_as_long_as_the_bound_where_they_take_part_and_elsewhere_there_is_noise() -> None:
    game = among_others()
    with mock.patch.object(CanaryUsers, "single_features", autospec=True) as joined:
        joined.side_effect = lambda *of: (
            FederatedImageDataset.single_features(*of) or pytest.fail("no features")
        )
        release = game.play()
    assert joined.call_count >= 8
    seen, took_part = release.sums[:, : game.canaries], release.drawn & game.joined
    noise = game.calibration.value_noise_multiplier
    assert abs(seen[took_part].mean() - 1) < 4 * noise / took_part.sum() ** 0.5
    assert abs(seen[~took_part].mean()) < 4 * noise / (~took_part).sum() ** 0.5
    assert abs(seen[~took_part].std() / noise - 1) < 4 / (2 * (~took_part).sum()) ** 0.5


@pytest.mark.parametrize(
    "mechanism, convicted",
    [
        (private_mean, False),
        (LessNoise, True),
        (SameNoise, True),
        (ClippedTogether, True),
        (ClippedAfterAveraging, True),
    ],
)
def test_an_audit_among_many_users(mechanism: MakeMechanism, convicted: bool) -> None:
    assert audit(replace(among_others(), make_mechanism=mechanism)).convicted is convicted


@pytest.mark.parametrize("mechanism, convicted", [(private_mean, False), (BiasNotClipped, True)])
def test_an_audit_of_many_runs(mechanism: MakeMechanism, convicted: bool) -> None:
    assert audit(replace(beside_one(), make_mechanism=mechanism), runs=80).convicted is convicted
