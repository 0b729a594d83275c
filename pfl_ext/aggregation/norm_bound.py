"""The mean of updates whose L2 norm is bounded
(Sun et al. 2019, "Can You Really Backdoor Federated Learning?", arXiv 1911.07963, section 4).

The bound looks at one update at a time, so the engine applies it at no cost. An update that is not finite
counts as 0, with its weight. Where attackers see all other updates (`alie`), these are collected first, and
one that is not finite is left out together with its weight. With privacy this is one more scaling of a user's
own update before the mechanism clips it; the engine then trains users one after another.

Letters: U users, V variables, B the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pfl.context import UserContext
from pfl.metrics import Metrics, StringMetricName, Weighted
from pfl.stats import MappedVectorStatistics
from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from dataset.arrays import FloatArray, IntArray
from pfl_ext.aggregation.rule import AggregationRule, by_blocks, register
from pfl_ext.aggregation.spool import Spool
from pfl_ext.configs import STRICT
from pfl_ext.privacy.central import tally_of
from pfl_ext.privacy.mechanisms import BOUND_RANGE, FlatGaussianMechanism, layer_limit
from pfl_ext.stage import Stage

BOUNDED = StringMetricName("fraction of updates above the norm bound")
"""Name of a round's metric."""


@dataclass(frozen=True, config=STRICT)
class NormBoundOptions:
    """Options of the norm bound."""

    bound: PositiveFloat = 1.0
    """B, the maximum L2 norm of a user's update; a longer update is scaled down to it."""

    def __post_init__(self) -> None:
        if not BOUND_RANGE[0] <= self.bound <= BOUND_RANGE[1]:
            raise ValueError(f"aggregation.options.bound is {self.bound:g}: it must lie in {BOUND_RANGE}")


@register("norm_bound")
class NormBound(AggregationRule):
    """``sum_i p_i x_i min(1, B / |x_i|)``."""

    options: ClassVar[type] = NormBoundOptions
    weighs: ClassVar[bool] = True

    def aggregate(self, spool: Spool, rows: IntArray) -> FloatArray:
        """The mean of bounded updates from a spool, which is needed where attackers see all other updates."""
        squares = np.zeros(len(rows))
        for _, block in spool.coordinates(rows):
            squares += (block * block).sum(1)
        limit = layer_limit(self.chosen.bound, 1)
        scales = limit / np.maximum(np.sqrt(squares), limit)
        weights = spool.weights[rows]
        return by_blocks(spool, rows, weights / weights.sum() * scales)


class BoundedUpdates(Stage):
    """Bounds a user's update: in pfl's loop as the postprocessor before the weighting, or in the engine."""

    def __init__(self, bound: float) -> None:
        self._clipping = FlatGaussianMechanism(bound, 0.0)
        self.clipping_bound = bound

    def postprocess_one_user(
        self, *, stats: MappedVectorStatistics, user_context: UserContext
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """Scale one user's update."""
        clipped = self._clipping.clip(stats)
        above = float(~(clipped.whole & clipped.finite))
        return stats, Metrics([(BOUNDED, Weighted(above, int(user_context.num_datapoints > 0)))])

    def user_scales(self, names: Sequence[str], squared_norms: Tensor) -> tuple[Tensor, Tensor]:
        """Factors ``[U, V]`` and tallies ``[U, 5]`` from squared norms ``[U, V]``; the engine calls this."""
        scales, norms, whole, finite = self._clipping.user_scales(names, squared_norms)
        return scales, tally_of(norms, whole, finite)

    @staticmethod
    def metrics(tally: Tensor | None) -> Metrics:
        """The metrics of a worker's share of a round, from the sum of its users' tallies."""
        users, above = (0.0, 0.0) if tally is None else tally[:2].tolist()
        return Metrics([(BOUNDED, Weighted(above, users))])
