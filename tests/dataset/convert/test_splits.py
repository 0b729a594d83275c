"""Dealing: the shares, whole users or part of each, the same whatever the order of the source."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from dataset.convert.splits import Dealing, deal


def dealt(
    users: list[str], how: Dealing, splits: list[str | None] | None = None, images: list[str] | None = None
) -> dict[str, tuple[str, str]]:
    """Split and user by image."""
    images = images or [f"i{number}" for number in range(len(users))]
    columns = [users, images, splits or [None] * len(users)]
    given = [pa.chunked_array([pa.array(column, pa.string())]) for column in columns]
    table = deal(given[0], given[1], given[2], how)
    rows = table.to_pylist()
    assert [row["image_id"] for row in rows] == images
    return {row["image_id"]: (row["partition"], row["user_id"]) for row in rows}


def how(by: str, val: float = 0.2, test: float = 0.1, seed: int = 0, keep: bool = False) -> Dealing:
    return Dealing(keep, by, {"val": val, "test": test}, seed)


def of_users(sizes: list[int]) -> list[str]:
    return [f"u{user:03d}" for user, size in enumerate(sizes) for _ in range(size)]


def test_by_users_a_split_has_whole_users_in_the_shares() -> None:
    users = of_users([1 + user % 7 for user in range(50)])
    found = dealt(users, how("users"))
    assert [user for _, user in found.values()] == users, "nobody is renamed"
    split_of = {user: split for split, user in found.values()}
    assert len({(split, user) for split, user in found.values()}) == 50
    assert Counter(split_of.values()) == {"train": 35, "val": 10, "test": 5}


def test_by_images_each_user_gives_its_share_on_average_and_keeps_one() -> None:
    sizes = [1 + user % 7 for user in range(700)]
    found = dealt(of_users(sizes), how("images"))
    train = Counter(user for split, user in found.values() if split == "train")
    assert len(train) == 700
    counts = Counter(split for split, _ in found.values())
    assert abs(counts["val"] / len(found) - 0.2) < 0.02
    assert abs(counts["test"] / len(found) - 0.1) < 0.02
    assert {user for split, user in found.values() if split == "val"} <= {f"val-{user}" for user in train}
    one = dealt(of_users([1000, 1]), how("images"))
    assert Counter(split for split, _ in one.values()) == {"train": 701, "val": 200, "test": 100}


@pytest.mark.parametrize("by", ["users", "images"])
def test_the_order_of_the_source_changes_nothing_and_the_seed_does(by: str) -> None:
    users = of_users([5] * 40)
    first = dealt(users, how(by))
    order = np.random.default_rng(0).permutation(len(users)).tolist()
    mixed = dealt([users[k] for k in order], how(by), images=[f"i{k}" for k in order])
    assert mixed == first
    assert dealt(users, how(by, seed=1)) != first


def test_a_further_user_moves_few_others() -> None:
    users = of_users([1] * 200)
    before, after = dealt(users, how("users")), dealt([*users, "new"], how("users"))
    assert sum(before[image] != after[image] for image in before) <= 2


def test_given_splits_stay_and_a_missing_one_may_be_dealt_of_train() -> None:
    users = of_users([4] * 20)
    splits: list[str | None] = ["test" if number >= 60 else "train" for number in range(80)]
    found = dealt(users, how("users", val=0.2, test=0, keep=True), splits)
    assert Counter(split for split, _ in found.values()) == {"train": 48, "val": 12, "test": 20}
    with pytest.raises(ValueError, match="--test_share has no effect, because the source already has the"):
        dealt(users, how("users", val=0, test=0.1, keep=True), splits)


def test_a_user_in_two_splits_is_renamed_unless_that_is_another_user() -> None:
    none = how("users", val=0, test=0, keep=True)
    found = dealt(["a", "a", "b"], none, ["train", "test", "test"])
    assert list(found.values()) == [("train", "a"), ("test", "test-a"), ("test", "test-b")]
    with pytest.raises(
        ValueError, match="user 'a' has images in several splits and is renamed 'test-a' in test, but"
    ):
        dealt(["a", "a", "test-a"], none, ["train", "test", "train"])


def test_splits_that_would_be_empty_are_refused() -> None:
    with pytest.raises(ValueError, match="2 users are not enough for 3 splits: give --split_by images, or"):
        dealt(["a", "b"], how("users"))
    with pytest.raises(ValueError, match="no user has enough images to give one to val"):
        dealt(["a", "b"], how("images"))
    with pytest.raises(ValueError, match="there is no image for training"):
        dealt(["a"], how("users", val=0, test=0, keep=True), ["test"])
