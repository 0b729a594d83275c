"""FedMA: networks are averaged layer by layer, after their neurons have been matched
(Wang et al. 2020, "Federated Learning with Matched Averaging", Algorithm 1, arXiv 2002.06440).

A pass has as many rounds as the network has layers. In its round n

1. every user trains its own network from layer n on; the layers below are global and frozen;
2. it sends its layer n. The server matches the users' neurons (`pfl_ext.algorithms.matching`). The means of
   matched neurons are the global layer, which all users receive and freeze;
3. each user puts the inputs of its layer n + 1 in the order of the global neurons.

The outputs of the last layer are classes and need no matching. It is averaged class by class: a user's weight
for class k is its share of all images of that class. A class without images is averaged as the other layers
are. After the last round of a pass all users have the global network. Further passes are the paper's FedMA
with communication, so ``federated.num_rounds`` is any multiple of the number of layers.

The matching is the paper's BBP-MAP, that of PFNM (Yurochkin et al. 2019, "Bayesian Nonparametric Federated
Learning of Neural Networks", arXiv 1905.12022). It may find neurons that only some users have. They become
further global neurons, with the mean of the users that have them. In the paper the network grows. Here it
has its final shape from the start, of which ``room`` is empty at first: these neurons have weights of 0,
in and out, which training leaves at 0. So ``room 0.1`` with vgg9 begins with nine tenths of each hidden layer
and grows to at most the whole. How much it grows is up to gamma and sigma: with 1 for all, as in the paper's
code, the neurons of users who began alike are all matched, and nothing grows. With ``room 0`` all global
neurons have a neuron of every user, and the process's sigma, sigma0 and gamma have no effect.

Each user has a network of its own, so the users of the first cohort stay from the first round to the last.
Set ``federated.cohort_size`` to the number of users for all of them. Between two rounds the scored model has
the mean of the layers that are not matched yet. The paper weighs all users equally:
``federated.weighting users``.

Letters: P trained parameters, J users, N layers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar

import numpy as np
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from pfl_ext.algorithms.algorithm import Algorithm, RunContext, Setup, Traffic, register, trained_bytes
from pfl_ext.algorithms.clients import Clients, Weights
from pfl_ext.algorithms.matching import (
    Belief,
    alive,
    by_neuron,
    first_neurons,
    layers_of,
    matched,
    mean,
    neurons,
    reordered,
)
from pfl_ext.checkpoint import CHECKPOINTS
from pfl_ext.configs import STRICT, rounded_down
from pfl_ext.models.memory import refuse_beyond_memory
from pfl_ext.rules import PRIVACY_NOT_ARGUED, Refusals

BACKBONE = "backbone."
COPIES = 7
"""Networks in memory for each user at most: before and after training, the update, one reordered, and the
neurons of a layer in float64."""
NUMBER = 4
"""Size in bytes of a neuron's place in a layer, and of a class count."""


Deviation = Annotated[float, Field(ge=1e-6, le=1e6)]


@dataclass(frozen=True, config=STRICT)
class FedMAOptions:
    """Options of the matching."""

    passes: Annotated[int, Field(ge=0)] = 5
    """Maximum number of further matchings of all users' neurons, after the first matching of each."""
    room: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each hidden layer that is empty at first, for neurons that only some users have."""
    sigma: Deviation = Belief.sigma
    """Standard deviation of users' weights around those of their global neuron."""
    sigma0: Deviation = Belief.sigma0
    """Standard deviation of the global neurons' weights, whose mean is 0."""
    gamma: Annotated[float, Field(ge=1e-6, le=1e9)] = Belief.gamma
    """Mass of the Beta-Bernoulli process: the larger, the more neurons that only some users have."""

    @property
    def belief(self) -> Belief:
        """The process that users' neurons are taken to come from."""
        return Belief(self.sigma, self.sigma0, self.gamma)


