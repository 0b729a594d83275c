"""FedNAS: users search together for the architecture of their network
(He, Annavaram, Avestimehr 2020, "Towards Non-I.I.D. and Invisible Data with FedNAS: Federated Deep Learning
via Neural Architecture Search", arXiv 2004.08546).

The network is that of DARTS' search (`pfl_ext.models.darts`, arXiv 1806.09055), whose parameters are weights
w and architecture variables alpha. Every user starts at the server's (w, alpha) and halves its training
images. With L_train the loss of a batch of the first half and L_val that of one of the second, each batch is
two steps (MiLeNAS, He et al. 2020, arXiv 2003.12238; first order: w is a constant for alpha)

    alpha <- Adam step on  grad_alpha (lambda L_train(w, alpha) + L_val(w, alpha))
    w     <- SGD step on   grad_w L_train(w, alpha)

and the server averages both over the cohort by FedAvg's weights: ``(w, alpha) <- sum_k p_k (w_k, alpha_k)``.
After each round the genotype that alpha says stands in the round's line of ``metrics.jsonl``, and the last
one in ``results.json``. The second stage trains the derived network: ``model.arch: darts`` with this file, or
the text in it, as ``model.genotype``, by FedAvg or any other algorithm.

What is chosen here:

* The halves are a function of (seed, user), the same in every round; of an odd number of images the first
  half has one more. A user with one image moves w alone. No image of the test or val split is read: these
  only score the model between rounds.
* In an epoch each batch of the first half meets one of the second; where that has a batch less, its first
  comes once more.
* w's gradient is clipped (`local.max_grad_norm`), and alpha's is not.
* Both optimisers start without state for every user in every round: users keep nothing between rounds, and
  Adam's moments, two more copies of alpha, are not sent. Adam's bias correction counts a user's steps of the
  round.
* The learning rate of w falls over the rounds (`local.schedule`), not within a user's epochs.

The engine does not know these steps: pfl's loop over users trains them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
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

from pfl_ext.algorithms.algorithm import Algorithm, Means, Setup, register
from pfl_ext.algorithms.clients import Clients, Weights
from pfl_ext.configs import STRICT
from pfl_ext.data.federated_dataset import Batch, UserImages
from pfl_ext.models.darts import SearchNetwork
from pfl_ext.randomness import stream
from pfl_ext.rules import PRIVACY_NOT_ARGUED, Refusals

Decay = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, config=STRICT)
class FedNASOptions:
    """Steps of alpha; those of w are the keys of ``local``. The defaults are the paper's."""

    alpha_learning_rate: PositiveFloat = 3e-4
    """Factor of Adam's step."""
    alpha_beta1: Decay = 0.5
    """Share of the mean gradient that a step keeps."""
    alpha_beta2: Decay = 0.999
    """Share of the mean squared gradient that a step keeps."""
    alpha_weight_decay: NonNegativeFloat = 1e-3
    """Multiple of alpha that is added to its gradient."""
    train_loss_weight: NonNegativeFloat = 1.0
    """Lambda: weight of the loss of the first half in alpha's gradient; 0: DARTS' first order."""


@register("fednas")
class FedNAS(Algorithm[Weights]):
    """The search; its state is w and alpha by name."""

    options: ClassVar[type] = FedNASOptions
    refusals: ClassVar[Refusals] = PRIVACY_NOT_ARGUED
    idle: ClassVar[str] = "server. local.virtual_size"
    idle_in_runtime: ClassVar[str] = "engine lanes fuse cpu_kernels precision"

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self.clients = Clients(replace(means, engine=None), LocalSearch(means))

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse what is no search over all weights and all images.

        Raises:
            ValueError: one line with the reason.
        """
        backbone = setup.module.backbone
        if not isinstance(backbone, SearchNetwork):
            raise ValueError("fednas searches in the network of a search: set model.arch to darts_search")
        if not all(p.requires_grad for p in backbone.parameters()):
            raise ValueError("fednas trains all weights with the architecture: set model.trained to all")
        if setup.users.total_images != setup.users.partition.sizes.sum():
            raise ValueError("fednas halves all images of a user for good: set local.max_images to none")

    @property
    def engine(self) -> None:
        """Users do not train by the engine."""
        return None

    def init(self, seed: int) -> Weights:
        """The first w and alpha."""
        return self.clients.weights()

    def round(self, state: Weights, number: int) -> tuple[Weights, dict[str, Any]]:
        """The cohort searches, and the server averages."""
        update, line = self.clients.mean_update(state, self.clients.cohort(number), number)
        state = {name: tensor + update[name] for name, tensor in state.items()}
        return state, {**line, **self.findings(state)}

    def findings(self, state: Weights) -> dict[str, Any]:
        """The genotype."""
        return {"genotype": network_of(self.model(state)).genotype().text}

    def model(self, state: Weights) -> PyTorchModel:
        """The network of the search."""
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

    def __init__(self, means: Means) -> None:
        self._seed, self._options = means.seed, means.options

    def simulate_one_user(
        self, model: PyTorchModel, user_dataset: UserImages, central_context: CentralContext
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """What the user's steps change in w and alpha."""
        start, local = model.get_parameters(), central_context.model_train_params
        optimizer = model.new_local_optimizer(learning_rate=get_param_value(local.local_learning_rate))
        alphas = network_of(model).alphas
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if all(p is not alpha for alpha in alphas)]
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
    """The network of the search in a run's model."""
    network = model.pytorch_model.backbone
    assert isinstance(network, SearchNetwork)
    return network


def halves(images: UserImages, seed: int) -> tuple[UserImages, UserImages]:
    """A user's images for w and those for alpha, by a permutation that (seed, user) draws."""
    order = stream(seed, "halves of an architecture search", str(images.user_id)).permutation(len(images))
    middle = (len(images) + 1) // 2
    return images.part(order[:middle], 0), images.part(order[middle:], 1)


def paired(train: Iterable[Batch], val: Iterable[Batch]) -> Iterator[tuple[Batch, Batch | None]]:
    """Each batch for w with one for alpha, which come in a circle; None where there is none at all."""
    others = cycle(val)
    return ((batch, next(others, None)) for batch in train)


def alpha_step(
    model: PyTorchModel, optimizer: torch.optim.Optimizer, train: Batch, val: Batch, weight: float
) -> None:
    """A step of alpha on ``weight`` times the loss of the first batch and the loss of the second."""
    alphas = network_of(model).alphas
    with _not_noted(model):
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
    """A step of w on the loss of a batch, with a gradient of at most this norm."""
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


@contextlib.contextmanager
def _not_noted(model: PyTorchModel) -> Iterator[None]:
    """Within, losses are of no step of w, and no part of a round's training loss."""
    module = model.pytorch_model
    noted, module.noted = module.noted, None
    try:
        yield
    finally:
        module.noted = noted
