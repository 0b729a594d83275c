"""FedIR's weights by hand, and that they change nothing where a user is like the target."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_ext.algorithms.fedir import ImportanceOptions, ImportanceWeights, importance_weights
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.tasks.multi_label import WeightedMultiLabel
from pfl_ext.tasks.single_label import SingleLabel
from pfl_ext.tasks.task import WeightedTask
from tests.closeness import assert_close_as_vector
from tests.pfl_ext.engine.setting import NoisyStore, Setting, distance, rounding_of
from tests.pfl_ext.samplings import local_sampling
from tests.pfl_ext.stores import NumberedStore

CLASSES = 4
labels_of = st.lists(st.integers(0, CLASSES - 1), min_size=1, max_size=50)


@given(labels_of, st.lists(st.integers(1, 9), min_size=CLASSES, max_size=CLASSES), st.integers(1, 50))
def test_an_image_weighs_target_over_own_frequency(labels: list[int], mass: list[int], part: int) -> None:
    """Equation 3; q from all the user's images, also where only some of them take part."""
    of_user = np.eye(CLASSES, dtype=np.uint8)[labels]
    weighted = ImportanceWeights.of_counts(mass, sum(mass), SingleLabel())(of_user[:part], of_user)
    for row, label in zip(weighted, labels):
        expected = (mass[label] / sum(mass)) / (labels.count(label) / len(labels))
        assert row[label] == pytest.approx(expected, rel=1e-6)
        assert np.count_nonzero(row) == 1


@given(labels_of, st.integers(1, 7))
def test_a_user_like_the_target_has_weights_of_exactly_one(labels: list[int], times: int) -> None:
    of_user = np.eye(CLASSES, dtype=np.uint8)[labels]
    weights = ImportanceWeights.of_counts(of_user.sum(0) * times, len(of_user) * times, SingleLabel())
    assert np.array_equal(weights(of_user, of_user), of_user)


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=30), st.integers(1, 7))
def test_a_multi_label_user_like_the_target_has_weights_of_exactly_one(rows: Any, times: int) -> None:
    of_user = np.array(rows, np.uint8)
    weights = ImportanceWeights.of_counts(of_user.sum(0) * times, len(of_user) * times, WeightedMultiLabel())
    assert np.array_equal(weights(of_user, of_user), 2.0 * of_user - 1)


def test_a_multi_label_image_is_weighted_label_by_label() -> None:
    of_user = np.array([[1, 0], [1, 1], [1, 0], [0, 0]], np.uint8)  # q = 3/4, 1/4
    weights = ImportanceWeights([0.5, 0.5], WeightedMultiLabel())
    expected = [[2 / 3, -2 / 3], [2 / 3, 2], [2 / 3, -2 / 3], [-2, -2 / 3]]
    assert_close_as_vector(weights(of_user, of_user), np.array(expected), 8)
    capped = ImportanceWeights([0.5, 0.5], WeightedMultiLabel(), cap=1.5)(of_user, of_user)
    np.testing.assert_allclose(np.abs(capped).max(0), [1.5, 1.5])
    assert np.array_equal(np.sign(capped), np.sign(expected))
    least = ImportanceWeights([0.5, 0.5], WeightedMultiLabel(), cap=0.5)(of_user, of_user)
    assert np.array_equal(least, 0.5 * np.sign(expected)), "a cap may be below 1"


def test_weighted_frequencies_are_the_targets() -> None:
    """What importance weights are for: under them the user's classes have the target's shares."""
    of_user = np.eye(CLASSES, dtype=np.uint8)[[0] * 17 + [1] * 5 + [2, 3]]
    weights = ImportanceWeights([0.1, 0.2, 0.3, 0.4], SingleLabel())(of_user, of_user)
    assert_close_as_vector(weights.sum(0) / weights.sum(), np.array([0.1, 0.2, 0.3, 0.4]), 2 * 24)


def test_the_target_is_the_distribution_over_all_users_images() -> None:
    store = NumberedStore([3, 8200])  # image r is of class r mod 5
    weights = importance_weights(ImportanceOptions(reweight="fedir"), store, SingleLabel())
    assert weights is not None
    each = np.eye(5, dtype=np.uint8)  # a user with an image of each class, so q = 1/5
    shares = np.bincount(np.arange(8203) % 5) / 8203
    assert_close_as_vector(weights(each, each).sum(1), 5 * shares, 8)


