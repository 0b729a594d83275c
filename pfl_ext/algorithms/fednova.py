"""FedNova: normalised averaging, so that users with more local steps do not pull the model further
(Wang et al. 2020, "Tackling the Objective Inconsistency Problem", arXiv 2007.07481).

A user's update of T steps is ``-lr sum_k a_k g_k``. It sends ``d = update / |a|_1``; the server moves by
``tau_eff sum_i p_i d_i`` with ``p_i`` the weights of the mean. ``tau_eff`` is ``sum_i p_i |a_i|_1``, and with
a proximal term ``sum_i p_i T_i`` (the authors' code). Server momentum is the server's optimiser: "sgd" with
momentum is theirs, ``v <- momentum v + g``.

As pfl statistics: the user's tensors divided by ``|a|_1``, and one tensor more, `STEPS`, which the weighting
and the sums over users and workers treat like the others, so that its mean is tau_eff.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.context import CentralContext
from pfl.hyperparam.base import get_param_value
from pfl.internal.bridge import FrameworkBridgeFactory as bridges
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics

from pfl_ext.algorithms.optimizers import PerVariableClippedSGD

STEPS = "pfl_ext.algorithms.fednova/steps"
"""Key of a user's share of tau_eff, ``[1]``."""


@dataclass(frozen=True)
class FedNovaParams(NNAlgorithmParams):
    """pfl's parameters and ``mu``, the weight of ``|w - w_central|^2 / 2`` in every user's loss; 0: none."""

    mu: float = 0.0


@lru_cache(maxsize=4096)
def coefficient_sum(num_steps: int, momentum: float = 0.0, rate_times_mu: float = 0.0) -> float:
    """``|a|_1``: what the gradients of so many local steps count for in the update, in learning rates.

    By the response to a single gradient, through momentum and proximal pull together. Plain SGD gives T;
    momentum rho the sum of ``c <- rho c + 1``; a proximal term alone ``a <- a (1 - lr mu) + 1``.
    """
    total, position, velocity = 0.0, 0.0, 1.0
    for _ in range(num_steps):
        position += velocity
        total += abs(position)
        velocity = momentum * velocity - rate_times_mu * position
    return total


@dataclass(frozen=True)
class Normaliser:
    """The form of the users' local training, on which their ``|a|_1`` depends."""

    momentum: float
    rate_times_mu: float

    def scale(self, num_steps: int) -> float:
        """``1 / |a|_1``; 0 for a user without a step, whose update is zero."""
        total = coefficient_sum(num_steps, self.momentum, self.rate_times_mu)
        return 1 / total if total else 0.0

    def effective_steps(self, num_steps: int) -> float:
        """The user's term of tau_eff."""
        if self.rate_times_mu:
            return float(num_steps)
        return coefficient_sum(num_steps, self.momentum)

    def statistics(self, update: MappedVectorStatistics, num_steps: int) -> MappedVectorStatistics:
        """What a user sends, from its update ``w - w_central``; in place."""
        scale = self.scale(num_steps)
        for name in update:
            update[name] *= scale
        device = next(iter(update.values())).device
        update[STEPS] = torch.tensor([self.effective_steps(num_steps)], device=device)
        return update


def normaliser(model: PyTorchModel, context: CentralContext) -> Normaliser:
    """That of a round.

    :raises ValueError: for a local optimiser whose steps are not those of SGD with momentum.
    """
    rate = float(get_param_value(context.model_train_params.local_learning_rate))
    optimizer = model.new_local_optimizer(learning_rate=rate)
    group = optimizer.param_groups[0]
    known = type(optimizer) in (torch.optim.SGD, PerVariableClippedSGD)
    if not known or group["nesterov"] or group["dampening"]:
        raise ValueError("FedNova counts the steps of plain SGD or SGD with momentum: train users with that")
    return Normaliser(float(group["momentum"]), rate * float(get_param_value(context.algorithm_params.mu)))


class StepCounter:
    """A user's data set that counts the batches it hands out."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self.num_steps = dataset, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def iter(self, batch_size: int | None) -> Iterator[Any]:
        """As the data set."""
        for batch in self._dataset.iter(batch_size):
            self.num_steps += 1
            yield batch


class FedNova(FederatedAveraging):
    """pfl's algorithm; its parameters are `FedNovaParams`. Not for private training, which bounds updates."""

    def train_one_user(
        self,
        initial_model_state: MappedVectorStatistics,
        model: PyTorchModel,
        user_dataset: Any,
        central_context: CentralContext,
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """SGD, with the proximal term if there is one, then division by ``|a|_1``."""
        counted, how = StepCounter(user_dataset), central_context.model_train_params
        mu = get_param_value(central_context.algorithm_params.mu)
        if mu:
            bridges.fedprox_bridge().do_proximal_sgd(model, counted, how, mu=mu)
        else:
            bridges.sgd_bridge().do_sgd(model, counted, how)
        update = model.get_model_difference(initial_model_state)
        return normaliser(model, central_context).statistics(update, counted.num_steps), Metrics()

    def process_aggregated_statistics(
        self,
        central_context: CentralContext,
        aggregate_metrics: Metrics,
        model: PyTorchModel,
        statistics: MappedVectorStatistics,
    ) -> tuple[PyTorchModel, Metrics]:
        """Multiply the mean by tau_eff and let the server's optimiser step on it."""
        statistics.average()
        effective = float(statistics.pop(STEPS)[0])
        for name in statistics:
            statistics[name] = statistics[name] * effective
        applied: tuple[PyTorchModel, Metrics] = model.apply_model_update(statistics)
        return applied
