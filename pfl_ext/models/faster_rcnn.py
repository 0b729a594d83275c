"""Faster R-CNN: a detector that proposes boxes, and then classifies and refines each of them.

``model.arch`` is ``fasterrcnn_`` and the encoder's name, as ``fasterrcnn_efficientnet_lite0``. Over a ResNet
the detector is as wide as torchvision's, over the networks for small devices it is narrower.

Shape letters: B images of a batch, S the side of the input, A anchors of an image, P proposals of an image, R
proposals of all images together, C classes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import MultiScaleRoIAlign, batched_nms
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool

from pfl_ext.models.decoders import Architecture, Decoder, targets_of_images
from pfl_ext.models.dropout import OF_ANCHORS, OF_PROPOSALS, draws_of_images, keys_of_images
from pfl_ext.models.encoders import FORMS
from pfl_ext.models.small import NETWORKS
from pfl_ext.tasks.box_coding import PLAIN, clipped, decoded, objects
from pfl_ext.tasks.detection_rcnn import (
    IGNORED,
    NOT_THERE,
    PROPOSALS,
    PROPOSALS_SAMPLED,
    PROPOSALS_SHARE,
    FasterRCNNDetection,
    Parts,
    joined,
    proposal_labels,
    sampled,
)
from pfl_ext.tasks.detection_scores import CLASS

FIRST = 1
"""Index of the first of the encoder's five maps that is used: that of stride 4."""
SIDES, RATIOS = (16, 32, 64, 128, 256), (0.5, 1.0, 2.0)
"""Sides of each map's anchors in pixels, and ratios of height and width. torchvision's sides, for images of
800 pixels, are twice as large."""
CANONICAL = 112
"""Side in pixels of a proposal that is read from the map of stride 16; torchvision's is twice that."""
COMPARED, OVERLAP, LEAST_SIDE = 1000, 0.7, 1e-3
"""For proposals: how many of a map are compared, the IoU above which the one with the lower score is dropped,
and the least side in pixels."""
POOLED = 7
"""Rows and columns to which a proposal's part of a map is resized."""
WIDE, NARROW = (256, 1024), (96, 256)
"""Channels of the maps, and units of the second stage: torchvision's, and for small networks."""


class FasterRCNN(Decoder):
    """A pyramid of five maps; a network that proposes boxes on each; a network for the proposals' classes.

    Ren et al. 2015 (arXiv 1506.01497) over a pyramid (Lin et al. 2017, arXiv 1612.03144). Modules and method
    are torchvision's, except for the constants of this file and of `pfl_ext.tasks.detection_rcnn`.

    In training the true boxes are added to the proposals (`pfl_ext.models.decoders.taught`), and only a
    sample of objects and background goes through the second stage. The sample follows from the images' keys
    (`pfl_ext.models.dropout`), which are functions of (seed, round, user, step), and from the anchor of each
    proposal. So it depends neither on other images of the batch nor on the order of scores. Without keys, as
    in evaluation, all draws are those of the key 0.

    Its outputs are those of `pfl_ext.tasks.detection_rcnn.joined`. No gradient goes through the corners of
    proposals.

    Args:
        channels: channels of the encoder's maps.
        num_classes: C.
        widths: channels of the maps, and units of the second stage.
    """

    by_class: ClassVar[str] = "predictor"

    def __init__(self, channels: Sequence[int], num_classes: int, widths: tuple[int, int]) -> None:
        super().__init__()
        width, units = widths
        self.pyramid = FeaturePyramidNetwork(list(channels[FIRST:]), width, extra_blocks=LastLevelMaxPool())
        self.anchors = AnchorGenerator(tuple((side,) for side in SIDES), (RATIOS,) * len(SIDES))
        self.second = TwoMLPHead(width * POOLED**2, units)
        self.predictor = FastRCNNPredictor(units, num_classes + 1)
        self.first = RPNHead(width, len(RATIOS))  # last: not to end in a linear layer

    def forward(self, maps: Sequence[Tensor], images: Tensor) -> Tensor:
        """See `Decoder.forward`."""
        named = OrderedDict((str(number), x) for number, x in enumerate(maps[FIRST:]))
        pyramid = self.pyramid(named)
        levels, (batch, side) = list(pyramid.values()), (len(images), images.shape[3])
        objectness, shifts = ([_rows(x, n) for x in found] for found, n in zip(self.first(levels), (1, 4)))
        sizes = [x.shape[1] for x in objectness]
        scores, moves = torch.cat(objectness, 1)[..., 0].float(), torch.cat(shifts, 1).float()
        with torch.autocast(images.device.type, enabled=False):
            anchors = self._anchors(levels, side).expand(batch, -1, -1)
            draws = draws_of_images(OF_PROPOSALS, anchors.shape[1] + _most(targets_of_images()), images)
            proposals, of_proposals = _proposed(scores.detach(), moves.detach(), anchors, sizes, side, draws)
            proposals, of_proposals = _near_the_truth(proposals, of_proposals, draws[:, anchors.shape[1] :])
            there = of_proposals != NOT_THERE
            features = {name: pyramid[name] for name in named}
            if (kind := levels[0].dtype) != torch.float64:
                features, kind = {name: x.float() for name, x in features.items()}, torch.float32
            rois = [boxes[mine].to(kind) for boxes, mine in zip(proposals, there)]
            pool = MultiScaleRoIAlign([*named], POOLED, 2, canonical_scale=CANONICAL)
            looked_at = pool(features, rois, [(side, side)] * batch)
        logits, offsets = self.predictor(self.second(looked_at))
        parts = Parts(
            torch.full((batch,), side, device=images.device),
            scores,
            moves,
            anchors,
            draws_of_images(OF_ANCHORS, anchors.shape[1], images),
            _spread(logits, there),
            _spread(offsets, there).view(batch, PROPOSALS, -1, 4),
            proposals,
            of_proposals,
        )
        return joined(parts)

    def _anchors(self, levels: Sequence[Tensor], side: int) -> Tensor:
        """The anchors' corners in pixels, ``[A, 4]`` float32. The cells of a map divide the image evenly.

        torchvision rounds the step between cells down to whole pixels, as its images are padded to multiples.
        """
        self.anchors.set_cell_anchors(torch.float32, levels[0].device)
        sizes = [(x.shape[2], x.shape[3]) for x in levels]
        steps: Any = [(side / height, side / width) for height, width in sizes]  # declared as tensors
        return torch.cat(self.anchors.grid_anchors(sizes, steps))


