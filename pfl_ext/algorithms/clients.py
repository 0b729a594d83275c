"""Local training for algorithms with a loop of their own: users who train whatever weights they are given.

Users train as FedAvg's do, by the engine where it can, and with several workers each takes its share of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from pfl.context import CentralContext
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics
from torch import Tensor

from pfl_ext.algorithms.algorithm import Means
from pfl_ext.algorithms.fedavg import FedAvg
from pfl_ext.backend import cohort_line, training_context
from pfl_ext.data.federated_dataset import IntArray, UserImages
from pfl_ext.privacy.central import is_private
from pfl_ext.rules import PRIVACY_NOT_ARGUED, Refusals, refuse

Weights = dict[str, Tensor]
"""The trained variables of a model by name."""


class Trainer(Protocol):
    """What pfl's backend asks of an algorithm whose users do not train as FedAvg's do."""

    refusals: Refusals

    def simulate_one_user(
        self, model: PyTorchModel, user_dataset: UserImages, central_context: CentralContext
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """A user's update by variable, of the model that the server sent, which is left as it was."""
        ...


class Clients:
    """The users of a run.

    Args:
        means: the run's.
        trainer: what trains one user, and says its ``refusals``; None: FedAvg's local training.

    Raises:
        ValueError: in a private run, whose mechanism bounds one sum of updates in each round and not several.
    """

    def __init__(self, means: Means, trainer: Trainer | None = None) -> None:
        refuse(PRIVACY_NOT_ARGUED, privacy=any(map(is_private, means.postprocessors)))
        self._means, self._algorithm = means, FedAvg() if trainer is None else trainer
        self._backend = means.backend()

    def weights(self) -> Weights:
        """A copy of those that the run's model has now."""
        return {name: p.detach().clone() for name, p in self._means.model.variable_map.items()}

    @torch.no_grad()
    def model(self, weights: Mapping[str, Tensor]) -> PyTorchModel:
        """The run's model, which has these weights from here on."""
        for name, parameter in self._means.model.variable_map.items():
            parameter.copy_(weights[name])
        return self._means.model

    def cohort(self, number: int) -> IntArray:
        """The users of a round; the same on every worker."""
        return self._means.users.cohort(self._means.cohort_size, number)

    def mean_update(
        self, weights: Mapping[str, Tensor], users: IntArray, number: int
    ) -> tuple[Weights, dict[str, Any]]:
        """Train some users from these weights, in a round.

        Returns:
            The weighted mean of their updates, on every worker, and what ``metrics.jsonl`` says of them:
            how many users and images, and their training loss. Without users the mean is 0.
        """
        model = self.model(weights)
        if not len(users):
            return {name: torch.zeros_like(w) for name, w in weights.items()}, {"users": 0, "images": 0}
        context = training_context(number, len(users), self._means.local_in(number))
        with self._means.users.only(users):
            sums, metrics = self._backend.gather_results(model, self._algorithm, central_context=context)
        if float(sums.weight):  # 0 where users weigh by their images and have none: then the sums are 0 too
            sums.average()
        # pfl would also count the nobody that stands for the users of a worker without any
        line = {**cohort_line(metrics), "users": len(users)}
        return {name: sums[name].to(w.dtype, copy=True) for name, w in weights.items()}, line
