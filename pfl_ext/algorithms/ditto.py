"""Ditto: besides the common model, each user trains a model of its own that is held near the common one
(Li et al. 2021, "Ditto: Fair and Robust Federated Learning Through Personalization", arXiv 2012.04221,
Algorithm 1).

The server's w is trained by FedAvg. Every user of a round also trains its own model v_i, with all trained
variables, by local SGD on

    F_i(v) + lambda / 2 |v - w_t|^2,    w_t the server's model as the user received it.

v_i starts as w_0, the model of the first round, and never leaves the user. With lambda = 0 each user trains
alone. The v_i do not change the server's model, which is FedAvg's.

The engine trains w, one user after another; pfl's loop over users trains the v_i, in compiled layers on a
CPU. A user's batches are the same for both where `federated.options.personal_epochs` is none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from pfl_ext.algorithms.algorithm import RunContext, register
from pfl_ext.algorithms.clients import Clients, Weights
from pfl_ext.algorithms.personal_steps import InPhases, Phase, Pull
from pfl_ext.algorithms.personalised import KeptOptions, Personalised
from pfl_ext.configs import STRICT


@dataclass(frozen=True, config=STRICT)
class DittoOptions(KeptOptions):
    """How users' own models are trained."""

    proximal_weight: NonNegativeFloat = 1.0
    """Lambda, the weight of the term that holds a user's own model near the server's; 0: it trains alone."""
    personal_epochs: PositiveInt | None = None
    """Epochs of training a user's own model in a round; none: local.num_epochs."""
    personal_learning_rate: PositiveFloat | None = None
    """Learning rate of the user's own model, in every round; none: that of local training."""


@register("ditto")
class Ditto(Personalised):
    """Ditto. Each user keeps a whole model."""

    options: ClassVar[type] = DittoOptions
    takes: ClassVar[tuple[str, ...]] = ("compression",)

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._personal = InPhases(self.twin)
        self._owners = Clients(replace(self.context, engine=None), self._personal)

    def train_user(self, x: Weights, kept: Tensor, user: int, number: int) -> tuple[Weights, Tensor, Tensor]:
        """FedAvg's update of w, then the steps of v_i."""
        update, seen = self.clients.train_alone(x, user, number)
        options, pull = self.context.options, Pull(self.context.options.proximal_weight, x)
        phase = Phase(self.shared, options.personal_epochs, options.personal_learning_rate, pull)
        self._personal.phases = [phase]
        moved, _ = self._owners.train_alone(self.layout.named(kept), user, number)
        return update, kept + self.layout.flat(moved), seen
