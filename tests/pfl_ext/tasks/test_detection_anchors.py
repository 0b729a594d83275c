"""SSD and Faster R-CNN: each image's losses and detections are torchvision's of that image alone."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder, Matcher, SSDMatcher
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.models.detection.ssd import SSD
from torchvision.ops import box_iou

from pfl_ext.tasks import detection_rcnn as rcnn
from pfl_ext.tasks import detection_ssd as ssd
from pfl_ext.tasks.box_coding import PLAIN, USUAL, decoded, encoded
from pfl_ext.tasks.detection import MOST
from pfl_ext.tasks.detection_scores import CLASS, CROWD, FLAGS, NO_BOX, SCORE
from tests.pfl_ext.tasks.test_detection import CLASSES, SIDE, made_boxes

ANCHORS = 400
OF_SSD, OF_RCNN = ssd.SSDDetection(CLASSES), rcnn.FasterRCNNDetection(CLASSES)


def made_anchors(draw: torch.Generator, boxes: Tensor, number: int) -> Tensor:
    """``[n, number, 4]`` within the image, some of them near true boxes."""
    low = torch.rand(len(boxes), number, 2, generator=draw) * (SIDE - 12)
    high = (low + 4 + torch.rand(len(boxes), number, 2, generator=draw) * 40).clamp(max=SIDE)
    anchors = torch.cat([low, high], 2)
    for image, known in zip(anchors, boxes):
        mine = known[known[:, CLASS] != NO_BOX][:, :4]
        for row, box in enumerate(mine.repeat_interleave(5, 0)):
            image[row] = box + torch.randn(4, generator=draw) * 2
    anchors = anchors.clamp(0, SIDE)
    return torch.cat([anchors[..., :2], anchors[..., 2:].maximum(anchors[..., :2] + 1)], 2)


def mine(boxes: Tensor) -> dict[str, Tensor]:
    """The objects of an image, in torchvision's form; classes from 1 on."""
    kept = boxes[(boxes[:, CLASS] != NO_BOX) & (boxes[:, FLAGS] == 0)]
    return {"boxes": kept[:, :4], "labels": kept[:, CLASS].long() + 1}


def ssd_outputs(seed: int, boxes: Tensor) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    n = len(boxes)
    logits = torch.randn(n, ANCHORS, CLASSES + 1, generator=draw) * 2
    offsets, anchors = torch.randn(n, ANCHORS, 4, generator=draw), made_anchors(draw, boxes, ANCHORS)
    return torch.cat([logits, offsets, anchors, torch.full((n, ANCHORS, 1), float(SIDE))], 2)


def ssd_parts(outputs: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    logits, offsets, anchors, _ = torch.split(outputs, [CLASSES + 1, 4, 4, 1], 1)
    return {"cls_logits": logits[None], "bbox_regression": offsets[None]}, anchors


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 9999))
def test_the_loss_of_ssd_is_torchvisions_of_each_image(seed: int) -> None:
    boxes = made_boxes(seed, crowds=0.3)
    outputs = ssd_outputs(seed, boxes)
    losses = OF_SSD.image_losses(outputs, boxes)
    theirs: Any = SimpleNamespace(box_coder=BoxCoder(USUAL), neg_to_pos_ratio=3.0)
    for i, image in enumerate(outputs):
        found, anchors = ssd_parts(image)
        target = mine(boxes[i])
        if len(target["boxes"]):
            matches = SSDMatcher(0.5)(box_iou(target["boxes"], anchors))
        else:
            matches = torch.full((ANCHORS,), -1)
        expected = SSD.compute_loss(theirs, [target], found, [anchors], [matches])
        assert losses[i].item() == pytest.approx(sum(v.item() for v in expected.values()), rel=1e-5)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 9999))
def test_the_detections_of_ssd_are_torchvisions(seed: int) -> None:
    boxes = made_boxes(seed, 2)
    outputs = ssd_outputs(seed, boxes)
    _, kept = OF_SSD.scored(outputs, boxes)
    chosen: Any = SimpleNamespace(
        box_coder=BoxCoder(USUAL),
        score_thresh=ssd.LEAST_SCORE,
        topk_candidates=ssd.CANDIDATES,
        nms_thresh=ssd.OVERLAP,
        detections_per_img=MOST,
    )
    for image, rows in zip(outputs, kept[:, :MOST]):
        found, anchors = ssd_parts(image)
        (expected,) = SSD.postprocess_detections(chosen, found, [anchors], [(SIDE, SIDE)])
        compared(rows, expected["boxes"], expected["labels"] - 1, expected["scores"])


