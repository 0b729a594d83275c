"""Scores of single-label classifiers beside those of scikit-learn, torchmetrics and plain formulas."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
from sklearn import metrics as theirs
from torch import Tensor
from torchmetrics.functional.classification import multiclass_calibration_error

from dataset.arrays import FloatArray, IntArray
from pfl_ext.tasks.ranking import auroc
from pfl_ext.tasks.single_label import SingleLabel
from pfl_ext.tasks.single_label_scores import BINS, FEW_CLASSES, MANY_CLASSES, ClassCounts

TASK = SingleLabel()
ROUNDING = 2.0**-20
"""Relative to 100 %: float32 probabilities and sums in torchmetrics."""


def case(seed: int, n: int, k: int, *, tied: bool, absent: int = 0) -> tuple[Tensor, IntArray]:
    """Logits ``[n, k]`` and labels, none of which is of the last ``absent`` classes."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, k - absent, n)
    logits = rng.normal(0, 2, (n, k)) + 2 * np.eye(k)[labels]
    return torch.tensor(np.round(logits) if tied else logits, dtype=torch.float32), labels


def scored(logits: Tensor, labels: IntArray) -> ClassCounts:
    one_hot = np.eye(logits.shape[1], dtype=np.uint8)[labels]
    _, kept = TASK.scored(logits, torch.from_numpy(one_hot))
    return TASK.statistics(len(labels), np.arange(len(labels)), [kept], [one_hot])


def areas(probabilities: FloatArray, labels: IntArray) -> list[float]:
    """scikit-learn's area of each class that has images and lacks some."""
    several = [c for c in range(probabilities.shape[1]) if 0 < (labels == c).sum() < len(labels)]
    return [theirs.roc_auc_score(labels == c, probabilities[:, c]) for c in several]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("k, absent", [(2, 0), (7, 0), (7, 3), (21, 1), (101, 4)])
