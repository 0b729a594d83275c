"""SCAFFOLD: control variates that take out the drift of users' local steps
(Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", Algorithm 1,
arXiv 1910.06378).

The server has a control variate c and every user i one of its own c_i, all 0 at first. A user starts at the
server's x and makes K steps ``y <- y - lr (g_i(y) - c_i + c)``. Its new control variate is

* option I: ``c_i+ = g_i(x)``, the gradient at x of all its images that take part, which costs one more pass;
* option II: ``c_i+ = c_i - c + (x - y) / (K lr)``, the mean of the gradients of its steps.

It sends ``y - x`` and ``c_i+ - c_i``. The server's optimiser steps on the weighted mean of the first over the
cohort S, and ``c <- c + sum_S w_i (c_i+ - c_i) / sum_all w_i``: the paper's ``|S| / N`` times the mean where
every user has the same weight. So c is the weighted mean of all c_i at any time, and the optimum of
``sum_i w_i f_i / sum_i w_i`` is where training rests, with weights by images as with weights by users.

Where the correction ``c - c_i`` goes is a choice once local training is more than plain SGD:

* "gradient", the paper's equation: it is added to the loss's gradient, so that clipping, weight decay and
  momentum come after it. Momentum lets a gradient count for more than one step; option II then divides by
  ``|a|_1``, the sum of what the K gradients count for (`pfl_ext.algorithms.fednova`), instead of K.
* "step", as in NIID-Bench (Li et al. 2022, arXiv 2102.02079): ``y <- y - lr (c - c_i)`` after every step of
  the optimiser. Option II divides by K: under momentum rho c_i is about ``1 / (1 - rho)`` gradients, as a
  correction that no momentum magnifies has to be.

pfl 0.6.0 has a SCAFFOLD too, which is wrong: it keeps minus the gradient as c_i and adds ``c - c_i`` to the
gradient all the same, so that drift is doubled. Its option I also gives all users one buffer as their c_i.

Not for private training: c_i outlives the round, and so would what it tells of the user.

Letters: P parameters that are trained, U users.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.context import CentralContext
from pfl.hyperparam.base import get_param_value
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics
from torch import Tensor, nn

from pfl_ext.algorithms.fednova import StepCounter, coefficient_sum
from pfl_ext.algorithms.optimizers import PerVariableClippedSGD
from pfl_ext.algorithms.user_vectors import UserVectors

CHANGE = "pfl_ext.algorithms.scaffold/"
"""Before the name of a variable: the key of ``c_i+ - c_i`` in a user's statistics."""
Option = Literal["I", "II"]
Correction = Literal["gradient", "step"]


@dataclass(frozen=True)
class ScaffoldParams(NNAlgorithmParams):
    """pfl's parameters and SCAFFOLD's own.

    ``total_weight``: the weights of all users together, of those who do not take part too; U where every user
    weighs 1. ``option`` and ``correction``: see the module.
    """

    total_weight: float
    option: Option = "II"
    correction: Correction = "gradient"


class Controls:
    """c and every c_i, as vectors ``[P]`` in the order of the model's trained parameters.

    Args:
        module: the model; its parameters are never changed here.
        user_ids: of the U users, as their data sets tell them.
        path: of the file with the users' vectors (`UserVectors`); None: a temporary one.
    """

    def __init__(self, module: nn.Module, user_ids: Sequence[str], path: Path | None = None) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._shapes = {name: p.shape for name, p in named}
        self._sizes = [p.numel() for _, p in named]
        self.server = torch.zeros(sum(self._sizes), device=named[0][1].device)
        self._numbers = {user: number for number, user in enumerate(user_ids)}
        self._users = UserVectors(len(user_ids), len(self.server), path)

    def number(self, user_id: str | None) -> int:
        """Of the user with this id, 0 to U - 1."""
        assert user_id is not None, "SCAFFOLD needs data sets with a user_id"
        return self._numbers[user_id]

    def own(self, user: int) -> Tensor:
        """c_i ``[P]`` of a user, at the start of the round."""
        found = self._users.read(user)
        if found is None:
            return torch.zeros_like(self.server)
        return torch.tensor(found, device=self.server.device)

    def correction(self, own: Tensor) -> dict[str, Tensor]:
        """``c - c_i`` by variable."""
        return self.named(self.server - own)

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a vector ``[P]`` by variable."""
        parts = torch.split(vector, self._sizes)
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts)}

    def flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The vector ``[P]`` of tensors by variable."""
        return torch.cat([tensors[name].reshape(-1) for name in self._shapes])

    def renew(self, user: int, own: Tensor, change: Tensor) -> None:
        """Keep ``c_i + change`` as the user's from the end of the round on."""
        self._users.write(user, (own + change).cpu().numpy())

    def end_round(self, change: Tensor) -> None:
        """Move c by ``change`` ``[P]``, and let the users' new c_i be theirs."""
        self.server += change
        self._users.end_round()

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds; the users' vectors stay in their file."""
        return {"c": self.server, **self._users.tensors()}

    def saved(self) -> None:
        """The checkpoint with the last `tensors` has taken its name."""
        self._users.saved()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint's `tensors`; ValueError as `UserVectors.load`."""
        self._users.load(tensors)
        self.server.copy_(tensors["c"])


