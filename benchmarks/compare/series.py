"""The curves of groups: the mean over the seeds of each, with the least and the greatest of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.compare.groups import Group
from benchmarks.compare.measures import Curve, curve, followed
from benchmarks.reporting.runs import RunRecord
from dataset.arrays import FloatArray

Axis = Callable[[Curve], FloatArray | None]
"""Along what a curve is drawn."""


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


def by_steps(found: Curve) -> FloatArray:
    """Rounds, or epochs."""
    return found.steps


def by_minutes(found: Curve) -> FloatArray | None:
    """Minutes of training; None where they are not known."""
    return None if found.seconds is None else found.seconds / 60


def by_virtual_minutes(found: Curve) -> FloatArray | None:
    """Minutes of the users' devices; None where there is no virtual clock."""
    return None if found.virtual is None else found.virtual / 60


def by_megabytes(found: Curve) -> FloatArray | None:
    """MB between the server and its users; None where they are not known."""
    return None if found.bytes is None else found.bytes / 1e6


def by_megabytes_up(found: Curve) -> FloatArray | None:
    """MB that users send to the server; None where they are not known."""
    return None if found.bytes_up is None else found.bytes_up / 1e6


def by_epsilon(found: Curve) -> FloatArray | None:
    """Epsilon of the model, as executed; None without privacy, and where it is infinite or not known."""
    return found.epsilon


def by_simulated_epsilon(found: Curve) -> FloatArray | None:
    """Epsilon of the model for the larger system that the run simulates; None where it simulates none."""
    return found.simulated_epsilon


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
    steps = sorted(set.intersection(*(set(found.steps) for found, _ in several))) if several else []
    if not steps:
        return None
    rows = [np.searchsorted(found.steps, steps) for found, _ in several]
    values = np.array([found.values[row] for (found, _), row in zip(several, rows)])
    joined = np.max if axis in (by_epsilon, by_simulated_epsilon) else np.mean
    x = joined([along[row] for (_, along), row in zip(several, rows)], axis=0)
    more = [(along, found.values) for found, along in singles]
    return Line(place, x, values.mean(0), values.min(0), values.max(0), len(values), more)


def _curves(runs: Sequence[RunRecord], keys: tuple[str, ...], axis: Axis) -> list[tuple[Curve, FloatArray]]:
    """The curve of each run that has these numbers, and its values along the axis."""
    curves = [found for run in runs if (found := curve(run, *keys)) is not None and len(found.steps)]
    return [(found, along) for found in curves if (along := axis(found)) is not None]
