"""Accuracy by counts, and the evaluation of single-label classifiers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pfl.model.pytorch import PyTorchModel
from sklearn.metrics import f1_score
from torch import Tensor, nn

from pfl_ext import evaluation
from pfl_ext.evaluation import LOSS, SCORES, CentralEvaluation
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.tasks.losses import TrainingLoss
from pfl_ext.tasks.multi_label import MultiLabel, WeightedMultiLabel
from pfl_ext.tasks.single_label import SingleLabel
from pfl_ext.tasks.single_label_scores import ClassCounts
from pfl_ext.tasks.task import Task
from tests.pfl_ext.stores import NumberedStore

CLASSES = 5


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60), st.integers(1, 9))
def test_accuracy_is_the_share_of_right_guesses_in_any_batches(
    pairs: list[tuple[int, int]], size: int
) -> None:
    guesses, labels = np.array(pairs).T
    one_hot = np.eye(CLASSES, dtype=np.uint8)[labels]
    total = ClassCounts.from_batch(guesses[:0], one_hot[:0])
    for i in range(0, len(pairs), size):
        total = total + ClassCounts.from_batch(guesses[i : i + size], one_hot[i : i + size])
    assert total == ClassCounts.from_batch(guesses, one_hot)
    assert total.overall_value == pytest.approx(np.mean(guesses == labels))
    means = [np.mean(guesses[labels == c] == c) for c in set(labels.tolist())]
    expected = {
        "accuracy": 100 * np.mean(guesses == labels),
        "C-accuracy": 100 * np.mean(means),
        "macro-F1": 100 * f1_score(labels, guesses, average="macro"),
    }
    assert SingleLabel().summarise(total) == pytest.approx(expected)
    for c in range(CLASSES):
        assert np.isnan(total.per_class[c]) == (c not in labels)


@pytest.mark.parametrize("smoothing", [0.1, 0.9])
def test_smoothed_losses_are_torchs_and_scores_are_without(smoothing: float) -> None:
    draw = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(7, CLASSES, generator=draw)
    labels = torch.arange(7) % CLASSES
    one_hot = nn.functional.one_hot(labels, CLASSES)
    task = SingleLabel().trained_by(TrainingLoss(label_smoothing=smoothing))
    theirs = nn.functional.cross_entropy(logits.double(), labels, reduction="none", label_smoothing=smoothing)
    expected = theirs.numpy()
    assert task.image_losses(logits, one_hot).numpy() == pytest.approx(expected, rel=2.0**-20)
    assert task.loss(logits, one_hot).item() == pytest.approx(expected.mean(), rel=2.0**-20)
    weights = torch.arange(1.0, 8)
    weighted = task.reweighted().loss(logits, one_hot * weights[:, None])
    assert weighted.item() == pytest.approx(np.average(expected, weights=weights), rel=2.0**-20)
    for smoothed, plain in zip(task.scored(logits, one_hot), SingleLabel().scored(logits, one_hot)):
        assert torch.equal(smoothed, plain)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(3, CLASSES))
    module = ImageClassifier(backbone, task=task, input_size=1)
    batch = torch.zeros(7, 1, 1, 3, dtype=torch.uint8), one_hot
    module.task = SingleLabel()
    plain_loss = module.loss(*batch).item()
    module.task = task
    assert module.metrics(*batch)["loss"].overall_value == pytest.approx(plain_loss, rel=2.0**-20)
    assert module.loss(*batch).item() != plain_loss


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("of_classes", [None, torch.arange(1.0, CLASSES + 1)])
def test_the_loss_of_mixed_images_is_the_mixture_of_their_losses(
    smoothing: float, of_classes: Tensor | None
) -> None:
    """With weights of images, too; mixing smoothed labels is smoothing mixed ones."""
    draw = torch.Generator().manual_seed(6)
    logits, labels = 3 * torch.randn(7, CLASSES, generator=draw), torch.arange(7) % CLASSES
    weights, others, share = torch.arange(1.0, 8), torch.tensor([3, 1, 6, 2, 0, 4, 5]), 0.7
    rows = nn.functional.one_hot(labels, CLASSES) * weights[:, None]
    hard = SingleLabel(TrainingLoss(label_smoothing=smoothing, weights=of_classes))
    task = hard.trained_by(TrainingLoss(label_smoothing=smoothing, weights=of_classes, mixes=True))
    own, other = (hard.image_losses(logits, targets) for targets in (rows, rows[others]))
    expected = (share * weights * own + (1 - share) * weights[others] * other).sum() / weights.sum()
    found = task.loss(logits, share * rows + (1 - share) * rows[others])
    assert found.item() == pytest.approx(expected.item(), rel=2.0**-20)
    assert task.loss(logits, rows).item() == pytest.approx(hard.loss(logits, rows).item(), rel=2.0**-20)


@pytest.mark.parametrize("task", [MultiLabel(), WeightedMultiLabel()])
def test_labels_that_do_not_exclude_each_other_are_not_smoothed(task: Task) -> None:
    with pytest.raises(ValueError, match=r"set augment.label_smoothing, which is 0.1, to 0") as caught:
        task.trained_by(TrainingLoss(label_smoothing=0.1))
    assert "\n" not in str(caught.value)


def test_sums_over_workers_are_sums_of_vectors() -> None:
    one = ClassCounts.from_batch([0, 1, -1], np.eye(3)[[0, 2, 1]])
    other = ClassCounts.from_batch([2], np.eye(3)[[2]])
    assert one.from_vector(one.to_vector() + other.to_vector()) == one + other
    with pytest.raises(ValueError, match="1 of 4 scores are NaN"):
        _ = (one + other).overall_value
    assert other.overall_value == 1


def test_counts_beyond_float32_survive_a_sum_between_workers() -> None:
    one = ClassCounts.from_batch([0], np.eye(1))
    big = ClassCounts(1, one.numbers * (2**24 + 1))
    assert one.from_vector(big.to_vector() + one.to_vector()) == big + one
    assert (big + one).images.tolist() == [2**24 + 2]


@pytest.mark.parametrize("left, right", [(0, 2), (2, 0), (1, 2)])
def test_images_without_a_prediction_of_either_side_are_counted(left: int, right: int) -> None:
    first, second = (
        ClassCounts.from_batch([-1] * unknown + [0], np.eye(3)[[0] * (unknown + 1)])
        for unknown in (left, right)
    )
    total = first + second
    assert total.unknown == left + right
    with pytest.raises(ValueError, match=f"{left + right} of {left + right + 2} scores are NaN"):
        _ = total.overall_value


@pytest.mark.parametrize("row", [[0, 0, 0], [1, 1, 0]])
def test_an_image_without_exactly_one_label_is_refused(row: list[int]) -> None:
    with pytest.raises(ValueError, match=f"image 1 of a batch has {sum(row)} labels"):
        ClassCounts.from_batch([0, 0], [[1, 0, 0], row])


class Colours(nn.Module):
    """Logits are linear in an image's mean colour."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, CLASSES)
        nn.init.zeros_(self.head.bias)
        nn.init.uniform_(self.head.weight, -30, 30, generator=torch.Generator().manual_seed(0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def classifier(task: Task) -> tuple[ImageClassifier, PyTorchModel]:
    module = ImageClassifier(Colours(), input_size=8, task=task)
    return module, PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_a_single_label_split_is_scored_by_cross_entropy_and_accuracy(batch_size: int) -> None:
    store = NumberedStore([7, 6])
    module, model = classifier(SingleLabel())
    metrics = CentralEvaluation(store, batch_size=batch_size)(model)
    images, targets = (torch.from_numpy(part) for part in store.read(np.arange(13)))
    logits = module(images)
    loss = nn.functional.cross_entropy(logits, targets.argmax(1))
    assert metrics[LOSS].overall_value == pytest.approx(loss.item(), rel=1e-5)
    right = (logits.argmax(1) == targets.argmax(1)).numpy()
    assert 0 < right.mean() < 1
    assert metrics[SCORES].overall_value == pytest.approx(right.mean())
    assert metrics[SCORES].right.tolist() == [int(right[c::CLASSES].sum()) for c in range(CLASSES)]


def test_weighted_training_is_scored_as_plain_multi_label() -> None:
    store = NumberedStore([7, 6])
    plain = CentralEvaluation(store, batch_size=4)(classifier(MultiLabel())[1])
    weighted = CentralEvaluation(store, batch_size=4)(classifier(WeightedMultiLabel())[1])
    assert weighted[SCORES] == plain[SCORES]
    assert weighted[LOSS].overall_value == plain[LOSS].overall_value


def test_a_diverged_single_label_model_is_reported() -> None:
    module, model = classifier(SingleLabel())
    with torch.no_grad():
        next(module.parameters())[2] = float("nan")
    with pytest.raises(ValueError, match="13 of 13 scores are NaN"):
        _ = CentralEvaluation(NumberedStore([7, 6]))(model)[SCORES].overall_value


def test_workers_count_disjoint_shares_even_empty_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    store = NumberedStore([2, 1])
    _, model = classifier(SingleLabel())
    alone = CentralEvaluation(store)(model)
    monkeypatch.setattr("pfl.internal.ops.all_reduce_metrics", lambda metrics: metrics)
    total: Any = None
    for rank in range(4):
        distributed = type("Fake", (), {"world_size": 4, "global_rank": rank})
        monkeypatch.setattr(evaluation, "get_ops", lambda d=distributed: type("Ops", (), {"distributed": d}))
        part = CentralEvaluation(store)(model)
        total = part if total is None else total + part
    assert total[SCORES].confusion.tolist() == alone[SCORES].confusion.tolist()
    assert total[SCORES].summary() == pytest.approx(alone[SCORES].summary(), abs=1e-3)
    assert total[LOSS].overall_value == pytest.approx(alone[LOSS].overall_value)
