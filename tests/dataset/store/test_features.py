"""Features on disk: what is read is what was computed, whatever happened to the files in between."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from dataset.arrays import Float32Array, IntArray
from dataset.store import features
from dataset.store.features import BLOCK, FeatureCache

WIDTH = 3
COUNTS = {"train": 2 * BLOCK + 5, "test": 7}
ALL = {name: np.arange(count) for name, count in COUNTS.items()}


def cache(tmp_path: Path, kind: str = "float32", **depends_on: object) -> FeatureCache:
    return FeatureCache(tmp_path / "f.hdf5", depends_on, COUNTS, WIDTH, kind)


def made(split: str, rows: IntArray) -> Float32Array:
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
    def killed(split: str, rows: IntArray) -> Float32Array:
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


@pytest.mark.parametrize("kind, file", [("float32", "f32"), ("float32", "json"), ("float16", "f16")])
@pytest.mark.parametrize("damage", ["bit", "cut", "gone", "other"])
def test_damage_is_computed_again(tmp_path: Path, kind: str, file: str, damage: str) -> None:
    cache(tmp_path, kind).fill([("train", 0), ("train", 1), ("train", 2)], made)
    path = cache(tmp_path, kind).folder / f"train.{file}"
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
    found = cache(tmp_path, kind)
    missing = found.missing({"train": ALL["train"]})
    assert ("train", 2) in missing
    found.fill(missing, made)
    expected = made("train", ALL["train"]).astype(kind)
    assert np.array_equal(found.read("train", ALL["train"]), expected)


def test_half_precision_lies_beside_full_in_half_the_space_and_is_read_as_float32(tmp_path: Path) -> None:
    full, half = cache(tmp_path), cache(tmp_path, "float16")
    for one in (full, half):
        one.fill(one.missing(ALL), made)
    assert half.num_bytes * 2 == full.num_bytes
    assert (half.folder / "train.f16").stat().st_size == COUNTS["train"] * WIDTH * 2
    assert (full.folder / "train.f32").stat().st_size == COUNTS["train"] * WIDTH * 4
    rows = np.random.default_rng(0).permutation(COUNTS["train"])
    read = cache(tmp_path, "float16").read("train", rows)
    assert read.dtype == np.float32
    assert np.array_equal(read, made("train", rows).astype(np.float16))
    assert not np.array_equal(read, made("train", rows)), "some of these numbers have 12 bits"
    assert np.array_equal(cache(tmp_path).read("train", rows), made("train", rows))


def test_the_folder_of_full_precision_is_the_one_that_it_was(tmp_path: Path) -> None:
    """The key of before there were formats."""
    key = hashlib.sha256(json.dumps({"a": 1}).encode()).hexdigest()[:16]
    assert cache(tmp_path, a=1).folder.name == key
    assert cache(tmp_path, "float16", a=1).folder.name != key


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_beyond_half_precision_are_refused_and_its_largest_is_not(tmp_path: Path, sign: int) -> None:
    def reaching(largest: float) -> FeatureCache:
        filled = cache(tmp_path, "float16", largest=largest)
        filled.fill(
            [("test", 0)], lambda split, rows: np.full((len(rows), WIDTH), sign * largest, np.float32)
        )
        return filled

    assert np.array_equal(reaching(65504.0).read("test", np.array([3])), np.full((1, WIDTH), sign * 65504.0))
    message = r"the frozen layers compute numbers of up to 65505, but model\.feature_format float16 has a"
    with pytest.raises(ValueError, match=message):
        reaching(65505.0)  # which rounds to 65504


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
    with pytest.raises(ValueError, match=r"but only 1e-08 GB are free: free some space, or set"):
        cache(tmp_path).fill([("test", 0)], made)


def test_space_is_asked_for_what_is_missing_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache(tmp_path).fill([("train", 0), ("train", 1)], made)
    begun = cache(tmp_path)
    missing = begun.missing(ALL)
    need = (5 + 7) * WIDTH * 4  # the rows of the last blocks, as float32
    monkeypatch.setattr(features, "free", lambda folder: need - 1)
    with pytest.raises(ValueError, match="free some space"):
        begun.fill(missing, made)
    monkeypatch.setattr(features, "free", lambda folder: need)
    begun.fill(missing, made)
    assert cache(tmp_path).missing(ALL) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "f.hdf5.features").touch()
    with pytest.raises(OSError, match=r"f.hdf5.features.* cannot be written"):
        cache(tmp_path).fill([("test", 0)], made)
