"""The geometric median, as RFA computes it
(Pillutla, Kakade and Harchaoui 2022, "Robust Aggregation for Federated Learning", arXiv 1912.13445,
Algorithm 2).

It is the z that minimises ``sum_i p_i |z - x_i|``, with p_i the weights of the mean. A smoothed Weiszfeld
step computes ``b_i = p_i / max(least_distance, |z - x_i|)``; then z becomes ``sum_i b_i x_i / sum_i b_i``.
Each step reads the updates twice. z starts at the median of each coordinate. The paper starts at the mean;
from there the paper's number of steps does not suffice to forget an update of 1e10.

Letters: P numbers of an update.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from dataset.arrays import FloatArray, IntArray
from pfl_ext.aggregation.by_coordinate import Median
from pfl_ext.aggregation.rule import AggregationRule, SpooledOptions, by_blocks, register
from pfl_ext.aggregation.spool import Spool
from pfl_ext.configs import STRICT


@dataclass(frozen=True, config=STRICT)
class WeiszfeldOptions(SpooledOptions):
    """Options of the iteration."""

    iterations: PositiveInt = 4
    """Number of Weiszfeld steps."""
    least_distance: PositiveFloat = 1e-5
    """Smaller distances are replaced by this one, so that no update gets all of the weight."""


@register("geometric_median")
class GeometricMedian(AggregationRule):
    """Weiszfeld's algorithm, in float64."""

    options: ClassVar[type] = WeiszfeldOptions
    weighs: ClassVar[bool] = True

    def aggregate(self, spool: Spool, rows: IntArray) -> FloatArray:
        """z after `iterations` steps."""
        z = Median(self.chosen).aggregate(spool, rows)
        for _ in range(self.chosen.iterations):
            squares = np.zeros(len(rows))
            for part, block in spool.coordinates(rows):
                squares += ((block - z[part]) ** 2).sum(1)
            b = spool.weights[rows] / np.maximum(np.sqrt(squares), self.chosen.least_distance)
            z = by_blocks(spool, rows, b / b.sum())
        return z
