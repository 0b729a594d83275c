"""Boxes for detectors with anchors: their overlaps, and offsets from one box to another.

Shape letters: B images of a batch, M true boxes of an image, A anchors or proposals of an image.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pfl_ext.tasks.detection_scores import CLASS, CROWD, FLAGS, NO_BOX

LARGEST = math.log(1000 / 16)
"""Largest log ratio of sides that is decoded, as in torchvision: exp of more is too large."""
Weights = tuple[float, float, float, float]
PLAIN: Weights = (1.0, 1.0, 1.0, 1.0)
USUAL: Weights = (10.0, 10.0, 5.0, 5.0)
"""Factors of offsets: one over their usual deviations (Girshick 2015, arXiv 1504.08083)."""


def objects(targets: Tensor) -> Tensor:
    """``[..., M]``: which rows of true boxes ``[..., M, 6]`` are objects that a detector should find."""
    return (targets[..., CLASS] != NO_BOX) & (targets[..., FLAGS].long() & CROWD == 0)


def overlaps(first: Tensor, second: Tensor) -> Tensor:
    """IoU ``[B, M, A]`` of each pair of boxes ``[B, M, 4]`` and ``[B, A, 4]``; 0 for boxes without area."""
    low = torch.maximum(first[:, :, None, :2], second[:, None, :, :2])
    high = torch.minimum(first[:, :, None, 2:], second[:, None, :, 2:])
    inner = (high - low).clamp(min=0)
    common = inner[..., 0] * inner[..., 1]
    union = _areas(first)[:, :, None] + _areas(second)[:, None] - common
    return common / union.clamp(min=1e-12)


def qualities(targets: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """IoU ``[B, M, A]`` of true boxes ``[B, M, 6]`` with others ``[B, A, 4]``, and which rows are `objects`.

    The IoU of other rows is -1.
    """
    counts = objects(targets)
    return torch.where(counts[..., None], overlaps(targets[..., :CLASS], boxes), -1.0), counts


def chosen(targets: Tensor, number: Tensor) -> Tensor:
    """The row of true boxes ``[B, M, 6]`` with each of these numbers ``[B, A]``: ``[B, A, 6]``."""
    return targets.gather(1, number[..., None].expand(-1, -1, targets.shape[2]))


def _areas(boxes: Tensor) -> Tensor:
    sides = boxes[..., 2:] - boxes[..., :2]
    return sides[..., 0] * sides[..., 1]


def encoded(boxes: Tensor, anchors: Tensor, weights: Weights) -> Tensor:
    """Offsets ``[..., 4]`` from anchors to boxes, ``[..., 4]`` each.

    They are the centre's offsets along x and y in sides of the anchor, and the logarithms of the ratios of
    widths and heights (Girshick et al. 2014, arXiv 1311.2524, appendix C), times the weights.
    """
    middle, sides = _centred(boxes)
    of_anchor, width = _centred(anchors)
    parts = [(middle - of_anchor) / width, (sides / width).log()]
    return torch.cat(parts, -1) * boxes.new_tensor(weights)


def decoded(offsets: Tensor, anchors: Tensor, weights: Weights) -> Tensor:
    """Boxes ``[..., 4]`` to which offsets ``[..., 4]`` lead from anchors; see `encoded`."""
    plain = offsets / offsets.new_tensor(weights)
    of_anchor, width = _centred(anchors)
    middle = of_anchor + plain[..., :2] * width
    half = plain[..., 2:].clamp(max=LARGEST).exp() * width / 2
    return torch.cat([middle - half, middle + half], -1)


def _centred(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Centre and sides, ``[..., 2]`` each."""
    sides = boxes[..., 2:] - boxes[..., :2]
    return boxes[..., :2] + sides / 2, sides


def clipped(boxes: Tensor, side: Tensor | float) -> Tensor:
    """Boxes ``[..., 4]`` cut off at the border of a square image; ``side`` broadcasts to them."""
    return boxes.clamp(min=0).minimum(torch.as_tensor(side, dtype=boxes.dtype, device=boxes.device))