@dataclass(frozen=True)
class Renewal:
    """How c_i follows from a round's local training."""

    option: Option
    correction: Correction
    learning_rate: float
    momentum: float

    def change(
        self, server: Tensor, own: Tensor, update: Tensor, num_steps: int, gradient: Tensor | None
    ) -> Tensor:
        """``c_i+ - c_i`` from c, c_i, ``y - x`` and option I's ``g_i(x)``, all ``[P]``; 0 without a step."""
        if num_steps == 0:
            return torch.zeros_like(own)
        if self.option == "I":
            assert gradient is not None
            return gradient - own
        counted = float(num_steps)
        if self.correction == "gradient":
            counted = coefficient_sum(num_steps, self.momentum)
        return update / (-counted * self.learning_rate) - server


def renewal(model: PyTorchModel, context: CentralContext) -> Renewal:
    """That of a round.

    Raises:
        ValueError: for local training whose steps are not those of SGD with momentum.
    """
    how, params = context.model_train_params, context.algorithm_params
    rate = float(get_param_value(how.local_learning_rate))
    optimizer = model.new_local_optimizer(learning_rate=rate)
    group = optimizer.param_groups[0]
    known = type(optimizer) in (torch.optim.SGD, PerVariableClippedSGD)
    if not known or group["nesterov"] or group["dampening"]:
        raise ValueError("SCAFFOLD knows the steps of plain SGD or SGD with momentum: train users with that")
    if model.grad_scaler is not None or how.grad_accumulation_steps != 1 or how.get("local_num_steps"):
        raise ValueError("SCAFFOLD has no gradient scaling, accumulation or local_num_steps: leave them out")
    return Renewal(params.option, params.correction, rate, float(group["momentum"]))


def gradient_at(model: PyTorchModel, batches: Iterable[Any], num_images: int) -> dict[str, Tensor]:
    """The gradient of the mean loss over a user's images where the model stands, by variable."""
    parameters = model.variable_map
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for batch in batches:
        ready = model._prepare_batch(batch)
        with model.amp_context or contextlib.nullcontext():
            noted, model.pytorch_model.noted = getattr(model.pytorch_model, "noted", None), None
            loss = model.pytorch_model.loss(*ready)  # of no step
            model.pytorch_model.noted = noted
        found = torch.autograd.grad(loss, list(parameters.values()))
        for name, gradient in zip(total, found):
            total[name].add_(gradient, alpha=len(ready[0]) / num_images)
    return total


def _corrected_step(
    module: Any,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    train_kwargs: Mapping[str, Any],
    arguments: Any,
    *,
    correction: Mapping[str, Tensor],
    form: Renewal,
) -> None:
    """One local step, as pfl's loop asks for it."""
    with arguments.amp_context:
        loss = module.loss(*batch, **train_kwargs)
    loss.backward()
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if form.correction == "gradient":
        for name, parameter in trained.items():
            parameter.grad += correction[name]
    if arguments.max_grad_norm is not None:
        nn.utils.clip_grad_norm_(module.parameters(), arguments.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    if form.correction == "step":
        for name, parameter in trained.items():
            parameter.data.sub_(correction[name], alpha=form.learning_rate)


class Scaffold(FederatedAveraging):
    """The algorithm for pfl's loop and for the engine; its parameters are `ScaffoldParams`.

    Every user at most once in a cohort, and the users' statistics weighted but not changed otherwise:
    `pfl_ext.backend` refuses the rest.
    """

    def __init__(self, controls: Controls) -> None:
        super().__init__()
        self.controls = controls

    def train_one_user(
        self,
        initial_model_state: MappedVectorStatistics,
        model: PyTorchModel,
        user_dataset: Any,
        central_context: CentralContext,
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """Corrected local steps; ``y - x`` and ``c_i+ - c_i`` as statistics."""
        controls, form = self.controls, renewal(model, central_context)
        user = controls.number(user_dataset.user_id)
        own, gradient = controls.own(user), None
        if form.option == "I":
            gradient = controls.flat(gradient_at(model, user_dataset.once(), len(user_dataset)))
        counted = StepCounter(user_dataset)
        how = central_context.model_train_params
        correction = controls.correction(own)
        model.do_multiple_epochs_of(counted, how, _corrected_step, correction=correction, form=form)
        update = model.get_model_difference(initial_model_state)
        change = form.change(controls.server, own, controls.flat(update), counted.num_steps, gradient)
        controls.renew(user, own, change)
        for name, part in controls.named(change).items():
            update[CHANGE + name] = part
        return update, Metrics()

    def process_aggregated_statistics(
        self,
        central_context: CentralContext,
        aggregate_metrics: Metrics,
        model: PyTorchModel,
        statistics: MappedVectorStatistics,
    ) -> tuple[PyTorchModel, Metrics]:
        """Move c by the cohort's share of all weight, and let the server's optimiser step on the mean."""
        share = float(statistics.weight) / central_context.algorithm_params.total_weight
        statistics.average()
        keys = [key for key in statistics if key.startswith(CHANGE)]
        changes = {key.removeprefix(CHANGE): statistics.pop(key)[0] for key in keys}
        self.controls.end_round(share * self.controls.flat(changes).float())
        applied: tuple[PyTorchModel, Metrics] = model.apply_model_update(statistics)
        return applied
