"""One of several real workers of a private round: ``torchrun ... private_worker.py OUT_DIR``.

Each worker has its share of 6 users, whose update is their number on one axis of P and zero on the others.
What pfl's backend hands to the model is written to OUT_DIR/<rank>.npy, ``[rounds, P]``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pfl.model.pytorch  # noqa: F401  (makes torch the framework of pfl)
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.data.dataset import Dataset
from pfl.internal.ops import pytorch_ops
from pfl.internal.ops.selector import get_default_framework_module as get_ops
from pfl.metrics import Metrics
from pfl.stats import MappedVectorStatistics

from pfl_ext.privacy.central import NoisyMean, private_mean
from pfl_ext.privacy.local import LocallyPrivateMean, LocalPrivacyConfig
from tests.pfl_ext.privacy.test_central import calibration, context

SIZE, ROUNDS, USERS = 150_000, 3, 6
BOUND = 0.5


def mechanisms() -> dict[str, NoisyMean]:
    """What is tried, by name; noise on the mean is known for each."""
    options: dict[str, Any] = {"cohort": USERS, "noise_cohort": 60, "rounds": ROUNDS, "clipping_bound": BOUND}
    banded = calibration(3.0, mechanism="gaussian", sampler="cyclic", band=2, **options)
    return {
        "gaussian": private_mean(calibration(3.0, mechanism="gaussian", **options), noise_seed=7),
        "banded": private_mean(banded, noise_seed=7),
        "local": LocallyPrivateMean(LocalPrivacyConfig("laplace", BOUND), ROUNDS, noise_seed=7),
    }


class Shares:
    """Users dealt to workers in turn; odd and even rounds leave the last worker with more and with fewer."""

    def get_cohort(self, cohort_size: int) -> Iterator[tuple[Dataset, int]]:
        rank, world = get_ops().distributed.global_rank, get_ops().distributed.world_size
        for user in range(rank, USERS, world):
            yield Dataset((np.array([user], np.float32),)), user


class Trainer:
    """The update of a user: its number over 100 on the first axis, within the bound."""

    def simulate_one_user(
        self, model: Any, user: Dataset, context: Any
    ) -> tuple[MappedVectorStatistics, Metrics]:
        update = torch.zeros(SIZE)
        update[0] = float(user.raw_data[0][0]) / 100
        return MappedVectorStatistics({"a.w": update[:100], "b.w": update[100:]}), Metrics()


def rounds_of(mechanism: NoisyMean) -> np.ndarray[Any, np.dtype[np.float32]]:
    """``[rounds, P]``: the noisy means, through pfl's backend."""
    shares, means = Shares(), []
    backend = SimulatedBackend(shares, shares, [WeightByUser(), mechanism])
    for r in range(ROUNDS):
        stats, _ = backend.gather_results(None, Trainer(), central_context=context(r))
        stats.average()
        means.append(torch.cat([t.flatten() for t in stats.values()]).numpy().copy())
    return np.stack(means)


if __name__ == "__main__":
    torch.set_num_threads(1)
    pytorch_ops.distributed = (
        pytorch_ops.PyTorchDistributedContext()
    )  # as when pfl is imported under torchrun
    for name, mechanism in mechanisms().items():
        np.save(Path(sys.argv[1]) / f"{name}-{get_ops().distributed.global_rank}.npy", rounds_of(mechanism))
