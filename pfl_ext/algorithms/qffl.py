"""q-FFL: users with a higher loss have more weight, so that accuracy differs less between users
(Li, Sanjabi, Beirami and Smith 2020, "Fair Resource Allocation in Federated Learning", arXiv 1905.10497).

With a weight p_i of each user, the objective (equation 1) is

    f_q(x) = sum_i p_i F_i(x)^(q + 1) / (q + 1),

which is FedAvg's for q = 0, and tends to the largest loss of a user for q to infinity. q-FedAvg (Algorithm 2)
minimises it. With L the Lipschitz constant of the gradients, and x_i user i's model after its local steps,

    D_i = L (x - x_i),   h_i = q F_i^(q - 1) |D_i|^2 + L F_i^q,   x <- x - sum_i F_i^q D_i / sum_i h_i.

h_i bounds the curvature of F_i^(q + 1) / (q + 1) at x (Lemma 3), so one L serves for every q. Where
`lipschitz` is none, L is 1 / the users' learning rate, as in the authors' code, with a rate tuned for q = 0.

With the update u_i = x_i - x, and both sums divided by L, this is `pfl_ext.algorithms.by_loss` with the
exponent a_i = q log F_i and the stretch s_i = 1 + q L |u_i|^2 / F_i; p_i weighs both sums. With q = 0 it is
FedAvg. The authors draw users in proportion to p_i instead, and give those of a cohort equal weights:
`federated.sampling` proportional and `federated.weighting` users.

A loss below 1e-10 is replaced by 1e-10, which is the number that the authors add to each loss.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from pfl_ext.algorithms.algorithm import Setup, register
from pfl_ext.algorithms.by_loss import ByLoss
from pfl_ext.configs import STRICT

LEAST_LOSS = 1e-10


@dataclass(frozen=True, config=STRICT)
class QFFLOptions:
    """How much more weight a higher loss gives."""

    q: Annotated[float, Field(ge=0, le=100)] = 1.0
    """q: each update is weighted by its user's loss to this power; 0: FedAvg."""
    lipschitz: PositiveFloat | None = None
    """L, the Lipschitz constant of the loss gradients; none: 1 / the users' learning rate in the round."""


@register("qffl")
class QFFL(ByLoss):
    """q-FedAvg, which minimises q-FFL's objective."""

    options: ClassVar[type] = QFFLOptions

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse L = none where 1 over the learning rate is not the same L for all weights and steps, and an
        L without effect.
        """
        if not setup.options.q:
            if setup.options.lipschitz is not None:
                raise ValueError(
                    "federated.options.lipschitz has no effect if federated.options.q is 0: set q above 0, "
                    "or leave lipschitz out"
                )
            return
        if setup.rate_keys and setup.options.lipschitz is None:
            raise ValueError(
                "qffl divides by the local learning rate, so there must be only one: set "
                f"{' and '.join(setup.rate_keys)} to 1, or set federated.options.lipschitz"
            )
        if not setup.is_sgd and setup.options.lipschitz is None:
            raise ValueError(
                "qffl divides by the local learning rate, which is no bound on steps that are not sgd's: set "
                "local.optimizer to sgd, or set federated.options.lipschitz"
            )

    def tilts(self, losses: Tensor) -> Tensor:
        """``q log F_i``."""
        return losses.clamp(min=LEAST_LOSS).log() * float(self.context.options.q)

    def stretch(self, loss: float, squared_norm: float, rate: float) -> float:
        """``h_i / (L F_i^q)``."""
        options = self.context.options
        lipschitz = 1 / rate if options.lipschitz is None else options.lipschitz
        return float(1 + options.q * lipschitz * squared_norm / max(loss, LEAST_LOSS))
