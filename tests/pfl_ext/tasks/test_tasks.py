"""Known answers of the three tasks, and that what an image contributes is its own alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pfl_ext.tasks.multi_label import MultiLabel, WeightedMultiLabel
from pfl_ext.tasks.single_label import SingleLabel
from pfl_ext.tasks.task import Task
from tests.closeness import assert_close_as_vector
from tests.pfl_ext.engine.setting import LABELS, TASKS, targets_for


def logits_of(n: int, draw: torch.Generator) -> Tensor:
    return torch.randn(n, LABELS, generator=draw) * 3


def cross_entropy(x: Tensor, label: int) -> float:
    """``log sum exp - x[label]`` in float64."""
    return math.log(sum(math.exp(v) for v in x.double().tolist())) - float(x[label])


def binary(x: float, present: bool) -> float:
    return math.log1p(math.exp(-x if present else x))


@settings(max_examples=40)
@given(st.integers(1, 9), st.integers(0, 99))
def test_single_label_is_the_self_normalised_mean_of_cross_entropies(n: int, seed: int) -> None:
    """Equation 4 of FedIR by hand."""
    draw = torch.Generator().manual_seed(seed)
    logits, targets = logits_of(n, draw), targets_for(SingleLabel(), n, draw)
    weights = [float(row.max()) for row in targets]
    losses = [cross_entropy(x, int(row.argmax())) for x, row in zip(logits, targets)]
    expected = sum(w * loss for w, loss in zip(weights, losses)) / sum(weights)
    assert float(SingleLabel().loss(logits, targets)) == pytest.approx(expected, rel=1e-5)


@settings(max_examples=40)
@given(st.integers(1, 9), st.integers(0, 99))
def test_weighted_multi_label_normalises_every_label_by_itself(n: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits, targets = logits_of(n, draw), targets_for(WeightedMultiLabel(), n, draw)
    expected = 0.0
    for label in range(LABELS):
        column = targets[:, label].tolist()
        losses = [binary(float(x), t > 0) for x, t in zip(logits[:, label], column)]
        expected += sum(abs(t) * loss for t, loss in zip(column, losses)) / sum(map(abs, column)) / LABELS
    assert float(WeightedMultiLabel().loss(logits, targets)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("task", [SingleLabel(), WeightedMultiLabel()])
def test_the_scale_of_weights_has_no_effect(task: Task) -> None:
    """In single-label batches one for all; in multi-label ones another for each label."""
    draw = torch.Generator().manual_seed(0)
    logits, targets = logits_of(6, draw), targets_for(task, 6, draw)
    scale = torch.full((LABELS,), 7.0) if isinstance(task, SingleLabel) else torch.rand(LABELS) + 0.5
    loss = task.loss
    assert_close_as_vector(loss(logits, targets * scale), loss(logits, targets), 100)
    other = targets.clone()
    other[0] *= 5
    assert abs(float(loss(logits, other) - loss(logits, targets))) > 1e-3


def test_plain_targets_of_each_kind_give_the_plain_losses() -> None:
    draw = torch.Generator().manual_seed(1)
    logits, present = logits_of(7, draw), targets_for(MultiLabel(), 7, draw)
    signed = WeightedMultiLabel().loss(logits, 2 * present - 1)
    assert_close_as_vector(signed, MultiLabel().loss(logits, present), 100)
    labels = logits.flip(0).argmax(1)
    one_hot = torch.nn.functional.one_hot(labels, LABELS)
    expected = torch.nn.functional.cross_entropy(logits, labels)
    assert_close_as_vector(SingleLabel().loss(logits, one_hot), expected, 100)


@pytest.mark.parametrize("task", TASKS)
def test_once_settled_an_image_has_its_loss_whatever_stands_beside_it(task: Task) -> None:
    """What lets users share a pass: the batch's loss is a sum over images, each from its own row."""
    draw = torch.Generator().manual_seed(2)
    logits, targets = logits_of(5, draw), targets_for(task, 5, draw)
    settled, shares = task.settled(targets)
    losses = task.image_losses(logits, settled)
    one_by_one = [task.image_losses(logits[i : i + 1], settled[i : i + 1])[0] for i in range(5)]
    assert_close_as_vector(torch.stack(one_by_one), losses, 50)
    assert_close_as_vector((losses * shares).sum(), task.loss(logits, targets), 50)
    assert losses.dtype == torch.float32
    assert float(shares.sum()) == pytest.approx(1)
