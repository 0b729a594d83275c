from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dataset.flair.mini import MiniSpec, draw_images, mini_index, write_mini
from dataset.store.hdf5 import DataFile
from dataset.store.views import LabelSetView

SPEC = MiniSpec(train_users=20, val_users=3, test_users=3, image_size=12, num_fine_labels=40)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> DataFile:
    path = tmp_path_factory.mktemp("task") / "mini.hdf5"
    write_mini(path, SPEC)
    return DataFile(path)


@pytest.mark.parametrize("cache_bytes", [0, 10**9])
def test_rows_come_with_their_own_images_and_targets_from_many_threads(
    file: DataFile, cache_bytes: int
) -> None:
    store = LabelSetView(file, "labels", 12, cache_bytes=cache_bytes).split("train")
    index = mini_index(SPEC)
    whole = draw_images(SPEC, index, "train", np.arange(store.num_images))
    labels = index.splits["train"].labels["labels"]
    rng = np.random.default_rng(0)
    asked = [rng.integers(0, store.num_images, 7) for _ in range(60)]
    with ThreadPoolExecutor(4) as pool:
        for rows, (images, targets) in zip(asked, pool.map(store.read, asked)):
            np.testing.assert_array_equal(images, whole[rows])
            np.testing.assert_array_equal(targets, labels.dense(rows))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Split and row of each image that is decoded from now on."""
    found: list[tuple[str, int]] = []
    real = DataFile.read_images

    def count(self: DataFile, split: str, rows: np.ndarray, size: int) -> np.ndarray:
        found.extend((split, row) for row in rows.tolist())
        return real(self, split, rows, size)

    monkeypatch.setattr(DataFile, "read_images", count)
    return found


def test_the_cache_reads_each_image_once(file: DataFile, decoded: list[tuple[str, int]]) -> None:
    kept = LabelSetView(file, "labels", 12, cache_bytes=10**9).split("train")
    for rows in (np.array([3, 1, 3]), np.array([1, 2]), np.array([2, 3])):
        kept.read(rows)
    assert sorted(decoded) == [("train", 1), ("train", 2), ("train", 3)]


def test_a_split_that_is_asked_for_twice_is_decoded_once(
    file: DataFile, decoded: list[tuple[str, int]]
) -> None:
    """A run scores val during training and again at the end."""
    task = LabelSetView(file, "labels", 12, cache_bytes=10**9)
    rows = np.arange(task.split("val").num_images)
    first, second = (task.split("val").read(rows)[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert sorted(decoded) == [("val", row) for row in rows.tolist()]


@pytest.mark.parametrize("spare", [0, 1, 12 * 12 * 3 - 1])
def test_the_budget_is_that_of_all_splits_together(
    file: DataFile, decoded: list[tuple[str, int]], spare: int
) -> None:
    """With room for n images, a second pass over all splits decodes all but n."""
    task = LabelSetView(file, "labels", 12)
    counts = {name: task.split(name).num_images for name in ("train", "val", "test")}
    room = counts["train"] + counts["val"] // 2
    small = LabelSetView(file, "labels", 12, cache_bytes=room * 12 * 12 * 3 + spare)
    for decodes in (sum(counts.values()), sum(counts.values()) - room):
        decoded.clear()
        for name, count in counts.items():
            images, _ = small.split(name).read(np.arange(count)[::-1])
            np.testing.assert_array_equal(images, file.read_images(name, np.arange(count)[::-1], 12))
        assert len(decoded) == decodes + sum(counts.values())  # those of the comparison
    assert small.pixels._kept.nbytes <= small.cache_bytes


def test_images_are_brought_to_the_size_asked_for(file: DataFile) -> None:
    images, _ = LabelSetView(file, "labels", 9).split("val").read(np.arange(2))
    assert images.shape == (2, 9, 9, 3)
    assert images.dtype == np.uint8


def test_a_binary_label_is_one_column_of_its_taxonomy(file: DataFile) -> None:
    rows = np.arange(LabelSetView(file).split("train").num_images)
    for taxonomy in ("labels", "fine_grained_labels"):
        full = LabelSetView(file, taxonomy, 12)
        everything = full.split("train").targets(rows)
        name = full.label_names[-1]
        binary = LabelSetView(file, "labels", 12, binary_label=name)
        assert binary.label_names == (name,)
        np.testing.assert_array_equal(binary.split("train").targets(rows)[:, 0], everything[:, -1])
        assert binary.split("train").label_counts().tolist() == [everything[:, -1].sum()]
        np.testing.assert_array_equal(full.split("train").label_counts(), everything.sum(0))


def test_what_a_file_cannot_give_is_said_in_one_line(file: DataFile, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the label 'unicorn' is in neither taxonomy.*animal, art"):
        LabelSetView(file, binary_label="unicorn")
    with pytest.raises(ValueError, match="no images in the split 'holdout'"):
        LabelSetView(file).split("holdout")