def compared(rows: Tensor, boxes: Tensor, labels: Tensor, scores: Tensor) -> None:
    found = rows[rows[:, CLASS] != NO_BOX]
    assert len(found) == len(boxes)
    assert torch.equal(found[:, CLASS].long(), labels)
    torch.testing.assert_close(found[:, SCORE], scores)
    torch.testing.assert_close(found[:, :4], boxes, rtol=0, atol=1e-3)


def rcnn_parts(seed: int, boxes: Tensor, there: int = rcnn.PROPOSALS) -> rcnn.Parts:
    draw = torch.Generator().manual_seed(seed)
    n, rows = len(boxes), rcnn.PROPOSALS
    draws = torch.rand(n, rows, generator=draw)
    draws[:, there:] = rcnn.NOT_THERE
    anchors = made_anchors(draw, boxes, ANCHORS)
    return rcnn.Parts(
        torch.full((n,), float(SIDE)),
        torch.randn(n, ANCHORS, generator=draw),
        torch.randn(n, ANCHORS, 4, generator=draw),
        anchors,
        torch.rand(n, ANCHORS, generator=draw),
        torch.randn(n, rows, CLASSES + 1, generator=draw) * 2,
        torch.randn(n, rows, CLASSES + 1, 4, generator=draw),
        made_anchors(draw, boxes, rows),
        draws,
    )


def drawn(draws: Tensor, count: int, share: float, labels: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """torchvision's balanced sampler, that takes the lowest draws in the place of a permutation's first."""
    (label,) = labels
    positive, negative = torch.where(label >= 1)[0], torch.where(label == 0)[0]
    positive = positive[draws[positive].argsort()][: int(count * share)]
    negative = negative[draws[negative].argsort()][: count - len(positive)]
    masks = [torch.zeros_like(label, dtype=torch.uint8) for _ in range(2)]
    masks[0][positive], masks[1][negative] = 1, 1
    return [masks[0]], [masks[1]]


def theirs_of_anchors(parts: rcnn.Parts, i: int, target: dict[str, Tensor]) -> float:
    their: Any = SimpleNamespace(
        box_similarity=box_iou,
        proposal_matcher=Matcher(rcnn.IS_OBJECT, rcnn.IS_BACKGROUND, allow_low_quality_matches=True),
        fg_bg_sampler=partial(drawn, parts.anchor_draws[i], rcnn.ANCHORS_SAMPLED, rcnn.ANCHORS_SHARE),
    )
    labels, matched = RegionProposalNetwork.assign_targets_to_anchors(their, [parts.anchors[i]], [target])
    at = labels[0] > 0
    wanted = torch.zeros(ANCHORS, 4)
    wanted[at] = BoxCoder(PLAIN).encode_single(matched[0][at], parts.anchors[i][at])
    both = RegionProposalNetwork.compute_loss(
        their, parts.objectness[i][:, None], parts.shifts[i], labels, [wanted]
    )
    return float(sum(loss.item() for loss in both))


def theirs_of_proposals(parts: rcnn.Parts, i: int, target: dict[str, Tensor], there: int) -> float:
    sampler = partial(drawn, parts.draws[i], rcnn.PROPOSALS_SAMPLED, rcnn.PROPOSALS_SHARE)
    their: Any = SimpleNamespace(
        check_targets=lambda targets: None,
        add_gt_proposals=lambda proposals, boxes: proposals,  # they are in the network, not in the loss
        proposal_matcher=Matcher(rcnn.IN_SECOND, rcnn.IN_SECOND, allow_low_quality_matches=False),
        fg_bg_sampler=sampler,
        box_coder=BoxCoder(USUAL),
    )
    their.assign_targets_to_proposals = partial(RoIHeads.assign_targets_to_proposals, their)
    their.subsample = partial(RoIHeads.subsample, their)
    proposals = parts.proposals[i, :there]
    labels = their.assign_targets_to_proposals([proposals], [target["boxes"]], [target["labels"]])[1]
    masks = sampler(labels)
    at = torch.where(masks[0][0] | masks[1][0])[0]
    found = RoIHeads.select_training_samples(their, [proposals], [target])
    both = fastrcnn_loss(parts.logits[i][at], parts.offsets[i][at].flatten(1), found[2], found[3])
    return float(sum(loss.item() for loss in both))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 9999), there=st.sampled_from([40, 150, rcnn.PROPOSALS]))
