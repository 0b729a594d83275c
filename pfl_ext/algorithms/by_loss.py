"""Averages in which a user with a larger loss has a larger weight: the common part of q-FFL and TERM.

In a round every user i of the cohort S first computes its loss F_i at the model x that it received. F_i is
the mean training loss over its images of this round, each cropped as in training. Then the user trains as in
FedAvg, which gives the update u_i. The server's optimiser steps on

    d = sum_{i in S} p_i c_i u_i / sum_{i in S} p_i c_i s_i.

p_i is FedAvg's weight: 1, or the number of the user's images. The algorithm computes the tilt
``c_i = exp(a_i - max a)`` and the stretch ``s_i >= 1`` from the losses. Where all c_i and s_i are 1, d is
FedAvg's mean update. A user without images has no loss, and its weight is 0.

A round costs one more forward pass over the cohort's images than in FedAvg. Users are trained one after
another, so only one lane of the engine works, and users with a single step do not share a pass.

Private training is refused: a user's weight depends on its images and on the other users' losses.

Letters: n users of a cohort.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from pfl.model.pytorch import PyTorchModel
from torch import Tensor

from dataset.arrays import IntArray
from pfl_ext.algorithms.algorithm import RunContext, Traffic, trained_bytes
from pfl_ext.algorithms.clients import Clients, Weights, line_of
from pfl_ext.algorithms.server_model import ServerModelAlgorithm
from pfl_ext.rules import PRIVACY_NOT_ARGUED, Refusals
from pfl_ext.workers.distributed import current

LOSS_BYTES = 4


class ByLoss(ServerModelAlgorithm):
    """Base of algorithms that weight users by their losses; a subclass defines `tilts`, maybe `stretch`."""

    refusals: ClassVar[Refusals] = {
        **PRIVACY_NOT_ARGUED,
        "replacement": (
            "users are trained one by one, and a user that is drawn twice would use the same batches "
            "twice: set federated.replacement to false"
        ),
    }
    idle: ClassVar[str] = "federated.reweight federated.max_importance"

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.clients = Clients(context)

    @abstractmethod
    def tilts(self, losses: Tensor) -> Tensor:
        """The exponents a_i ``[n]`` for losses F_i ``[n]``. Both are float64; losses are finite and >= 0."""

    def stretch(self, loss: float, squared_norm: float, rate: float) -> float:
        """s_i, given a user's loss, its update's squared norm, and ``rate``, its local learning rate."""
        return 1.0

    def round(self, state: PyTorchModel, number: int) -> tuple[PyTorchModel, dict[str, Any]]:
        """Compute the cohort's losses, train it, and make a step of the server's optimiser.

        Raises:
            Diverged: when a user's loss is not finite.
        """
        x, users = self.clients.weights(), self.clients.cohort(number)
        losses = self._losses(users, number)
        counted = losses[:, 1] > 0
        weights = torch.zeros(len(users), dtype=torch.float64)
        if counted.any():
            tilts = self.tilts(losses[counted, 0])
            weights[counted] = (tilts - tilts.max()).exp()
        weights *= losses[:, 1] if self.context.by_images else 1.0
        total, weight, seen = self._trained(x, users, losses[:, 0], weights, number)
        update = {name: torch.zeros_like(w) for name, w in x.items()}
        for name, tensor in total.items() if weight else ():
            update[name] = (tensor / weight).to(update[name].dtype)
        rate = self.clients.server_step(x, update, number)
        line = {**line_of(seen), "learning_rate": rate}
        if counted.any():
            line["largest_user_loss"] = round(float(losses[counted, 0].max()), 6)
        return state, line

    def _trained(
        self, x: Weights, users: IntArray, losses: Tensor, weights: Tensor, number: int
    ) -> tuple[dict[str, Tensor], float, Tensor]:
        """The cohort's weighted sum of updates, its sum of weights, and rows ``[n, 3]`` for `line_of`."""
        rate = float(self.context.local_in(number).local_learning_rate)
        total = {name: torch.zeros_like(w, dtype=self.context.accumulate) for name, w in x.items()}
        seen, stretches = self.clients.unseen(users), torch.zeros(len(users), dtype=torch.float64)
        with self.clients.dealt(users, number) as mine:
            for place in mine:
                update, seen[place] = self.clients.train_alone(x, int(users[place]), number)
                for name, tensor in total.items():
                    tensor.add_(update[name].to(tensor.dtype), alpha=float(weights[place]))
                stretches[place] = self.stretch(float(losses[place]), squared_norm(update), rate)
        self.clients.gather(stretches)
        if (workers := current()) is not None:
            workers.sum_model([seen], list(total.values()))
        return total, float((weights * stretches).sum()), seen

    def _losses(self, users: IntArray, number: int) -> Tensor:
        """``[n, 2]`` float64: each user's loss at the run's model (0 without images) and number of images."""
        found = torch.zeros(len(users), 2, dtype=torch.float64)
        with self.clients.dealt(users, number) as mine:
            for place in mine:
                loss_and_images = self.clients.loss_of(int(users[place]), number)
                found[place] = torch.tensor(loss_and_images, dtype=torch.float64)
        self.clients.gather_losses(found, number)
        return found

    def bytes(self, state: PyTorchModel) -> Traffic:
        """A user receives the trained variables, and sends an update and its loss."""
        size = trained_bytes(self.context.module)
        return Traffic(size, size + LOSS_BYTES)


def squared_norm(update: Weights) -> float:
    """The squared norm of all variables together."""
    return math.fsum(float(torch.linalg.vector_norm(tensor)) ** 2 for tensor in update.values())
