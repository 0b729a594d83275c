"""Local SGD on some of a network's variables, maybe with a pull towards weights, another loss or gradient.

Users with personal variables, a personal model or steps of their own train in this way, in pfl's loop. The
engine cannot make these steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pfl.context import CentralContext
from pfl.hyperparam.base import NNTrainHyperParams, get_param_value
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics
from torch import Tensor

from pfl_ext.data.user_images import Batch, UserImages
from pfl_ext.engine.cpu.twin import CompiledTwin
from pfl_ext.evaluation import autocast_of
from pfl_ext.rules import PRIVACY_NOT_ARGUED, Refusals, not_noted


@dataclass(frozen=True)
class Pull:
    """The term ``weight / 2 |v - towards|^2`` of a user's loss."""

    weight: float
    towards: Mapping[str, Tensor]
    """The weights that v is pulled to, by variable."""


def optimizer_of(model: PyTorchModel, rate: float, variables: Iterable[Tensor]) -> torch.optim.Optimizer:
    """A new optimiser of the run's local training, with this learning rate, for only these variables."""
    optimizer: torch.optim.Optimizer = model.new_local_optimizer(learning_rate=rate)
    chosen = {id(variable) for variable in variables}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in chosen]
    return optimizer


Loss = Callable[..., Tensor]
"""Computes a scalar from what a classifier's ``loss`` takes: images, targets and crops of a batch."""
Gradient = Callable[[Callable[[], Tensor], Sequence[Tensor]], Sequence[Tensor | None]]
"""Computes what a step descends along, a tensor or None for each variable, from a function that computes the
batch's loss at the variables' current values, and from the variables, whose values it leaves as they were.
Only the function's first value counts in the round's training loss."""


def steepest(loss: Callable[[], Tensor], variables: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradient of the loss; None for a variable on which it does not depend."""
    return torch.autograd.grad(loss(), variables, allow_unused=True)


class Descent:
    """Steps of the run's local optimiser on some variables, with momentum from 0, weight decay and clipping.

    Gradients of other variables are not computed, so clipping by one norm takes the norm of these variables.
    The pull is added to the gradient before clipping.

    Args:
        model: the run's model, whose variables change.
        local: the users' local training.
        names: the variables that are trained.
        rate: the learning rate.
        pull: a term that is added to the loss, or None.
        loss: what is lowered on a batch; None: the model's own loss.
        gradient: what a step descends along.
    """

    def __init__(
        self,
        model: PyTorchModel,
        local: NNTrainHyperParams,
        names: Collection[str],
        rate: float,
        pull: Pull | None,
        loss: Loss | None = None,
        gradient: Gradient = steepest,
    ) -> None:
        self._gradient = gradient
        self._model, self._pull, self._max_norm = model, pull, local.local_max_grad_norm
        self._loss: Loss = model.pytorch_model.loss if loss is None else loss
        self._variables = {name: p for name, p in model.variable_map.items() if name in names}
        self._optimizer = optimizer_of(model, rate, self._variables.values())

    def step(self, batch: Batch, noted: bool = True) -> None:
        """Make one step on a batch; ``noted``: whether its loss counts in the round's training loss."""
        ready, variables = self._model._prepare_batch(batch), list(self._variables.values())
        counts = noted

        def loss() -> Tensor:
            nonlocal counts
            aside, counts = contextlib.nullcontext() if counts else not_noted(self._model), False
            with autocast_of(self._model), aside:
                return self._loss(*ready)

        for parameter, gradient in zip(variables, self._gradient(loss, variables)):
            parameter.grad = gradient
        if self._pull is not None and self._pull.weight:
            for name, parameter in self._variables.items():
                drift = self._pull.weight * (parameter.detach() - self._pull.towards[name])
                parameter.grad = drift if parameter.grad is None else parameter.grad + drift
        if self._max_norm is not None:
            torch.nn.utils.clip_grad_norm_(variables, self._max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()


@dataclass(frozen=True)
class Phase:
    """Some epochs of a user's local training."""

    names: Collection[str]
    """Names of the variables that change."""
    num_epochs: int | None = None
    """Number of epochs, with batches drawn for them; None: ``local.num_epochs``, with FedAvg's batches."""
    rate: float | None = None
    """Learning rate; None: the run's in this round."""
    pull: Pull | None = None
    loss: Loss | None = None
    """What is lowered on a batch; None: the model's own loss."""
    gradient: Gradient = steepest
    """What a step descends along."""
    noted: bool = True
    """Whether its losses count in the round's training loss."""


class InPhases:
    """Trains one user, one phase after another. A phase without variables is left out.

    Args:
        twin: the network's compiled layers, if there are any.
        phases: may be changed between users.
    """

    refusals: Refusals = PRIVACY_NOT_ARGUED

    def __init__(self, twin: CompiledTwin, phases: Sequence[Phase] = ()) -> None:
        self._twin, self.phases = twin, phases

    def simulate_one_user(
        self, model: PyTorchModel, user_dataset: UserImages, central_context: CentralContext
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """The user's update over all phases together, by variable."""
        start, local = model.get_parameters(), central_context.model_train_params
        for number, phase in enumerate(self.phases):
            if not phase.names or not len(user_dataset):
                continue
            images, epochs = user_dataset, get_param_value(local.local_num_epochs)
            if phase.num_epochs is not None:
                images = user_dataset.part(np.arange(len(user_dataset)), number, phase.num_epochs)
                epochs = phase.num_epochs
            rate = get_param_value(local.local_learning_rate) if phase.rate is None else phase.rate
            descent = Descent(model, local, phase.names, rate, phase.pull, phase.loss, phase.gradient)
            with self._twin.in_place():
                for _ in range(epochs):
                    for batch in images.iter(local.local_batch_size):
                        descent.step(batch, phase.noted)
        update = model.get_model_difference(start, clone=True)
        model.set_parameters(start)
        return update, Metrics()
