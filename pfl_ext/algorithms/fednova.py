"""FedNova: normalised averaging, so that users with more local steps do not pull the model further
(Wang et al. 2020, "Tackling the Objective Inconsistency Problem", arXiv 2007.07481).

A user's update of T steps is ``-lr sum_k a_k g_k``. It sends ``d = update / |a|_1``, and the server moves by
``tau_eff sum_i p_i d_i`` with ``p_i`` the weights of the mean. ``tau_eff`` is ``sum_i p_i |a_i|_1``, or
``sum_i p_i T_i`` with a proximal term (as in the authors' code). The authors' server momentum is the server
optimiser "sgd" with momentum, ``v <- momentum v + g``.

As pfl statistics a user sends its tensors divided by ``|a|_1`` and one more tensor, `STEPS`. The weighting
and the sums over users and workers treat it like the others, so its mean is tau_eff.

T counts the steps that a user made, also where it did only a part of its work (`pfl_ext.devices.turnout`).

Private training is refused: a mechanism would clip the update before its division by ``|a|_1``, and the
number of steps has no bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from pfl.context import CentralContext
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics

from pfl_ext.algorithms.algorithm import Setup, Traffic, register
from pfl_ext.algorithms.fedprox import ProximalOptions
from pfl_ext.algorithms.on_pfl import OnPfl, local_steps
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.rules import Refusals, Rule

STEPS = "pfl_ext.algorithms.fednova/steps"
"""Key of a user's share of tau_eff, ``[1]``."""


@lru_cache(maxsize=4096)
def coefficient_sum(num_steps: int, momentum: float = 0.0, rate_times_mu: float = 0.0) -> float:
    """``|a|_1``: the total weight of the gradients of ``num_steps`` local steps in the update, per rate.

    It is computed from the response to a single gradient, through momentum and proximal pull together. Plain
    SGD gives T; momentum rho the sum of ``c <- rho c + 1``; a proximal term alone ``a <- a (1 - lr mu) + 1``.
    """
    total, position, velocity = 0.0, 0.0, 1.0
    for _ in range(num_steps):
        position += velocity
        total += abs(position)
        velocity = momentum * velocity - rate_times_mu * position
    return total


@dataclass(frozen=True)
class Normaliser(Rule):
    """Divides each user's update by ``|a|_1``, which depends on the form of local training."""

    momentum: float
    rate_times_mu: float
    proximal_weight: float = 0.0

    def scale(self, num_steps: int) -> float:
        """``1 / |a|_1``; 0 for a user without a step, whose update is zero."""
        total = coefficient_sum(num_steps, self.momentum, self.rate_times_mu)
        return 1 / total if total else 0.0

    def counts(self, num_steps: int) -> Mapping[str, float]:
        """The user's term of tau_eff."""
        if self.rate_times_mu:
            return {STEPS: float(num_steps)}
        return {STEPS: coefficient_sum(num_steps, self.momentum)}


@register("fednova")
class FedNova(OnPfl):
    """FedNova on pfl's loop."""

    options = ProximalOptions
    refusals: ClassVar[Refusals] = {
        "privacy": (
            "FedNova divides updates by the number of steps, for which no privacy bound is known: choose "
            "algorithm fedavg or fedprox"
        )
    }
    takes: ClassVar[tuple[str, ...]] = ("compression", "devices")

    @classmethod
    def resolved(cls, options: ProximalOptions) -> dict[str, Any]:
        """The default of mu."""
        return {"mu": options.mu or 0.0}

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse steps of unknown length, and a proximal term whose pull differs between layers."""
        if not setup.is_sgd:
            raise ValueError(
                "FedNova divides by the sum of the weights that steps of sgd give to gradients: set "
                "local.optimizer to sgd"
            )
        if setup.options.mu and setup.rate_keys:
            raise ValueError(
                "FedNova with federated.mu needs a single learning rate: set "
                f"{' and '.join(setup.rate_keys)} to 1, or federated.mu to none"
            )

    @classmethod
    def traffic(cls, module: ImageClassifier) -> Traffic:
        """Besides its update, a user sends its term of tau_eff."""
        down, up = super().traffic(module)
        return Traffic(down, up + 4)

    def rule(self, model: PyTorchModel, context: CentralContext) -> Normaliser:
        """Local SGD, with the proximal term if there is one, then division by ``|a|_1``.

        Raises:
            ValueError: for a local optimiser whose steps are not those of SGD with momentum.
        """
        steps, mu = local_steps(model, context, "FedNova"), self.resolved(self.setup.options)["mu"]
        return Normaliser(steps.momentum, steps.rate * mu, mu)

    def average(self, statistics: MappedVectorStatistics, context: CentralContext) -> None:
        """Multiply the mean by tau_eff."""
        statistics.average()
        effective = float(statistics.pop(STEPS)[0])
        for name in statistics:
            statistics[name] = statistics[name] * effective
