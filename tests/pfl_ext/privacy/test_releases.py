"""Releases before training are composed with the rounds, or refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from pfl_ext.privacy.accounting import PrivacyConfig
from pfl_ext.privacy.epsilon import (
    System,
    gaussian_delta,
)
from tests.pfl_ext.privacy.test_accounting import REMOVE

pytestmark = pytest.mark.xdist_group("accounting")
"""One process runs them all: calibrations are remembered."""


def test_releases_before_training_are_composed_with_the_rounds() -> None:
    """By dp-accounting itself; of several runs each has releases of its own."""

    def direct(rounds: int, releases: int) -> float:
        ledger = PLDAccountant(REMOVE, value_discretization_interval=3e-4)
        ledger.compose(dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(2.0)), rounds)
        ledger.compose(dp_accounting.GaussianDpEvent(8.0), releases)
        return float(ledger.get_epsilon(1e-5))

    plain = System(1000, 100, 2.0, 1e-5, "poisson", "pld")
    system = replace(plain, releases=(8.0, 8.0))
    assert system.epsilon_after(50) == pytest.approx(direct(50, 2), rel=1e-3)
    assert system.epsilon_after(50) > 1.01 * plain.epsilon_after(50)
    assert system.epsilon_of_runs(3, 50) == pytest.approx(direct(150, 6), rel=1e-3)
    mu = math.sqrt(2) / 8
    assert gaussian_delta(system.epsilon_after(0), mu) == pytest.approx(1e-5, rel=0.01)
    assert plain.epsilon_after(0) == 0


def test_releases_take_their_part_of_the_budget() -> None:
    config = PrivacyConfig(epsilon=2.0, delta=1e-5, moments_multiplier=8.0)
    noises = [
        c.calibrate(1000, 100, 50).simulated.noise_multiplier
        for c in (replace(config, moments_multiplier=None), config, replace(config, moments_multiplier=4.0))
    ]
    assert noises[0] < noises[1] < noises[2]
    calibration = config.calibrate(1000, 100, 50)
    assert calibration.epsilon <= 2.0
    assert calibration.to_json()["as_executed"]["releases_before_training"] == [8.0, 8.0]
    with pytest.raises(ValueError, match=r"moments_multiplier is 8: .* alone spend an epsilon of 0\.6"):
        replace(config, epsilon=0.1).calibrate(1000, 100, 50)
    for tiny in (1e-300, 1e-5, 0.01):
        with pytest.raises(ValueError, match="alone spend an epsilon of"):
            replace(config, moments_multiplier=tiny).calibrate(1000, 100, 50)
    odd = {"moments_multiplier": 1e300, "mean_bound": 1e300, "square_bound": 1e-300}
    for key, value in odd.items():
        given: dict[str, Any] = {"epsilon": 2.0, "moments_multiplier": 8.0, key: value}
        with pytest.raises(ValueError, match=r"should be (less|greater) than or equal to"):
            PrivacyConfig(**given)


@pytest.mark.parametrize(
    "key, value, needed",
    [
        ("sampler", "fixed", "poisson"),
        ("sampler", "cyclic", "poisson"),
        ("noise", "rounds_as_epochs", "calibrated"),
        ("noise_cohort_size", 500, "none"),
        ("noise_population", 5000, "none"),
    ],
)
def test_releases_are_refused_where_nobody_has_argued_for_them(key: str, value: Any, needed: str) -> None:
    given: dict[str, Any] = {"epsilon": 2.0, "moments_multiplier": 8.0, key: value}
    with pytest.raises(
        ValueError, match=rf"privacy\.{key} is {value}, but .*: set privacy\.{key} to {needed}"
    ):
        PrivacyConfig(**given)


def test_a_small_epsilon_over_many_rounds_is_not_refused() -> None:
    """The search for a start, on few orders, found none, and that was the run's error."""
    config = PrivacyConfig(epsilon=0.05, delta=1e-5, sampler="fixed", accountant="rdp")
    calibration = config.calibrate(10_000, 100, 100_000)
    assert calibration.simulated.noise_multiplier == pytest.approx(820.741)
    assert 0.0499 < calibration.epsilon <= 0.05