@register("fedma")
class FedMA(Algorithm[list[Weights]]):
    """Matched averaging. The state is the users' own networks, in the order of the cohort."""

    options: ClassVar[type] = FedMAOptions
    refusals: ClassVar[Refusals] = {
        **PRIVACY_NOT_ARGUED,
        "replacement": (
            "in fedma each user has its own network, so a user must not be drawn twice in a cohort: set "
            "federated.replacement to false"
        ),
    }
    idle: ClassVar[str] = "server."
    idle_in_runtime: ClassVar[str] = "reduce"
    only_last: ClassVar[bool] = True

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.clients = Clients(context)
        self.layers = layers_of(context.module.backbone, BACKBONE)
        self.users = self.clients.cohort(0)

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse idle options, other layers, incomplete passes, and networks that do not fit in memory."""
        options: FedMAOptions = setup.options
        for field in fields(Belief):
            if not options.room and getattr(options, field.name) != field.default:
                raise ValueError(
                    f"federated.options.{field.name} has no effect because no neuron can be added: "
                    "remove it, or set federated.options.room"
                )
        *hidden, last = layers_of(setup.module.backbone, BACKBONE)
        if not setup.users.has_labels:
            raise ValueError(
                "fedma averages the last layer by how many images of each class a user has, and these "
                "annotations are no labels: choose another federated.algorithm"
            )
        layers = len([*hidden, last])
        if options.room and not any(rounded_down(options.room, layer.neurons) for layer in hidden):
            raise ValueError(
                f"federated.options.room is {options.room:g}, which is less than one neuron in each "
                "layer of this network: raise it, or set it to 0"
            )
        if setup.num_rounds % layers:
            nearest = max(1, round(setup.num_rounds / layers)) * layers
            raise ValueError(
                f"fedma matches one of the {layers} layers of this network in each round: set "
                f"federated.num_rounds to a multiple of {layers}, such as {nearest}"
            )
        refuse_beyond_memory(
            COPIES * setup.cohort_size * trained_bytes(setup.module),
            f"fedma keeps a network of each of {setup.cohort_size:,} users",
            "lower federated.cohort_size",
        )

    @classmethod
    def state_bytes(cls, setup: Setup) -> int:
        """In each checkpoint the users' networks besides the first."""
        return CHECKPOINTS * (setup.cohort_size - 1) * trained_bytes(setup.module)

    def init(self, seed: int) -> list[Weights]:
        """The state before the first round: all users have the run's network, less the room in it."""
        options: FedMAOptions = self.context.options
        first = self.clients.weights()
        for layer, following in pairwise(self.layers):
            there = layer.neurons - rounded_down(options.room, layer.neurons)
            first = first_neurons(first, layer, following, there)
        return [dict(first) for _ in self.users]

    def round(self, state: list[Weights], number: int) -> tuple[list[Weights], dict[str, Any]]:
        """Train all users' layers from layer n on, and combine layer n on the server."""
        place = number % len(self.layers)
        trained, line = self._trained(state, place, number)
        layer, alike = self.layers[place], np.array(self._shares())[:, None]  # [J, 1]
        moved = 0
        if place + 1 < len(self.layers):
            users = [neurons(user, layer) for user in trained]
            found = matched(users, self.context.options.passes, self.context.options.belief)
            following = self.layers[place + 1]
            trained = [reordered(user, layer, following, places) for user, places in zip(trained, found)]
            moved = sum(int((places != np.arange(layer.neurons)).sum()) for places in found)
            weights = alike * np.stack([alive(user[places]) for user, places in zip(users, found)])  # [J, N]
        else:
            weights = np.stack([self._labels(int(user), number) for user in self.users])
        total = weights.sum(0)
        weights = np.where(total > 0, weights / np.where(total > 0, total, 1), alike)
        together = {name: by_neuron([user[name] for user in trained], weights) for name in layer.variables}
        line |= {"layer": place, "moved": moved, "neurons": int(alive(neurons(together, layer)).sum())}
        return [{**user, **{n: t.clone() for n, t in together.items()}} for user in trained], line

    def _trained(self, users: list[Weights], place: int, number: int) -> tuple[list[Weights], dict[str, Any]]:
        """The users' networks after local training of the layers from ``place`` on."""
        self.clients.model(users[0])  # the layers below are the same for all users
        with self._frozen_below(place) as clients:
            names = list(clients.weights())
            starts = [{name: user[name] for name in names} for user in users]
            updates, line = clients.each_update(starts, self.users, number)
        moved = [
            {name: start[name] + update[name] for name in names} for start, update in zip(starts, updates)
        ]
        return [{**user, **changed} for user, changed in zip(users, moved)], line

    @contextmanager
    def _frozen_below(self, place: int) -> Iterator[Clients]:
        """In this context the layers below ``place`` are frozen. Yields clients that train the others."""
        module, engine = self.context.module, self.context.engine
        if place == 0:
            yield self.clients
            return
        below = {name for layer in self.layers[:place] for name in layer.variables}
        frozen = [parameter for name, parameter in module.named_parameters() if name in below]
        for parameter in frozen:
            parameter.requires_grad_(False)
        model = copy.copy(self.context.model)
        model._variable_map = {name: p for name, p in module.named_parameters() if p.requires_grad}
        model._model_diff = MappedVectorStatistics()
        engine = None if engine is None else engine.like(module)
        try:
            yield Clients(replace(self.context, model=model, engine=engine))
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)
            if engine is not None:
                engine.close()

    def _shares(self) -> list[float]:
        """Each user's weight in a mean; they add up to 1."""
        weights = [1.0] * len(self.users)
        if self.context.by_images:
            weights = self.context.users.images[self.users].astype(float).tolist()
        total = sum(weights)
        return [weight / total if total else 1 / len(weights) for weight in weights]

    def _mean(self, users: list[Weights], name: str) -> Tensor:
        return mean([user[name] for user in users], self._shares())

    def _labels(self, user: int, number: int) -> np.ndarray[Any, Any]:
        """How many of a user's images in this round have each class, ``[K]``."""
        self.context.users.set_round(number)
        images = self.context.users.user_dataset(user)
        targets = images.targets  # of images that are not mixed
        counts: np.ndarray[Any, Any] = (targets > 0).double().sum(0).numpy()
        return counts

    def model(self, state: list[Weights]) -> PyTorchModel:
        """The network with the global layers, and the users' mean of the layers not matched yet."""
        return self.clients.model({name: self._mean(state, name) for name in state[0]})

    def tensors(self, state: list[Weights]) -> dict[str, Tensor]:
        """The tensors of all users' networks."""
        return {f"{place}/{name}": t for place, user in enumerate(state) for name, t in user.items()}

    def load(self, state: list[Weights], tensors: Mapping[str, Tensor]) -> list[Weights]:
        """The users' networks in a checkpoint's tensors."""
        return [
            {name: tensors[f"{place}/{name}"].to(t.device) for name, t in user.items()}
            for place, user in enumerate(state)
        ]

    def findings(self, state: list[Weights]) -> dict[str, Any]:
        """The number of neurons of each hidden layer of the model."""
        model = {name: self._mean(state, name) for name in state[0]}
        return {"neurons": [int(alive(neurons(model, layer)).sum()) for layer in self.layers[:-1]]}

    def bytes(self, state: list[Weights]) -> Traffic:
        """The mean over the rounds of a pass. Each layer goes up once and comes down once, with its neurons'
        places; the class counts go up with the last layer. The first network, which comes down once in the
        run, is added. Empty neurons count as others do.
        """
        size, rounds, total = trained_bytes(self.context.module), len(self.layers), self.context.num_rounds
        places = NUMBER * sum(layer.neurons for layer in self.layers[:-1])
        down = -(-(size + places) // rounds) + -(-size // total)
        return Traffic(down, -(-(size + NUMBER * self.layers[-1].neurons) // rounds))
