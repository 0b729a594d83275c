"""FedAvg whose users are not made too sure: the entropy of their outputs is part of the loss
(Pereyra et al. 2017, "Regularizing Neural Networks by Penalizing Confident Output Distributions",
arXiv 1701.06548, equation 5).
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from pfl_ext.algorithms.algorithm import register
from pfl_ext.algorithms.clients import Weights
from pfl_ext.algorithms.own_steps import OwnSteps
from pfl_ext.configs import STRICT
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.rules import Refusals


@dataclass(frozen=True, config=STRICT)
class ConfidentOptions:
    """The key of this algorithm."""

    beta: NonNegativeFloat = 0.1
    """Weight of the entropy."""


@register("confident")
class Confident(OwnSteps):
    """FedAvg with another loss."""

    options = ConfidentOptions
    refusals: ClassVar[Refusals] = {}
    takes = ("compression", "aggregation", "attack", "devices")

    def loss(
        self, module: ImageClassifier, received: Weights, images: Tensor, targets: Tensor, crops: Tensor
    ) -> Tensor:
        """Cross-entropy - beta entropy. ``received`` are the weights from which the user started."""
        outputs, targets = module.outputs(images, targets, crops)
        logs = outputs.log_softmax(1)
        entropy = -(logs.exp() * logs).sum(1).mean()
        beta: float = self.setup.options.beta
        return module.task.loss(outputs, targets) - beta * entropy
