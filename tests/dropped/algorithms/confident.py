"""FedAvg whose users are not made too sure: the entropy of their outputs is part of the loss
(Pereyra et al. 2017, "Regularizing Neural Networks by Penalizing Confident Output Distributions",
arXiv 1701.06548, equation 5).
"""

from __future__ import annotations

from typing import Any

from pfl.model.pytorch import PyTorchModel
from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from pfl_ext.algorithms.algorithm import RunContext, register
from pfl_ext.algorithms.clients import Clients, Weights
from pfl_ext.algorithms.server_model import ServerModelAlgorithm
from pfl_ext.configs import STRICT
from pfl_ext.models.classifier import ImageClassifier


@dataclass(frozen=True, config=STRICT)
class ConfidentOptions:
    """The key of this algorithm."""

    beta: NonNegativeFloat = 0.1
    """Weight of the entropy."""


@register("confident")
class Confident(ServerModelAlgorithm):
    """FedAvg with another loss; the state is the run's model with the server's optimiser."""

    options = ConfidentOptions

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.clients = Clients(context, loss=self.loss)

    def loss(
        self, module: ImageClassifier, received: Weights, images: Tensor, targets: Tensor, crops: Tensor
    ) -> Tensor:
        """Cross-entropy - beta entropy. ``received`` are the weights from which the user started."""
        outputs, targets = module.outputs(images, targets, crops)
        logs = outputs.log_softmax(1)
        entropy = -(logs.exp() * logs).sum(1).mean()
        beta: float = self.context.options.beta
        return module.task.loss(outputs, targets) - beta * entropy

    def round(self, state: PyTorchModel, number: int) -> tuple[PyTorchModel, dict[str, Any]]:
        """Train the cohort from the model, and make a step of the server's optimiser on the mean update."""
        x = self.clients.weights()
        update, line = self.clients.mean_update(x, self.clients.cohort(number), number)
        return state, {**line, "learning_rate": self.clients.server_step(x, update, number)}
