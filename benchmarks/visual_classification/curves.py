"""Accuracy over a run as the paper reads it: at a round, at a batch, relative to centralised training.

Acc@round is the accuracy of the model after so many rounds; Acc@batch that after so many local batches of the
largest user of each round, one after another, "a proxy for a fixed time budget" (Hsu, Qi, Brown, Table 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from benchmarks.core.config.trees import Tree
from benchmarks.reporting.runs import RunRecord, finished_run, reading
from benchmarks.visual_classification.config import VISION
from dataset.arrays import FloatArray, IntArray


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
        """Accuracy of the last model scored at or before so many batches; None if the run made fewer."""
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
    """The curve of the lines of ``metrics.jsonl``; a line's scores are the model's before that line's round.

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


def read_finished(directory: Path) -> RunRecord:
    """A run that has ended, with a curve.

    Raises:
        ValueError: what is wrong with it, in a line.
    """
    run = finished_run(directory, VISION, {"test": ["accuracy"]})
    curve_of(run)
    return run


def curve_of(run: RunRecord) -> Curve:
    """The accuracy over a run.

    Raises:
        ValueError: when its lines are damaged or missing.
    """
    with reading(run.directory):
        return read_curve(run.history)


@dataclass(frozen=True)
class Row:
    """The seeds of one experiment."""

    label: str
    """The name of the setting, and what tells it from other rows of the same setting and partition."""
    runs: tuple[RunRecord, ...]
    centralised: float | None
    """Test accuracy of centralised training on the same data, in percent, where it is known."""
    reasons: tuple[str, ...] = ()
    """Why it cannot be compared with the paper; empty where it can."""

    @property
    def name(self) -> str:
        """The setting."""
        return place(self.runs[0])[0]

    @property
    def partition(self) -> str:
        """The partition of the data."""
        return place(self.runs[0])[1]

    @cached_property
    def curves(self) -> tuple[Curve, ...]:
        """The curve of each seed."""
        return tuple(map(curve_of, self.runs))


def place(run: RunRecord) -> tuple[str, str]:
    """Setting and partition."""
    return str(run.config.setting), str(run.config.data.partition or "users")
