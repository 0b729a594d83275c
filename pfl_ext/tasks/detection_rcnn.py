"""Object detection in two stages by Faster R-CNN: places with an object, then its class and box.

Shape letters: B images of a batch, M rows for the boxes of an image, A anchors of an image, P proposals of an
image, N anchors or proposals, C classes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import batched_nms

from pfl_ext.tasks.box_coding import PLAIN, USUAL, chosen, clipped, decoded, encoded, qualities
from pfl_ext.tasks.detection import Detection, listed
from pfl_ext.tasks.detection_scores import CLASS

PROPOSALS = 300
"""Most proposals of an image (Ren et al., section 4.1)."""
ANCHORS_SAMPLED, ANCHORS_SHARE = 256, 0.5
"""Number of an image's anchors in a loss, and the largest share of anchors with an object (section 3.1.3)."""
PROPOSALS_SAMPLED, PROPOSALS_SHARE = 128, 0.25
"""The same for proposals. Girshick 2015 (arXiv 1504.08083, section 2.3) has 128 of two images; torchvision
has 512 of one larger image."""
IS_OBJECT, IS_BACKGROUND = 0.7, 0.3
"""IoU of an anchor with a true box from which on it belongs to the box; IoU below which it is background."""
IN_SECOND = 0.5
"""IoU of a proposal with a true box from which on it belongs to the box; below, it is background."""
BETA = 1 / 9
"""Where a smooth L1 loss changes from square to linear, as in torchvision."""
LEAST_SCORE, OVERLAP, LEAST_SIDE = 0.05, 0.5, 0.01
"""For detections: least score, IoU above which the lower score is dropped, and least side in pixels."""
NOT_THERE = -1.0
"""The draw of a filler row."""
IGNORED = -1
FIRST = 10
"""Numbers of an anchor: a logit, four offsets, four corners, a draw."""


class Parts(NamedTuple):
    """Outputs of `pfl_ext.models.faster_rcnn.FasterRCNN` by their meaning."""

    side: Tensor  # [B]: S
    objectness: Tensor  # [B, A]: logits
    shifts: Tensor  # [B, A, 4]: offsets of anchors
    anchors: Tensor  # [B, A, 4]: corners
    anchor_draws: Tensor  # [B, A]
    logits: Tensor  # [B, P, C + 1]: of the background first
    offsets: Tensor  # [B, P, C + 1, 4]
    proposals: Tensor  # [B, P, 4]: corners
    draws: Tensor  # [B, P]: in 0..1, or NOT_THERE


def joined(parts: Parts) -> Tensor:
    """One tensor ``[B, 1 + 10 A + P (5 C + 10)]`` float32, as a task's outputs are."""
    first = [parts.objectness[..., None], parts.shifts, parts.anchors, parts.anchor_draws[..., None]]
    second = [parts.logits, parts.offsets.flatten(2), parts.proposals, parts.draws[..., None]]
    flat = [torch.cat([t.float() for t in columns], 2).flatten(1) for columns in (first, second)]
    return torch.cat([parts.side[:, None].float(), *flat], 1)


def split(outputs: Tensor, num_classes: int) -> Parts:
    """The inverse of `joined`."""
    width = 5 * (num_classes + 1) + 5
    of_anchors = outputs.shape[1] - 1 - PROPOSALS * width
    side, first, second = torch.split(outputs, [1, of_anchors, PROPOSALS * width], 1)
    objectness, shifts, anchors, anchor_draws = torch.split(
        first.reshape(len(first), -1, FIRST), [1, 4, 4, 1], 2
    )
    wide = second.reshape(len(second), PROPOSALS, width)
    labels = num_classes + 1
    logits, offsets, proposals, draws = torch.split(wide, [labels, 4 * labels, 4, 1], 2)
    return Parts(
        side[:, 0],
        objectness[..., 0],
        shifts,
        anchors,
        anchor_draws[..., 0],
        logits,
        offsets.reshape(len(offsets), PROPOSALS, labels, 4),
        proposals,
        draws[..., 0],
    )


