"""Privacy with two real processes under torchrun and pfl's own distributed context (gloo)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pfl_ext.privacy.central import PrivateMean
from tests.launching import command
from tests.launching import run as launch
from tests.pfl_ext.privacy.private_worker import BOUND, ROUNDS, SIZE, USERS, mechanisms, rounds_of

pytestmark = pytest.mark.xdist_group("private workers")
"""One process runs them all: they look at one launch."""

Means = np.ndarray[Any, np.dtype[np.float32]]
NAMES = list(mechanisms())


@pytest.fixture(scope="module")
def by_worker(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Means]]:
    """What each of two workers handed to its model, by mechanism."""
    out = tmp_path_factory.mktemp("workers")
    words = command("torchrun", 2, "tests.pfl_ext.privacy.private_worker", str(out))
    launch(words, PFL_PYTORCH_DEVICE="cpu")
    return {name: [np.load(out / f"{name}-{rank}.npy") for rank in range(2)] for name in NAMES}


def expected_std(name: str, round_number: int) -> float:
    """Sigma C / cohort_lg, or what the other mechanisms promise of the mean."""
    if name == "local":
        return float(2 / 8 * BOUND * np.sqrt(2 / USERS))
    mechanism = mechanisms()[name]
    assert isinstance(mechanism, PrivateMean)
    scale = mechanism._correlated._factor.noise_scales[round_number]
    return mechanism.calibration.value_noise_multiplier * BOUND / 60 * float(scale)


@pytest.mark.parametrize("name", NAMES)
def test_two_workers_noise_the_mean_once(name: str, by_worker: dict[str, list[Means]]) -> None:
    """Not once each: the variance would be twice that. Within 1 % over 450,000 draws."""
    means = by_worker[name]
    assert np.array_equal(means[0], means[1])
    assert means[0].shape == (ROUNDS, SIZE)
    for r in range(ROUNDS):
        assert means[0][r, 1:].std() == pytest.approx(expected_std(name, r), rel=0.01)
    assert name != "gaussian" or expected_std(name, 0) == pytest.approx(3.0 * BOUND / 60)


@pytest.mark.parametrize("name", NAMES)
def test_two_workers_release_what_one_releases(name: str, by_worker: dict[str, list[Means]]) -> None:
    """The same noise on the same mean of all users, of whom each worker saw half."""
    alone = rounds_of(mechanisms()[name])
    assert np.allclose(by_worker[name][0], alone, rtol=0, atol=1e-6)
