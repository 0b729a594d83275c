"""Krum and Multi-Krum
(Blanchard et al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", arXiv
1703.02757, sections 4 and 5.2).

The score of an update is the sum of its squared distances to the n - f - 2 nearest other updates. Krum is the
update with the least score (the first of equal ones). Multi-Krum is the mean of the m updates with the least
scores. Squared distances are summed over blocks of coordinates in float64. They are computed from updates:
between whole models the differences would be lost in rounding.

Letters: n updates, f of them bad, m that are kept.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from dataset.arrays import FloatArray, IntArray
from pfl_ext.aggregation.rule import AggregationRule, ToleratedOptions, by_blocks, register
from pfl_ext.aggregation.spool import Spool
from pfl_ext.configs import STRICT


@dataclass(frozen=True, config=STRICT)
class MultiKrumOptions(ToleratedOptions):
    """Options of Multi-Krum."""

    kept: PositiveInt | None = None
    """m, the number of updates whose mean is taken, at most n - f; none: n - f."""


def squared_distances(spool: Spool, rows: IntArray) -> FloatArray:
    """The squared distances between updates, ``[n, n]``, at least 0."""
    products, squares = np.zeros((len(rows), len(rows))), np.zeros(len(rows))
    for _, block in spool.coordinates(rows):
        products += block @ block.T
        squares += (block * block).sum(1)
    found = np.maximum(squares[:, None] + squares[None] - 2 * products, 0)
    np.fill_diagonal(found, 0)
    return found


class OfScores(AggregationRule):
    """The mean of the updates with the least scores."""

    def least(self) -> str:
        """The condition of `works_with`, for an error message."""
        return "n > 2 f + 2"

    def works_with(self, n: int) -> bool:
        """Whether ``n > 2 f + 2``."""
        return n > 2 * self.bad(n) + 2

    def best(self, n: int) -> int:
        """m, the number of updates that are averaged."""
        return 1

    def aggregate(self, spool: Spool, rows: IntArray) -> FloatArray:
        """The mean, with equal weights, of the m updates with the least scores."""
        n = len(rows)
        nearest = np.sort(squared_distances(spool, rows), axis=1)[:, 1 : n - self.bad(n) - 1]
        chosen = np.argsort(nearest.sum(1), kind="stable")[: self.best(n)]
        return by_blocks(spool, rows[chosen], np.full(len(chosen), 1 / len(chosen)))


@register("krum")
class Krum(OfScores):
    """The update with the least score."""

    options: ClassVar[type] = ToleratedOptions


@register("multi_krum")
class MultiKrum(OfScores):
    """The mean of the m updates with the least scores."""

    options: ClassVar[type] = MultiKrumOptions

    def best(self, n: int) -> int:
        """m, the number of updates that are averaged."""
        most = n - self.bad(n)
        return most if self.chosen.kept is None else min(self.chosen.kept, most)
