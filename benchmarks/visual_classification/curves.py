"""Accuracy over a run as the paper reads it: at a round, at a batch, relative to centralised training.

Acc@round is the accuracy of the model after so many rounds; Acc@batch that after so many local batches of the
largest user of each round, one after another, "a proxy for a fixed time budget" (Hsu, Qi, Brown, Table 2).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.core.config.digests import config_tree, experiment_digest
from benchmarks.core.config.trees import Tree, read_yaml
from benchmarks.reporting.runs import DAMAGE
from benchmarks.visual_classification.config import VISION, Config
from pfl_ext.checkpoint import read_json

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """E evaluations of one run, in the order of training."""

    rounds: IntArray  # [E], rounds before each
    batches: IntArray  # [E], batches of the largest users before each
    accuracy: FloatArray  # [E], percent

    def at_round(self, number: int) -> float | None:
        """Accuracy of the last model scored at or before a round; None if the run did not get there."""
        return self._at(self.rounds, number)

    def at_batch(self, number: int) -> float | None:
        """Likewise after so many batches."""
        return self._at(self.batches, number)

    def _at(self, places: IntArray, number: int) -> float | None:
        if not len(places) or places[-1] < number:
            return None
        return float(self.accuracy[np.searchsorted(places, number, "right") - 1])

    def rounds_to(self, accuracy: float) -> int | None:
        """The first round whose model has this accuracy in percent; None if none has."""
        reached = np.flatnonzero(self.accuracy >= accuracy)
        return int(self.rounds[reached[0]]) if len(reached) else None

    @property
    def best(self) -> float:
        """The greatest accuracy seen, which the paper's Figure 4 reports; on test it chooses no model."""
        return float(self.accuracy.max())


def read_curve(lines: Sequence[Tree]) -> Curve:
    """From the lines of ``metrics.jsonl``; a line's scores are the model's before that line's round.

    They are ``tracked`` where they are those of test, or ``val``, which in older runs may be test too.
    """
    batches = np.cumsum([0, *(line.get("max_local_steps", 0) for line in lines)])
    found = [(i, line.get("tracked", line.get("val"))) for i, line in enumerate(lines)]
    scores = {i: columns["accuracy"] for i, columns in found if columns is not None}
    scored = list(scores)
    return Curve(
        np.array([lines[i].get("round", lines[i].get("epoch")) for i in scored], np.int64),
        batches[scored].astype(np.int64),
        np.array(list(scores.values()), np.float64),
    )


@dataclass(frozen=True)
class FinishedRun:
    """What the report knows of one run."""

    directory: Path
    config: Tree
    results: Tree
    curve: Curve

    @property
    def place(self) -> tuple[str, str]:
        """Setting and partition."""
        return str(self.results["setting"]), str(self.config["data"]["partition"] or "users")

    @property
    def experiment(self) -> tuple[str, str, str | None]:
        """What seeds of one experiment share, and no other run: config, data and weights."""
        weights = self.results.get("weights") or {}
        data = self.results.get("data_sha256") or self.results["dataset"]  # a public release has no checksum
        return experiment_digest(self.config, Config), str(data), weights.get("sha256")

    @property
    def seed(self) -> int:
        """Of the run."""
        return int(self.results["seed"])


def read_run(directory: Path) -> FinishedRun:
    """A run that has ended.

    :raises ValueError: what is wrong with it, in a line.
    """
    if not (directory / "results.json").exists():
        raise ValueError(f"{directory} has not ended")
    try:
        results = read_json(directory / "results.json")
        is_another = "accuracy" not in results["test"]
    except DAMAGE as fault:
        raise _unreadable(directory, fault) from None
    if is_another:
        raise ValueError(f"{directory} is a run of another benchmark")
    try:
        config = config_tree(VISION.read(read_yaml(directory / "config.yaml"), "config.yaml"))
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        return FinishedRun(directory, config, results, read_curve(lines))
    except DAMAGE as fault:
        raise _unreadable(directory, fault) from None


def _unreadable(directory: Path, fault: BaseException) -> ValueError:
    text = " ".join(str(fault).split())
    return ValueError(f"{directory} cannot be read: {type(fault).__name__}: {text}")
