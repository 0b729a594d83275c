"""Rounds of the algorithms as one of the workers of a launcher: ``algorithm_worker DIRECTORY``.

Each worker writes what the server is given after the last round to ``DIRECTORY/<case>-<rank>.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pfl_ext as pfl_ext  # before pfl, see there

# isort: split
import numpy as np
import torch

from pfl_ext.algorithms.closed_form import HeadOptions, RidgeOptions
from pfl_ext.algorithms.fed3r import Fed3R
from pfl_ext.algorithms.fedcof import FedCOF, FedCOFOptions
from pfl_ext.algorithms.fedir import ImportanceWeights
from pfl_ext.algorithms.fedncm import FedNCM
from pfl_ext.tasks.single_label import SingleLabel
from pfl_ext.workers.distributed import connected, current
from tests.pfl_ext.algorithms.test_closed_form import ALL, Features, algorithm, asked
from tests.pfl_ext.algorithms.test_fedir import NoisyOneHot
from tests.pfl_ext.engine.setting import LABELS, NoisyStore, Setting, private
from tests.pfl_ext.samplings import local_sampling

SIZES = [3, 11, 1, 20, 2, 7, 9, 1]


def cases() -> dict[str, Setting]:
    """What is tried, by name."""
    once = local_sampling(1, 4, None, straddle=False, input_size=10)
    virtual = local_sampling(1, 4, None, straddle=False, input_size=10, virtual_size=8)
    named = NoisyStore([5, 9])
    named.user_ids[0] = "nobody"
    target = ImportanceWeights([1 / LABELS] * LABELS, SingleLabel(), cap=5)
    return {
        "fednova": Setting(SIZES, once, nova=True, momentum=0.5, weight_decay=0.01, rounds=2),
        "fednova-proximal": Setting(SIZES, once, nova=True, mu=0.3, rounds=2),
        "fednova-alone": Setting([5, 9], once, nova=True, by_images=False, cohort=1, rounds=2),
        "scaffold": Setting(SIZES, once, scaffold=("II", "gradient"), cohort=5, rounds=3),
        "feddyn": Setting(SIZES, once, dynamic=0.3, cohort=5, rounds=3),
        "feddyn-alone": Setting([5, 9], once, store=named, dynamic=0.3, by_images=False, cohort=1, rounds=4),
        "fedvc-fedir": Setting(
            SIZES,
            virtual,
            by_images=False,
            sampler="proportional_replacement",
            task=SingleLabel(),
            store=NoisyOneHot(SIZES),
            reweight=target,
            rounds=2,
        ),
    }


def heads() -> dict[str, torch.Tensor]:
    """The head of each closed form, from users of whom one worker at times has none."""
    kinds = (FedNCM, HeadOptions()), (Fed3R, RidgeOptions(ridge=1.0)), (FedCOF, FedCOFOptions())
    found = {}
    for kind, options in kinds:
        store = Features([30, 0, 2, 28], ALL)
        weight, bias, _ = asked(algorithm(kind, store, options, 3, SingleLabel()))
        found[kind.__name__] = torch.from_numpy(np.concatenate([weight, bias[:, None]], 1))
    store, options = Features([30, 0, 2, 28], ALL), RidgeOptions(ridge=1.0)
    for name, more in (("private", {"mechanism": private(4, noisy=False)}), ("random", {"random": 40})):
        weight, bias, _ = asked(algorithm(Fed3R, store, options, 4, SingleLabel(), **more))
        found[name] = torch.from_numpy(np.concatenate([weight, bias[:, None]], 1))
    return found


def main(directory: Path) -> None:
    """All cases in both engines."""
    torch.set_num_threads(1)
    with connected("auto", threads=1, timeout=60):
        workers = current()
        rank = 0 if workers is None else workers.global_rank
        for name, setting in cases().items():
            for engine in (False, True):
                update, weight, _ = setting.run(engine)
                torch.save(
                    {**update, "weight": torch.tensor(weight)}, directory / f"{name}-{engine}-{rank}.pt"
                )
        torch.save(heads(), directory / f"heads-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
