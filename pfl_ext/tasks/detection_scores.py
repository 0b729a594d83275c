"""COCO's average precision of detections, exact over batches and workers.

Detections and true boxes of all images are kept and gathered, since a mean of precisions is no precision.
pycocotools computes the precision.

Shape letters: N images of an evaluation set, n of them that are here, D rows for an image's detections, M
rows for its true boxes, C classes, T thresholds of overlap.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
from pfl.metrics import MetricValue

from dataset.arrays import Float32Array, FloatArray, IntArray
from dataset.files import needed
from pfl_ext.tasks.ranking import diverged
from pfl_ext.tasks.task import mean_of_known

CLASS, FLAGS, SCORE = 4, 5, 5
"""Columns after left, top, right and bottom: the class; then a true box's flags or a detection's score."""
COLUMNS = 6
NO_BOX = -1
"""The class of a row without a box."""
CROWD = 1
"""The bit of a box's flags that says that it surrounds a group of objects."""
HALF = 0
"""Index of .5 among COCO's thresholds of overlap, .5, .55, ..., .95."""
PRECISIONS = 101
"""Levels of recall at which COCO reads the precision."""

COCO = ("pycocotools.coco", "pycocotools.cocoeval")
"""Modules that are imported only when used, since commands without detection do not need them."""

Array = Float32Array


def scorers() -> list[ModuleType]:
    """The modules `COCO`.

    Raises:
        ValueError: when they are not installed.
    """
    return [needed(name, "detection") for name in COCO]


class Detections(MetricValue):
    """Detections and true boxes of some images of one evaluation set; ``+`` is a union.

    Every image must be scored once. If two workers scored an image, or one did twice, reading raises an
    error.

    Args:
        num_images: N.
        num_classes: C.
        parts: for each the images' positions ``[n]``, detections ``[n, D, 6]`` and true boxes ``[n, M, 6]``,
            with the columns of `CLASS`. A NaN score means that an image's outputs were not finite.
    """

    def __init__(
        self, num_images: int, num_classes: int, parts: Sequence[tuple[IntArray, Array, Array]]
    ) -> None:
        self.num_images, self.num_classes = num_images, num_classes
        self._parts = list(parts)
        assert self._parts, "a part without images says how many rows an image has"

    @cached_property
    def images(self) -> tuple[IntArray, Array, Array]:
        """All parts as one, in the order of the images."""
        rows, found, truth = (np.concatenate(each) for each in zip(*self._parts))
        order = np.argsort(rows, kind="stable")
        assert len(np.unique(rows)) == len(rows), "an image was scored twice"
        return rows[order], found[order], truth[order]

    def only(self, rows: IntArray) -> Detections:
        """The detections of only these images of the evaluation set."""
        here, found, truth = self.images
        kept = np.isin(here, rows)
        return Detections(self.num_images, self.num_classes, [(here[kept], found[kept], truth[kept])])

    @property
    def has_objects(self) -> bool:
        """Whether there is a box that a detector should find, which a crowd's is not."""
        _, _, truth = self.images
        return bool(((truth[..., CLASS] != NO_BOX) & (truth[..., FLAGS].astype(np.int64) & CROWD == 0)).any())

    @cached_property
    def precisions(self) -> FloatArray:
        """AP at each threshold for each class, ``[T, C]`` in [0, 1]; NaN for a class without objects.

        Raises:
            ValueError: when the network's outputs were not finite.
        """
        _, found, truth = self.images
        if unknown := int(np.isnan(found[..., SCORE]).any(1).sum()):
            raise diverged(unknown, len(found))
        curves = _curves(found, truth, self.num_classes)
        known = (curves > -1).all(1)
        return np.where(known, curves.mean(1), np.nan)

    @property
    def per_class(self) -> FloatArray:
        """AP of each class, the mean over all thresholds, ``[C]``."""
        return np.asarray(self.precisions.mean(0))

    @property
    def overall_value(self) -> float:
        """mAP in [0, 1]: the mean over the classes that have objects; 0 without any."""
        return mean_of_known(self.per_class)

    @property
    def at_half(self) -> float:
        """mAP50 in [0, 1]: `overall_value` at the threshold .5."""
        return mean_of_known(self.precisions[HALF])

    def __add__(self, other: Detections) -> Detections:
        assert isinstance(other, Detections)
        assert (self.num_images, self.num_classes) == (other.num_images, other.num_classes)
        return Detections(self.num_images, self.num_classes, [*self._parts, *other._parts])

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Detections)
        mine, others = (np.concatenate([part.ravel() for part in each.images]) for each in (self, other))
        return bool(np.array_equal(mine, others, equal_nan=True))

    def to_vector(self) -> Array:
        """``[N (1 + 6 D + 6 M)]``: a row for each image; its first number counts how often it was scored."""
        rows, found, truth = self.images
        counted = np.ones((len(rows), 1), np.float32)
        flat = [part.reshape(len(rows), part.shape[1] * COLUMNS) for part in (found, truth)]
        vector = np.zeros((self.num_images, 1 + sum(part.shape[1] for part in flat)), np.float32)
        vector[rows] = np.concatenate([counted, *flat], 1)
        return vector.ravel()

    def from_vector(self, vector: Float32Array) -> Detections:
        """The detections from a sum of such vectors over workers who scored different images."""
        _, found, truth = self.images
        table = vector.reshape(self.num_images, -1).astype(np.float32)
        rows = np.flatnonzero(table[:, 0])
        assert (table[rows, 0] == 1).all(), "an image was scored twice"
        end = 1 + found.shape[1] * COLUMNS
        shapes = (found.shape[1], COLUMNS), (truth.shape[1], COLUMNS)
        both = (table[rows, 1:end], table[rows, end:])
        parts = [part.reshape(len(rows), *shape) for part, shape in zip(both, shapes)]
        return Detections(self.num_images, self.num_classes, [(rows, parts[0], parts[1])])


