"""Mixup and CutMix: shares, pairs and boxes are those of the papers, in a user's batch, and repeatable."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pfl_ext.data.mixing import KEYED_COLUMNS, mix, mixed
from pfl_ext.data.sampling import LocalSampling
from pfl_ext.data.transforms import AugmentConfig, draw_crops, draw_keys
from pfl_ext.data.user_images import UserImages
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.tasks.losses import TrainingLoss
from pfl_ext.tasks.single_label import SingleLabel
from tests.pfl_ext.engine.setting import LABELS, small_backbone

SIDE = 10
KINDS: dict[str, dict[str, Any]] = {
    "mixup": {"mixup": 0.7},
    "cutmix": {"cutmix": 1.0},
    "both": {"mixup": 0.7, "cutmix": 1.0},
}


def batch(n: int, seed: int = 0, **alphas: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An input, its labels, its crops, and the mixed labels."""
    rng = np.random.default_rng(seed)
    crops = draw_keys(rng, draw_crops(rng, n, 12, SIDE, "crop", "both"))
    x = torch.rand(n, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))
    labels = torch.eye(LABELS)[torch.arange(n) % LABELS].to(torch.uint8)
    targets, columns = mix(labels, crops, rng, SIDE, AugmentConfig(**alphas))
    return x, labels, torch.from_numpy(columns), targets


def partners(crops: Tensor) -> Tensor:
    return torch.arange(len(crops)) + crops[:, KEYED_COLUMNS].long()


def test_mixup_adds_two_images_and_two_labels_by_one_share() -> None:
    x, labels, crops, targets = batch(7, mixup=0.7)
    others, share = partners(crops), crops[0, KEYED_COLUMNS + 1].double()
    assert sorted(others.tolist()) == list(range(7))
    assert 0.05 < share < 0.95
    got = mixed(x, crops)
    expected = share * x.double() + (1 - share) * x[others].double()
    torch.testing.assert_close(got.double(), expected, atol=2.0**-23, rtol=0)
    of_labels = share * labels.double() + (1 - share) * labels[others].double()
    torch.testing.assert_close(targets.double(), of_labels, atol=2.0**-23, rtol=0)


def test_cutmix_puts_a_box_of_another_image_and_its_part_of_the_label() -> None:
    """Pixel by pixel. Boxes that reach over an edge have a smaller share."""
    cut_off = 0
    for seed in range(40):
        x, labels, crops, targets = batch(5, seed, cutmix=1.0)
        others, (top, left, bottom, right) = partners(crops), map(int, crops[0, KEYED_COLUMNS + 2 :].tolist())
        assert 0 <= top <= bottom <= SIDE
        assert 0 <= left <= right <= SIDE
        cut_off += (bottom - top) % 2 or bottom - top != right - left
        got, rows = mixed(x, crops), range(SIDE)
        inside = torch.tensor([[top <= r < bottom and left <= c < right for c in rows] for r in rows])
        assert torch.equal(got, torch.where(inside, x[others], x))
        share = 1 - inside.double().mean()
        of_labels = share * labels.double() + (1 - share) * labels[others].double()
        torch.testing.assert_close(targets.double(), of_labels, atol=2.0**-23, rtol=0)
    assert 5 < cut_off < 40


def test_a_box_has_the_authors_size() -> None:
    """Half its side is that of ``S sqrt(1 - s)`` in whole pixels, rounded down twice, as in their code."""
    augment, size, sides = AugmentConfig(cutmix=1.0), 200, []
    for seed in range(200):
        rng, again = np.random.default_rng(seed), np.random.default_rng(seed)
        crops = np.zeros((3, KEYED_COLUMNS), np.float32)
        top, left, bottom, right = mix(torch.eye(3), crops, rng, size, augment)[1][
            0, KEYED_COLUMNS + 2 :
        ].tolist()
        again.integers(1)
        half = int(size * math.sqrt(1 - again.beta(1.0, 1.0))) // 2
        assert bottom - top <= 2 * half
        if top > 0 and bottom < size and left > 0 and right < size:
            assert (bottom - top, right - left) == (2 * half, 2 * half)
            sides.append(half)
    assert len(sides) > 30


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_shares_are_drawn_from_beta(alpha: float) -> None:
    """Mean 1/2 and variance ``1 / (4 (2 alpha + 1))``, within 5 deviations of the means of 1,500."""
    rng, crops, n = np.random.default_rng(1), np.zeros((2, KEYED_COLUMNS), np.float32), 1500
    augment, labels = AugmentConfig(mixup=alpha), torch.eye(2)
    found = torch.tensor(
        [float(mix(labels, crops, rng, 8, augment)[1][0, KEYED_COLUMNS + 1]) for _ in range(n)]
    ).double()
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(found.mean() - 0.5) < 5 * math.sqrt(variance / n)
    squares = (found - 0.5).square()
    assert abs(squares.mean() - variance) < 5 * squares.std() / math.sqrt(n)


