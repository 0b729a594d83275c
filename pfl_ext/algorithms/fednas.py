"""FedNAS: users search together for a network's architecture
(He, Annavaram, Avestimehr 2020, "Towards Non-I.I.D. and Invisible Data with FedNAS: Federated Deep Learning
via Neural Architecture Search", arXiv 2004.08546).

The network is DARTS' search network (`pfl_ext.models.darts`, arXiv 1806.09055). Its parameters are weights w
and architecture variables alpha. Every user starts at the server's (w, alpha) and divides its training images
into two halves. L_train is the loss of a batch of the first half, L_val that of a batch of the second. Each
pair of batches makes two steps (MiLeNAS, He et al. 2020, arXiv 2003.12238, first order: w is constant in the
first)

    alpha <- Adam step on  grad_alpha (lambda L_train(w, alpha) + L_val(w, alpha))
    w     <- SGD step on   grad_w L_train(w, alpha)

and the server averages both over the cohort by FedAvg's weights: ``(w, alpha) <- sum_k p_k (w_k, alpha_k)``.
Each round's line of ``metrics.jsonl`` has the genotype that alpha selects, and ``results.json`` has the last
one. A second run trains the derived network, by FedAvg or any other algorithm: ``model.arch: darts`` with
this file, or its text, as ``model.genotype``.

What is chosen here:

* The halves are a function of (seed, user), the same in every round. With an odd number of images the first
  half has one more. A user with one image trains only w. The test and val splits only score the model
  between rounds.
* In an epoch each batch of the first half is paired with one of the second. Where the second has one batch
  less, its first batch is used twice.
* The gradient of w is clipped (`local.max_grad_norm`); that of alpha is not.
* Both optimisers start without state for every user in every round: users keep nothing between rounds, and
  Adam's moments, two more copies of alpha, are not sent. Adam's bias correction counts a user's steps of the
  round.
* The learning rate of w falls over the rounds (`local.schedule`), not within a user's epochs.

The engine does not know these steps, so pfl's loop over users makes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import cycle
from typing import Annotated, Any, ClassVar

import torch
from pfl.context import CentralContext
from pfl.hyperparam.base import get_param_value
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics
from pydantic import Field, NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from pfl_ext.algorithms.algorithm import Algorithm, RunContext, Setup, register
from pfl_ext.algorithms.clients import Clients, Weights
from pfl_ext.algorithms.personal_steps import optimizer_of
from pfl_ext.configs import STRICT
from pfl_ext.data.user_images import Batch, UserImages
from pfl_ext.models.darts import SearchNetwork
from pfl_ext.randomness import stream
from pfl_ext.rules import PRIVACY_NOT_ARGUED, Refusals, not_noted

Decay = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, config=STRICT)
class FedNASOptions:
    """Options of the steps of alpha; ``local`` has those of w. The defaults are the paper's."""

    alpha_learning_rate: PositiveFloat = 3e-4
    """Factor of Adam's step."""
    alpha_beta1: Decay = 0.5
    """Share of the mean gradient that a step keeps."""
    alpha_beta2: Decay = 0.999
    """Share of the mean squared gradient that a step keeps."""
    alpha_weight_decay: NonNegativeFloat = 1e-3
    """Weight decay: the multiple of alpha that is added to its gradient."""
    train_loss_weight: NonNegativeFloat = 1.0
    """Lambda, the weight of L_train in alpha's gradient; 0: DARTS' first order."""


@register("fednas")
class FedNAS(Algorithm[Weights]):
    """The search. Its state is w and alpha, by name."""

    options: ClassVar[type] = FedNASOptions
    refusals: ClassVar[Refusals] = PRIVACY_NOT_ARGUED
    idle: ClassVar[str] = "server. local.virtual_size"
    idle_in_runtime: ClassVar[str] = "engine precision"

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.clients = Clients(context, LocalSearch(context))

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse a network or options with which not all weights are searched over all images."""
        backbone = setup.module.backbone
        if not isinstance(backbone, SearchNetwork):
            raise ValueError(
                "fednas needs a network with an architecture to search for: set model.arch to darts_search"
            )
        if not all(p.requires_grad for p in backbone.parameters()):
            raise ValueError(
                "fednas trains all weights together with the architecture: set model.trained to all"
            )
        if setup.users.total_images != setup.users.partition.sizes.sum():
            raise ValueError(
                "fednas divides all images of a user into two fixed halves: set local.max_images to none"
            )

    def init(self, seed: int) -> Weights:
        """The first w and alpha."""
        return self.clients.weights()

    def round(self, state: Weights, number: int) -> tuple[Weights, dict[str, Any]]:
        """Every user of the cohort searches, and the server averages."""
        update, line = self.clients.mean_update(state, self.clients.cohort(number), number)
        state = {name: tensor + update[name] for name, tensor in state.items()}
        return state, {**line, **self.findings(state)}

    def findings(self, state: Weights) -> dict[str, Any]:
        """The genotype."""
        return {"genotype": network_of(self.model(state)).genotype().text}

    def model(self, state: Weights) -> PyTorchModel:
        """The run's model with the search network at this state."""
        return self.clients.model(state)

    def tensors(self, state: Weights) -> dict[str, Tensor]:
        """w and alpha."""
        return dict(state)

    def load(self, state: Weights, tensors: Mapping[str, Tensor]) -> Weights:
        """w and alpha."""
        return {name: tensors[name].to(tensor.device) for name, tensor in state.items()}


