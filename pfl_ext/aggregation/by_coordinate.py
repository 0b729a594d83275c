"""Rules that treat each coordinate by itself
(Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", arXiv
1803.01498, definitions 1 and 2).

Letters: n updates, f of them bad.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from dataset.arrays import FloatArray, IntArray
from pfl_ext.aggregation.rule import AggregationRule, SpooledOptions, ToleratedOptions, register
from pfl_ext.aggregation.spool import Spool


class ByCoordinate(AggregationRule):
    """For each coordinate, the mean of the middle values after sorting."""

    @abstractmethod
    def dropped(self, n: int) -> int:
        """How many of n values are left out at either end."""

    def aggregate(self, spool: Spool, rows: IntArray) -> FloatArray:
        """The mean of the remaining values. They are summed alone; nothing is subtracted from a total."""
        out, ends = np.zeros(spool.length), self.dropped(len(rows))
        for part, block in spool.coordinates(rows):
            block.sort(axis=0)
            out[part] = block[ends : len(rows) - ends].mean(0)
        return out


@register("median")
class Median(ByCoordinate):
    """The median of each coordinate; for an even number of updates, the mean of the two in the middle."""

    options: ClassVar[type] = SpooledOptions

    def dropped(self, n: int) -> int:
        """How many values are left out at either end so that one or two remain."""
        return (n - 1) // 2


@register("trimmed_mean")
class TrimmedMean(ByCoordinate):
    """The mean of each coordinate without its f greatest and its f least values."""

    options: ClassVar[type] = ToleratedOptions

    def dropped(self, n: int) -> int:
        """f, the number of values that are left out at either end."""
        return self.bad(n)
