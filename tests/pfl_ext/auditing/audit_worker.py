"""One of several workers of an audit: ``torchrun ... audit_worker.py OUT_DIR``.

Each worker plays the games below, and writes what it would hand to its model to OUT_DIR/<game>-<rank>.npz.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import pfl_ext as pfl_ext  # before pfl, see there

# isort: split
import numpy as np
import torch
from pfl.context import CentralContext
from pfl.internal.ops.selector import get_default_framework_module as get_ops
from torch import Tensor

from pfl_ext.auditing.audit import claimed
from pfl_ext.auditing.canaries import Directions, Game
from pfl_ext.privacy.accounting import Calibration, PrivacyConfig
from pfl_ext.privacy.central import PrivateMean
from pfl_ext.privacy.epsilon import Sampler, System
from pfl_ext.workers.distributed import connected
from tests.pfl_ext.auditing.trained_games import EngineGame

COLUMNS = 2**12


def uncalibrated(sampler: Sampler, columns: int) -> Calibration:
    """Four rounds with a noise multiplier of 1, whatever that is worth; half of the users in each."""
    users = Directions(columns).size
    system = System(users, users // 2, 1.0, 1e-3, sampler, "pld")
    return Calibration(PrivacyConfig(epsilon=2.0, sampler=sampler, clipping_bound=0.5), 4, system, system)


class OneWorkersNoise(PrivateMean):
    """Worker 0 adds the noise, and the others train on without it."""

    def _noise(self, context: CentralContext, size: int, users: int) -> tuple[Tensor, float]:
        noise, std = super()._noise(context, size, users)
        return (noise if get_ops().distributed.global_rank == 0 else torch.zeros(size)), std


@cache
def games() -> dict[str, Game]:
    """By name: without defect, with one worker's noise, with all users trained by all workers; the engine."""
    many = Game(claimed(1.0, "poisson", COLUMNS), Directions(COLUMNS))
    few = EngineGame(uncalibrated("poisson", 16), Directions(16))
    return {
        "honest": many,
        "noise of one worker": replace(many, make_mechanism=OneWorkersNoise),
        "users twice": many,
        "engine": few,
    }


def main() -> None:
    """Play them all."""
    with connected("cpu", threads=1, timeout=60):
        rank = get_ops().distributed.global_rank
        for name, game in games().items():
            whole = mock.patch("pfl_ext.backend.dealt", lambda tasks, workers: [list(tasks)] * workers)
            if name == "users twice":
                whole.start()
            release = game.play()
            mock.patch.stopall()
            np.savez(Path(sys.argv[1]) / f"{name}-{rank}.npz", **vars(release))


if __name__ == "__main__":
    main()