class LocalSearch:
    """One user's part of a round."""

    refusals: Refusals = PRIVACY_NOT_ARGUED

    def __init__(self, context: RunContext) -> None:
        self._seed, self._options = context.seed, context.options

    def simulate_one_user(
        self, model: PyTorchModel, user_dataset: UserImages, central_context: CentralContext
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """The user's update of w and alpha."""
        start, local = model.get_parameters(), central_context.model_train_params
        alphas = network_of(model).alphas
        weights = [p for p in model.variable_map.values() if all(p is not alpha for alpha in alphas)]
        optimizer = optimizer_of(model, get_param_value(local.local_learning_rate), weights)
        options = self._options
        of_alpha = torch.optim.Adam(
            alphas,
            options.alpha_learning_rate,
            (options.alpha_beta1, options.alpha_beta2),
            weight_decay=options.alpha_weight_decay,
        )
        first, second = halves(user_dataset, self._seed)
        if len(first):
            for _ in range(get_param_value(local.local_num_epochs)):
                pairs = paired(first.iter(local.local_batch_size), second.iter(local.local_batch_size))
                for train, val in pairs:
                    if val is not None:
                        alpha_step(model, of_alpha, train, val, options.train_loss_weight)
                    weight_step(model, optimizer, train, local.local_max_grad_norm)
        update = model.get_model_difference(start, clone=True)
        model.set_parameters(start)
        return update, Metrics()


def network_of(model: PyTorchModel) -> SearchNetwork:
    """The search network in a run's model."""
    network = model.pytorch_model.backbone
    assert isinstance(network, SearchNetwork)
    return network


def halves(images: UserImages, seed: int) -> tuple[UserImages, UserImages]:
    """A user's images for w and its images for alpha, by a permutation that is drawn from (seed, user)."""
    order = stream(seed, "halves of an architecture search", str(images.user_id)).permutation(len(images))
    middle = (len(images) + 1) // 2
    return images.part(order[:middle], 0), images.part(order[middle:], 1)


def paired(train: Iterable[Batch], val: Iterable[Batch]) -> Iterator[tuple[Batch, Batch | None]]:
    """Pairs of a batch for w and one for alpha; the latter start over when used up (None if none exists)."""
    others = cycle(val)
    return ((batch, next(others, None)) for batch in train)


def alpha_step(
    model: PyTorchModel, optimizer: torch.optim.Optimizer, train: Batch, val: Batch, weight: float
) -> None:
    """Make a step of alpha on ``weight`` times the loss of ``train`` plus the loss of ``val``."""
    alphas = network_of(model).alphas
    with not_noted(model):
        gradients = torch.autograd.grad(_loss(model, val), alphas)
        if weight:
            of_train = torch.autograd.grad(_loss(model, train), alphas)
            gradients = tuple(g + weight * h for g, h in zip(gradients, of_train))
    for alpha, gradient in zip(alphas, gradients):
        alpha.grad = gradient
    optimizer.step()
    optimizer.zero_grad()


def weight_step(
    model: PyTorchModel, optimizer: torch.optim.Optimizer, train: Batch, max_norm: float | None
) -> None:
    """Make a step of w on a batch's loss, with the gradient clipped to ``max_norm``."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    for weight, gradient in zip(weights, torch.autograd.grad(_loss(model, train), weights)):
        weight.grad = gradient
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(weights, max_norm)
    optimizer.step()
    optimizer.zero_grad()


def _loss(model: PyTorchModel, batch: Batch) -> Tensor:
    loss: Tensor = model.pytorch_model.loss(*model._prepare_batch(batch))
    return loss
