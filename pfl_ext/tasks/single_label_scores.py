"""Scores of single-label classifiers, as counts that add up over batches and workers.

Shape letters: B images of a batch, N images of an evaluation set, n of them that are here, K classes.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
from pfl.metrics import MetricValue

from dataset.arrays import Float32Array, FloatArray, IntArray
from pfl_ext.tasks.multi_label_scores import MultiLabelScores
from pfl_ext.tasks.ranking import auroc, diverged
from pfl_ext.tasks.task import mean_of_known
from pfl_ext.tasks.whole_numbers import DIGITS, UNITS, in_units, received, sent

UNKNOWN = -1
"""Prediction for an image with a probability that is NaN."""
FEW_CLASSES = 100
"""Up to so many classes there is a confusion matrix, and an AUROC, for which all probabilities are kept."""
MANY_CLASSES = 20
"""With more classes than these there is a top-5 accuracy."""
BINS = 15
"""Intervals of confidence of the expected calibration error."""


class ClassCounts(MetricValue):
    """Images by true and predicted class, and the sums behind the other scores.

    Everything is a whole number, so that a sum has no order (`pfl_ext.tasks.whole_numbers`). The confidence
    of an image is the highest of its probabilities. Bin b of `BINS` has the images with a confidence in
    (b / BINS, (b + 1) / BINS], as in Guo et al. 2017.

    Args:
        num_classes: K.
        numbers: all of them, in the order of `_sizes`.
        rows: the probabilities, where there are at most `FEW_CLASSES`.
    """

    KEPT = ("likeliest class or `UNKNOWN`", "confidence", "squared error", "classes before the true one")
    """What `from_rows` needs of each image: the squared error is the sum of the squares of what the
    probabilities differ by from 1 for the true class and 0 for the others."""

    def __init__(self, num_classes: int, numbers: IntArray, rows: MultiLabelScores | None = None) -> None:
        self.num_classes, self.numbers, self.rows = num_classes, numbers, rows
        parts = np.split(numbers, np.cumsum(self._sizes(num_classes))[:-1])
        self.right, self.images, self.guessed = parts[:3]
        """``right``, ``images`` and ``guessed``: images of each class that are predicted correctly, that
        there are, and that are predicted as it, ``[K]``."""
        self._in_bins, self._right_in_bins, self._confidence = parts[3:6]
        """The images of each bin, those that are predicted correctly, and the sum of confidences in units."""
        self._single = parts[6]
        """Images without a prediction, images with their class among the five likeliest, squared errors."""
        self.confusion = parts[7].reshape(-1, num_classes) if num_classes <= FEW_CLASSES else None
        """Images by true (row) and predicted class, ``[K, K]``."""

    @staticmethod
    def _sizes(num_classes: int) -> tuple[int, ...]:
        matrix = num_classes**2 if num_classes <= FEW_CLASSES else 0
        return (num_classes, num_classes, num_classes, BINS, BINS, BINS, 3, matrix)

    @classmethod
    def of_nothing(cls, num_classes: int, num_rows: int) -> ClassCounts:
        """Counts of no image."""
        none = np.empty((0, len(cls.KEPT) + num_classes), np.float32)
        return cls.from_rows(num_rows, np.empty(0, np.int64), none, none[:, len(cls.KEPT) :])

    @classmethod
    def from_batch(cls, predicted: npt.ArrayLike, targets: npt.ArrayLike) -> ClassCounts:
        """Count a batch of which the predicted classes are known and nothing else.

        Unknown predictions are counted apart and reported when the metric is read, by all workers alike.

        Args:
            predicted: ``[B]`` integers, a class in 0..K-1 or `UNKNOWN`.
            targets: ``[B, K]``, each row with a single non-zero element.

        Raises:
            ValueError: an image has no label or several.
        """
        guesses, marks = np.asarray(predicted, np.int64), np.asarray(targets).astype(bool, copy=False)
        assert guesses.shape == marks.shape[:1]
        labels = np.count_nonzero(marks, axis=1)
        if (labels != 1).any():
            first = int(np.flatnonzero(labels != 1)[0])
            raise ValueError(
                f"image {first} of a batch has {labels[first]} labels, but the single-label task needs "
                "exactly one: choose the multi-label task, or other data"
            )
        truth, num_classes = marks.argmax(1), marks.shape[1]
        counts = cls(num_classes, np.zeros(sum(cls._sizes(num_classes)), np.int64))
        known = guesses != UNKNOWN
        counts.right[:] = np.bincount(truth[guesses == truth], minlength=num_classes)
        counts.images[:] = np.bincount(truth, minlength=num_classes)
        counts.guessed[:] = np.bincount(guesses[known], minlength=num_classes)
        if counts.confusion is not None:
            np.add.at(counts.confusion, (truth[known], guesses[known]), 1)
        counts._single[0] = (~known).sum()
        return counts

    @classmethod
    def from_rows(
        cls, num_rows: int, rows: IntArray, kept: Float32Array, targets: npt.ArrayLike
    ) -> ClassCounts:
        """Count images of an evaluation set of N.

        Args:
            num_rows: N.
            rows: ``[n]``, the position of each image.
            kept: ``[n, 4]`` with the columns `KEPT`, or ``[n, 4 + K]`` with the probabilities after these.
            targets: as those of `from_batch`.
        """
        first = len(cls.KEPT)
        guesses, marks = kept[:, 0].astype(np.int64), np.asarray(targets).astype(bool, copy=False)
        counts, known = cls.from_batch(guesses, marks), guesses != UNKNOWN
        confidence, squares, before = kept[known, 1:first].T
        bins = np.clip(np.ceil(confidence.astype(np.float64) * BINS).astype(np.int64) - 1, 0, BINS - 1)
        right = marks[known, guesses[known]]
        counts._in_bins[:] = np.bincount(bins, minlength=BINS)
        counts._right_in_bins[:] = np.bincount(bins[right], minlength=BINS)
        np.add.at(counts._confidence, bins, in_units(confidence))
        if counts.confusion is not None:
            counts.rows = MultiLabelScores.from_batch(num_rows, rows, kept[:, first:], marks)
        counts._single[1:] = (before < 5).sum(), in_units(squares).sum()
        return counts

    @property
    def unknown(self) -> int:
        """How many images have no prediction."""
        return int(self._single[0])

    def summary(self) -> dict[str, float]:
        """The scores by name, in percent except for ``Brier``.

        ``accuracy``, and ``C-accuracy``, the mean over the classes that have images (balanced accuracy).
        ``macro-F1``: the mean of the classes' F1 scores, over classes that have images or are predicted.
        ``ECE``: the mean over images of how far accuracy and mean confidence of its bin are apart.
        ``Brier``: the mean squared error of the probabilities, summed over classes, from 0 to 2.
        ``top-5 accuracy``, with more than `MANY_CLASSES`: the share of images whose class is among the five
        likeliest; of classes that are equally likely, those with lower numbers come first.
        ``AUROC``, with at most `FEW_CLASSES`: the mean over classes of each against the rest, over classes
        that have images and lack some; NaN without any.

        Raises:
            ValueError: when probabilities were NaN.
        """
        total = max(int(self.images.sum()), 1)
        scores = {
            "accuracy": 100 * self.overall_value,
            "C-accuracy": 100 * mean_of_known(self.per_class),
            "macro-F1": 100 * mean_of_known(self.f1),
        }
        if self._in_bins.sum() != self.images.sum():  # there were no probabilities
            return scores
        gaps = np.abs(self._right_in_bins * UNITS - self._confidence)
        scores["ECE"] = 100 * float(gaps.sum() / UNITS / total)
        in_five, squares = self._single[1:].tolist()
        scores["Brier"] = squares / UNITS / total
        if self.num_classes > MANY_CLASSES:
            scores["top-5 accuracy"] = 100 * in_five / total
        if self.rows is not None:
            scores["AUROC"] = 100 * self.auroc
        return scores

    @property
    def overall_value(self) -> float:
        """Top-1 accuracy in [0, 1]; 0 without images. ValueError if probabilities were NaN."""
        if self.unknown:
            raise diverged(self.unknown, int(self.images.sum()))
        return float(self.right.sum() / max(self.images.sum(), 1))

    @property
    def per_class(self) -> FloatArray:
        """Accuracy of each class, ``[K]`` in [0, 1]; NaN for a class without images."""
        return np.where(self.images > 0, self.right / np.maximum(self.images, 1), np.nan)

    @property
    def f1(self) -> FloatArray:
        """F1 score of each class, ``[K]`` in [0, 1]; NaN for a class without images that is not predicted."""
        either = self.images + self.guessed
        return np.where(either > 0, 2 * self.right / np.maximum(either, 1), np.nan)

    @cached_property
    def auroc(self) -> float:
        """The mean over classes of the area under the ROC curve; NaN where it has no meaning."""
        assert self.rows is not None
        areas = auroc(self.rows.scores(), self.rows.targets())
        return float(np.nanmean(areas)) if not np.isnan(areas).all() else float("nan")

    def __add__(self, other: ClassCounts) -> ClassCounts:
        assert isinstance(other, ClassCounts)
        rows = None if self.rows is None or other.rows is None else self.rows + other.rows
        return ClassCounts(self.num_classes, self.numbers + other.numbers, rows)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, ClassCounts)
        return bool(np.array_equal(self.numbers, other.numbers)) and self.rows == other.rows

    def to_vector(self) -> Float32Array:
        """The digits of all numbers, and the rows."""
        numbers = sent(self.numbers)
        return numbers if self.rows is None else np.concatenate([numbers, self.rows.to_vector()])

    def from_vector(self, vector: Float32Array) -> ClassCounts:
        """The counts from a sum of such vectors."""
        end = DIGITS * len(self.numbers)
        rows = None if self.rows is None else self.rows.from_vector(vector[end:])
        return ClassCounts(self.num_classes, received(vector[:end]), rows)
