"""Users with one row of features each, read and trained many at a time: sums in closed form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dataset.arrays import IntArray
from pfl_ext.data.augmented_views import AugmentedViews
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.data.sampling import LocalSampling
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.engine.plan import MAX_USERS, MAX_USERS_OF_FEATURES
from pfl_ext.engine.training import LocalTraining
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.features import FeatureClassifier
from pfl_ext.privacy.accounting import PrivacyConfig
from pfl_ext.privacy.central import PrivateMean
from pfl_ext.privacy.mechanisms import MARGIN
from pfl_ext.tasks.single_label import SingleLabel
from tests.closeness import assert_close_as_vector

USERS, WIDTH, CLASSES, BOUND = 600, 40, 5, 2.0
LOCAL = LocalTraining(0.5, 1, 4, "none", 0.0, 0.0, None)


class FeatureStore:
    """Rows of numbers of very different size, each a user's only one unless sizes say otherwise."""

    def __init__(self, sizes: list[int]) -> None:
        self.user_ids = [str(u) for u in range(len(sizes))]
        self.user_offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        draw = np.random.default_rng(0)
        scale = 10.0 ** draw.uniform(-3, 1, (int(self.user_offsets[-1]), 1))
        self.features = (draw.standard_normal((len(scale), WIDTH)) * scale).astype(np.float32)
        self.reads = 0

    def read(self, rows: IntArray) -> tuple[Any, Any]:
        self.reads += 1
        return self.features[rows], self.targets(rows)

    def targets(self, rows: IntArray) -> Any:
        return np.eye(CLASSES, dtype=np.uint8)[rows % CLASSES]


class ViewStore(FeatureStore):
    """Three views of each row, of which the second and third are multiples of the first."""

    def read(self, rows: IntArray) -> tuple[Any, Any]:
        self.reads += 1
        return AugmentedViews(rows, 3, self.viewed), self.targets(rows)

    def viewed(self, rows: IntArray, views: IntArray) -> Any:
        return self.features[rows] * (1 + views[:, None]).astype(np.float32)


def network() -> FeatureClassifier:
    torch.manual_seed(3)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, CLASSES))
    whole = ImageClassifier(backbone, task=SingleLabel(), input_size=4)
    return FeatureClassifier(whole, "1", WIDTH)


def summed(
    sizes: list[int], private: bool = True, kind: type[FeatureStore] = FeatureStore
) -> tuple[dict[str, Any], FeatureStore, Any]:
    store, model = kind(sizes), network()
    data = FederatedImageDataset(store, LocalSampling(input_size=4, batch_size=4), seed=1)
    config = PrivacyConfig(epsilon=50.0, delta=1e-4, clipping_bound=BOUND)
    scaling = PrivateMean(config.calibrate(len(sizes), len(sizes), 2), noise_seed=4) if private else None
    engine = CohortEngine(model, lanes=1)
    tasks = engine.tasks(data.members(len(sizes)), LOCAL, scaling)
    done = engine.train(data, tasks, LOCAL, lambda _: 1.0, scaling)
    return {name: t.clone() for name, t in done.update.items()}, store, tasks


def in_closed_form(store: FeatureStore, bound: float) -> list[torch.Tensor]:
    """``sum of min(1, bound / |update|) update``: ``|gradient| = |p - y| sqrt(|x|^2 + 1)``, in float64."""
    head = network().trained_part
    assert isinstance(head, nn.Linear)
    x = torch.from_numpy(store.features).double()
    y = torch.from_numpy(store.targets(np.arange(len(x)))).double()
    e = (x @ head.weight.detach().double().T + head.bias.detach().double()).softmax(1) - y
    norms = LOCAL.learning_rate * e.norm(dim=1) * (x.square().sum(1) + 1).sqrt()
    updates = -LOCAL.learning_rate * e * (bound / norms).clamp(max=1)[:, None]
    assert bound == float("inf") or 0.05 < float((norms > bound).double().mean()) < 0.95
    return [updates.T @ x, updates.sum(0)]


@pytest.mark.parametrize("private", [False, True])
def test_clipped_sums_are_those_in_closed_form(private: bool) -> None:
    found, store, tasks = summed([1] * USERS, private)
    assert [len(task.members) for task in tasks] == [256, 256, 88]
    assert store.reads == 2 * len(tasks), "one for the rows of a group, and one that asks what rows are"
    bound = BOUND * (1 - MARGIN) if private else float("inf")
    ours = [found["backbone.1.weight"], found["backbone.1.bias"]]
    assert_close_as_vector(ours, in_closed_form(store, bound), 2 * (USERS + WIDTH))


@pytest.mark.parametrize("kind", [FeatureStore, ViewStore])
def test_users_read_together_are_those_read_one_by_one(
    kind: type[FeatureStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    together, store, _ = summed([1] * USERS, kind=kind)
    monkeypatch.setattr(FederatedImageDataset, "single_features", lambda self, members: None)
    alone, other, _ = summed([1] * USERS, kind=kind)
    assert other.reads == USERS
    assert store.reads < 10
    assert all(torch.equal(together[name], alone[name]) for name in alone)


def test_a_group_with_a_user_of_several_rows_is_read_one_by_one() -> None:
    found, store, _ = summed([1, 3, 1, 1])
    assert store.reads == 4
    assert all(torch.isfinite(t).all() and t.any() for t in found.values())


def test_groups_of_images_stay_as_small_as_they_were() -> None:
    assert (MAX_USERS, MAX_USERS_OF_FEATURES) == (16, 256)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(48, CLASSES))
    assert CohortEngine(ImageClassifier(backbone, task=SingleLabel(), input_size=4))._max_users == 16
