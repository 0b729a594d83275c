"""pFedMe: a user's own model is the proximal point of its loss at the model that it shares
(Dinh, Tran, Nguyen 2020, "Personalized Federated Learning with Moreau Envelopes", arXiv 2006.08848,
Algorithm 1).

The server's w minimises the mean of the users' Moreau envelopes,
``min_theta F_i(theta) + lambda / 2 |theta - w|^2``. A user of a round starts with w_i = theta_i = w. For each
minibatch D of its local training (R of them, those of ``local.num_epochs`` epochs)

    K times  theta_i <- theta_i - personal_learning_rate (grad F(theta_i; D) + lambda (theta_i - w_i)),
    then     w_i <- w_i - eta lambda (w_i - theta_i),     eta = local.learning_rate,

so that theta_i approximates the proximal point. theta_i is kept from one minibatch to the next. The user
sends ``w_i - w``. The server makes the step ``w <- (1 - beta) w + beta sum_i p_i w_i``, where beta is
``server.learning_rate`` with the server optimiser sgd. ``federated.weighting users`` makes all p_i equal, as
in the paper.

Training does not read what a user kept. The user keeps its last theta_i on disk only to be scored as its own
model. No loss is computed at w_i, so a round's training loss is that of the steps of theta_i. The ``local``
keys for momentum, weight decay and clipping act on the steps of theta_i; the paper has none of them. In the
paper all users train and those drawn are averaged; here only those drawn train.

The engine does not know these steps, so pfl's loop over users makes them, in compiled layers on a CPU.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pfl.context import CentralContext
from pfl.hyperparam.base import get_param_value
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics
from pydantic import PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from pfl_ext.algorithms.algorithm import RunContext, Setup, register
from pfl_ext.algorithms.clients import Clients, Weights
from pfl_ext.algorithms.personal_steps import Descent, Pull
from pfl_ext.algorithms.personalised import ONLY_OF_COHORTS, KeptOptions, Personalised
from pfl_ext.configs import STRICT
from pfl_ext.data.user_images import UserImages
from pfl_ext.engine.cpu.twin import CompiledTwin
from pfl_ext.rules import PRIVACY_NOT_ARGUED, Refusals


@dataclass(frozen=True, config=STRICT)
class PFedMeOptions(KeptOptions):
    """The steps of a user's own model; the defaults are the authors'."""

    proximal_weight: PositiveFloat = 15.0
    """Lambda: how strongly a user's own model is held near its shared model."""
    personal_steps: PositiveInt = 5
    """K: the number of steps of the user's own model on each minibatch."""
    personal_learning_rate: PositiveFloat = 0.09
    """Learning rate of these steps. They diverge unless rate * (lambda + the loss's curvature) is below 2."""


@register("pfedme")
class PFedMe(Personalised):
    """pFedMe. Each user keeps a whole model, to be scored."""

    options: ClassVar[type] = PFedMeOptions
    takes: ClassVar[tuple[str, ...]] = ("compression",)
    idle_in_runtime: ClassVar[str] = ONLY_OF_COHORTS

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._envelope = Envelope(self.context.options, self.twin)
        self.clients = Clients(self.context, self._envelope)

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse what `Personalised` refuses, and a separate learning rate for the head."""
        super().check(setup)
        if setup.rate_keys:
            raise ValueError(
                "pfedme trains all layers with the same learning rate: set "
                f"{' and '.join(setup.rate_keys)} to 1"
            )

    def train_user(self, x: Weights, kept: Tensor, user: int, number: int) -> tuple[Weights, Tensor, Tensor]:
        """``w_i - w`` and theta_i. ``kept`` is not read."""
        update, seen = self.clients.train_alone(x, user, number)
        return update, self.layout.flat(self._envelope.theta), seen


class Envelope:
    """Makes one user's steps in a round."""

    refusals: Refusals = PRIVACY_NOT_ARGUED
    theta: Weights
    """theta_i of the user who trained last."""

    def __init__(self, options: PFedMeOptions, twin: CompiledTwin) -> None:
        self._options, self._twin = options, twin

    def simulate_one_user(
        self, model: PyTorchModel, user_dataset: UserImages, central_context: CentralContext
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """The user's update ``w_i - w``; theta_i is kept in `theta`."""
        start, local, options = model.get_parameters(), central_context.model_train_params, self._options
        variables = model.variable_map
        w = {name: p.detach().clone() for name, p in variables.items()}
        pull = Pull(options.proximal_weight, w)
        theta = Descent(model, local, set(variables), options.personal_learning_rate, pull)
        rate = get_param_value(local.local_learning_rate) * options.proximal_weight
        for _ in range(get_param_value(local.local_num_epochs)):
            for batch in user_dataset.iter(local.local_batch_size):
                with self._twin.in_place():
                    for _ in range(options.personal_steps):
                        theta.step(batch)
                with torch.no_grad():
                    for name, parameter in variables.items():
                        w[name].sub_(w[name] - parameter, alpha=rate)
        self.theta = {name: p.detach().clone() for name, p in variables.items()}
        model.set_parameters(start)
        update = {name: w[name] - p.detach() for name, p in variables.items()}
        return MappedVectorStatistics(update), Metrics()
