"""A class and a box for each object: object detection.

Boxes are one array in which every image has as many rows as the image with most boxes. So they are a tensor
like any other target.

Shape letters: B images of a batch, N images of an evaluation set, M rows for the boxes of an image, A places
of an image at which a box may be predicted, C classes, S the side of the network's input, D rows for an
image's detections.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import batched_nms, sigmoid_focal_loss

from dataset.arrays import Float32Array, IntArray
from pfl_ext.data.transforms import Framing, boxes_cropped
from pfl_ext.tasks.box_coding import chosen, objects
from pfl_ext.tasks.detection_scores import CLASS, COLUMNS, FLAGS, NO_BOX, SCORE, Detections, scorers
from pfl_ext.tasks.task import Task

NO_LIMIT = 1e8
"""Greatest distance, in pixels, of a place that is responsible for boxes of any size."""
RADIUS = 1.5
"""A box belongs to places at most this many strides from its centre, along each axis."""
LEAST_SCORE, CANDIDATES, OVERLAP, MOST = 0.05, 1000, 0.6, 100
"""For detections: the least score; how many are compared with one another; the IoU above which the one with
the lower score is dropped; how many are kept, as in COCO."""
EPSILON = 1e-7
"""Square pixels that are added to an area, so that a quotient of areas is finite."""


class Detection(Task):
    """FCOS: focal loss of the classes, GIoU loss of the boxes, cross-entropy of the centre-ness.

    Tasks of other detectors are subclasses with another loss, and another way from outputs to detections.

    Tian et al. 2019 (arXiv 1904.01355). Matching and losses are those of torchvision's FCOS for one image:
    each image's losses are divided by its own number of places with a box, while torchvision divides the
    batch's losses by the batch's number. So an image's loss depends on that image alone. The loss of a batch
    is the mean over its images.

    Targets are float32 ``[B, M, 6]``: left, top, right and bottom in pixels of the image, class, flags. A row
    with the class -1 is no box. A crowd's box has no loss; in evaluation it counts as in COCO.

    Outputs are those of `pfl_ext.models.detection.FCOS`.

    Args:
        num_classes: C.
    """

    headline = ("mAP", "mAP50")
    outputs = "boxes"
    scored_together = 16

    def __init__(self, num_classes: int) -> None:
        if num_classes < 1:
            raise ValueError(f"num_classes is {num_classes}: a detector has at least 1")
        scorers()  # refuses before training if they are not installed
        self.num_classes = num_classes

    def collate(self, annotations: Float32Array) -> Tensor:
        """Boxes ``[B, M, 6]``, unchanged.

        Raises:
            ValueError: for a class that is not one of the C classes.
        """
        highest = int(annotations[..., CLASS].max(initial=NO_BOX))
        if highest >= self.num_classes:
            raise ValueError(
                f"a box has the class {highest}, of {self.num_classes}: check the file with "
                "python -m dataset.store"
            )
        return torch.from_numpy(annotations)

    def augment(
        self, images: Tensor, targets: Tensor, crops: Tensor | None, framing: Framing
    ) -> tuple[Tensor, Tensor]:
        """Images ``[B, 3, S, S]``, and boxes after the same crops and flips, in pixels of these.

        Only a box's visible part is kept. A box without a visible part is removed.
        """
        pixels, (height, width) = self.pixels(images, crops, framing), images.shape[1:3]
        size = framing.input_size
        if crops is None and (height, width) == (size, size):
            return pixels, targets
        if crops is None:
            crops = torch.tensor([[0, 0, height, width, 0, 0]], device=targets.device).expand(len(targets), 6)
        moved = boxes_cropped(targets[..., :CLASS], crops, size)
        visible = (moved[..., :2] < moved[..., 2:]).all(2)
        classes = torch.where(visible, targets[..., CLASS], NO_BOX)
        return pixels, torch.cat([moved, classes[..., None], targets[..., FLAGS:]], 2)

    def image_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Losses ``[B]`` of outputs ``[B, A, C + 10]`` and boxes ``[B, M, 6]``; waits for no device."""
        of_classes, of_boxes, of_centres, places = self.sums(outputs, targets)
        return (of_classes + of_boxes + of_centres) / places

    def sums(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What makes up each image's loss, ``[B]`` each: sums over its places of the losses of classes, boxes
        and centre-ness; and the number of its places with a box, at least 1.
        """
        logits, centred, distances, places = _parts(outputs.float(), self.num_classes)
        boxes, has_box, classes = _matched(places, targets)
        labels = F.one_hot(classes.long(), self.num_classes).to(logits.dtype) * has_box[..., None]
        focal = sigmoid_focal_loss(logits, labels).sum((1, 2))
        overlap = _giou_losses(_boxes(distances, places), boxes) * has_box
        sides = _distances(places, boxes)
        centre = (_ratio(sides[..., 0], sides[..., 2]) * _ratio(sides[..., 1], sides[..., 3])).sqrt()
        of_centre = F.binary_cross_entropy_with_logits(centred, centre, reduction="none") * has_box
        return focal, overlap.sum(1), of_centre.sum(1), has_box.sum(1).clamp(min=1)

    def scored(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The losses; and each image's detections followed by its true boxes, ``[B, D + M, 6]`` float32.

        All boxes are in pixels of the network's input, in which they are compared.
        """
        kept = self.predicted(outputs)
        kept[outputs.isnan().flatten(1).any(1), :, SCORE] = torch.nan
        return self.image_losses(outputs, targets).double(), torch.cat([kept, targets], 1)

    def predicted(self, outputs: Tensor) -> Tensor:
        """The detections in the form of `listed`, ``[B, D, 6]``, in pixels of the network's input."""
        each = self.found(outputs)
        return torch.stack(each) if each else outputs.new_empty((0, MOST, COLUMNS))

    def found(self, outputs: Tensor) -> list[Tensor]:
        """The detections of each image in the form of `listed`, best first."""
        logits, centred, distances, places = _parts(outputs, self.num_classes)
        scores = (logits.sigmoid() * centred.sigmoid()[..., None]).sqrt()
        x, y, stride = places[..., :3].unbind(-1)
        side = torch.stack([x, y], -1).amax(1) + stride.amin(1)[:, None] / 2  # the image's side
        boxes = _boxes(distances, places).clamp(min=0).minimum(side.round().repeat(1, 2)[:, None])
        return [_best(*image) for image in zip(boxes, scores)]

    def statistics(
        self, num_rows: int, rows: IntArray, predictions: Sequence[Tensor], annotations: Sequence[Any]
    ) -> Detections:
        """The detections and true boxes of all batches."""
        none = np.empty((0, MOST + annotations[0].shape[1], COLUMNS), np.float32)
        both = np.concatenate([none, *(part.cpu().numpy() for part in predictions)])
        return Detections(num_rows, self.num_classes, [(rows, both[:, :MOST], both[:, MOST:])])

    def summarise(self, statistics: Detections) -> dict[str, float]:
        """In percent: ``mAP``, the mean over thresholds of overlap from .5 to .95, and ``mAP50``, at .5."""
        return {"mAP": 100 * statistics.overall_value, "mAP50": 100 * statistics.at_half}

    def user_columns(self, predictions: Tensor, annotations: Any) -> dict[str, float]:
        """NaN for a user without objects, who has no score."""
        rows = np.arange(len(predictions))
        found = self.statistics(len(rows), rows, [predictions], [annotations])
        columns = self.summarise(found)
        return columns if found.has_objects else dict.fromkeys(columns, float("nan"))


def _parts(outputs: Tensor, num_classes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits ``[B, A, C]``, of centre-ness ``[B, A]``, distances ``[B, A, 4]`` and places ``[B, A, 5]``."""
    logits, centred, distances, places = torch.split(outputs, [num_classes, 1, 4, 5], 2)
    return logits, centred[..., 0], distances, places


def _boxes(distances: Tensor, places: Tensor) -> Tensor:
    """Corners in pixels, from distances to the sides in strides; ``[..., 4]``."""
    at, far = places[..., :2], distances * places[..., 2:3]
    return torch.cat([at - far[..., :2], at + far[..., 2:]], -1)


def _distances(places: Tensor, boxes: Tensor) -> Tensor:
    """Distances from places to a box's four sides, in pixels; negative outside; ``[..., 4]``."""
    at = places[..., :2]
    return torch.cat([at - boxes[..., :2], boxes[..., 2:] - at], -1)


def _matched(places: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The box for which each place is responsible, ``[B, A, 4]``; whether there is one; and its class.

    It is the smallest box that contains the place, has its centre near it, and has its farthest side within
    the place's bounds. A place without such a box gets a box around it and the class 0, so its losses are
    finite.
    """
    boxes = targets[..., :CLASS]
    counts = objects(targets)
    sides = _distances(places[:, :, None], boxes[:, None])
    least, greatest = sides.amin(3), sides.amax(3)
    middle = (boxes[..., :2] + boxes[..., 2:]) / 2
    stride, low, high = places[..., 2:].unbind(2)
    away = (places[:, :, None, :2] - middle[:, None]).abs().amax(3)
    fits = counts[:, None] & (least > 0) & (away < RADIUS * stride[..., None])
    fits &= (greatest > low[..., None]) & (greatest < high[..., None])
    areas = _area(boxes[..., 2:] - boxes[..., :2])
    smallest, number = torch.where(fits, areas[:, None], torch.inf).min(2)
    has_box = smallest < torch.inf
    true = chosen(targets, number)
    around = _boxes(torch.ones_like(true[..., :CLASS]), places)
    return (
        torch.where(has_box[..., None], true[..., :CLASS], around),
        has_box,
        torch.where(has_box, true[..., CLASS], 0),
    )


def _area(sides: Tensor) -> Tensor:
    """The area for sides ``[..., 2]``; the gradient of torch's product over an axis would wait for a GPU."""
    return sides[..., 0] * sides[..., 1]


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """The smaller over the larger."""
    return torch.minimum(a, b) / torch.maximum(a, b)


def _giou_losses(found: Tensor, boxes: Tensor) -> Tensor:
    """One minus the generalised IoU (Rezatofighi et al. 2019, arXiv 1902.09630) of pairs, ``[..., 4]`` each.

    torchvision's version selects overlapping pairs by a mask, for which the CPU must wait.
    """
    inner = torch.minimum(found, boxes)[..., 2:] - torch.maximum(found, boxes)[..., :2]
    outer = torch.maximum(found, boxes)[..., 2:] - torch.minimum(found, boxes)[..., :2]
    common, around = _area(inner.clamp(min=0)), _area(outer)
    union = _area(found[..., 2:] - found[..., :2]) + _area(boxes[..., 2:] - boxes[..., :2]) - common
    return 1 - common / (union + EPSILON) + (around - union) / (around + EPSILON)


def _best(boxes: Tensor, scores: Tensor) -> Tensor:
    """An image's detections ``[D, 6]``, from its boxes ``[A, 4]`` and scores ``[A, C]``."""
    best, order = (
        torch.where(scores > LEAST_SCORE, scores, -1).flatten().topk(min(CANDIDATES, scores.numel()))
    )
    order, best = order[best > 0], best[best > 0]
    place, label = order // scores.shape[1], order % scores.shape[1]
    kept = batched_nms(boxes[place], best, label, OVERLAP)
    return listed(boxes[place[kept]], label[kept], best[kept])


def listed(boxes: Tensor, labels: Tensor, scores: Tensor) -> Tensor:
    """The first `MOST` of an image's detections as rows ``[D, 6]``: corners, class, score; filled up to D.

    Args:
        boxes: ``[n, 4]`` corners in pixels of the network's input, best first.
        labels: ``[n]`` classes.
        scores: ``[n]`` in 0..1.
    """
    found = boxes.new_zeros((MOST, COLUMNS))
    found[:, CLASS] = NO_BOX
    columns = [boxes[:MOST], labels[:MOST, None].to(boxes.dtype), scores[:MOST, None]]
    found[: min(len(boxes), MOST)] = torch.cat(columns, 1)
    return found
