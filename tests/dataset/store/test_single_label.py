"""One class an image: who has it, which class it is and which pixels, under every way of dealing them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from dataset.store.annotations import LabelMatrix
from dataset.store.hdf5 import DataFile
from dataset.store.index import PartitionIndex, SplitIndex
from dataset.store.own_splits import carved
from dataset.store.views import SingleLabelView, SplitImages
from pfl_ext.data.federated_dataset import ImageStore, natural_partition
from tests.dataset.drawn import label_rows, number_in
from tests.dataset.store.test_hdf5 import partitioned, write

CLOTHING = Path("/tmp/clothing.hdf5")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> DataFile:
    """Image i of train shows i + 1 and has labels[i % 2]; of the fine, i % 3 == 2 has one."""
    return DataFile(write(tmp_path_factory.mktemp("s") / "f.hdf5", "raw", splits=partitioned()))


def shown(store: SplitImages, rows: list[int]) -> list[int]:
    """The file's rows that the pixels of these rows of a store belong to."""
    return [number_in(image) - 1 for image in store.read(np.array(rows))[0]]


def users_rows(store: SplitImages) -> dict[str, list[int]]:
    """The file's rows of each user of a store."""
    bounds = zip(store.user_ids, store.user_offsets, store.user_offsets[1:])
    return {user: store.file_rows[start:stop].tolist() for user, start, stop in bounds}


@pytest.mark.parametrize("cache_bytes", [0, 10**8])
@pytest.mark.parametrize(
    "partition, users, offsets, rows",
    [
        (None, ["a", "b", "c"], [0, 2, 3, 7], [0, 1, 2, 3, 4, 5, 6]),
        ("crossed", ["p", "q"], [0, 3, 7], [6, 0, 3, 1, 2, 5, 4]),
        ("geo-100", ["one", "two", "é"], [0, 1, 3, 5], [5, 2, 3, 0, 6]),
    ],
)
def test_a_partition_deals_the_images_in_its_own_order(
    file: DataFile,
    partition: str | None,
    users: list[str],
    offsets: list[int],
    rows: list[int],
    cache_bytes: int,
) -> None:
    store = SingleLabelView(file, partition, cache_bytes=cache_bytes).split("train")
    assert list(store.user_ids) == users
    assert store.user_offsets.tolist() == offsets
    assert store.num_images == len(rows)
    assert shown(store, list(range(len(rows)))) == rows
    assert store.classes.tolist() == [row % 2 for row in rows]
    asked = [2, 0, 0]
    images, targets = store.read(np.array(asked))
    assert [number_in(image) - 1 for image in images] == [rows[i] for i in asked]
    np.testing.assert_array_equal(targets, np.eye(2, dtype=np.uint8)[[rows[i] % 2 for i in asked]])
    np.testing.assert_array_equal(store.targets(np.array(asked)), targets)
    assert store.label_counts().tolist() == [
        sum(row % 2 == 0 for row in rows),
        sum(row % 2 for row in rows),
    ]
    protocol: ImageStore = store
    assert natural_partition(protocol).sizes.tolist() == np.diff(offsets).tolist()


def test_images_without_exactly_one_label_and_users_without_others_are_left_out(file: DataFile) -> None:
    """Row i has the fine labels {i % 3, 2}: rows 2 and 5 of train have just one; user a has neither row."""
    task = SingleLabelView(file, taxonomy="fine_grained_labels")
    assert task.label_names == ("p", "q", "r")
    store = task.split("train")
    assert (task.num_left_out("train"), store.num_images) == (5, 2)
    assert list(store.user_ids) == ["b", "c"]
    assert store.user_offsets.tolist() == [0, 1, 2]
    assert shown(store, [0, 1]) == [2, 5]
    assert store.classes.tolist() == [2, 2]
    part = SingleLabelView(file, "geo-100", "fine_grained_labels")
    assert part.num_left_out("train") == 3
    assert list(part.split("train").user_ids) == ["one", "two"]
    assert shown(part.split("train"), [0, 1]) == [5, 2]


def test_a_partition_is_of_the_training_images_only(file: DataFile) -> None:
    task = SingleLabelView(file, "crossed")
    assert list(task.split("val").user_ids) == ["d", "é"]
    assert task.num_left_out("val") == 0


