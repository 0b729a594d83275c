"""One of two workers whose clocks and caches differ: ``tuning_worker DIRECTORY``.

Alone, worker 0 would have users trained one by one, and worker 1 in the largest groups. Each writes what it
chose, where from, and the sum of a round to ``DIRECTORY/RANK.pt``.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch

import pfl_ext as pfl_ext  # before pfl, see there

# isort: split
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.engine.plan import Arrangement
from pfl_ext.engine.tuning import Tuner
from pfl_ext.workers.distributed import connected
from tests.pfl_ext.engine.setting import Setting

SIZES = [1, 3, 2, 9, 1, 1, 4, 2]
SECONDS = {"0": {32: 4.0, 64: 3.0, 128: 3.5, -1: 1.0}, "1": {32: 4.0, 64: 3.0, 128: 1.0, -1: 9.0}}
"""Seconds of a pass by worker and images of a group, -1: one by one. The least sum is that of 128."""


class Clock:
    """Moved on by training alone, at this worker's pace."""

    def __init__(self, rank: str) -> None:
        self.now, train = 0.0, CohortEngine.train

        def watched(engine: CohortEngine, *job: object) -> object:
            own = engine.arrangement
            self.now += SECONDS[rank][own.images if own.fuse else -1]
            return train(engine, *job)  # type: ignore[arg-type]

        CohortEngine.train = watched  # type: ignore[method-assign, assignment]

    def __call__(self) -> float:
        return self.now


def main(directory: Path) -> None:
    """Tune and train a round, connected to the other worker."""
    rank = os.environ["RANK"]
    with connected("cpu", threads=1, timeout=120):
        tuner = Tuner(kept=directory / f"cache {rank}", clock=Clock(rank))
        update, *_ = Setting(SIZES, tuner=tuner).run(True)
    assert tuner.outcome is not None
    chosen = Arrangement(*(tuner.outcome[name] for name in ("lanes", "fuse", "images")))
    found = {"chosen": asdict(chosen), "source": tuner.outcome["source"], "update": update}
    torch.save(found, directory / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
