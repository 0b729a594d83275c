"""Tilted losses over users (TERM: Li, Beirami, Sanjabi and Smith 2021, "Tilted Empirical Risk Minimization",
arXiv 2007.01162, Sections 2 and 5).

With a weight p_i of each user (sum 1), the objective is

    R_t(x) = 1/t log sum_i p_i exp(t F_i(x)),

FedAvg's for t to 0, the greatest user's loss for t to infinity, and for t < 0 one that gives way to the
users who are already well served, so that users with wrong labels count less. Its gradient (Lemma 1) is the
mean of the users' gradients with the weights

    p_i exp(t F_i) / sum_j p_j exp(t F_j),

with which here the updates of a round are averaged: `pfl_ext.algorithms.by_loss` with the tilt a_i = t F_i
and no stretch. The sum in the denominator is over the round's cohort: for a part of the users, the weights
are an estimate.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from pfl_ext.algorithms.algorithm import register
from pfl_ext.algorithms.by_loss import ByLoss
from pfl_ext.configs import STRICT


@dataclass(frozen=True, config=STRICT)
class TiltedOptions:
    """How much more users count whose loss is high."""

    tilt: Annotated[float, Field(ge=-1000, le=1000)] = 1.0
    """t, by which losses are multiplied in the exponent; 0: FedAvg; below 0, high losses count less."""


@register("tilted")
class Tilted(ByLoss):
    """FedAvg with tilted weights."""

    options: ClassVar[type] = TiltedOptions

    def tilts(self, losses: Tensor) -> Tensor:
        """``t F_i``."""
        return losses * float(self.means.options.tilt)
