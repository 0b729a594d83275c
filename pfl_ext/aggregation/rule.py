"""What every rule of aggregation offers, and the rules by name.

A rule is a class under ``@register("name")`` in this folder: ``aggregation.kind: name`` chooses it, and each
field of its ``options`` is set as ``aggregation.options.FIELD``.

Privacy is refused with all of them but the mean and the norm bound: one user can change which updates a
median or Krum chooses, and so move the result by much more than its own share.

Letters: n updates x_i, f of them bad, P numbers of an update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from pfl_ext.aggregation.spool import DoubleArray, IntArray, Spool
from pfl_ext.configs import STRICT, NoOptions
from pfl_ext.registry import Registry

MEAN = "mean"
"""The rule that every algorithm has."""


@dataclass(frozen=True, config=STRICT)
class SpooledOptions:
    """What every rule has that needs all updates of a round at once.

    Bucketing (Karimireddy et al. 2022, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing",
    arXiv 2006.09365, Algorithm 1) applies the rule to the means of small groups of users, drawn in each
    round, which differ less among themselves where users' images differ. One bad user spoils its whole group,
    so with groups of s `tolerated` must be s times the share of bad users.
    """

    bucket_size: PositiveInt = 1
    """Users whose mean counts as one update, drawn at random in each round; 1: each user by itself."""
    max_state_gb: PositiveFloat = 16.0
    """Most disk, in GB, for the updates of a round."""


@dataclass(frozen=True, config=STRICT)
class ToleratedOptions(SpooledOptions):
    """Options of rules that tolerate a certain number of bad updates."""

    tolerated: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    """Share of the updates of a round that may be bad; f is that times n, rounded down."""


class AggregationRule(ABC):
    """One rule with its options."""

    options: ClassVar[type] = NoOptions
    """The frozen dataclass of its options; a `SpooledOptions` of a rule that needs all updates at once."""
    weighs: ClassVar[bool] = False
    """Whether updates count by their weights; else they count alike."""

    def __init__(self, options: Any) -> None:
        self.chosen = options

    def least(self) -> str | None:
        """What n must be, in words for a refusal; None: at least 1."""
        return None

    def works_with(self, n: int) -> bool:
        """Whether so many updates are enough."""
        return n > 0

    def bad(self, n: int) -> int:
        """f among n updates."""
        return int(self.chosen.tolerated * n + 1e-9)

    @abstractmethod
    def aggregate(self, spool: Spool, rows: IntArray) -> DoubleArray:
        """One update ``[P]`` from those in some rows of a spool, with `Spool.weights`; at least one row."""


RULES: Registry[type[AggregationRule]] = Registry("pfl_ext.aggregation", "aggregation.kind")
"""What ``aggregation.kind`` chooses by name."""
register = RULES.register
"""Decorator of a rule's class."""


def by_blocks(spool: Spool, rows: IntArray, weights: DoubleArray) -> DoubleArray:
    """``sum_i weights_i x_i``, in float64."""
    total = np.zeros(spool.length)
    for part, block in spool.coordinates(rows):
        total[part] = weights @ block
    return total


@register(MEAN)
class Mean(AggregationRule):
    """The weighted mean. It needs no spool, but where attackers look at all other updates first."""

    weighs: ClassVar[bool] = True

    def aggregate(self, spool: Spool, rows: IntArray) -> DoubleArray:
        """``sum_i p_i x_i``."""
        weights = spool.weights[rows]
        return by_blocks(spool, rows, weights / weights.sum())
