"""The curves of groups: the mean over the seeds of each, with the least and the greatest of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.compare.groups import Group
from benchmarks.compare.measures import Axis, Curve, curve, followed
from benchmarks.reporting.runs import RunRecord
from dataset.arrays import FloatArray


@dataclass(frozen=True)
class Line:
    """One group in one chart: the mean over its seeds at each x, and the least and the greatest of them."""

    place: int
    """Position of the group in the comparison, which gives its colour."""
    x: FloatArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray
    n: int
    singles: Sequence[tuple[FloatArray, FloatArray]] = ()
    """Curves of runs that have not ended, each by itself."""

    def is_of_runs_of(self, other: Line) -> bool:
        """Whether this line of a group is of the same runs as another one, along another axis: their scores
        are the same. Seconds or bytes may be known of only some runs."""
        return self.n == other.n and np.array_equal(self.mean, other.mean)


def lines_of(groups: Sequence[Group], split: str, name: str, axis: Axis) -> list[Line]:
    """The lines of the groups that follow this score of this split."""
    made = []
    for place, group in enumerate(groups):
        where = [place_of for run in group.runs if (place_of := followed(run)) and place_of[1] == split]
        line = line_of(place, group, (where[0][0], name), axis) if where else None
        made += [] if line is None else [line]
    return made


def line_of(place: int, group: Group, keys: tuple[str, ...], axis: Axis) -> Line | None:
    """One group's line: the mean of its seeds that have ended, or of all where none has, at common steps."""
    ended = _curves(group.finished, keys, axis)
    under_way = _curves(group.unfinished, keys, axis)
    several, singles = (ended, under_way) if ended else (under_way, [])
    steps = sorted(set.intersection(*(set(found.along["steps"]) for found in several))) if several else []
    if not steps:
        return None
    rows = [np.searchsorted(found.along["steps"], steps) for found in several]
    values = np.array([found.values[row] for found, row in zip(several, rows)])
    joined = np.max if axis.endswith("epsilon") else np.mean
    x = joined([found.along[axis][row] for found, row in zip(several, rows)], axis=0)
    more = [(found.along[axis], found.values) for found in singles]
    return Line(place, x, values.mean(0), values.min(0), values.max(0), len(values), more)


def _curves(runs: Sequence[RunRecord], keys: tuple[str, ...], axis: Axis) -> list[Curve]:
    """The curve of each run that has these numbers and is known along the axis."""
    curves = [curve(run, *keys) for run in runs]
    return [found for found in curves if found is not None and len(found.values) and axis in found.along]
