"""MOON: a user's features are held near those of the server's model, and away from those that its own model
had before (Li, He and Song 2021, "Model-Contrastive Federated Learning", arXiv 2103.16257, Algorithm 1).

With z(w; x) the input of the network's last layer for an image x, w_t the server's model as the user received
it and v_i the model with which the user ended its last round, local SGD minimises the mean over a batch of

    CE(w; x, y) - mu log( e^(a / tau) / (e^(a / tau) + e^(b / tau)) ),
    a = cos(z(w; x), z(w_t; x)),   b = cos(z(w; x), z(v_i; x)),

where cos is the cosine of the angle between two vectors, and of the z only z(w; x) has a gradient. Then v_i
becomes the user's new w, and ``w - w_t`` is sent. The server averages as FedAvg does.

What is chosen here:

* The authors compare the outputs of a projection head of two layers, which they put before the last layer of
  every network, also FedAvg's. ``model.arch moon_cnn`` is theirs with that head. Any other classifier is
  compared by the input of its last layer, without a projection head; a map of features counts as its mean
  over positions.
* In a user's first round v_i is w_t, so the term is ``mu log 2`` with a gradient of 0, and the user trains
  as in FedAvg. The authors' code has a random network there.
* All three networks see the same crop of an image. With ``model.dropout`` w_t and v_i drop no units.
* A round's training loss is the task's, without the term.

With ``mu 0`` this is FedAvg. A user keeps a whole model, which is also scored as its own (`own_images`) where
``federated.options.held_out`` sets images aside, or ``scored_on`` names a split. The engine does not know
these steps, so pfl's loop over users makes them, in compiled layers on a CPU; each batch goes through three
networks.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from pfl_ext.algorithms.algorithm import RunContext, Setup, register
from pfl_ext.algorithms.clients import Clients, Weights
from pfl_ext.algorithms.personal_parts import BACKBONE, trained_names
from pfl_ext.algorithms.personal_steps import InPhases, Phase
from pfl_ext.algorithms.personalised import ONLY_OF_COHORTS, KeptOptions, Personalised
from pfl_ext.configs import STRICT, Fraction
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.parties import PartyNetworks
from pfl_ext.models.probing import before_each, two_images
from pfl_ext.models.trained import features_in, head_of


@dataclass(frozen=True, config=STRICT)
class MoonOptions(KeptOptions):
    """The term's weight and temperature."""

    mu: NonNegativeFloat = 1.0
    """Weight of MOON's term; the authors try 0.1, 1, 5 and 10, and take 5 for CIFAR-10, 1 for CIFAR-100."""
    temperature: PositiveFloat = 0.5
    """Tau, by which cosines are divided; the authors'."""
    held_out: Fraction = 0.0
    """Share of each user's images that is held out from training, to score it there; 0: none."""


@register("moon")
class Moon(Personalised):
    """MOON. Each user keeps the model with which it ended its last round."""

    options: ClassVar[type] = MoonOptions
    takes: ClassVar[tuple[str, ...]] = ("compression",)
    has_server_model: ClassVar[bool] = True
    idle_in_runtime: ClassVar[str] = ONLY_OF_COHORTS

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._steps = InPhases(self.twin)
        self.clients = Clients(self.context, self._steps)

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse what `Personalised` refuses, a temperature of no term, and networks without features that
        training changes.
        """
        super().check(setup)
        if not setup.options.mu and setup.options.temperature != MoonOptions.temperature:
            raise ValueError(
                "federated.options.temperature has no effect if federated.options.mu is 0: set mu "
                "above 0, or leave temperature out"
            )
        backbone = setup.module.backbone
        if setup.module.task.outputs != "image" or isinstance(backbone, PartyNetworks):
            raise ValueError(
                "moon needs one feature vector for each image, which networks for masks or boxes and "
                "networks with model.parties do not have: choose another federated.algorithm"
            )
        with torch.no_grad(), features_in(backbone) as found:
            setup.module(two_images(setup.module.input_size).to(setup.module.mean.device))
        if len(found) != 1:
            raise ValueError(
                f"moon needs one feature vector for each image, but the last layer of this network runs "
                f"{len(found)} times: choose another model.arch or federated.algorithm"
            )
        last = f"{BACKBONE}{head_of(backbone)[0]}."
        if all(name.startswith(last) for name in trained_names(setup.module)):
            raise ValueError(
                "moon compares features before the last layer, but none of the layers before it is "
                "trained: set model.trained to all, or to another value that trains more than the head"
            )

    def train_user(self, x: Weights, kept: Tensor, user: int, number: int) -> tuple[Weights, Tensor, Tensor]:
        """FedAvg's steps with the term in the loss; the new v_i is where they end."""
        before = self.layout.named(kept) if self.seen[user] else x
        options, module = self.context.options, self.context.model.pytorch_model
        loss = Contrast(module, x, before, options.mu, options.temperature) if options.mu else None
        self._steps.phases = [Phase(self.shared, loss=loss)]
        update, seen = self.clients.train_alone(x, user, number)
        return update, self.layout.flat({name: w + update[name] for name, w in x.items()}), seen


class Contrast:
    """The task's loss of a batch plus MOON's term.

    Args:
        module: the network that is trained.
        received: w_t, by variable.
        before: v_i, by variable.
        mu: the term's weight.
        temperature: tau.
    """

    def __init__(
        self, module: ImageClassifier, received: Weights, before: Weights, mu: float, temperature: float
    ) -> None:
        self._module, self._mu, self._temperature = module, mu, temperature
        self._others = [
            {name.removeprefix(BACKBONE): w for name, w in weights.items()} for weights in (received, before)
        ]

    def __call__(self, *batch: Any) -> Tensor:
        """The loss of images, targets and crops, as `ImageClassifier.loss` takes them."""
        network, inputs = self._module.backbone, list[Tensor]()
        with (
            features_in(network) as found,
            before_each([("", network)], lambda _, __, of_network: inputs.append(of_network[0])),
        ):
            loss = self._module.loss(*batch)
            with torch.no_grad():
                for weights in self._others:
                    torch.func.functional_call(network, weights, (inputs[0],))
        z, received, before = found
        near, far = F.cosine_similarity(z, received), F.cosine_similarity(z, before)
        return loss + self._mu * F.softplus((far - near) / self._temperature).mean()