def _curves(found: Array, truth: Array, num_classes: int) -> FloatArray:
    """Precision at each threshold, level of recall and class, ``[T, 101, C]``; -1 where there is no object.

    Objects of any size count, and at most the D best detections of an image and a class.
    """
    coco, scoring = scorers()

    def dataset(boxes: Array, is_truth: bool) -> Any:
        out = coco.COCO()
        out.dataset = {
            "images": [{"id": number} for number in range(len(boxes))],
            "categories": [{"id": number} for number in range(num_classes)],
            "annotations": _annotations(boxes, is_truth),
        }
        out.createIndex()
        return out

    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints
        evaluation = scoring.COCOeval(dataset(truth, True), dataset(found, False), "bbox")
        settings = evaluation.params
        settings.areaRng, settings.areaRngLbl = [[0, float("inf")]], ["all"]
        settings.maxDets = [found.shape[1]]
        if not len(found):
            return np.full((len(settings.iouThrs), PRECISIONS, num_classes), -1.0)
        evaluation.evaluate()
        evaluation.accumulate()
    curves: FloatArray = evaluation.eval["precision"][..., 0, 0]
    return curves


def _annotations(boxes: Array, is_truth: bool) -> list[dict[str, Any]]:
    """The boxes for pycocotools. There id 0 means no annotation, and a box is left, top, width and height."""
    out: list[dict[str, Any]] = []
    for image, row in np.argwhere(boxes[..., CLASS] != NO_BOX).tolist():
        left, top, right, bottom, category, last = boxes[image, row].astype(np.float64).tolist()
        sides = right - left, bottom - top
        more = {"iscrowd": int(last) & CROWD} if is_truth else {"score": last}
        out.append(
            {
                "id": len(out) + 1,
                "image_id": image,
                "category_id": int(category),
                "bbox": [left, top, *sides],
                "area": sides[0] * sides[1],
                **more,
            }
        )
    return out
