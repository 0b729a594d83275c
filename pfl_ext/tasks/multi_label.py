"""Several labels for each image, each of which is present or not: multi-label classification.

Shape letters: B images of a batch, n images that are scored, K labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dataset.arrays import Float32Array, FloatArray, IntArray
from pfl_ext.tasks import multi_label_scores as scores
from pfl_ext.tasks.losses import PLAIN, TrainingLoss
from pfl_ext.tasks.multi_label_scores import MultiLabelScores
from pfl_ext.tasks.task import Task, WeightedTask


class MultiLabel(Task):
    """Binary cross-entropy of labels that are present (1) or not (0), the mean over images and labels.

    A label of a mixed image (`pfl_ext.data.mixing`) is present in part: the loss is the mixture of both.

    The score is average precision, exact and with 200 thresholds (`pfl_ext.tasks.multi_label_scores`).
    """

    headline = ("C-AP", "O-AP")
    mixable = True

    def __init__(self, loss: TrainingLoss = PLAIN) -> None:
        self._loss = loss

    def trained_by(self, loss: TrainingLoss) -> MultiLabel:
        """The task with this loss; refuses label smoothing."""
        loss.check_for_labels()
        loss.check_for_images()
        return self._with(loss)

    @property
    def user_headline(self) -> str:
        """O-AP: in C-AP, all classes that a user lacks count 0."""
        return self.headline[1]

    def image_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``[B]``, the mean over labels, from logits and targets ``[B, K]``."""
        return self._loss.of_labels(outputs.float(), targets.float()).mean(1)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over all B x K at once."""
        return self._loss.of_labels(outputs.float(), targets.float()).mean()

    def scored(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The binary cross-entropies, and the labels' probabilities ``[B, K]`` float32."""
        logits = outputs.float()
        losses = PLAIN.of_labels(logits, targets.float())
        return losses.double().mean(1), self.predicted(outputs)

    def predicted(self, outputs: Tensor) -> Tensor:
        """The labels' probabilities, ``[B, K]`` float32."""
        return torch.sigmoid(outputs.float())

    def statistics(
        self, num_rows: int, rows: IntArray, predictions: Sequence[Tensor], annotations: Sequence[Any]
    ) -> MultiLabelScores:
        """The scored rows themselves, from which every column is exact."""
        truth = np.concatenate(annotations)
        probabilities = torch.cat(list(predictions)).cpu().numpy() if predictions else np.empty(truth.shape)
        return MultiLabelScores.from_batch(num_rows, rows, probabilities, truth)

    def summarise(self, statistics: MultiLabelScores) -> dict[str, float]:
        """The columns of `pfl_ext.tasks.multi_label_scores.summarise`, in percent."""
        return statistics.summary()

    def user_columns(self, predictions: Tensor, annotations: Any) -> dict[str, float]:
        """The columns `pfl_ext.tasks.multi_label_scores.PER_USER`."""
        return scores.user_columns(predictions.cpu().numpy(), annotations)

    def shown(self, column: str) -> str:
        """The name of a column for people; see `pfl_ext.tasks.multi_label_scores.shown`."""
        return scores.shown(column)

    def reweighted(self) -> WeightedTask:
        """This task as a `WeightedMultiLabel`; a task of one's own keeps all else of its class.

        Raises:
            ValueError: where images are mixed; signed weights of two labels have no mixture. And for a task
                of one's own with another loss, which would not be weighted.
        """
        if self._loss.mixes:
            raise ValueError(
                "federated.reweight weights present and absent labels differently, so several labels of two "
                "images cannot be mixed: set it to none, or augment.mixup and augment.cutmix to none"
            )
        kind = type(self)
        for name in ("collate", "settled", "image_losses", "loss"):
            if getattr(kind, name) is not getattr(MultiLabel, name):
                raise ValueError(
                    f"{kind.__name__} has its own {name}, which reads plain labels and not those that "
                    "FedIR has weighted: set federated.reweight to none"
                )
        weighted: WeightedTask = object.__new__(type(kind.__name__, (WeightedMultiLabel, kind), {}))
        vars(weighted).update(vars(self))
        return weighted


class WeightedMultiLabel(WeightedTask, MultiLabel):
    """Binary cross-entropy with a weight for each image and label, self-normalised label by label.

    ``(1/K) sum_c [sum_b w_bc l_bc / sum_b w_bc]`` is equation 4 of FedIR (Hsu, Qi, Brown 2020) with each
    label as a task of its own. This form is ours; the paper has only single labels. A target's sign says
    whether the label is present, and its size is the weight ``w_bc > 0``. So plain targets are +1 and -1,
    with the plain multi-label loss. It is scored as `MultiLabel`, from annotations of 0 and 1.
    """

    mixable = False

    def settled(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The targets with the weights of each label scaled to a mean of 1 over the batch; equal shares."""
        targets = targets.float()
        return targets / targets.abs().mean(0), super().settled(targets)[1]

    def image_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``[B]``, the mean over labels of weight times binary cross-entropy; target 0 has no loss."""
        losses = self._loss.of_labels(outputs.float(), (targets > 0).float())
        return (losses * targets.abs()).mean(1)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The shares of the settled targets, as in every task but the plain one."""
        return Task.loss(self, outputs, targets)

    def event_shares(self, label_shares: FloatArray) -> FloatArray:
        """Each label is a task of two events: ``[2 K]``, first that it is present, then that it is not."""
        return np.concatenate([label_shares, 1 - label_shares])

    def event(self, number: int, num_labels: int) -> tuple[str, int]:
        """The event that an image has or lacks a label."""
        return ("has", number) if number < num_labels else ("lacks", number - num_labels)

    def weighted(self, annotations: npt.NDArray[Any], weights: FloatArray) -> Float32Array:
        """The weight of a present label, and minus the weight of an absent one."""
        present, absent = np.split(weights, 2)
        return np.where(annotations != 0, present, -absent).astype(np.float32)