def test_with_both_a_batch_has_one_of_them_by_equal_chance() -> None:
    boxes = [
        bool((batch(4, seed, mixup=1.0, cutmix=1.0)[2][:, KEYED_COLUMNS + 1] == 1).all())
        for seed in range(200)
    ]
    assert abs(sum(boxes) - 100) < 5 * 7.1


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_alone_stays_as_it_is_to_the_bit(kind: str) -> None:
    for seed in range(10):
        x, labels, crops, targets = batch(1, seed, **KINDS[kind])
        assert torch.equal(mixed(x, crops), x)
        assert torch.equal(targets, labels.float())


@pytest.mark.parametrize("kind", KINDS)
def test_joined_batches_are_mixed_each_in_itself(kind: str) -> None:
    each = [batch(n, seed, **KINDS[kind]) for seed, n in enumerate((3, 1, 8, 2))]
    together = mixed(torch.cat([b[0] for b in each]), torch.cat([b[2] for b in each]))
    assert torch.equal(together, torch.cat([mixed(b[0], b[2]) for b in each]))
    last = each[2][0].contiguous(memory_format=torch.channels_last)
    assert torch.equal(mixed(last, each[2][2]), mixed(each[2][0], each[2][2]))


@pytest.mark.parametrize("kind", KINDS)
def test_images_that_fill_a_batch_up_do_not_reach_others(kind: str) -> None:
    """As in recorded steps: they have the first image's crop, and here no number at all as pixels."""
    for seed in range(20):
        x, _, crops, _ = batch(5, seed, **KINDS[kind])
        filled = torch.cat([x, torch.full((3, *x.shape[1:]), torch.nan)])
        got = mixed(filled, torch.cat([crops, crops[:1].expand(3, -1)]))
        assert torch.equal(got[:5], mixed(x, crops))


def test_without_columns_nothing_is_mixed() -> None:
    x, _, crops, _ = batch(4, **KINDS["both"])
    for fewer in (None, crops[:, :6], crops[:, :KEYED_COLUMNS]):
        assert mixed(x, fewer) is x


def users_batches(number: int = 2, max_steps: int | None = None, **more: Any) -> list[Any]:
    sampling = LocalSampling(num_epochs=2, batch_size=4, input_size=SIDE, **more)
    pixels = np.random.default_rng(5).integers(0, 256, (11, 12, 12, 3)).astype(np.uint8)
    labels = np.eye(LABELS, dtype=np.uint8)[np.arange(11) % LABELS]
    rng = np.random.Generator(np.random.Philox(key=number))
    user = UserImages(pixels, labels, "user", sampling, rng, max_steps=max_steps)
    return [parts for _ in range(2) for parts in user.iter(4)]


def test_a_users_batches_are_mixed_by_its_own_draws_alone() -> None:
    first, again = users_batches(mixup=0.5, cutmix=1.0), users_batches(mixup=0.5, cutmix=1.0)
    assert all(torch.equal(ours, theirs) for one, two in zip(first, again) for ours, theirs in zip(one, two))
    fewer = users_batches(max_steps=4, mixup=0.5, cutmix=1.0)
    assert len(fewer) == 4
    assert all(torch.equal(ours, theirs) for one, two in zip(fewer, first) for ours, theirs in zip(one, two))
    other, plain = users_batches(3, mixup=0.5, cutmix=1.0), users_batches(keys=True)
    assert not any(
        torch.equal(one[2][:, KEYED_COLUMNS + 1], two[2][:, KEYED_COLUMNS + 1])
        for one, two in zip(first, other)
    )
    for (images, targets, crops), (same, labels, keyed) in zip(first, plain):
        assert torch.equal(images, same), "order and crops are those of a user without mixing"
        assert torch.equal(crops[:, :6], keyed[:, :6])
        torch.testing.assert_close(targets.sum(0), labels.float().sum(0))
    assert len({float(crops[0, KEYED_COLUMNS + 1]) for _, _, crops in first}) > 1, "each step draws"


def test_the_loss_is_of_mixed_images_and_scores_are_not() -> None:
    task = SingleLabel().trained_by(TrainingLoss(mixes=True))
    model = ImageClassifier(small_backbone(), input_size=SIDE, task=task)
    images, targets, crops = users_batches(mixup=0.5)[0]
    x, same = model.prepare(images, targets, crops)
    assert same is targets
    assert torch.equal(x, mixed(model.prepare(images, targets, crops[:, :KEYED_COLUMNS])[0], crops))
    with pytest.raises(AssertionError, match="not mixed"):
        model.metrics(images, targets, crops)
    assert torch.equal(model(images, crops), model(images, crops[:, :6]))
