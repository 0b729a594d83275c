"""FedProx: users are held near the server's model
(Li et al. 2020, "Federated Optimization in Heterogeneous Networks", arXiv 1812.06127).

The term ``mu |w - w_central|^2 / 2`` is added to every user's loss; the server's part is FedAvg's. In the
paper users may solve their problem inexactly. Here all make the same number of epochs, or stragglers do a
part of their work with ``devices.late: partial``. The paper's experiments have ``devices.stragglers`` of 0,
0.5 or 0.9, and its FedAvg drops them (``devices.late: drop``).

With privacy: the term acts on one user's local training, before its update is clipped.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pfl.context import CentralContext
from pfl.model.pytorch import PyTorchModel
from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass

from pfl_ext.algorithms.algorithm import register
from pfl_ext.algorithms.on_pfl import OnPfl
from pfl_ext.configs import STRICT
from pfl_ext.rules import Refusals, Rule

DEFAULT_MU = 0.01


@dataclass(frozen=True, config=STRICT)
class ProximalOptions:
    """The options of FedProx, and of FedNova, which can also have a proximal term."""

    mu: NonNegativeFloat | None = None
    """Weight mu of the proximal term, without unit; none: 0.01 in FedProx, 0 in FedNova."""


@register("fedprox")
class FedProx(OnPfl):
    """pfl's FedProx."""

    options = ProximalOptions
    refusals: ClassVar[Refusals] = {}
    takes: ClassVar[tuple[str, ...]] = ("compression", "aggregation", "attack", "devices")

    @classmethod
    def resolved(cls, options: ProximalOptions) -> dict[str, Any]:
        """The default of mu."""
        return {"mu": DEFAULT_MU if options.mu is None else options.mu}

    def rule(self, model: PyTorchModel, context: CentralContext) -> Rule:
        """Local SGD with the proximal term."""
        return Rule(self.resolved(self.setup.options)["mu"])
