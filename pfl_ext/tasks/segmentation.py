"""A class for each pixel: semantic segmentation.

Shape letters: B images of a batch, n images that are scored, H x W their stored size, S the side of the
network's input and of its outputs, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from pfl.metrics import MetricValue
from torch import Tensor

from dataset.arrays import ByteArray, Float32Array, FloatArray, IntArray
from pfl_ext.data.transforms import Framing, gathered
from pfl_ext.tasks.losses import PLAIN, TrainingLoss, dice_losses
from pfl_ext.tasks.ranking import diverged
from pfl_ext.tasks.task import Task, mean_of_known
from pfl_ext.tasks.whole_numbers import UNITS, in_units, received, sent

VOID = 255
"""The class number of pixels that belong to no class; they have no loss and no score."""


class Segmentation(Task):
    """Softmax cross-entropy of each pixel, and one confusion matrix over all images.

    The loss of an image is the sum over its pixels that have a class, over their number. An image without
    such pixels has the loss 0 and no gradient, but keeps its share of the batch, which does not depend on
    masks. Pixels of a padded crop outside an image are void. Evaluation compares at the size of the network's
    input: the whole image is resized to it, and the mask has the class at each pixel's centre.

    Args:
        num_classes: C, at most 255.
        loss: of a pixel.
        background: whether class 0 is for pixels of no object. Then the mean Dice score leaves it out.
    """

    headline = ("mIoU",)
    outputs = "pixels"
    scored_together = 16

    def __init__(self, num_classes: int, loss: TrainingLoss = PLAIN, background: bool = False) -> None:
        if not 1 <= num_classes <= VOID:
            raise ValueError(f"num_classes is {num_classes}: a mask has 1 to {VOID} classes")
        self.num_classes, self._loss, self.background = num_classes, loss, background

    def trained_by(self, loss: TrainingLoss) -> Segmentation:
        """The task with this loss; refuses options of labels that an image lacks."""
        loss.check_for_classes()
        return self._with(loss)

    def collate(self, annotations: ByteArray) -> Tensor:
        """Masks ``[B, H, W]`` uint8, unchanged.

        Raises:
            ValueError: for a class that is not one of the C classes.
        """
        wrong = (annotations >= self.num_classes) & (annotations != VOID)
        if wrong.any():
            raise ValueError(
                f"a mask has the class {int(annotations[wrong].max())}, of {self.num_classes}: check the "
                "file with python -m dataset.store"
            )
        return torch.from_numpy(annotations)

    def augment(
        self, images: Tensor, targets: Tensor, crops: Tensor | None, framing: Framing
    ) -> tuple[Tensor, Tensor]:
        """Images ``[B, 3, S, S]``, and masks ``[B, S, S]`` after the same crops and flips."""
        pixels, (height, width) = self.pixels(images, crops, framing), targets.shape[1:]
        size = framing.input_size
        if crops is None and (height, width) == (size, size):
            return pixels, targets
        if crops is None:
            crops = torch.tensor([[0, 0, height, width, 0, 0]], device=targets.device).expand(len(targets), 6)
        return pixels, gathered(targets, crops, size, framing.padding, VOID)

    def image_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Losses ``[B]`` from logits ``[B, C, S, S]`` and masks ``[B, S, S]``."""
        return _image_losses(outputs, targets, self._loss)

    def scored(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The losses, and each image's counts ``[B, C, C + 1]`` int64 as in `Confusion`."""
        width = self.num_classes + 1
        known = targets != VOID
        guesses = torch.where(outputs.isnan().any(1), self.num_classes, outputs.argmax(1))
        images = torch.arange(len(targets), device=targets.device)[:, None, None]
        cells = (images * self.num_classes + targets.long()) * width + guesses
        length = len(targets) * self.num_classes * width
        counts = torch.bincount(cells[known], minlength=length).view(len(targets), self.num_classes, width)
        return _image_losses(outputs, targets, PLAIN).double(), counts

    def predicted(self, outputs: Tensor) -> Tensor:
        """The class of each pixel, ``[B, S, S]`` uint8."""
        return outputs.argmax(1).to(torch.uint8)

    def statistics(
        self, num_rows: int, rows: IntArray, predictions: Sequence[Tensor], annotations: Sequence[Any]
    ) -> Confusion:
        """The sum of the images' counts, and of their Dice scores."""
        total = Confusion(np.zeros((self.num_classes, self.num_classes + 1), np.int64))
        for part in predictions:
            counts = part.cpu().numpy()
            total += Confusion(counts.sum(0), *self._dice_of_images(counts))
        return total

    def _dice_of_images(self, counts: IntArray) -> tuple[int, int]:
        """The sum of the Dice scores of images in units of 1 / `UNITS`, and how many images have one, from
        counts ``[B, C, C + 1]``. An image's score is the mean over the classes that are in its truth or
        predicted, without the background."""
        first = int(self.background)
        right = counts.diagonal(axis1=1, axis2=2)[:, first:]
        areas = (counts.sum(2) + counts[:, :, :-1].sum(1))[:, first:]
        classes = (areas > 0).sum(1)
        scores = (2 * right / np.maximum(areas, 1)).sum(1)[classes > 0] / classes[classes > 0]
        return int(in_units(scores).sum()), len(scores)

    def summarise(self, statistics: Confusion) -> dict[str, float]:
        """Percent: ``mIoU``, ``Dice``, ``Dice per image`` and others: see `Confusion`."""
        return {
            "mIoU": 100 * statistics.overall_value,
            "Dice": 100 * mean_of_known(self._dice_of_objects(statistics)),
            "Dice per image": 100 * statistics.dice_of_images,
            "fwIoU": 100 * statistics.weighted_iou,
            "pixel accuracy": 100 * statistics.accuracy,
            "class accuracy": 100 * mean_of_known(statistics.recall),
        }

    def user_columns(self, predictions: Tensor, annotations: Any) -> dict[str, float]:
        """`user_summary` of the user's images."""
        rows = np.arange(len(predictions))
        return self.user_summary(self.statistics(len(rows), rows, [predictions], [annotations]))

    def user_summary(self, statistics: Confusion) -> dict[str, float]:
        """`summarise` for one user. NaN if all masks are void, and as Dice if there is no object, true or
        predicted."""
        columns = self.summarise(statistics)
        if not statistics.images:
            columns |= dict.fromkeys(("Dice", "Dice per image"), float("nan"))
        return columns if statistics.counts.any() else dict.fromkeys(columns, float("nan"))

    def _dice_of_objects(self, statistics: Confusion) -> FloatArray:
        return statistics.dice[1:] if self.background else statistics.dice


def _image_losses(outputs: Tensor, targets: Tensor, loss: TrainingLoss) -> Tensor:
    outputs, classes = outputs.float(), targets.long()
    if loss.dice == 1:
        return dice_losses(outputs, classes, VOID)
    losses = loss.of_classes(outputs, classes, VOID)
    means = losses.sum((1, 2)) / (targets != VOID).sum((1, 2)).clamp(min=1)
    return means + loss.dice * (dice_losses(outputs, classes, VOID) - means) if loss.dice else means


class Confusion(MetricValue):
    """Number of pixels by true and predicted class, over all images together.

    The scores are those of one matrix, not means over images or users. The intersection over union (IoU) of
    class c is the number of pixels of c predicted as c, over the number of pixels that are c or are predicted
    as c (Everingham et al. 2015, the PASCAL VOC challenge, section 4.3).

    ``counts`` is ``[C, C + 1]`` int64. A row is a true class and a column a predicted one; the last column
    has pixels whose outputs are not finite. Counts are added up as whole numbers
    (`pfl_ext.tasks.whole_numbers`).

    Args:
        counts: these.
        dice: the sum of the Dice scores of single images, in units of 1 / `UNITS`.
        images: how many images have one.
    """

    def __init__(self, counts: IntArray, dice: int = 0, images: int = 0) -> None:
        assert counts.ndim == 2
        assert counts.shape[1] == counts.shape[0] + 1
        self.counts, self.dice_sum, self.images = counts, dice, images

    @property
    def _pixels(self) -> IntArray:
        """The counts ``[C, C]``; raises ValueError if an output was not finite."""
        if unknown := int(self.counts[:, -1].sum()):
            raise diverged(unknown, int(self.counts.sum()))
        return self.counts[:, :-1]

    @property
    def per_class(self) -> FloatArray:
        """IoU of each class, ``[C]`` in [0, 1]; NaN for a class that is neither in truth nor predicted."""
        pixels = self._pixels
        union = pixels.sum(0) + pixels.sum(1) - pixels.diagonal()
        return np.where(union > 0, pixels.diagonal() / np.maximum(union, 1), np.nan)

    @property
    def dice(self) -> FloatArray:
        """Dice score of each class, ``[C]`` in [0, 1], with NaN as in `per_class`: twice the pixels of c that
        are predicted as c, over those that are c plus those that are predicted as c (F1 score)."""
        pixels = self._pixels
        total = pixels.sum(0) + pixels.sum(1)
        return np.where(total > 0, 2 * pixels.diagonal() / np.maximum(total, 1), np.nan)

    @property
    def dice_of_images(self) -> float:
        """Mean of the Dice scores of single images; 0 without any."""
        return self.dice_sum / UNITS / max(self.images, 1)

    @property
    def recall(self) -> FloatArray:
        """Share of each class's pixels that are predicted correctly (sensitivity), ``[C]``; NaN for a class
        without any."""
        pixels = self._pixels
        total = pixels.sum(1)
        return np.where(total > 0, pixels.diagonal() / np.maximum(total, 1), np.nan)

    @property
    def specificity(self) -> FloatArray:
        """Share of the pixels of other classes that are not predicted as each class, ``[C]``; NaN if there
        are none."""
        pixels = self._pixels
        others = pixels.sum() - pixels.sum(1)
        wrong = pixels.sum(0) - pixels.diagonal()
        return np.where(others > 0, 1 - wrong / np.maximum(others, 1), np.nan)

    @property
    def overall_value(self) -> float:
        """Mean IoU over the classes that are in truth or predicted; 0 without any pixel."""
        return mean_of_known(self.per_class)

    @property
    def weighted_iou(self) -> float:
        """Mean IoU, each class weighted by its pixels in truth."""
        shares = self._pixels.sum(1) / max(self._pixels.sum(), 1)
        return float(np.where(shares > 0, shares * self.per_class, 0.0).sum())

    @property
    def accuracy(self) -> float:
        """Share of all pixels that are predicted correctly."""
        return float(self._pixels.trace() / max(self._pixels.sum(), 1))

    def __add__(self, other: Confusion) -> Confusion:
        assert isinstance(other, Confusion)
        return Confusion(
            self.counts + other.counts, self.dice_sum + other.dice_sum, self.images + other.images
        )

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Confusion)
        return bool(np.array_equal(self._numbers, other._numbers))

    @property
    def _numbers(self) -> IntArray:
        """All that is added up, ``[C (C + 1) + 2]``."""
        return np.append(self.counts, [self.dice_sum, self.images])

    def to_vector(self) -> Float32Array:
        """The digits of all numbers."""
        return sent(self._numbers)

    def from_vector(self, vector: Float32Array) -> Confusion:
        """The numbers back, from a sum of up to 4,096 vectors."""
        numbers = received(vector)
        return Confusion(numbers[:-2].reshape(self.counts.shape), int(numbers[-2]), int(numbers[-1]))
