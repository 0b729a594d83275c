"""One label of K for each image: single-label classification.

Shape letters: B images of a batch, n images that are scored, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dataset.arrays import Float32Array, FloatArray, IntArray
from pfl_ext.tasks.losses import PLAIN, TrainingLoss
from pfl_ext.tasks.single_label_scores import FEW_CLASSES, UNKNOWN, ClassCounts
from pfl_ext.tasks.task import WeightedTask


class SingleLabel(WeightedTask):
    """Softmax cross-entropy: ``sum_b w_b l_b / sum_b w_b`` (equation 4 of FedIR: Hsu, Qi, Brown 2020).

    Row b of the targets has ``w_b > 0`` at its class and 0 elsewhere; one-hot rows give the plain mean. The
    score is accuracy. Where images are mixed, so are these rows: l_b is then the cross-entropy to a row over
    its sum, and w_b that sum. With the rows' mixture ``s w_a y_a + (1 - s) w_c y_c`` this is the mixture of
    both images' losses, ``s w_a l_a + (1 - s) w_c l_c``, over the same sum of weights.

    Args:
        loss: of an image. A weight ``w_b`` still multiplies all of it.
    """

    headline = ("accuracy",)
    shares_of_images = ("accuracy", "top-5 accuracy")
    lower_is_better = ("ECE", "Brier")
    units = MappingProxyType({"Brier": ""})
    exclusive = True
    mixable = True

    def __init__(self, loss: TrainingLoss = PLAIN) -> None:
        self._loss = loss

    def trained_by(self, loss: TrainingLoss) -> SingleLabel:
        """The task with this loss; refuses options of labels that an image lacks."""
        loss.check_for_classes()
        loss.check_for_images()
        return self._with(loss)

    def settled(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The targets, unchanged; the shares are the weights over their sum."""
        weights = targets.float().sum(1) if self._loss.mixes else targets.float().amax(1)
        return targets, weights / weights.sum()

    def image_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss at the class, ``[B]``, without the weight, from logits and targets ``[B, K]``."""
        if self._loss.mixes:
            shares = targets.float() / targets.float().sum(1, keepdim=True)
            return self._loss.of_classes(outputs.float(), shares)
        return self._loss.of_classes(outputs.float(), targets.argmax(1))

    def scored(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The cross-entropies, and `ClassCounts.KEPT` of each image, ``[B, 4]`` float32, followed by the
        classes' probabilities where there are at most `FEW_CLASSES`. The likeliest class is `UNKNOWN` where
        a probability is NaN."""
        logits, truth = outputs.float(), targets.argmax(1, keepdim=True)
        losses = PLAIN.of_classes(logits, truth[:, 0]).double()
        probabilities, own = self.predicted(outputs).clamp(max=1), logits.gather(1, truth)
        guesses = torch.where(probabilities.isnan().any(1), UNKNOWN, logits.argmax(1))
        numbers = torch.arange(logits.shape[1], device=logits.device)
        before = ((logits > own) | ((logits == own) & (numbers < truth))).sum(1)
        squares = (probabilities - (numbers == truth).float()).square().sum(1)
        kept = torch.stack([guesses.float(), probabilities.amax(1), squares, before.float()], 1)
        return losses, torch.cat([kept, probabilities], 1) if len(numbers) <= FEW_CLASSES else kept

    def predicted(self, outputs: Tensor) -> Tensor:
        """The classes' probabilities, ``[B, K]`` float32."""
        return torch.softmax(outputs.float(), 1)

    def statistics(
        self, num_rows: int, rows: IntArray, predictions: Sequence[Tensor], annotations: Sequence[Any]
    ) -> ClassCounts:
        """Counts by class; with few classes the scored rows, too."""
        truth = np.concatenate(annotations)
        if not predictions:
            return ClassCounts.of_nothing(truth.shape[1], num_rows)
        kept = torch.cat(list(predictions)).cpu().numpy()
        if kept.ndim == 1:  # the scores of a task of one's own are of the predicted classes alone
            return ClassCounts.from_batch(kept, truth)
        return ClassCounts.from_rows(num_rows, rows, kept, truth)

    def summarise(self, statistics: ClassCounts) -> dict[str, float]:
        """The columns of `ClassCounts.summary`; AUROC is 0 where it has no meaning."""
        return {name: 0.0 if np.isnan(value) else value for name, value in statistics.summary().items()}

    def user_columns(self, predictions: Tensor, annotations: Any) -> dict[str, float]:
        """`summarise` of one user; AUROC is NaN where all of the user's images are of one class."""
        columns = super().user_columns(predictions, annotations)
        of_one_class = "AUROC" in columns and (annotations != 0).any(0).sum() < 2
        return {**columns, "AUROC": np.nan} if of_one_class else columns

    def check_target(self, label_shares: FloatArray) -> None:
        """Refuse also shares that do not sum to 1, since the classes exclude each other."""
        super().check_target(label_shares)
        if abs(label_shares.sum() - 1) > 1e-6:
            raise ValueError(
                f"FedIR's target distribution sums to {label_shares.sum():g}: give shares that sum to 1"
            )

    def weighted(self, annotations: npt.NDArray[Any], weights: FloatArray) -> Float32Array:
        """The weight at the class of each image, 0 elsewhere."""
        return (annotations * weights).astype(np.float32)
