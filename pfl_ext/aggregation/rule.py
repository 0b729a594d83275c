"""The interface of every aggregation rule, and the rules by name.

A rule is a class under ``@register("name")`` in this folder: ``aggregation.kind: name`` chooses it, and each
field of its ``options`` is set as ``aggregation.options.FIELD``.

Only the mean and the norm bound can be used with privacy. One user can change which updates a median or Krum
chooses, and so move the result by much more than its own share.

Letters: n updates x_i, f of them bad, P numbers of an update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from dataset.arrays import FloatArray, IntArray
from pfl_ext.aggregation.spool import Spool
from pfl_ext.configs import STRICT, NoOptions, rounded_down
from pfl_ext.registry import Registry

MEAN = "mean"
"""Name of the rule that works with every algorithm."""


@dataclass(frozen=True, config=STRICT)
class SpooledOptions:
    """Options of every rule that needs all updates of a round at once.

    Bucketing (Karimireddy et al. 2022, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing",
    arXiv 2006.09365, Algorithm 1) applies the rule to the means of small groups of users, drawn in each
    round. Where users' images differ, these means differ less than single updates. One bad user spoils its
    whole group, so with groups of s `tolerated` must be s times the share of bad users.
    """

    bucket_size: PositiveInt = 1
    """s, the size of the groups, drawn in each round, whose mean counts as one update; 1: single users."""
    max_state_gb: PositiveFloat = 16.0
    """Most disk space, in GB, for the updates of a round."""


@dataclass(frozen=True, config=STRICT)
class ToleratedOptions(SpooledOptions):
    """Options of rules that tolerate a certain number of bad updates."""

    tolerated: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    """Share of the updates of a round that may be bad; f is that times n, rounded down."""


class AggregationRule(ABC):
    """An aggregation rule with its options."""

    options: ClassVar[type] = NoOptions
    """The frozen dataclass of its options; a `SpooledOptions` if the rule needs all updates at once."""
    weighs: ClassVar[bool] = False
    """Whether updates count by their weights; else all count the same."""

    def __init__(self, options: Any) -> None:
        self.chosen = options

    def least(self) -> str | None:
        """The condition on n, in words for a refusal; None: n is at least 1."""
        return None

    def works_with(self, n: int) -> bool:
        """Whether n updates are enough."""
        return n > 0

    def bad(self, n: int) -> int:
        """f, the number of bad updates among n."""
        return rounded_down(self.chosen.tolerated, n)

    @abstractmethod
    def aggregate(self, spool: Spool, rows: IntArray) -> FloatArray:
        """Combine the updates in ``rows`` of a spool, at least one, into one ``[P]``, by `Spool.weights`."""


RULES: Registry[type[AggregationRule]] = Registry("pfl_ext.aggregation", "aggregation.kind")
"""What ``aggregation.kind`` chooses by name."""
register = RULES.register
"""Class decorator that registers a rule under a name."""


def by_blocks(spool: Spool, rows: IntArray, weights: FloatArray) -> FloatArray:
    """``sum_i weights_i x_i``, in float64."""
    total = np.zeros(spool.length)
    for part, block in spool.coordinates(rows):
        total[part] = weights @ block
    return total


@register(MEAN)
class Mean(AggregationRule):
    """The weighted mean. It needs a spool only where attackers see all other updates."""

    weighs: ClassVar[bool] = True

    def aggregate(self, spool: Spool, rows: IntArray) -> FloatArray:
        """``sum_i p_i x_i``."""
        weights = spool.weights[rows]
        return by_blocks(spool, rows, weights / weights.sum())
