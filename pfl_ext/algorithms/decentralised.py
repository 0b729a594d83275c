"""Training without a server: each user has a model of its own, and mixes it with those of its neighbours.

In a round every user trains its model on its own images, then sends it to some others:

    x_i <- sum_j M_ij (x_j + u_j),   with u_j what local training from user j's model changes.

M is the round's mixing matrix. Its columns have the sum 1, so mixing does not change the mean over users,
``x' = 1/n sum_i x_i``. x' is scored, and saved at the end. All users have the same weight, however many
images they have; a user without images mixes models and does not train.

``federated.cohort_size`` is the number of users in the network. Where the run has more users, those of the
network are drawn once from the seed, and the others take no part. All users of the network take part in each
round. No network is simulated: all n models are in the memory of this process (of every worker).

Letters: n users; P parameters that are trained.
"""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from pfl.model.pytorch import PyTorchModel
from torch import Tensor

from dataset.arrays import FloatArray
from pfl_ext.algorithms.algorithm import Algorithm, RunContext, Setup, Traffic, trained_bytes
from pfl_ext.algorithms.clients import Clients, Weights
from pfl_ext.checkpoint import CHECKPOINTS
from pfl_ext.models.memory import refuse_beyond_memory
from pfl_ext.randomness import stream
from pfl_ext.workers.distributed import is_main

COPIES = 5
"""Copies of all users' models at a round's peak: the state, users' starts, updates, x + u, and the mix."""


@dataclass(frozen=True)
class Models:
    """The state at the start of a round."""

    x: Weights
    """The users' models, by variable: ``[n, ...]``."""
    omega: Tensor
    """``[n]`` float64: the divisor of each user's x; 1 where the rows of M have the sum 1, too."""
    sent: Tensor
    """``[2]`` int64: the number of models sent so far, and of rounds so far."""

    def models(self) -> Weights:
        """``z_i = x_i / omega_i``, the models from which users train, by variable ``[n, ...]``."""
        if bool((self.omega == 1).all()):
            return self.x
        return {name: w / self._omega_for(w) for name, w in self.x.items()}

    def _omega_for(self, stacked: Tensor) -> Tensor:
        return self.omega.to(stacked.device, stacked.dtype).view(-1, *[1] * (stacked.dim() - 1))

    def mean(self) -> Weights:
        """The mean model ``x'``."""
        return {name: w.double().mean(0).to(w.dtype) for name, w in self.x.items()}

    def consensus_distance(self) -> float:
        """``sqrt(1/n sum_i |z_i - x'|^2)`` over all P parameters (Kong et al. 2021, arXiv 2102.04828)."""
        mean, total = self.mean(), 0.0
        for name, stacked in self.models().items():
            total += float((stacked - mean[name]).double().square().sum())
        return math.sqrt(total / len(self.omega))


def mixed(matrix: FloatArray, x: Weights, dtype: torch.dtype) -> Weights:
    """``sum_j M_ij x_j`` for each i, summed in ``dtype``.

    Args:
        matrix: M, ``[n, n]``.
        x: ``[n, ...]`` by variable.
    """
    result = {}
    for name, stacked in x.items():
        weights = torch.from_numpy(matrix).to(stacked.device, dtype)
        result[name] = (weights @ stacked.flatten(1).to(dtype)).to(stacked.dtype).view_as(stacked)
    return result