def _rows(x: Tensor, columns: int) -> Tensor:
    """``[B, n * columns, h, w]`` -> ``[B, h * w * n, columns]``, in the order of anchors."""
    n, wide, h, w = x.shape
    return x.reshape(n, wide // columns, columns, h, w).permute(0, 3, 4, 1, 2).flatten(1, 3)


def _spread(values: Tensor, there: Tensor) -> Tensor:
    """``[R, n]`` for the existing rows -> ``[B, P, n]`` float32, 0 elsewhere."""
    out = values.new_zeros((*there.shape, values.shape[1]), dtype=torch.float32)
    return out.masked_scatter(there[..., None].expand_as(out), values.float())


def _most(targets: Tensor | None) -> int:
    return 0 if targets is None else targets.shape[1]


def _proposed(
    scores: Tensor, moves: Tensor, anchors: Tensor, sizes: Sequence[int], side: int, draws: Tensor
) -> tuple[Tensor, Tensor]:
    """The proposals of each image, ``[B, P, 4]``, and the draw of each, ``[B, P]``; filled up to P rows."""
    found, kept_draws = [], []
    bounds = torch.tensor([0, *sizes]).cumsum(0).tolist()
    for score, boxes, drawn in zip(scores, clipped(decoded(moves, anchors, PLAIN), side), draws):
        best = [score[a:b].topk(min(COMPARED, b - a)).indices + a for a, b in pairwise(bounds)]
        level = torch.cat([torch.full_like(each, number) for number, each in enumerate(best)])
        place = torch.cat(best)
        is_large = (boxes[place, 2:] - boxes[place, :2] >= LEAST_SIDE).all(1)
        place, level = place[is_large], level[is_large]
        kept = place[batched_nms(boxes[place], score[place].sigmoid(), level, OVERLAP)[:PROPOSALS]]
        found.append(_filled(boxes[kept], 0.0))
        kept_draws.append(_filled(drawn[kept], NOT_THERE))
    corners, of_rows = torch.stack(found), torch.stack(kept_draws)
    return _without_fillers(corners, of_rows), of_rows


def _filled(rows: Tensor, value: float) -> Tensor:
    out = rows.new_full((PROPOSALS, *rows.shape[1:]), value)
    out[: len(rows)] = rows
    return out


def _without_fillers(corners: Tensor, draws: Tensor) -> Tensor:
    """Give filler rows a box of one pixel, so that results computed from them are finite."""
    one = corners.new_tensor([0.0, 0.0, 1.0, 1.0])
    return torch.where((draws == NOT_THERE)[..., None], one, corners)


def _near_the_truth(proposals: Tensor, draws: Tensor, of_truth: Tensor) -> tuple[Tensor, Tensor]:
    """In training a sample of proposals and true boxes, with sampled rows first; else all proposals."""
    targets = targets_of_images()
    if targets is None:
        return proposals, draws
    assert keys_of_images() is not None, "images of training bring keys"
    true = targets[..., :CLASS].to(proposals.dtype)
    boxes = torch.cat([proposals, true], 1)
    draws = torch.cat([draws, torch.where(objects(targets), of_truth, NOT_THERE)], 1)
    labels = torch.where(draws == NOT_THERE, IGNORED, proposal_labels(boxes, targets)[0])
    _, kept = sampled(labels, draws, PROPOSALS_SAMPLED, PROPOSALS_SHARE)
    draws = torch.where(kept, draws, NOT_THERE)
    order = (~kept).to(torch.uint8).argsort(dim=1, stable=True)[:, :PROPOSALS]
    draws = draws.gather(1, order)
    return _without_fillers(boxes.gather(1, order[..., None].expand(-1, -1, 4)), draws), draws


for _encoder in FORMS:
    _widths = WIDE if _encoder.startswith("resnet") else NARROW
    _network = Architecture(
        partial(FasterRCNN, widths=_widths), _encoder, "boxes", task=FasterRCNNDetection, drawing=True
    )
    NETWORKS.add(f"fasterrcnn_{_encoder}", _network)
