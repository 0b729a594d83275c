"""Accuracy of a single-label classifier as counts that add up over batches and workers.

Shape letters: B images of a batch, K classes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from pfl.metrics import MetricValue

from pfl_ext.tasks.metrics import FLOAT32_EXACT
from pfl_ext.tasks.ranking import diverged

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
UNKNOWN = -1
"""As a prediction: of an image whose logits are not numbers."""


class ClassCounts(MetricValue):
    """Images of each class, how many of them were predicted rightly, and how many had no prediction."""

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
                f"image {first} of a batch has {labels[first]} labels: objective single_label needs exactly "
                "one for every image; choose multi_label, or data with one"
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

    def summary(self) -> dict[str, float]:
        """Percent: ``accuracy``, and ``C-accuracy``, the mean over the classes that have images."""
        accuracy = self.overall_value
        present = self.per_class[self.images > 0]
        return {
            "accuracy": 100 * accuracy,
            "C-accuracy": 100 * float(present.mean()) if len(present) else 0.0,
        }

    def __add__(self, other: ClassCounts) -> ClassCounts:
        assert isinstance(other, ClassCounts)
        return ClassCounts(self.right + other.right, self.images + other.images, self.unknown + other.unknown)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, ClassCounts)
        return bool(np.array_equal(self.to_vector(), other.to_vector()))

    def to_vector(self) -> npt.NDArray[np.float32]:
        """All counts, ``[2 K + 1]``; each is at most the number of images, so float32 is exact."""
        return np.concatenate([self.right, self.images, [self.unknown]]).astype(np.float32)

    def from_vector(self, vector: npt.NDArray[np.float32]) -> ClassCounts:
        """The counts back, exact below 2**24 images."""
        assert vector.max(initial=0) < FLOAT32_EXACT, "2**24 images or more: float32 sums are no longer exact"
        counts = vector.astype(np.int64)
        k = len(self.images)
        return ClassCounts(counts[:k], counts[k : 2 * k], int(counts[-1]))

    def __repr__(self) -> str:
        return f"ClassCounts({self.right.sum()} of {self.images.sum()} right, {len(self.images)} classes)"
