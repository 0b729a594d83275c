"""Object detection by SSD: a class and a box for each of many default boxes.

Shape letters: B images of a batch, M rows for the boxes of an image, A default boxes of an image, C classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import batched_nms

from pfl_ext.tasks.box_coding import USUAL, chosen, clipped, decoded, encoded, qualities
from pfl_ext.tasks.detection import Detection, listed
from pfl_ext.tasks.detection_scores import CLASS

MATCH = 0.5
"""Least IoU of a default box with its true box. A true box's best default box always belongs to it."""
NEGATIVES = 3
"""Background boxes, those with the highest losses, that enter the loss for each default box of an object."""
LEAST_SCORE, CANDIDATES, OVERLAP = 0.001, 300, 0.55
"""For detections, torchvision's values for SSDLite: the least score, how many of a class are compared, and
the IoU above which the one with the lower score is dropped."""


class SSDDetection(Detection):
    """SSD: cross-entropy of the classes with the background, smooth L1 loss of the boxes.

    Liu et al. 2016 (arXiv 1512.02325), section 2.2. Matching, hard negatives and losses are those of
    torchvision's SSD for one image: an image's losses are divided by its own number of default boxes with an
    object, while torchvision divides the batch's losses by the batch's number. An image without objects has
    the loss 0 and no gradient. Nothing is drawn.

    Outputs are those of `pfl_ext.models.ssdlite.SSDLite`.
    """

    def image_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Losses ``[B]`` of outputs ``[B, A, C + 10]`` and boxes ``[B, M, 6]``; waits for no device."""
        logits, offsets, anchors, _ = self._parts(outputs.float())
        boxes, has_box, classes = matched(anchors, targets)
        wanted = encoded(torch.where(has_box[..., None], boxes, anchors), anchors, USUAL)
        of_boxes = F.smooth_l1_loss(offsets, wanted, reduction="none").sum(2) * has_box
        labels = torch.where(has_box, classes.long() + 1, 0)
        of_classes = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        number = has_box.sum(1)
        background = torch.where(has_box, -torch.inf, of_classes.detach())
        hardest = background.argsort(dim=1, descending=True, stable=True)
        is_hard = hardest.argsort(1) < NEGATIVES * number[:, None]
        counted = of_classes * (has_box | is_hard)
        losses: Tensor = (of_boxes.sum(1) + counted.sum(1)) / number.clamp(min=1)
        return losses

    def found(self, outputs: Tensor) -> list[Tensor]:
        """The detections of each image, as in `Detection.found`."""
        logits, offsets, anchors, side = self._parts(outputs)
        boxes = clipped(decoded(offsets, anchors, USUAL), side)
        return [_best(*image) for image in zip(boxes, logits.softmax(2)[..., 1:])]

    def _parts(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits ``[B, A, C + 1]``, offsets and default boxes ``[B, A, 4]``, and S ``[B, A, 1]``."""
        logits, offsets, anchors, side = torch.split(outputs, [self.num_classes + 1, 4, 4, 1], 2)
        return logits, offsets, anchors, side


def matched(anchors: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The true box to which each default box belongs, ``[B, A, 4]``; whether there is one; and its class.

    It is the true box that it overlaps most, by at least `MATCH`. But each true box gets the default box that
    overlaps it most; if this is the same one for several, it belongs to the last of them.
    """
    quality, counts = qualities(targets, anchors)
    best, number = quality.max(1)
    own = quality.argmax(2)  # best default box of each true box
    rows = torch.arange(targets.shape[1], device=targets.device)
    is_own = own[..., None] == torch.arange(anchors.shape[1], device=anchors.device)
    is_own &= counts[..., None]
    last = torch.where(is_own, rows[:, None], -1).amax(1)
    number = torch.where(last >= 0, last, number)
    has_box = (best >= MATCH) | (last >= 0)
    true = chosen(targets, number)
    return true[..., :CLASS], has_box, true[..., CLASS]


def _best(boxes: Tensor, scores: Tensor) -> Tensor:
    """An image's detections, from its boxes ``[A, 4]`` and scores ``[A, C]``."""
    best, place = torch.where(scores > LEAST_SCORE, scores, -1).topk(min(CANDIDATES, len(scores)), 0)
    label = torch.arange(scores.shape[1], device=scores.device).expand_as(place)
    is_left = best.flatten() > 0
    best, place, label = (t.flatten()[is_left] for t in (best, place, label))
    kept = batched_nms(boxes[place], best, label, OVERLAP)
    return listed(boxes[place[kept]], label[kept], best[kept])
