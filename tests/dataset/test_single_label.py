"""One class an image: who has it, which class it is and which pixels, under every way of dealing them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dataset.flair.hdf5 import FlairFile
from dataset.single_label import SingleLabelImages, SingleLabelTask
from pfl_ext.federated_dataset import ImageStore, natural_partition
from tests.dataset.drawn import number_in
from tests.dataset.test_hdf5 import partitioned, write

CLOTHING = Path("/tmp/clothing.hdf5")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> FlairFile:
    """Image i of train shows i + 1 and has labels[i % 2]; of the fine, i % 3 == 2 has one."""
    return FlairFile(write(tmp_path_factory.mktemp("s") / "f.hdf5", "raw", splits=partitioned()))


def shown(store: SingleLabelImages, rows: list[int]) -> list[int]:
    """The file's rows that the pixels of these rows of a store belong to."""
    return [number_in(image) - 1 for image in store.read(np.array(rows))[0]]


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
    file: FlairFile,
    partition: str | None,
    users: list[str],
    offsets: list[int],
    rows: list[int],
    cache_bytes: int,
) -> None:
    store = SingleLabelTask(file, partition, cache_bytes=cache_bytes).split("train")
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


def test_images_without_exactly_one_label_and_users_without_others_are_left_out(file: FlairFile) -> None:
    """Of the fine labels {i % 3, 2}, rows 2 and 5 of train have one; user a has neither."""
    task = SingleLabelTask(file, taxonomy="fine_grained_labels")
    assert task.label_names == ("p", "q", "r")
    store = task.split("train")
    assert (task.num_left_out("train"), store.num_images) == (5, 2)
    assert list(store.user_ids) == ["b", "c"]
    assert store.user_offsets.tolist() == [0, 1, 2]
    assert shown(store, [0, 1]) == [2, 5]
    assert store.classes.tolist() == [2, 2]
    part = SingleLabelTask(file, "geo-100", "fine_grained_labels")
    assert part.num_left_out("train") == 3
    assert list(part.split("train").user_ids) == ["one", "two"]
    assert shown(part.split("train"), [0, 1]) == [5, 2]


def test_a_partition_is_of_the_training_images_only(file: FlairFile) -> None:
    task = SingleLabelTask(file, "crossed")
    assert list(task.split("val").user_ids) == ["d", "é"]
    assert task.num_left_out("val") == 0


def test_what_a_file_cannot_give_is_said_in_one_line(file: FlairFile, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no partition 'geo-30k'; there are crossed, geo-100"):
        SingleLabelTask(file, "geo-30k")
    plain = FlairFile(write(tmp_path / "plain.hdf5", "raw"))
    assert SingleLabelTask(plain).partition_names == ()
    with pytest.raises(ValueError, match=r"no partition 'crossed'; there are none, only users of its own"):
        SingleLabelTask(plain, "crossed")
    with pytest.raises(ValueError, match="'colours' is not a taxonomy"):
        SingleLabelTask(plain, taxonomy="colours")
    with pytest.raises(ValueError, match="no images in the split 'test'"):
        SingleLabelTask(plain).split("test")


@pytest.mark.skipif(not CLOTHING.exists(), reason=f"{CLOTHING} is not on this machine")
def test_garments_of_real_users_are_a_single_label_task() -> None:
    task = SingleLabelTask(FlairFile(CLOTHING), image_size=32)
    for name in ("train", "val", "test"):
        store, index = task.split(name), task.file.split(name)
        labels = index.labels["labels"].dense(np.arange(index.num_images))
        assert store.num_images + task.num_left_out(name) == index.num_images
        np.testing.assert_array_equal(store.label_counts(), labels[labels.sum(1) == 1].sum(0))
        ids = [index.user_ids[int(index.user_index[row])] for row in store.file_rows]
        sizes = np.diff(store.user_offsets)
        assert ids == np.repeat(np.array(store.user_ids), sizes).tolist()
        assert (sizes > 0).all()
