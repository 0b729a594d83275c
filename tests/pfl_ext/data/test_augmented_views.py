"""An image has a few views that stay as they are, and each use of it takes one of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from dataset.arrays import Float32Array, IntArray
from pfl_ext.data.augmented_views import AugmentedViews, crops_of_view
from pfl_ext.data.federated_dataset import FederatedImageDataset, Member
from pfl_ext.data.sampling import LocalSampling
from pfl_ext.data.transforms import AugmentConfig
from tests.pfl_ext.stores import NumberedStore

VIEWS, WIDTH = 3, 4
RESIZED = AugmentConfig("resized", "both")


class ViewStore(NumberedStore):
    """Features ``[row, view, 0, ...]``."""

    def read(self, rows: IntArray) -> tuple[Any, Any]:
        return AugmentedViews(rows, VIEWS, self.features), self.targets(rows)

    @staticmethod
    def features(rows: IntArray, views: IntArray) -> Float32Array:
        out = np.zeros((len(rows), WIDTH), np.float32)
        out[:, 0], out[:, 1] = rows, views
        return out


def data(sizes: list[int], round_number: int = 0, seed: int = 1, **sampling: Any) -> FederatedImageDataset:
    local = LocalSampling(**{"input_size": 8, "batch_size": 4, "views": VIEWS, **sampling})
    users = FederatedImageDataset(ViewStore(sizes), local, seed=seed)
    users.set_round(round_number)
    return users


def used(users: FederatedImageDataset, user: int, epochs: int = 1) -> list[tuple[int, int]]:
    """Row and view of each use, in the order of training."""
    found = users.user_dataset(user)
    batches = [batch for _ in range(epochs) for batch in found.iter(4)]
    return [(int(row), int(view)) for features, _, _ in batches for row, view in features[:, :2].tolist()]


def crops(rows: list[int], view: int = 0, seed: int = 0, split: str = "train") -> Float32Array:
    return crops_of_view(seed, split, np.array(rows), view, 32, 24, RESIZED)


def test_a_views_crop_depends_on_seed_split_row_and_view_and_on_nothing_else() -> None:
    some = crops([5, 900, 2])
    assert np.array_equal(crops([2, 5]), some[[2, 0]])
    others = [crops([6]), crops([5], view=1), crops([5], seed=1), crops([5], split="test")]
    kept = {tuple(crop.tolist()) for crop in (some[0], *(one[0] for one in others))}
    assert len(kept) == 5
    assert crops([]).shape == (0, 6)


def test_views_are_drawn_as_new_crops_are() -> None:
    """Every flip half of the time, and every place as likely."""
    plain = AugmentConfig("crop", "both")
    found = np.concatenate([crops_of_view(0, "train", np.arange(500), view, 12, 8, plain) for view in (0, 1)])
    n = len(found)
    assert np.all(np.abs(found[:, 4:6].mean(0) - 0.5) < 5 * 0.5 / n**0.5)
    places = np.bincount((5 * found[:, 0] + found[:, 1]).astype(int), minlength=25)
    assert np.all(np.abs(places - n / 25) < 6 * (n / 25) ** 0.5)


def test_each_use_takes_one_of_an_images_own_views() -> None:
    """All views come, as often as chance has it; the order of images is that of images."""
    uses = [use for number in range(100) for use in used(data([5, 7], number, num_epochs=2), 1, epochs=2)]
    counts = Counter(uses)
    assert {row for row, _ in uses} == set(range(5, 12))
    assert set(counts) == {(row, view) for row in range(5, 12) for view in range(VIEWS)}
    assert all(abs(count - 200 / VIEWS) < 6 * (200 / VIEWS) ** 0.5 for count in counts.values())
    images = FederatedImageDataset(
        NumberedStore([5, 7]), LocalSampling(input_size=8, batch_size=4, num_epochs=2), seed=1
    )
    order = [row for batch in images.user_dataset(1).iter(4) for row in batch[0][:, 0, 0, 2].tolist()]
    assert [row for row, _ in used(data([5, 7], num_epochs=2), 1)] == order


def test_the_views_of_a_round_are_a_function_of_seed_round_and_user() -> None:
    first = used(data([9, 9]), 1)
    assert first == used(data([9, 9, 9]), 1)
    assert first != used(data([9, 9], round_number=1), 1)
    assert first != used(data([9, 9], seed=2), 1)
    assert [view for _, view in first] != [view for _, view in used(data([9, 9]), 0)]


def test_one_more_pass_over_a_user_has_views_of_its_own_and_changes_no_other() -> None:
    alone, user = used(data([12]), 0), data([12]).user_dataset(0)
    once = [(int(r), int(v)) for batch in user.once() for r, v in batch[0][:, :2].tolist()]
    assert [row for row, _ in once] == list(range(12))
    assert sorted(once) != sorted(alone)
    again = [(int(r), int(v)) for batch in user.iter(4) for r, v in batch[0][:, :2].tolist()]
    assert again == alone


def test_an_image_that_comes_twice_takes_a_view_each_time() -> None:
    found = [used(data([2], number, virtual_size=8), 0) for number in range(20)]
    assert all(len(uses) == 8 and {row for row, _ in uses} == {0, 1} for uses in found)
    assert all(len(set(uses)) > 2 for uses in found), "8 uses with one view of each image: 2 of 3 ** 8"


@pytest.mark.parametrize("store_round", [0, 3])
def test_users_of_one_image_read_together_see_the_views_that_they_see_alone(store_round: int) -> None:
    users = data([1] * 60, store_round)
    members = [Member(user, 0, 1, 1, 1) for user in range(60)]
    together = users.single_features(members)
    assert together is not None
    alone = [batch for member in members for batch in users.read(member).iter(4)]
    assert together[0].tolist() == [row for batch in alone for row in batch[0].tolist()]
    assert together[1].tolist() == [row for batch in alone for row in batch[1].tolist()]
    assert len(set(together[0][:, 1].tolist())) == VIEWS
    assert together[2].shape == (60, 6)