def test_a_batch_of_one_class_is_unchanged() -> None:
    of_user = np.eye(CLASSES, dtype=np.uint8)[[1, 1, 1, 2]]
    weighted = torch.from_numpy(ImportanceWeights([0.4, 0.3, 0.2, 0.1], SingleLabel())(of_user[:3], of_user))
    logits = torch.randn(3, CLASSES, generator=torch.Generator().manual_seed(0))
    loss = SingleLabel().loss
    assert_close_as_vector(loss(logits, weighted), loss(logits, torch.from_numpy(of_user[:3]).float()), 50)


@pytest.mark.parametrize("task", [SingleLabel(), WeightedMultiLabel()])
def test_the_data_set_hands_on_weighted_targets_and_the_same_images(task: WeightedTask) -> None:
    store, sampling = NumberedStore([9, 6]), local_sampling(2, 4, 5, input_size=8)
    weights = ImportanceWeights([0.3, 0.1, 0.1, 0.2, 0.3], task)
    plain, weighted = (
        FederatedImageDataset(store, sampling, seed=2, reweight=w).user_dataset(0) for w in (None, weights)
    )
    of_user = store.targets(np.arange(9))
    for (images, targets, crops), (same, changed, also) in zip(plain.iter(4), weighted.iter(4)):
        assert torch.equal(images, same)
        assert torch.equal(crops, also)
        np.testing.assert_array_equal(changed.numpy(), weights(targets.numpy(), of_user))
        assert not torch.equal(targets, changed)


@pytest.mark.parametrize("engine", [False, True])
def test_where_a_user_is_like_the_target_fedir_is_plain_to_the_bit(engine: bool) -> None:
    sizes = [9]
    of_user = NoisyStore(sizes, SingleLabel()).read(np.arange(9))[1] > 0
    like = ImportanceWeights.of_counts(of_user.sum(0), 9, SingleLabel())
    one_hot = NoisyOneHot(sizes)
    plain = Setting(sizes, task=SingleLabel(), store=one_hot).run(engine)[0]
    same = Setting(sizes, task=SingleLabel(), store=one_hot, reweight=like).run(engine)[0]
    assert all(torch.equal(plain[n], same[n]) for n in plain)
    other = ImportanceWeights([0.6, 0.1, 0.1, 0.1, 0.1], SingleLabel())
    changed = Setting(sizes, task=SingleLabel(), store=one_hot, reweight=other).run(engine)[0]
    assert distance(changed, plain) > 0.05


class NoisyOneHot(NoisyStore):
    """One label each, without weights."""

    def __init__(self, sizes: Any) -> None:
        super().__init__(sizes, SingleLabel())

    def read(self, rows: Any) -> tuple[Any, Any]:
        images, targets = super().read(rows)
        return images, (targets > 0).astype(np.uint8)


@settings(max_examples=8)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.sampled_from([None, 7]))
def test_the_engine_trains_reweighted_users_as_pfls_loop_does(sizes: list[int], virtual: int | None) -> None:
    sampling = local_sampling(1, 4, None, straddle=False, input_size=10, virtual_size=virtual)
    weights = ImportanceWeights([0.6, 0.1, 0.1, 0.1, 0.1], SingleLabel(), cap=3)
    setting = Setting(
        sizes, sampling, task=SingleLabel(), store=NoisyOneHot(sizes), reweight=weights, clipping="none"
    )
    assert distance(setting.run(True)[0], setting.run(False)[0]) <= rounding_of(setting)


@pytest.mark.parametrize(
    "target, message",
    [
        ([0.5, 0.6], "sums to 1.1"),
        ([1.5, -0.5], "one share in 0..1"),
        ([[0.5, 0.5]], "one share in 0..1"),
    ],
)
def test_what_is_no_distribution_is_refused(target: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImportanceWeights(target, SingleLabel())


def test_a_class_that_the_target_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="a user has an image that has label 1, but no image of FedIR's"):
        ImportanceWeights([1.0, 0.0], SingleLabel())(np.eye(2), np.eye(2))
    with pytest.raises(ValueError, match="lacks label 0"):
        ImportanceWeights([1.0, 0.5], WeightedMultiLabel())(np.eye(2), np.eye(2))