def test_what_a_file_cannot_give_is_said_in_one_line(file: DataFile, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no partition 'geo-30k'; it has crossed, geo-100"):
        SingleLabelView(file, "geo-30k")
    plain = DataFile(write(tmp_path / "plain.hdf5", "raw"))
    assert SingleLabelView(plain).partition_names == ()
    with pytest.raises(ValueError, match=r"has no partition 'crossed'; it has none, only its own users"):
        SingleLabelView(plain, "crossed")
    with pytest.raises(ValueError, match="has no annotation 'colours'; it has"):
        SingleLabelView(plain, taxonomy="colours")
    with pytest.raises(ValueError, match="no images in the split 'test'"):
        SingleLabelView(plain).split("test")


def many_images(count: int) -> SplitIndex:
    """Users of 1, 2, ... images, the last of what is left; image i has labels[i % 2]."""
    sizes = [*range(1, 10), count - 45]
    labels = label_rows([[i % 2] for i in range(count)], 2)
    return SplitIndex(
        [f"user {size}" for size in range(len(sizes))],
        np.cumsum([0, *sizes]),
        np.repeat(np.arange(len(sizes), dtype=np.int32), sizes),
        [str(i) for i in range(count)],
        {"labels": labels, "fine_grained_labels": LabelMatrix(labels.indptr, labels.indices, 3)},
    )


@pytest.fixture(scope="module")
def without_val(tmp_path_factory: pytest.TempPathFactory) -> DataFile:
    """60 training images, of which "crossed" deals 40 to users of 1, 2, 3, 4, 10 and 20 images."""
    train = many_images(60)
    rows = np.random.default_rng(0).permutation(60)[:40]
    offsets = np.cumsum([0, 1, 2, 3, 4, 10, 20])
    crossed = PartitionIndex(list("abcdef"), rows, offsets)
    splits = {"train": dataclasses.replace(train, partitions={"crossed": crossed})}
    path = write(tmp_path_factory.mktemp("v") / "f.hdf5", "raw", splits=splits)
    return DataFile(path)


@pytest.mark.parametrize("partition", [None, "crossed"])
@pytest.mark.parametrize("share", [0.05, 0.25, 0.5, 0.99])
def test_a_carved_val_is_that_share_of_each_users_images(
    without_val: DataFile, partition: str | None, share: float
) -> None:
    whole = SingleLabelView(without_val, partition).split("train")
    task = SingleLabelView(without_val, partition, val_share=share, cache_bytes=10**8)
    train, val = task.split("train"), task.split("val")
    assert list(train.user_ids) == list(whole.user_ids)
    found = {name: users_rows(store) for name, store in (("train", train), ("val", val))}
    for user, rows in users_rows(whole).items():
        carved = found["val"].get(user, [])
        assert sorted([*found["train"][user], *carved]) == sorted(rows)
        assert len(carved) in {
            min(whole_number, len(rows) - 1)
            for whole_number in (int(np.floor(share * len(rows))), int(np.ceil(share * len(rows))))
        }
    for store in (train, val):
        assert shown(store, list(range(store.num_images))) == store.file_rows.tolist()
        assert store.classes.tolist() == [row % 2 for row in store.file_rows]
    assert task.splits == ("train", "val")
    assert (task.num_left_out("train"), task.num_left_out("val")) == (0, 0)


@pytest.mark.parametrize(("share", "end"), [(0.0, "labels"), (0.5, "labels at val_share 0.5")])
def test_a_split_without_an_image_of_one_label_is_refused(
    share: float, end: str, without_val: DataFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = np.empty(0, np.int64)
    monkeypatch.setattr(SingleLabelView, "_members", lambda *_: ([], nothing, nothing, 3))
    with pytest.raises(ValueError, match=rf"no image in .* has exactly one label in {end}$"):
        SingleLabelView(without_val, val_share=share).split("train")


def test_images_left_out_are_counted_with_training_beside_a_carved_val(tmp_path: Path) -> None:
    """Row i has the fine labels {i % 3, 2}: five rows of train have two."""
    file = DataFile(write(tmp_path / "f.hdf5", "raw", splits={"train": partitioned()["train"]}))
    task = SingleLabelView(file, None, "fine_grained_labels", val_share=0.5)
    assert (task.num_left_out("train"), task.num_left_out("val")) == (5, 0)


def test_a_carved_val_is_a_function_of_users_and_images_alone() -> None:
    """Another process finds the same; the order of the images does not matter."""
    users, ids = ["u", "v"], [str(number) for number in range(40)]
    owner = np.repeat([0, 1], 20)
    in_val = carved(ids, owner, users, 0.25)
    assert [i for i, carved in zip(ids, in_val) if carved] == [
        "2", "6", "11", "13", "14", "20", "25", "26", "30", "36",
    ]  # fmt: skip
    order = np.random.default_rng(0).permutation(40)
    again = carved([ids[i] for i in order], owner[order], users, 0.25)
    np.testing.assert_array_equal(again, in_val[order])
    larger = carved(ids, owner, users, 0.5)
    assert (larger | ~in_val).all()  # a larger share holds the smaller one


def test_users_of_few_images_give_their_share_on_average() -> None:
    """4,000 users of 3 images at a share of 0.1: 1,200 images expected, standard deviation 29."""
    users = [str(user) for user in range(4000)]
    in_val = carved([str(i) for i in range(12000)], np.repeat(np.arange(4000), 3), users, 0.1)
    assert abs(int(in_val.sum()) - 1200) < 5 * 29
    assert not carved(users, np.arange(4000), users, 0.9).any()  # a user's only image is for training


def test_a_val_that_cannot_be_carved_is_refused(file: DataFile, without_val: DataFile) -> None:
    with pytest.raises(ValueError, match=r"already has a split 'val': set data.val_share to 0 to use it"):
        SingleLabelView(file, val_share=0.1)
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"val_share is .*; give a number of at least 0 and below 1"):
            SingleLabelView(without_val, val_share=share)
    with pytest.raises(ValueError, match="no images in the split 'val'"):
        SingleLabelView(without_val).split("val")


@pytest.mark.skipif(not CLOTHING.exists(), reason=f"{CLOTHING} is not on this machine")
def test_garments_of_real_users_are_a_single_label_task() -> None:
    task = SingleLabelView(DataFile(CLOTHING), image_size=32)
    for name in ("train", "val", "test"):
        store, index = task.split(name), task.file.split(name)
        labels = index.labels["labels"].dense(np.arange(index.num_images))
        assert store.num_images + task.num_left_out(name) == index.num_images
        np.testing.assert_array_equal(store.label_counts(), labels[labels.sum(1) == 1].sum(0))
        ids = [index.user_ids[int(index.user_index[row])] for row in store.file_rows]
        sizes = np.diff(store.user_offsets)
        assert ids == np.repeat(np.array(store.user_ids), sizes).tolist()
        assert (sizes > 0).all()


@pytest.mark.parametrize(
    ("partition", "names", "train", "test", "val"),
    [
        (None, ("c",), {"a": [0, 1], "b": [2]}, {"c": [3, 4, 5, 6]}, ["q", "val-a"]),
        (None, ("c", "a"), {"b": [2]}, {"a": [0, 1], "c": [3, 4, 5, 6]}, ["q"]),
        ("crossed", ("q",), {"p": [6, 0, 3]}, {"q": [1, 2, 5, 4]}, ["q", "val-a"]),
    ],
)
def test_test_users_have_their_images_in_test_and_in_no_other_split(
    partition: str | None,
    names: tuple[str, ...],
    train: dict[str, list[int]],
    test: dict[str, list[int]],
    val: list[str],
    tmp_path: Path,
) -> None:
    """Also where the file has a test split, and val images of a test user."""
    splits = partitioned()
    splits["val"] = dataclasses.replace(splits["val"], user_ids=["q", "val-a"])
    file = DataFile(write(tmp_path / "f.hdf5", "raw", splits=splits))
    task = SingleLabelView(file, partition, test_users=names, cache_bytes=10**8)
    assert task.splits == ("train", "val", "test")
    assert users_rows(task.split("train")) == train
    assert users_rows(task.split("test")) == test
    assert list(task.split("val").user_ids) == val
    store = task.split("test")
    assert shown(store, list(range(store.num_images))) == store.file_rows.tolist()


def test_test_users_have_no_image_in_a_carved_val(without_val: DataFile) -> None:
    task = SingleLabelView(without_val, val_share=0.5, test_users=("user 3",))
    found = {name: users_rows(task.split(name)) for name in task.splits}
    whole = users_rows(SingleLabelView(without_val).split("train"))
    assert found["test"] == {"user 3": whole["user 3"]}
    assert "user 3" not in {**found["train"], **found["val"]}
    alone = users_rows(SingleLabelView(without_val, val_share=0.5).split("val"))
    assert found["val"] == {user: rows for user, rows in alone.items() if user != "user 3"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("c", "x"), "data.test_users has 'x', but the training users are a, b, c: give some of these, with"),
        (("",), "data.test_users has '', but"),
        (("a", "b", "c"), "data.test_users has all training users, so nobody would train: leave one out"),
    ],
)
def test_test_users_who_are_none_or_all_are_refused(
    file: DataFile, names: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        SingleLabelView(file, test_users=names)
