"""What a classifier is trained to do with a batch of targets, in a form that many users' batches can share.

An objective turns the targets ``[B, K]`` of one batch into targets and shares ``[B]`` such that the batch's
loss is ``sum_b shares_b image_losses_b``: whatever couples the images of a batch, as a self-normalised
importance weight does, is settled there, on the targets alone. After that every image stands for itself, so
that images of many users can go through a network together (`pfl_ext.engine`).

Shape letters: B images of a batch, K labels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

ObjectiveName = Literal["multi_label", "single_label", "multi_label_weighted"]


class Objective(ABC):
    """A loss of the logits and targets of a batch, and what the logits say."""

    name: ObjectiveName
    per_label = True
    """Whether each label is a yes or no of its own; else the K labels exclude each other."""

    def settled(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Targets ``[B, K]`` as `image_losses` wants them and each image's share ``[B]`` of the loss."""
        n = len(targets)
        return targets, torch.full((n,), 1 / n if n else 0.0, device=targets.device)

    @abstractmethod
    def image_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """``[B]`` float32 from logits ``[B, K]`` and settled targets, each from its own image alone."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of a batch, float32."""
        targets, shares = self.settled(targets)
        return (self.image_losses(logits, targets) * shares).sum()

    def scored(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """For evaluation, on the device: losses ``[B]`` float64 and what is predicted; plain targets.

        Here the binary cross-entropy and the labels' probabilities ``[B, K]`` float32.
        """
        logits = logits.float()
        losses = F.binary_cross_entropy_with_logits(logits, targets.float(), reduction="none")
        return losses.double().mean(1), torch.sigmoid(logits)


class MultiLabel(Objective):
    """Binary cross-entropy of labels that are present (1) or not (0), the mean over images and labels."""

    name: ObjectiveName = "multi_label"

    def image_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """``[B]``, the mean over labels."""
        losses = F.binary_cross_entropy_with_logits(logits.float(), targets.float(), reduction="none")
        return losses.mean(1)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean over all B x K at once."""
        return multi_label_loss(logits, targets)


class SingleLabel(Objective):
    """Softmax cross-entropy: ``sum_b w_b l_b / sum_b w_b`` (FedIR, equation 4).

    Row b of the targets has ``w_b > 0`` at its class and 0 elsewhere; one-hot rows give the plain mean.
    """

    name: ObjectiveName = "single_label"
    per_label = False

    def settled(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The targets as they are; the shares are the weights over their sum."""
        weights = targets.float().amax(1)
        return targets, weights / weights.sum()

    def image_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """``-log softmax`` at the class, ``[B]``, without the weight."""
        return F.cross_entropy(logits.float(), targets.argmax(1), reduction="none")

    def scored(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The cross-entropies, and the likeliest classes ``[B]`` int64, -1 where a logit is NaN."""
        losses = self.image_losses(logits, targets).double()
        return losses, torch.where(logits.isnan().any(1), -1, logits.argmax(1))


class WeightedMultiLabel(Objective):
    """Binary cross-entropy with a weight for each image and label, self-normalised label by label.

    ``(1/K) sum_c [sum_b w_bc l_bc / sum_b w_bc]``: FedIR's equation 4 for each label as a task of its own.
    This is our form, the paper has single labels only. The targets' sign says whether a label is present and
    their size is ``w_bc > 0``; so plain targets are +1 and -1, and give the plain multi-label loss.
    """

    name: ObjectiveName = "multi_label_weighted"

    def settled(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The targets with the weights of each label scaled to a mean of 1 over the batch; equal shares."""
        targets = targets.float()
        return targets / targets.abs().mean(0), super().settled(targets)[1]

    def image_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """``[B]``, the mean over labels of weight times binary cross-entropy; target 0 has no loss."""
        losses = F.binary_cross_entropy_with_logits(logits.float(), (targets > 0).float(), reduction="none")
        return (losses * targets.abs()).mean(1)


def multi_label_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of logits ``[B, K]`` in float32, the mean over all B x K; targets of any type."""
    return F.binary_cross_entropy_with_logits(logits.float(), targets.to(torch.float32))


OBJECTIVES = {objective.name: objective for objective in (MultiLabel(), SingleLabel(), WeightedMultiLabel())}
MULTI_LABEL = OBJECTIVES["multi_label"]


def objective_named(name: str) -> Objective:
    """The objective, or ValueError naming the key."""
    if name not in get_args(ObjectiveName):
        raise ValueError(f"objective must be one of {', '.join(get_args(ObjectiveName))}, not {name!r}")
    return OBJECTIVES[name]  # type: ignore[index]
