"""One label of K for each image: single-label classification.

Shape letters: B images of a batch, n images that are scored, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pfl.metrics import MetricValue
from torch import Tensor

from dataset.arrays import Float32Array, FloatArray, IntArray
from pfl_ext.tasks.losses import PLAIN, TrainingLoss
from pfl_ext.tasks.ranking import diverged
from pfl_ext.tasks.task import WeightedTask

FLOAT32_EXACT = 1 << 24
"""Below this, float32 holds every integer, so counts survive pfl's float32 all-reduce."""
UNKNOWN = -1
"""Prediction for an image with a logit that is NaN."""


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
    shares_of_images = ("accuracy",)
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
        """The cross-entropies, and the likeliest classes ``[B]`` int64, `UNKNOWN` where a logit is NaN."""
        losses = PLAIN.of_classes(outputs.float(), targets.argmax(1)).double()
        return losses, torch.where(outputs.isnan().any(1), UNKNOWN, outputs.argmax(1))

    def predicted(self, outputs: Tensor) -> Tensor:
        """The classes' probabilities, ``[B, K]`` float32."""
        return torch.softmax(outputs.float(), 1)

    def statistics(
        self, num_rows: int, rows: IntArray, predictions: Sequence[Tensor], annotations: Sequence[Any]
    ) -> ClassCounts:
        """Counts by class."""
        guesses = torch.cat(list(predictions)).cpu().numpy() if predictions else np.empty(0, np.int64)
        return ClassCounts.from_batch(guesses, np.concatenate(annotations))

    def summarise(self, statistics: ClassCounts) -> dict[str, float]:
        """Percent: ``accuracy``, and ``C-accuracy``, the mean over the classes that have images."""
        accuracy, found = statistics.overall_value, statistics.per_class[statistics.images > 0]
        return {"accuracy": 100 * accuracy, "C-accuracy": 100 * float(found.mean()) if len(found) else 0.0}

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


class ClassCounts(MetricValue):
    """Images and correct predictions of each class, and the number of images without a prediction."""

    def __init__(self, right: IntArray, images: IntArray, unknown: int = 0) -> None:
        """``right`` and ``images`` ``[K]``; use `from_batch`."""
        assert right.shape == images.shape
        self.right, self.images, self.unknown = right, images, unknown

    @classmethod
    def from_batch(cls, predicted: npt.ArrayLike, targets: npt.ArrayLike) -> ClassCounts:
        """Count a batch.

        Unknown predictions are counted apart and reported when the metric is read, by all workers alike.

        Args:
            predicted: ``[B]`` integers, a class in 0..K-1 or `UNKNOWN`.
            targets: ``[B, K]``, each row with a single non-zero element.

        Raises:
            ValueError: an image has no label or several.
        """
        guesses, marks = np.asarray(predicted, np.int64), np.asarray(targets) != 0
        assert guesses.shape == marks.shape[:1]
        labels = np.count_nonzero(marks, axis=1)
        if (labels != 1).any():
            first = int(np.flatnonzero(labels != 1)[0])
            raise ValueError(
                f"image {first} of a batch has {labels[first]} labels, but the single-label task needs "
                "exactly one: choose the multi-label task, or other data"
            )
        truth, num_classes = marks.argmax(1), marks.shape[1]
        right = np.bincount(truth[guesses == truth], minlength=num_classes)
        images = np.bincount(truth, minlength=num_classes)
        return cls(right, images, int((guesses == UNKNOWN).sum()))

    @property
    def overall_value(self) -> float:
        """Top-1 accuracy in [0, 1]; 0 without images. ValueError if logits were NaN."""
        if self.unknown:
            raise diverged(self.unknown, int(self.images.sum()))
        return float(self.right.sum() / max(self.images.sum(), 1))

    @property
    def per_class(self) -> FloatArray:
        """Accuracy of each class, ``[K]`` in [0, 1]; NaN for a class without images."""
        return np.where(self.images > 0, self.right / np.maximum(self.images, 1), np.nan)

    def __add__(self, other: ClassCounts) -> ClassCounts:
        assert isinstance(other, ClassCounts)
        return ClassCounts(self.right + other.right, self.images + other.images, self.unknown + other.unknown)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, ClassCounts)
        return bool(np.array_equal(self.to_vector(), other.to_vector()))

    def to_vector(self) -> Float32Array:
        """All counts, ``[2 K + 1]``; each is at most the number of images, so float32 is exact."""
        return np.concatenate([self.right, self.images, [self.unknown]]).astype(np.float32)

    def from_vector(self, vector: Float32Array) -> ClassCounts:
        """The counts from a sum of such vectors, exact below 2**24 images."""
        assert vector.max(initial=0) < FLOAT32_EXACT, "2**24 images or more: float32 sums are no longer exact"
        counts = vector.astype(np.int64)
        k = len(self.images)
        return ClassCounts(counts[:k], counts[k : 2 * k], int(counts[-1]))