@pytest.mark.parametrize("n", [1, 40, 300])
def test_scores_are_those_of_scikit_learn(n: int, k: int, absent: int, tied: bool) -> None:
    logits, labels = case(n + k, n, k, tied=tied, absent=absent)
    guesses, probabilities = logits.argmax(1).numpy(), torch.softmax(logits, 1).numpy()
    squares = ((probabilities.astype(float) - np.eye(k)[labels]) ** 2).sum(1)
    expected = {
        "accuracy": 100 * theirs.accuracy_score(labels, guesses),
        "macro-F1": 100 * theirs.f1_score(labels, guesses, average="macro"),
        "Brier": squares.mean(),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that are predicted and absent
        expected["C-accuracy"] = 100 * theirs.balanced_accuracy_score(labels, guesses)
    if k > MANY_CLASSES:
        first = np.argsort(-logits.numpy(), axis=1, kind="stable")[:, :5]
        expected["top-5 accuracy"] = 100 * (first == labels[:, None]).any(1).mean()
    found = TASK.summarise(scored(logits, labels))
    if k <= FEW_CLASSES:
        of_classes = areas(probabilities, labels)
        expected["AUROC"] = 100 * np.mean(of_classes) if of_classes else 0.0
    found.pop("ECE")
    assert found == pytest.approx(expected, rel=ROUNDING, abs=100 * ROUNDING)


@pytest.mark.parametrize("n, k", [(1, 3), (200, 7), (500, 30)])
def test_calibration_is_torchmetrics_in_fifteen_bins(n: int, k: int) -> None:
    logits, labels = case(n, n, k, tied=False)
    probabilities = torch.softmax(logits, 1)
    expected = multiclass_calibration_error(probabilities, torch.from_numpy(labels), k, n_bins=BINS)
    found = TASK.summarise(scored(logits, labels))["ECE"]
    assert found == pytest.approx(100 * float(expected), abs=100 * ROUNDING)


def test_a_confidence_at_an_edge_belongs_to_the_bin_below() -> None:
    """Guo et al. 2017: a bin is open below and closed above; 1 and 0 are in the last and the first."""
    confidence = np.array([1.0, 14 / 15, 0.5, 0.4, 0.0])
    kept = np.stack([[0, 0, 0, 0, 0], confidence, [0] * 5, [0] * 5], 1).astype(np.float32)
    kept[1, 1] = np.nextafter(np.float32(14 / 15), np.float32(0))
    targets = np.eye(101)[[0, 1, 0, 1, 0]]
    counts = ClassCounts.from_rows(5, np.arange(5), kept, targets)
    assert np.flatnonzero(counts._in_bins).tolist() == [0, 6, 7, 13, 14]  # 0.4 as float32 is above 6 / 15
    gaps = np.abs(np.array([1, 0, 1, 0, 1]) - kept[:, 1])
    assert counts.summary()["ECE"] == pytest.approx(100 * gaps.mean(), abs=1e-6)


@pytest.mark.parametrize("k", [3, 101])
def test_workers_add_up_to_one(k: int) -> None:
    """In any shares, one of them empty, exactly: sums are of whole numbers."""
    logits, labels = case(3, 50, k, tied=True)
    one_hot, edges = np.eye(k, dtype=np.uint8)[labels], (0, 7, 7, 31, 50)
    _, kept = TASK.scored(logits, torch.from_numpy(one_hot))
    whole = TASK.statistics(50, np.arange(50), [kept[:20], kept[20:]], [one_hot])
    parts = [
        TASK.statistics(50, np.arange(a, b), [kept[a:b]] if b > a else [], [one_hot[a:b]])
        for a, b in itertools.pairwise(edges)
    ]
    assert parts[3] + parts[0] + parts[1] + parts[2] == whole
    summed = np.sum([part.to_vector() for part in parts], 0)
    assert parts[1].from_vector(summed) == whole
    assert parts[1].from_vector(summed).summary() == whole.summary()


def test_the_matrix_has_true_classes_as_rows() -> None:
    logits, labels = case(8, 60, 4, tied=False)
    expected = theirs.confusion_matrix(labels, logits.argmax(1).numpy(), labels=range(4))
    assert scored(logits, labels).confusion.tolist() == expected.tolist()  # type: ignore[union-attr]
    assert scored(*case(8, 60, FEW_CLASSES + 1, tied=False)).confusion is None


def test_the_area_needs_images_of_two_classes() -> None:
    """For the whole it is 0 without any, and for a user it is unknown; a tie counts half."""
    targets = np.array([[True, False], [True, False]])
    scores = np.array([[0.5, 0.5], [0.1, 0.9]], np.float32)
    assert np.isnan(auroc(scores, targets)).all()
    assert auroc(scores, targets ^ [[True], [False]]).tolist() == [0.0, 0.0]
    assert auroc(scores[[0, 0]], targets ^ [[True], [False]]).tolist() == [0.5, 0.5]
    logits, one_hot = torch.tensor([[1.0, 2.0]]), np.array([[1, 0]], np.uint8)
    _, kept = TASK.scored(logits, torch.from_numpy(one_hot))
    assert TASK.summarise(scored(logits, np.array([0])))["AUROC"] == 0
    assert np.isnan(TASK.user_columns(kept, one_hot)["AUROC"])


def test_equal_probabilities_leave_the_likeliest_class_to_the_logits() -> None:
    """In float32 the softmax of two large logits may be the same number; accuracy must not change by it."""
    logits = torch.tensor([[-200.0, 0.0, np.nextafter(np.float32(1e-8), np.float32(1))]])
    assert torch.softmax(logits, 1)[0, 1] == torch.softmax(logits, 1)[0, 2]
    assert TASK.summarise(scored(logits, np.array([2])))["accuracy"] == 100


def test_a_task_whose_scores_are_of_the_predicted_classes_alone_works() -> None:
    class Second(SingleLabel):
        """Predicts the second likeliest class."""

        def scored(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            return super().scored(outputs, targets)[0], outputs.topk(2).indices[:, 1]

    logits, labels = case(2, 30, 5, tied=False)
    one_hot = np.eye(5, dtype=np.uint8)[labels]
    _, kept = Second().scored(logits, torch.from_numpy(one_hot))
    columns = Second().user_columns(kept, one_hot)
    assert columns["accuracy"] == pytest.approx(100 * np.mean(kept.numpy() == labels))
    assert set(columns) == {"accuracy", "C-accuracy", "macro-F1"}