def test_the_loss_of_faster_rcnn_is_torchvisions_of_each_image(seed: int, there: int) -> None:
    boxes = made_boxes(seed, crowds=0.3)
    parts = rcnn_parts(seed, boxes, there)
    outputs = rcnn.joined(parts)
    for mine_again, known in zip(rcnn.split(outputs, CLASSES), parts):
        assert torch.equal(mine_again, known)
    losses = OF_RCNN.image_losses(outputs, boxes)
    for i in range(len(boxes)):
        target = mine(boxes[i])
        expected = theirs_of_anchors(parts, i, target) + theirs_of_proposals(parts, i, target, there)
        assert losses[i].item() == pytest.approx(expected, rel=1e-5)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 9999))
def test_the_detections_of_faster_rcnn_are_torchvisions(seed: int) -> None:
    boxes = made_boxes(seed, 2)
    parts = rcnn_parts(seed, boxes, there=120)
    _, kept = OF_RCNN.scored(rcnn.joined(parts), boxes)
    chosen: Any = SimpleNamespace(
        box_coder=BoxCoder(USUAL),
        score_thresh=rcnn.LEAST_SCORE,
        nms_thresh=rcnn.OVERLAP,
        detections_per_img=MOST,
    )
    for i, rows in enumerate(kept[:, :MOST]):
        corners, scores, labels = RoIHeads.postprocess_detections(
            chosen,
            parts.logits[i, :120],
            parts.offsets[i, :120].flatten(1),
            [parts.proposals[i, :120]],
            [(SIDE, SIDE)],
        )
        compared(rows, corners[0], labels[0] - 1, scores[0])


@pytest.mark.parametrize("kind", ["ssd", "rcnn"])
def test_a_crowd_and_an_image_without_boxes_have_losses_alike_and_finite_gradients(kind: str) -> None:
    boxes = made_boxes(4)
    crowd, none = boxes.clone(), torch.full_like(boxes, NO_BOX)
    crowd[..., FLAGS] = CROWD
    outputs = ssd_outputs(1, boxes) if kind == "ssd" else rcnn.joined(rcnn_parts(1, boxes, there=50))
    task = OF_SSD if kind == "ssd" else OF_RCNN
    outputs.requires_grad_(True)
    assert torch.equal(task.image_losses(outputs, crowd), task.image_losses(outputs, none))
    assert not torch.equal(task.image_losses(outputs, boxes), task.image_losses(outputs, none))
    for truth in (boxes, none):
        (gradient,) = torch.autograd.grad(task.loss(outputs, truth), outputs)
        assert torch.isfinite(gradient).all()
        assert gradient.any() == (kind == "rcnn" or truth is boxes)


@given(seed=st.integers(0, 9999), share=st.sampled_from([0.25, 0.5]))
def test_a_sample_has_its_size_and_is_its_own_sample(seed: int, share: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(-1, 3, (3, 80), generator=draw)
    draws = torch.rand(3, 80, generator=draw)
    is_object, both = rcnn.sampled(labels, draws, 24, share)
    assert (is_object.sum(1) == (labels > 0).sum(1).clamp(max=int(share * 24))).all()
    background = (24 - is_object.sum(1)).minimum((labels == 0).sum(1))
    assert torch.equal((both & ~is_object).sum(1), background)
    assert not (both & (labels < 0)).any()
    again = rcnn.sampled(torch.where(both, labels, -1), draws, 24, share)
    assert torch.equal(again[0], is_object)
    assert torch.equal(again[1], both)


@pytest.mark.parametrize("weights", [PLAIN, USUAL])
def test_offsets_lead_back_to_the_box(weights: tuple[float, float, float, float]) -> None:
    draw = torch.Generator().manual_seed(0)
    boxes, anchors = (made_anchors(draw, made_boxes(1), 30).double() for _ in range(2))
    offsets = encoded(boxes, anchors, weights)
    torch.testing.assert_close(decoded(offsets, anchors, weights), boxes)
    theirs = BoxCoder(weights).encode_single(boxes[1].float(), anchors[1].float())
    torch.testing.assert_close(offsets[1].float(), theirs, rtol=1e-4, atol=1e-4)


def test_outputs_that_are_no_numbers_are_said() -> None:
    boxes = made_boxes(4)
    for task, outputs in ((OF_SSD, ssd_outputs(2, boxes)), (OF_RCNN, rcnn.joined(rcnn_parts(2, boxes)))):
        outputs[1, 3] = float("nan")
        _, kept = task.scored(outputs, boxes)
        rows = torch.arange(3).numpy()
        with pytest.raises(ValueError, match="1 of 3 scores are NaN: the model has diverged"):
            task.summarise(task.statistics(3, rows, [kept], [boxes.numpy()]))
