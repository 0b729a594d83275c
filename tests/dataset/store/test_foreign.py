"""Files of pfl-research and ml-flair are read as they stand."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest

from dataset.cli import run
from dataset.store.hdf5 import DataFile
from dataset.store.validate import main
from tests.dataset.drawn import assert_paired, number_in, records, write_predecessor

LAYOUTS = [("pfl", True), ("pfl", False), ("ml-flair", True), ("ml-flair", False)]


@pytest.mark.parametrize("maker, grouped", LAYOUTS)
def test_each_image_keeps_its_labels_and_user(tmp_path: Path, maker: str, grouped: bool) -> None:
    rows = records()
    path = write_predecessor(tmp_path / "f.h5", rows, maker, grouped)
    assert_paired(path, rows)
    assert_paired(path, rows, image_size=16)
    with DataFile(path) as file:
        assert file.grouped is grouped
        assert file.storage == "raw"
        assert maker in file.provenance["source"]


@pytest.mark.parametrize("maker, grouped", LAYOUTS)
def test_the_validator_describes_them(
    tmp_path: Path, maker: str, grouped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_predecessor(tmp_path / "f.h5", records(), maker, grouped)
    assert run(main, [str(path)]) == 0
    assert "train: 9 users" in capsys.readouterr().out


def test_a_mapping_in_another_order_is_brought_into_the_alphabetical_one(tmp_path: Path) -> None:
    rows = records()
    path = write_predecessor(tmp_path / "f.h5", rows, "pfl", True)
    with h5py.File(path, "r+") as file:
        mapping = json.loads(file["metadata/label_mapping"][()])
        del file["metadata/label_mapping"]
        reversed_ = {name: len(mapping) - 1 - column for name, column in mapping.items()}
        file["metadata/label_mapping"] = json.dumps(reversed_)
        for split in ("train", "val", "test"):
            for user in file[split].values():
                user["labels_col"][...] = len(mapping) - 1 - user["labels_col"][()]
    assert_paired(path, rows)


def test_reading_goes_on_after_pickling_and_closing(tmp_path: Path) -> None:
    path = write_predecessor(tmp_path / "f.h5", records(), "pfl", True)
    with DataFile(path) as file:
        first = file.read_images("train", np.array([3]), 32)
        with pickle.loads(pickle.dumps(file)) as other:
            assert np.array_equal(other.read_images("train", np.array([3]), 32), first)
        file.close()
        assert number_in(file.read_images("train", np.array([3]), 32)[0]) == number_in(first[0])


@pytest.mark.parametrize("grouped", [True, False])
def test_damage_is_one_line_that_names_file_and_place(
    tmp_path: Path, grouped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_predecessor(tmp_path / "f.h5", records(), "ml-flair", grouped)
    with h5py.File(path, "r+") as file:
        member = next(iter(file["train"].values()))
        shape = member["labels"].shape
        del member["labels"]
        member["labels"] = np.full(shape, b"unheard", "S8") if grouped else "unheard"
    assert run(main, [str(path)]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert str(path) in line
    assert "'unheard'" in line
    assert ("user user-" if grouped else "image 1") in line


def test_a_label_column_outside_the_mapping_is_refused(tmp_path: Path) -> None:
    path = write_predecessor(tmp_path / "f.h5", records(), "pfl", True)
    with h5py.File(path, "r+") as file:
        next(iter(file["train"].values()))["labels_col"][0] = 99
    with DataFile(path) as file, pytest.raises(ValueError, match="out of range"):
        file.split("train")


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    path = write_predecessor(tmp_path / "f.h5", records(), "ml-flair", True)
    with h5py.File(path, "r+") as file:
        del list(file["train"].values())[1]["fine_grained_labels"]
    with (
        DataFile(path) as file,
        pytest.raises(ValueError, match=r"split train, is damaged.*fine_grained_labels"),
    ):
        file.split("train")
