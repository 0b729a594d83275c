"""Features on disk: what is read is what was computed, whatever happened to the files in between."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dataset.store import features
from dataset.store.features import BLOCK, FeatureCache, FloatArray, IntArray

WIDTH = 3
COUNTS = {"train": 2 * BLOCK + 5, "test": 7}
ALL = {name: np.arange(count) for name, count in COUNTS.items()}


def cache(tmp_path: Path, **depends_on: object) -> FeatureCache:
    return FeatureCache(tmp_path / "f.hdf5", depends_on, COUNTS, WIDTH)


def made(split: str, rows: IntArray) -> FloatArray:
    """Numbers that differ by split, row and column."""
    return (rows[:, None] * 10 + np.arange(WIDTH) + 0.5 * (split == "test")).astype(np.float32)


def test_rows_come_back_in_the_order_asked_for(tmp_path: Path) -> None:
    filled = cache(tmp_path)
    assert filled.missing(ALL) == [("train", 0), ("train", 1), ("train", 2), ("test", 0)]
    filled.fill(filled.missing(ALL), made)
    again = cache(tmp_path)
    assert again.missing(ALL) == []
    for name, count in COUNTS.items():
        rows = np.random.default_rng(0).permutation(count)
        assert np.array_equal(again.read(name, rows), made(name, rows))
    assert again.read("train", np.empty(0, np.int64)).shape == (0, WIDTH)


def test_only_blocks_of_wanted_rows_are_computed(tmp_path: Path) -> None:
    last = {"train": np.array([2 * BLOCK + 4, 3])}
    assert cache(tmp_path).missing(last) == [("train", 0), ("train", 2)]


def test_a_fill_that_was_killed_goes_on_at_its_block(tmp_path: Path) -> None:
    def killed(split: str, rows: IntArray) -> FloatArray:
        if rows[0]:
            raise KeyboardInterrupt
        return made(split, rows)

    first = cache(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        first.fill(first.missing(ALL), killed)
    second = cache(tmp_path)
    assert second.missing(ALL) == [("train", 1), ("train", 2), ("test", 0)]
    second.fill(second.missing(ALL), made)
    assert np.array_equal(second.read("train", ALL["train"]), made("train", ALL["train"]))


@pytest.mark.parametrize("file", ["train.f32", "train.json"])
@pytest.mark.parametrize("damage", ["bit", "cut", "gone", "other"])
def test_damage_is_computed_again(tmp_path: Path, file: str, damage: str) -> None:
    cache(tmp_path).fill([("train", 0), ("train", 1), ("train", 2)], made)
    path = cache(tmp_path).folder / file
    content = bytearray(path.read_bytes())
    if damage == "bit":
        content[-2] ^= 1
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"[1, 2]")
    found = cache(tmp_path)
    missing = found.missing({"train": ALL["train"]})
    assert ("train", 2) in missing
    found.fill(missing, made)
    assert np.array_equal(found.read("train", ALL["train"]), made("train", ALL["train"]))


def test_what_features_depend_on_decides_the_folder(tmp_path: Path) -> None:
    assert cache(tmp_path, a=1, b=2).folder == cache(tmp_path, b=2, a=1).folder
    assert cache(tmp_path, a=1, b=2).folder != cache(tmp_path, a=1, b=3).folder


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not finite"):
        cache(tmp_path).fill([("test", 0)], lambda split, rows: made(split, rows) * np.float32(np.inf))


def test_a_full_disk_is_named_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "free", lambda folder: 10)
    with pytest.raises(ValueError, match=r"where 1e-08 are free: make room, or set runtime.cache_features"):
        cache(tmp_path).fill([("test", 0)], made)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "f.hdf5.features").touch()
    with pytest.raises(OSError, match=r"f.hdf5.features.* cannot be written"):
        cache(tmp_path).fill([("test", 0)], made)
