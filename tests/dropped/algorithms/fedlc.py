"""FedLC: a user's logits are calibrated by its numbers of images of each class
(Zhang et al. 2022, "Federated Learning with Label Distribution Skew via Logits Calibration",
arXiv 2209.00189).
"""

from __future__ import annotations

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from pfl_ext.algorithms.algorithm import register
from pfl_ext.algorithms.clients import Weights
from pfl_ext.algorithms.own_steps import OwnSteps
from pfl_ext.configs import STRICT
from pfl_ext.data.user_images import UserImages
from pfl_ext.models.classifier import ImageClassifier


@dataclass(frozen=True, config=STRICT)
class FedLCOptions:
    """The key of FedLC."""

    tau: NonNegativeFloat = 1.0
    """Strength of the calibration; 0: FedAvg."""


@register("fedlc")
class FedLC(OwnSteps):
    """FedAvg with the loss of the logits ``f_k - tau n_k^(-1/4)``, for the user's n_k images of class k."""

    options = FedLCOptions

    def begin_user(self, user: UserImages) -> None:
        """Count the user's images of each class; one that it has none of counts as a hundred-millionth."""
        self.margin = self.setup.options.tau * (user.targets > 0).sum(0).clamp(min=1e-8) ** -0.25

    def loss(
        self, module: ImageClassifier, received: Weights, images: Tensor, targets: Tensor, crops: Tensor
    ) -> Tensor:
        """The task's loss of the calibrated logits."""
        outputs, targets = module.outputs(images, targets, crops)
        return module.task.loss(outputs - self.margin.to(outputs.device), targets)
