"""Masks: the loss against float64, scores against torchmetrics, crops that take the mask along."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassJaccardIndex,
    MulticlassSpecificity,
)

from pfl_ext.data.transforms import Framing, cropped, draw_crops
from pfl_ext.tasks.losses import TrainingLoss
from pfl_ext.tasks.segmentation import VOID, Confusion, Segmentation

CLASSES = 5
TASK = Segmentation(CLASSES)


def made(
    seed: int, n: int = 4, side: int = 6, present: int = CLASSES, void: float = 0.2
) -> tuple[Tensor, Tensor]:
    """Logits, and masks of the first classes with void pixels."""
    draw = torch.Generator().manual_seed(seed)
    outputs = 3 * torch.randn(n, CLASSES, side, side, generator=draw)
    masks = torch.randint(present, (n, side, side), generator=draw, dtype=torch.uint8)
    masks[torch.rand(masks.shape, generator=draw) < void] = VOID
    return outputs, masks


def confusion(outputs: Tensor, masks: Tensor) -> Confusion:
    kept = TASK.scored(outputs, masks)[1]
    return TASK.statistics(len(masks), np.arange(len(masks)), [kept], [masks.numpy()])


def test_the_loss_of_an_image_is_the_mean_over_its_pixels_with_a_class() -> None:
    outputs, masks = made(0)
    losses = TASK.image_losses(outputs, masks)
    logits = outputs.double().numpy()
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    for i, mask in enumerate(masks.numpy()):
        rows, columns = np.nonzero(mask != VOID)
        expected = -logs[i, mask[rows, columns], rows, columns].mean()
        assert losses[i].item() == pytest.approx(expected, rel=8 * 2.0**-24 * len(rows))


@pytest.mark.parametrize("smoothing", [0.1, 0.9])
def test_smoothed_losses_are_torchs_image_by_image_and_void_has_none(smoothing: float) -> None:
    outputs, masks = made(3)
    outputs.requires_grad_(True)
    masks[2] = VOID
    task = TASK.trained_by(TrainingLoss(label_smoothing=smoothing))
    losses = task.image_losses(outputs, masks)
    for i in (0, 1, 3):
        theirs = F.cross_entropy(
            outputs[i : i + 1].double(), masks[i : i + 1].long(), ignore_index=VOID, label_smoothing=smoothing
        )
        assert losses[i].item() == pytest.approx(theirs.item(), rel=8 * 2.0**-24 * masks[i].numel())
    assert losses[2].item() == 0
    (gradient,) = torch.autograd.grad(losses.sum(), outputs)
    assert not gradient.permute(0, 2, 3, 1)[masks == VOID].any()
    assert gradient.permute(0, 2, 3, 1)[masks != VOID].any(1).all()
    outputs = outputs.detach()
    assert not torch.equal(losses, TASK.image_losses(outputs, masks))
    for smoothed, plain in zip(task.scored(outputs, masks), TASK.scored(outputs, masks)):
        assert torch.equal(smoothed, plain)


def test_an_image_of_void_has_no_loss_and_no_gradient_and_still_its_share() -> None:
    outputs, masks = made(1)
    masks[1] = VOID
    outputs.requires_grad_(True)
    losses = TASK.image_losses(outputs, masks)
    settled, shares = TASK.settled(masks)
    assert settled is masks
    assert shares.tolist() == [1 / 4] * 4
    assert losses[1].item() == 0
    (gradient,) = torch.autograd.grad((losses * shares).sum(), outputs)
    assert not gradient[1].any()
    assert gradient[0].any()
    assert not gradient.movedim(1, -1)[masks == VOID].any()


@settings(max_examples=25)
@given(seed=st.integers(0, 9999), present=st.integers(1, CLASSES), void=st.sampled_from([0.0, 0.3, 0.95]))
def test_scores_are_those_of_torchmetrics(seed: int, present: int, void: float) -> None:
    outputs, masks = made(seed, present=present, void=void)
    masks[0, 0, 0] = 0
    found = confusion(outputs, masks)
    columns = TASK.summarise(found)
    classes = masks.long()
    matrix = MulticlassConfusionMatrix(CLASSES, ignore_index=VOID)(outputs, classes)
    assert np.array_equal(found.counts[:, :-1], matrix.numpy())
    for name, metric in {
        "mIoU": MulticlassJaccardIndex(CLASSES, average="macro", ignore_index=VOID),
        "fwIoU": MulticlassJaccardIndex(CLASSES, average="weighted", ignore_index=VOID),
        "pixel accuracy": MulticlassAccuracy(CLASSES, average="micro", ignore_index=VOID),
        "Dice": MulticlassF1Score(CLASSES, average="macro", ignore_index=VOID),
    }.items():
        assert columns[name] == pytest.approx(100 * metric(outputs, classes).item(), rel=1e-5), name
    each = MulticlassJaccardIndex(CLASSES, average="none", ignore_index=VOID)(outputs, classes).numpy()
    known = ~np.isnan(found.per_class)
    assert found.per_class[known] == pytest.approx(each[known], rel=1e-6)
    assert not each[~known].any()
    for ours, theirs in ((found.dice, MulticlassF1Score), (found.specificity, MulticlassSpecificity)):
        each = theirs(CLASSES, average="none", ignore_index=VOID)(outputs, classes).numpy()
        known = ~np.isnan(ours)
        assert known.any()
        assert ours[known] == pytest.approx(each[known], rel=1e-6), theirs
    right = matrix.diagonal() / matrix.sum(1)
    assert columns["class accuracy"] == pytest.approx(100 * right.nanmean().item(), rel=1e-5)


def test_the_mean_dice_score_leaves_the_background_out() -> None:
    """By hand: class 1 has 3 pixels, 2 of them are found, 1 more is predicted: 2 * 2 / (3 + 3)."""
    masks = torch.tensor([[[0, 0, 0, 0], [1, 1, 1, VOID]]], dtype=torch.uint8)
    guesses = torch.tensor([[[0, 0, 0, 1], [1, 1, 0, 2]]])
    outputs = torch.nn.functional.one_hot(guesses, CLASSES).permute(0, 3, 1, 2).float()
    plain, medical = Segmentation(CLASSES), Segmentation(CLASSES, background=True)
    assert medical.summarise(confusion(outputs, masks))["Dice"] == pytest.approx(100 * 4 / 6)
    assert plain.summarise(confusion(outputs, masks))["Dice"] == pytest.approx(100 * (6 / 8 + 4 / 6) / 2)
    assert confusion(outputs, masks).specificity[:3] == pytest.approx([2 / 3, 3 / 4, 1])
    kept = medical.scored(outputs[:, :, :1, :3], masks[:, :1, :3])[1]  # neither true nor predicted objects
    columns = medical.user_columns(kept, None)
    assert np.isnan(columns["Dice"])
    assert np.isnan(columns["Dice per image"])
    assert columns["mIoU"] == 100


@settings(max_examples=25)
@given(seed=st.integers(0, 9999), background=st.booleans())
def test_the_dice_score_per_image_is_the_mean_over_images_with_objects(seed: int, background: bool) -> None:
    """Each image by torchmetrics; one is of background alone, and another is all void."""
    outputs, masks = made(seed, n=5, present=3)
    masks[3], outputs[3, 0] = 0, 100
    masks[4] = VOID
    task, first = Segmentation(CLASSES, background=background), int(background)
    kept = task.scored(outputs, masks)[1]
    each = []
    for i in range(4):
        found = task.statistics(1, np.arange(1), [kept[i : i + 1]], [None])
        scores = MulticlassF1Score(CLASSES, average="none", ignore_index=VOID)(
            outputs[i : i + 1], masks[i : i + 1].long()
        ).numpy()
        here = ~np.isnan(found.dice)
        here[:first] = False
        each += [scores[here].mean()] if here.any() else []
    assert len(each) == 4 - first
    whole = task.summarise(task.statistics(5, np.arange(5), [kept[:2], kept[2:]], [None, None]))
    assert whole["Dice per image"] == pytest.approx(100 * np.mean(each), rel=1e-5)


def test_statistics_add_up_over_batches_and_workers_to_those_of_all_images() -> None:
    outputs, masks = made(3, n=7)
    whole = confusion(outputs, masks)
    parts = [confusion(outputs[a:b], masks[a:b]) for a, b in ((0, 3), (3, 3), (3, 7))]
    assert parts[0] + parts[1] + parts[2] == whole
    summed = np.stack([part.to_vector() for part in parts]).sum(0, dtype=np.float32)
    assert parts[1].from_vector(summed) == whole
    assert parts[0] != whole


@settings(max_examples=20)
@given(
    st.lists(
        st.lists(st.integers(0, 2**58), min_size=6, max_size=6).map(lambda c: np.array(c).reshape(2, 3)),
        min_size=1,
        max_size=4,
    )
)
def test_counts_beyond_float32_survive_a_sum_between_workers(counts: list[np.ndarray]) -> None:
    each = [Confusion(part, 2**57 - place, place) for place, part in enumerate(counts)]
    summed = np.stack([part.to_vector() for part in each]).sum(0, dtype=np.float32)
    found = each[0].from_vector(summed)
    assert np.array_equal(found.counts, sum(counts))
    assert (found.dice_sum, found.images) == (
        sum(one.dice_sum for one in each),
        sum(one.images for one in each),
    )


def test_outputs_that_are_no_numbers_are_said_and_not_scored() -> None:
    outputs, masks = made(4, void=0.0)
    outputs[2, 1, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="1 of 144 scores are NaN: the model has diverged"):
        TASK.summarise(confusion(outputs, masks))


def test_users_scores_are_their_images_and_nothing_where_all_is_void() -> None:
    outputs, masks = made(5)
    masks[3] = VOID
    kept = TASK.scored(outputs, masks)[1]
    assert TASK.user_columns(kept[:2], masks[:2]) == TASK.summarise(confusion(outputs[:2], masks[:2]))
    assert all(np.isnan(value) for value in TASK.user_columns(kept[3:], masks[3:]).values())
    empty = confusion(outputs[:0], masks[:0])
    names = ("mIoU", "Dice", "Dice per image", "fwIoU", "pixel accuracy", "class accuracy")
    assert TASK.summarise(empty) == dict.fromkeys(names, 0.0)


@pytest.mark.parametrize("number", [0, 256, -1])
def test_a_mask_has_at_most_255_classes(number: int) -> None:
    with pytest.raises(ValueError, match="a mask has 1 to 255 classes"):
        Segmentation(number)


def test_a_class_that_is_none_of_them_is_refused() -> None:
    masks = made(6)[1].numpy()
    assert torch.equal(TASK.collate(masks), torch.from_numpy(masks))
    masks[1, 2, 3] = CLASSES
    with pytest.raises(ValueError, match="a mask has the class 5, of 5: check the file"):
        TASK.collate(masks)


@pytest.mark.parametrize("padding", ["zero", "reflect"])
@pytest.mark.parametrize("crop", ["crop", "padded"])
def test_crop_and_flips_take_the_mask_along(crop: str, padding: str) -> None:
    """A mask that says what the image shows still does; outside an image it is void."""
    rng = np.random.default_rng(7)
    images = torch.from_numpy(rng.integers(0, CLASSES, (9, 16, 16, 3), np.uint8))
    masks = images[..., 0].clone()
    crops = torch.from_numpy(draw_crops(rng, 9, 16, 14, crop, "both"))  # type: ignore[arg-type]
    framing = Framing(14, True, padding)  # type: ignore[arg-type]
    pixels, moved = TASK.augment(images, masks, crops, framing)
    inside = moved != VOID
    assert torch.equal((pixels[:, 0] * 255).round().to(torch.uint8)[inside], moved[inside])
    assert bool(inside.all()) == (crop == "crop" or padding == "reflect")


@settings(max_examples=30)
@given(seed=st.integers(0, 999), size=st.sampled_from([4, 5, 8, 16]))
def test_a_scaled_mask_lies_under_its_image(seed: int, size: int) -> None:
    """Two classes that are black and white: where the scaled image is far from grey, the mask agrees."""
    rng = np.random.default_rng(seed)
    masks = torch.zeros(1, 16, 16, dtype=torch.uint8)
    masks[:, rng.integers(16) :, rng.integers(16) :] = 1
    images = (masks * 255)[..., None].expand(-1, -1, -1, 3).contiguous()
    for crops in (None, torch.from_numpy(draw_crops(rng, 1, 16, size, "resized", "both"))):
        pixels, moved = TASK.augment(images, masks, crops, Framing(size))
        assert bool((moved <= 1).all())
        clear = (pixels[:, 0] - 0.5).abs() > 0.49
        assert torch.equal(moved[clear], (pixels[:, 0] > 0.5).to(torch.uint8)[clear])
        if crops is not None:
            assert torch.equal(pixels, cropped(images, crops, size))