class Decentralised(Algorithm[Models]):
    """Base of algorithms without a server. A subclass defines the mixing matrix of a round (`matrix`)."""

    idle: ClassVar[str] = "server. federated.weighting federated.sampling federated.replacement"
    idle_in_runtime: ClassVar[str] = "reduce"
    keeps_omega: ClassVar[bool] = False
    """Whether the rows of M may have another sum than 1; then `Models.omega` is mixed and sent as well."""

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.clients, self.n = Clients(context), context.cohort_size
        drawn = stream(context.seed, "users of the network").choice(
            context.users.num_users, self.n, replace=False
        )
        self.users = np.sort(drawn)
        self.matrix(context.options, self.n, context.seed, 0)  # raises the error of an impossible graph now
        if self.n < context.users.num_users and is_main():
            name, others = type(self).__name__, context.users.num_users - self.n
            print(
                f"{name}: the network has {self.n} users; {others} other users do not take part",
                file=sys.stderr,
            )

    @classmethod
    @abstractmethod
    def matrix(cls, options: Any, n: int, seed: int, number: int) -> FloatArray:
        """M of a round, ``[n, n]``, whose columns have the sum 1.

        Args:
            options: the algorithm's options.
            n: the number of users.
            seed: the run's seed.
            number: the round.

        Raises:
            ValueError: when there is no such graph of n users.
        """

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse models that do not fit in memory, and a graph that does not exist."""
        n, name = setup.cohort_size, cls.__name__
        if n > setup.users.num_users:  # also where cohorts may be drawn with replacement
            raise ValueError(
                f"federated.cohort_size is {n}, but {name} needs different users and there are only "
                f"{setup.users.num_users}: set it to at most {setup.users.num_users}"
            )
        refuse_beyond_memory(
            COPIES * n * trained_bytes(setup.module) + 3 * 8 * n * n,
            f"{name} keeps a model for each of {n:,} users",
            "choose a smaller network, or lower federated.cohort_size",
        )
        cls.matrix(setup.options, n, setup.seed, 0)

    @classmethod
    def state_bytes(cls, setup: Setup) -> int:
        """In each checkpoint the users' models besides the first."""
        return CHECKPOINTS * (setup.cohort_size - 1) * trained_bytes(setup.module)

    def init(self, seed: int) -> Models:
        """The state before the first round, in which all users have the run's model."""
        x = {name: torch.stack([w] * self.n) for name, w in self.clients.weights().items()}
        return Models(x, torch.ones(self.n, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))

    def round(self, state: Models, number: int) -> tuple[Models, dict[str, Any]]:
        """Every user trains its model; then the models are mixed."""
        matrix = self.matrix(self.context.options, self.n, self.context.seed, number)
        starts = state.models()
        models = [{name: w[user] for name, w in starts.items()} for user in range(self.n)]
        updates, line = self.clients.each_update(models, self.users, number)
        moved = {
            name: torch.stack([w[user] + updates[user][name] for user in range(self.n)])
            for name, w in state.x.items()
        }
        omega = torch.from_numpy(matrix) @ state.omega if self.keeps_omega else state.omega
        links = int(np.count_nonzero(matrix) - np.count_nonzero(np.diag(matrix)))
        after = Models(
            mixed(matrix, moved, self.context.accumulate), omega, state.sent + torch.tensor([links, 1])
        )
        distance = after.consensus_distance()
        return after, {**line, "consensus_distance": distance} if math.isfinite(distance) else line

    def model(self, state: Models) -> PyTorchModel:
        """The mean model x', which no single user has."""
        return self.clients.model(state.mean())

    def tensors(self, state: Models) -> dict[str, Tensor]:
        """The tensors of the whole state."""
        return {"omega": state.omega, "sent": state.sent} | {f"x/{name}": w for name, w in state.x.items()}

    def load(self, state: Models, tensors: Mapping[str, Tensor]) -> Models:
        """The state in a checkpoint's tensors."""
        x = {name: tensors[f"x/{name}"].to(w.device) for name, w in state.x.items()}
        return Models(x, tensors["omega"].cpu(), tensors["sent"].cpu())

    def bytes(self, state: Models) -> Traffic:
        """What a user receives from neighbours and sends to them in a round, a mean over users and rounds.

        A model, and its omega where that is mixed, is sent along each edge of the round's graph.
        """
        models, rounds = state.sent.tolist()
        size = trained_bytes(self.context.module) + state.omega.element_size() * self.keeps_omega
        each = round(models * size / (rounds * self.n)) if rounds else 0
        return Traffic(each, each)
