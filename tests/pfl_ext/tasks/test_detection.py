"""Boxes: losses and detections are torchvision's, precision is torchmetrics', and crops take boxes along."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics.detection import MeanAveragePrecision
from torchvision.models.detection import FCOS
from torchvision.models.detection._utils import BoxLinearCoder
from torchvision.models.detection.fcos import FCOSHead

from pfl_ext.data.transforms import Framing, cropped, draw_crops
from pfl_ext.models.detection import places_of
from pfl_ext.tasks.detection import LEAST_SCORE, MOST, OVERLAP, RADIUS, Detection
from pfl_ext.tasks.detection_scores import CLASS, CROWD, FLAGS, NO_BOX, SCORE, Detections

CLASSES, SIDE, ROWS = 3, 64, 5
LEVELS = [(8, 8), (4, 4), (2, 2)]
PLACES = places_of(LEVELS, SIDE, torch.device("cpu"))
TASK = Detection(CLASSES)


def made_boxes(seed: int, n: int = 3, crowds: float = 0.0) -> Tensor:
    """``[n, ROWS, 6]``: image i has up to i boxes, whose areas differ by more than float32 rounds 1e8 to."""
    rng = np.random.default_rng(seed)
    boxes = np.zeros((n, ROWS, 6), np.float32)
    boxes[..., CLASS] = NO_BOX
    for image in range(n):
        areas: list[float] = []
        for row in range(min(image, ROWS)):
            low, sides = rng.uniform(0, SIDE - 8, 2), rng.uniform(4, 48, 2)
            high = np.minimum(low + sides, SIDE)
            area = float(np.prod(high - low))
            if all(abs(area - other) > 32 for other in areas):
                crowd = CROWD * (rng.random() < crowds)
                boxes[image, row] = [*low, *high, rng.integers(CLASSES), crowd]
                areas.append(area)
    return torch.from_numpy(boxes)


def made_outputs(seed: int, n: int = 3) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    own = torch.randn(n, len(PLACES), CLASSES + 5, generator=draw)
    own[..., CLASSES + 1 :] = own[..., CLASSES + 1 :].exp()
    return torch.cat([own, PLACES.expand(n, -1, -1)], 2)


def as_torchvisions(outputs: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    logits, centred, distances, _ = torch.split(outputs, [CLASSES, 1, 4, 5], 2)
    half = PLACES[:, 2:3] / 2
    anchors = torch.cat([PLACES[:, :2] - half, PLACES[:, :2] + half], 1)
    return {"cls_logits": logits, "bbox_regression": distances, "bbox_ctrness": centred}, anchors


@settings(max_examples=20)
@given(seed=st.integers(0, 9999))
def test_the_loss_of_an_image_is_torchvisions_of_it_alone(seed: int) -> None:
    outputs, boxes = made_outputs(seed), made_boxes(seed, crowds=0.3)
    losses = TASK.image_losses(outputs, boxes)
    head: Any = FCOSHead(32, 1, CLASSES, 0)
    theirs: Any = SimpleNamespace(center_sampling_radius=RADIUS, head=head)
    numbers = [a * b for a, b in LEVELS]
    for i in range(len(boxes)):
        mine = boxes[i][(boxes[i, :, CLASS] != NO_BOX) & (boxes[i, :, FLAGS] == 0)]
        target = {"boxes": mine[:, :4], "labels": mine[:, CLASS].long()}
        found, anchors = as_torchvisions(outputs[i : i + 1])
        expected = FCOS.compute_loss(theirs, [target], found, [anchors], numbers)
        assert losses[i].item() == pytest.approx(sum(v.item() for v in expected.values()), rel=1e-5)


def test_an_image_without_boxes_teaches_the_background_and_a_crowd_nothing() -> None:
    outputs, boxes = made_outputs(1).requires_grad_(True), made_boxes(4)
    crowd = boxes.clone()
    crowd[..., FLAGS] = CROWD
    none = torch.full_like(boxes, NO_BOX)
    assert torch.equal(TASK.image_losses(outputs, crowd), TASK.image_losses(outputs, none))
    assert not torch.equal(TASK.image_losses(outputs, boxes), TASK.image_losses(outputs, none))
    (gradient,) = torch.autograd.grad(TASK.loss(outputs, none), outputs)
    assert gradient[..., :CLASSES].all()
    assert not gradient[..., CLASSES:].any()


@settings(max_examples=10)
@given(seed=st.integers(0, 9999))
def test_detections_are_torchvisions(seed: int) -> None:
    outputs = made_outputs(seed, 2)
    _, kept = TASK.scored(outputs, made_boxes(seed, 2))
    chosen: Any = SimpleNamespace(
        score_thresh=LEAST_SCORE,
        topk_candidates=1000,
        nms_thresh=OVERLAP,
        detections_per_img=MOST,
        box_coder=BoxLinearCoder(normalize_by_size=True),
    )
    found, anchors = as_torchvisions(outputs)
    in_levels = {name: [part] for name, part in found.items()}
    expected = FCOS.postprocess_detections(chosen, in_levels, [[anchors]] * 2, [(SIDE, SIDE)] * 2)
    for mine, theirs in zip(kept[:, :MOST], expected):
        rows = mine[mine[:, CLASS] != NO_BOX]
        assert torch.equal(rows[:, CLASS].long(), theirs["labels"])
        torch.testing.assert_close(rows[:, SCORE], theirs["scores"])
        torch.testing.assert_close(rows[:, :4], theirs["boxes"])


def near(boxes: Tensor, seed: int, share: float) -> Tensor:
    """Detections ``[n, MOST, 6]``: this share of the boxes, moved a little, and some that are wrong."""
    rng = np.random.default_rng(seed)
    out = np.zeros((len(boxes), MOST, 6), np.float32)
    out[..., CLASS] = NO_BOX
    for i, image in enumerate(boxes.numpy()):
        row = 0
        for box in (*image[image[:, CLASS] != NO_BOX], *made_boxes(seed + i, 3)[2].numpy()[:2]):
            if rng.random() < share and box[CLASS] != NO_BOX:
                corners = np.clip(box[:4] + rng.normal(0, 2, 4), 0, SIDE)
                out[i, row] = [
                    *np.minimum(corners[:2], corners[2:] - 1),
                    *corners[2:],
                    box[CLASS],
                    rng.random(),
                ]
                row += 1
    return torch.from_numpy(out)


def gathered(found: Tensor, truth: Tensor) -> Detections:
    rows = np.arange(len(truth))
    return TASK.statistics(len(truth), rows, [torch.cat([found, truth], 1)], [truth.numpy()])


def as_dicts(boxes: Tensor, last: str) -> list[dict[str, Tensor]]:
    known = [image[image[:, CLASS] != NO_BOX] for image in boxes]
    return [{"boxes": b[:, :4], "labels": b[:, CLASS].long(), last: b[:, 5]} for b in known]


@settings(max_examples=15)
@given(
    seed=st.integers(0, 9999),
    crowds=st.sampled_from([0.0, 0.4, 1.0]),
    share=st.sampled_from([0.0, 0.5, 0.9]),
    absent=st.integers(0, CLASSES),
)
def test_precision_is_that_of_torchmetrics(seed: int, crowds: float, share: float, absent: int) -> None:
    truth = made_boxes(seed, 7, crowds)
    truth[truth[..., CLASS] == absent] = NO_BOX
    found = near(truth, seed, share)
    statistics = gathered(found, truth)
    levels = np.linspace(0, 1, 101).tolist()  # torchmetrics' own are float32, and COCO's are not
    metric = MeanAveragePrecision(class_metrics=True, rec_thresholds=levels)
    target = [{**t, "iscrowd": t["iscrowd"].long()} for t in as_dicts(truth, "iscrowd")]
    metric.update(as_dicts(found, "scores"), target)
    expected = metric.compute()
    columns = TASK.summarise(statistics)
    for name, theirs in (("mAP", "map"), ("mAP50", "map_50")):
        value = max(expected[theirs].item(), 0.0)  # -1 where no class has an object
        assert columns[name] == pytest.approx(100 * value, abs=1e-4), name
    each = expected["map_per_class"].reshape(-1).tolist()
    for number, value in zip(expected["classes"].reshape(-1).tolist(), each):
        mine = statistics.per_class[number]
        assert np.isnan(mine) if value == -1 else mine == pytest.approx(value, abs=1e-6)
    assert statistics.has_objects == bool((~np.isnan(statistics.per_class)).any())


def test_statistics_add_up_over_batches_and_workers_to_those_of_all_images() -> None:
    truth = made_boxes(3, 7, 0.3)
    found = near(truth, 3, 0.7)
    whole = gathered(found, truth)
    kept, rows = torch.cat([found, truth], 1), np.arange(7)
    parts = [
        TASK.statistics(7, rows[part], [kept[part]] if len(rows[part]) else [], [truth[part].numpy()])
        for part in (slice(3, 7), slice(3, 3), slice(0, 3))
    ]
    assert parts[0] + parts[1] + parts[2] == whole
    assert parts[0] != whole
    summed = np.stack([part.to_vector() for part in parts]).sum(0, dtype=np.float32)
    assert parts[1].from_vector(summed) == whole
    assert TASK.summarise(parts[1].from_vector(summed)) == TASK.summarise(whole) != {"mAP": 0, "mAP50": 0}
    with pytest.raises(AssertionError, match="an image was scored twice"):
        _ = (whole + parts[0]).images
    with pytest.raises(AssertionError, match="an image was scored twice"):
        whole.from_vector(whole.to_vector() + parts[0].to_vector())
    alone = whole.only(np.array([5, 6]))
    assert TASK.summarise(alone) == TASK.summarise(gathered(found[5:], truth[5:]))


@pytest.mark.parametrize("stored", [SIDE, SIDE // 2])
def test_boxes_are_compared_in_pixels_of_the_networks_input(stored: int) -> None:
    """A detector that says where the boxes are is right, whatever size images are stored at."""
    truth = made_boxes(8, 4)
    truth[..., :CLASS] *= stored / SIDE
    images = torch.zeros(4, stored, stored, 3, dtype=torch.uint8)
    _, compared = TASK.augment(images, truth, None, Framing(SIDE))
    outputs = made_outputs(8, 4)
    outputs[..., : CLASSES + 1] = -20
    for i, boxes in enumerate(compared):
        for row, box in enumerate(boxes[boxes[:, CLASS] != NO_BOX]):
            at, stride = PLACES[row, :2], PLACES[row, 2]
            far = torch.cat([at - box[:2], box[2:4] - at]) / stride
            outputs[i, row, CLASSES + 1 : CLASSES + 5] = far
            outputs[i, row, [int(box[CLASS]), CLASSES]] = 20.0
    _, kept = TASK.scored(outputs, compared)
    statistics = TASK.statistics(4, np.arange(4), [kept], [truth.numpy()])
    assert TASK.summarise(statistics) == pytest.approx({"mAP": 100, "mAP50": 100})


def test_outputs_that_are_no_numbers_are_said_and_not_scored() -> None:
    outputs, boxes = made_outputs(4), made_boxes(4)
    outputs[1, 7, 2] = float("nan")
    _, kept = TASK.scored(outputs, boxes)
    with pytest.raises(ValueError, match="1 of 3 scores are NaN: the model has diverged"):
        TASK.summarise(gathered(kept[:, :MOST], boxes))


def test_users_scores_are_their_images_and_nothing_where_there_is_no_object() -> None:
    truth = made_boxes(5, 4)
    found = near(truth, 5, 0.9)
    mine = TASK.user_columns(torch.cat([found, truth], 1)[2:], truth[2:].numpy())
    assert mine == TASK.summarise(gathered(found[2:], truth[2:]))
    crowd = truth[2:].clone()
    crowd[..., FLAGS] = CROWD
    for none in (truth[:1], crowd):
        kept = torch.cat([found[: len(none)], none], 1)
        assert all(np.isnan(value) for value in TASK.user_columns(kept, none.numpy()).values())
    empty = TASK.statistics(4, np.arange(0), [], [truth[:0].numpy()])
    assert TASK.summarise(empty) == {"mAP": 0.0, "mAP50": 0.0}


def test_a_class_that_is_none_of_them_is_refused() -> None:
    boxes = made_boxes(6).numpy()
    assert torch.equal(TASK.collate(boxes), torch.from_numpy(boxes))
    boxes[1, 0, CLASS] = CLASSES
    with pytest.raises(ValueError, match="a box has the class 3, of 3: check the file"):
        TASK.collate(boxes)
    with pytest.raises(ValueError, match="a detector has at least 1"):
        Detection(0)


@settings(max_examples=30)
@given(seed=st.integers(0, 9999), crop=st.sampled_from(["crop", "padded", "resized", None]))
def test_crop_and_flips_take_a_box_along_and_one_that_is_left_outside_goes(seed: int, crop: Any) -> None:
    """A white rectangle on black lies in its box, and fills it up to the pixels that scaling makes grey."""
    rng = np.random.default_rng(seed)
    low = rng.integers(0, 24, (4, 2))
    high = np.minimum(low + rng.integers(2, 20, (4, 2)), 32)
    images = torch.zeros(4, 32, 32, 3, dtype=torch.uint8)
    boxes = torch.full((4, 2, 6), float(NO_BOX))
    for i, ((left, top), (right, bottom)) in enumerate(zip(low.tolist(), high.tolist())):
        images[i, top:bottom, left:right] = 255
        boxes[i, 0] = torch.tensor([left, top, right, bottom, i % CLASSES, CROWD])
    crops = None if crop is None else torch.from_numpy(draw_crops(rng, 4, 32, 24, crop, "both"))
    framing = Framing(24, crop in ("crop", "padded"))
    pixels, moved = TASK.augment(images, boxes, crops, framing)
    if crops is not None:
        assert torch.equal(pixels, cropped(images, crops, 24, exact=framing.exact))
    assert (moved[:, 1, CLASS] == NO_BOX).all()
    at = torch.arange(24.0) + 0.5
    y, x = torch.meshgrid(at, at, indexing="ij")
    for white, (left, top, right, bottom, label, flags) in zip(pixels[:, 0] > 0.99, moved[:, 0].tolist()):
        if label == NO_BOX:
            assert not white.any()
            continue
        assert flags == CROWD
        assert 0 <= left < right <= 24
        assert 0 <= top < bottom <= 24
        inside = (x > left) & (x < right) & (y > top) & (y < bottom)
        core = (x > left + 2) & (x < right - 2) & (y > top + 2) & (y < bottom - 2)
        assert not (white & ~inside).any()
        assert white[core].all()
