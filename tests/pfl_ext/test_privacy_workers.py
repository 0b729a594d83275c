"""Privacy with two real processes under torchrun and pfl's own distributed context (gloo)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pfl_ext.privacy import PrivateMean
from tests.pfl_ext.private_worker import BOUND, ROUNDS, SIZE, USERS, mechanisms, rounds_of

Means = np.ndarray[Any, np.dtype[np.float32]]
NAMES = list(mechanisms())


@pytest.fixture(scope="module")
def by_worker(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Means]]:
    """What each of two workers handed to its model, by mechanism."""
    out, root = tmp_path_factory.mktemp("workers"), Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = [str(root / "tests/pfl_ext/private_worker.py"), str(out)]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PFL_PYTORCH_DEVICE": "cpu"}
    done = subprocess.run(
        [*command, *script], env=environment, cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: [np.load(out / f"{name}-{rank}.npy") for rank in range(2)] for name in NAMES}


def expected_std(name: str, round_number: int) -> float:
    """Sigma C / cohort_lg, or what the other mechanisms promise of the mean."""
    if name == "local":
        return float(2 / 8 * BOUND * np.sqrt(2 / USERS))
    made = mechanisms()[name]
    assert isinstance(made, PrivateMean)
    scale = made._correlated._factor.noise_scales[round_number]
    return made.calibration.value_noise_multiplier * BOUND / 60 * float(scale)


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
