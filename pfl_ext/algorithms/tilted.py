"""Tilted losses over users (TERM: Li, Beirami, Sanjabi and Smith 2021, "Tilted Empirical Risk Minimization",
arXiv 2007.01162, Sections 2 and 5).

With a weight p_i of each user (sum 1), the objective is

    R_t(x) = 1/t log sum_i p_i exp(t F_i(x)).

For t to 0 it tends to FedAvg's objective, and for t to infinity to the largest loss of a user. With t < 0
users with a low loss have more weight, and users with wrong labels less. Its gradient (Lemma 1) is the mean
of the users' gradients with the weights

    p_i exp(t F_i) / sum_j p_j exp(t F_j).

Here the updates of a round are averaged with these weights: `pfl_ext.algorithms.by_loss` with the exponent
a_i = t F_i and no stretch. The sum in the denominator is over the round's cohort, so the weights are
estimates where the cohort is not all users.
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
    """How much more weight a higher loss gives."""

    tilt: Annotated[float, Field(ge=-1000, le=1000)] = 1.0
    """t, the factor of a loss in the exponent. 0: FedAvg; below 0, high losses have less weight."""


@register("tilted")
class Tilted(ByLoss):
    """FedAvg with tilted weights."""

    options: ClassVar[type] = TiltedOptions

    def tilts(self, losses: Tensor) -> Tensor:
        """``t F_i``."""
        return losses * float(self.context.options.tilt)
