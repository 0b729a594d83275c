"""The geometric median, as RFA computes it
(Pillutla, Kakade and Harchaoui 2022, "Robust Aggregation for Federated Learning", arXiv 1912.13445,
Algorithm 2).

It is the z that minimises ``sum_i p_i |z - x_i|``, p_i the weights of the mean. Smoothed Weiszfeld steps:
``b_i = p_i / max(least_distance, |z - x_i|)``, then z becomes ``sum_i b_i x_i / sum_i b_i``. Each step goes
through the updates twice. z starts at the median of each coordinate: from the mean, where the paper starts,
an update of 1e10 takes more steps than the paper makes to be forgotten.

Letters: P numbers of an update.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from pfl_ext.aggregation.by_coordinate import Median
from pfl_ext.aggregation.rule import AggregationRule, SpooledOptions, by_blocks, register
from pfl_ext.aggregation.spool import DoubleArray, IntArray, Spool
from pfl_ext.configs import STRICT


@dataclass(frozen=True, config=STRICT)
class WeiszfeldOptions(SpooledOptions):
    """How near it comes."""

    iterations: PositiveInt = 4
    """Weiszfeld steps."""
    least_distance: PositiveFloat = 1e-5
    """Distances below it count as this, so that no update has all of the weight."""


@register("geometric_median")
class GeometricMedian(AggregationRule):
    """Weiszfeld's algorithm, in float64."""

    options: ClassVar[type] = WeiszfeldOptions
    weighs: ClassVar[bool] = True

    def aggregate(self, spool: Spool, rows: IntArray) -> DoubleArray:
        """After `iterations` steps."""
        z = Median(self.chosen).aggregate(spool, rows)
        for _ in range(self.chosen.iterations):
            squares = np.zeros(len(rows))
            for part, block in spool.coordinates(rows):
                squares += ((block - z[part]) ** 2).sum(1)
            b = spool.weights[rows] / np.maximum(np.sqrt(squares), self.chosen.least_distance)
            z = by_blocks(spool, rows, b / b.sum())
        return z