class FasterRCNNDetection(Detection):
    """Faster R-CNN: losses of anchors' objectness and boxes, and of proposals' classes and boxes.

    Ren et al. 2015 (arXiv 1506.01497), equation 1 and section 3.1.3, and Girshick 2015 (arXiv 1504.08083),
    section 2.3. Matching, sampling and losses are those of torchvision's Faster R-CNN for one image: an
    image's losses are divided by its own number of sampled anchors or proposals, while torchvision divides
    the batch's losses by the batch's number.

    The outputs contain draws, and anchors and proposals with the lowest draws are sampled; nothing is drawn
    here. In evaluation the draws are the same for each image, so that its loss is a function of image and
    model.

    Outputs are those of `pfl_ext.models.faster_rcnn.FasterRCNN`.
    """

    def image_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``[B]``, of outputs of `joined` and boxes ``[B, M, 6]``."""
        parts = split(outputs.float(), self.num_classes)
        return _first_losses(parts, targets) + _second_losses(parts, targets)

    def found(self, outputs: Tensor) -> list[Tensor]:
        """The detections of each image, as in `Detection.found`."""
        parts = split(outputs, self.num_classes)
        boxes = decoded(parts.offsets, parts.proposals[:, :, None], USUAL)[:, :, 1:]
        boxes = clipped(boxes, parts.side[:, None, None, None])
        scores = parts.logits.softmax(2)[..., 1:] * (parts.draws != NOT_THERE)[..., None]
        return [_best(*image) for image in zip(boxes, scores)]


def _first_losses(parts: Parts, targets: Tensor) -> Tensor:
    labels, boxes = anchor_labels(parts.anchors, targets)
    is_object, is_sampled = sampled(labels, parts.anchor_draws, ANCHORS_SAMPLED, ANCHORS_SHARE)
    number = is_sampled.sum(1).clamp(min=1)
    wanted = encoded(torch.where(is_object[..., None], boxes, parts.anchors), parts.anchors, PLAIN)
    of_boxes = F.smooth_l1_loss(parts.shifts, wanted, reduction="none", beta=BETA).sum(2) * is_object
    truth = is_object.to(parts.objectness.dtype)
    of_objects = F.binary_cross_entropy_with_logits(parts.objectness, truth, reduction="none") * is_sampled
    losses: Tensor = (of_boxes.sum(1) + of_objects.sum(1)) / number
    return losses


def _second_losses(parts: Parts, targets: Tensor) -> Tensor:
    labels, boxes = proposal_labels(parts.proposals, targets)
    labels = torch.where(parts.draws == NOT_THERE, IGNORED, labels)
    is_object, is_sampled = sampled(labels, parts.draws, PROPOSALS_SAMPLED, PROPOSALS_SHARE)
    number = is_sampled.sum(1).clamp(min=1)
    classes = labels.clamp(min=0)
    own = parts.offsets.gather(2, classes[..., None, None].expand(-1, -1, 1, 4))[:, :, 0]
    wanted = encoded(torch.where(is_object[..., None], boxes, parts.proposals), parts.proposals, USUAL)
    of_boxes = F.smooth_l1_loss(own, wanted, reduction="none", beta=BETA).sum(2) * is_object
    of_classes = F.cross_entropy(parts.logits.transpose(1, 2), classes, reduction="none") * is_sampled
    losses: Tensor = (of_boxes.sum(1) + of_classes.sum(1)) / number
    return losses


def anchor_labels(anchors: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """1 for an anchor ``[B, N, 4]`` of an object, 0 for the background, -1 between; and the box of each.

    An anchor belongs to an object if they overlap by `IS_OBJECT`, or if no anchor overlaps the object more.
    """
    quality, counts = qualities(targets, anchors)
    best, number = quality.max(1)
    highest = quality.amax(2, keepdim=True)
    is_best = ((quality == highest) & (highest > 0) & counts[..., None]).any(1)
    labels = torch.where(best >= IS_OBJECT, 1, torch.where(best < IS_BACKGROUND, 0, IGNORED))
    return torch.where(is_best, 1, labels), chosen(targets, number)[..., :CLASS]


def proposal_labels(proposals: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The class plus 1 of a proposal ``[B, N, 4]``, 0 for the background, ``[B, N]``; and the box of each."""
    best, number = qualities(targets, proposals)[0].max(1)
    own = chosen(targets, number)
    return torch.where(best >= IN_SECOND, own[..., CLASS].long() + 1, 0), own[..., :CLASS]


def sampled(labels: Tensor, draws: Tensor, count: int, share: float) -> tuple[Tensor, Tensor]:
    """A sample of each image's objects and background: the sampled objects, and all; ``[B, N]`` bool.

    It has at most ``share * count`` objects, and background up to ``count``. Those with the lowest draws are
    taken, so that a sample of a sample is the same.

    Args:
        labels: ``[B, N]``: above 0 for objects, 0 for background, below 0 for rows that are never sampled.
        draws: ``[B, N]`` in 0..1; the first of equal ones counts as lower.
        count: size of a sample.
        share: largest share of objects in it.
    """
    is_object = _lowest(draws, labels > 0, torch.full_like(labels[:, 0], int(share * count)))
    rest = count - is_object.sum(1)
    return is_object, is_object | _lowest(draws, labels == 0, rest)


def _lowest(draws: Tensor, among: Tensor, number: Tensor) -> Tensor:
    order = torch.where(among, draws, torch.inf).argsort(dim=1, stable=True)
    return among & (order.argsort(1) < number[:, None])


def _best(boxes: Tensor, scores: Tensor) -> Tensor:
    """An image's detections, from its boxes ``[P, C, 4]`` and scores ``[P, C]``."""
    labels = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    is_large = (boxes[..., 2:] - boxes[..., :2] >= LEAST_SIDE).all(2)
    kept = (scores > LEAST_SCORE) & is_large
    boxes, scores, labels = boxes[kept], scores[kept], labels[kept]
    order = batched_nms(boxes, scores, labels, OVERLAP)
    return listed(boxes[order], labels[order], scores[order])
