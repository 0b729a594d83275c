"""FedProx: users are held near the server's model
(Li et al. 2020, "Federated Optimization in Heterogeneous Networks", arXiv 1812.06127).

Every user's loss has the term ``mu |w - w_central|^2 / 2`` besides; the server does what FedAvg's does. The
paper's inexact solutions are the same number of epochs for all, or what ``devices.late: partial`` lets each
do: its experiments have ``devices.stragglers`` of 0, 0.5 or 0.9, whom FedAvg drops (``devices.late: drop``).

With privacy: the term acts on one user's local training, before its update is clipped.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.fedprox import FedProxParams
from pfl.context import CentralContext
from pfl.model.pytorch import PyTorchModel
from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass

from pfl_ext.algorithms.algorithm import Setup, register
from pfl_ext.algorithms.on_pfl import OnPfl
from pfl_ext.configs import STRICT
from pfl_ext.rules import Refusals, Rule, mu_of

DEFAULT_MU = 0.01


@dataclass(frozen=True, config=STRICT)
class ProximalOptions:
    """The options of FedProx, and of FedNova, which can have a proximal term too."""

    mu: NonNegativeFloat | None = None
    """Weight of the proximal term of FedProx (none: 0.01) and FedNova (none: 0), without unit."""


@register("fedprox")
class FedProx(OnPfl):
    """pfl's algorithm; its parameters are ``FedProxParams``."""

    options = ProximalOptions
    refusals: ClassVar[Refusals] = {}
    takes: ClassVar[tuple[str, ...]] = ("compression", "aggregation", "attack", "devices")

    @classmethod
    def resolved(cls, options: ProximalOptions) -> dict[str, Any]:
        """mu."""
        return {"mu": DEFAULT_MU if options.mu is None else options.mu}

    @classmethod
    def build(cls, setup: Setup, **common: Any) -> tuple[OnPfl, NNAlgorithmParams]:
        """The algorithm and its parameters."""
        return cls(), FedProxParams(**common, **cls.resolved(setup.options))

    def rule(self, model: PyTorchModel, context: CentralContext) -> Rule:
        """Local SGD with the proximal term."""
        return Rule(mu_of(context))
