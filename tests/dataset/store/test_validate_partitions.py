"""Every kind of damage to a partition in a file is found, and named."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from dataset.store.validate import validate
from tests.dataset.store.test_hdf5 import partitioned, write
from tests.dataset.store.test_validate import put

GEO = "train/partitions/geo-100"


def row_out_of_range(file: h5py.File) -> None:
    put(file, f"{GEO}/rows", np.array([5, 2, 3, 0, 7]))


def dealt_twice(file: h5py.File) -> None:
    put(file, f"{GEO}/rows", np.array([5, 2, 3, 0, 5]))


def user_without_images(file: h5py.File) -> None:
    put(file, f"{GEO}/offsets", np.array([0, 1, 1, 5]))


def same_user(file: h5py.File) -> None:
    put(file, f"{GEO}/user_ids", np.array([b"one", b"two", b"one"]))


def odd_name(file: h5py.File) -> None:
    file.move(GEO, "train/partitions/geo 100")


def stale_rows(file: h5py.File) -> None:
    file[f"{GEO}/rows"][0] = 4


def no_rows(file: h5py.File) -> None:
    del file[f"{GEO}/rows"]


def elsewhere(file: h5py.File) -> None:
    del file["train/partitions"]
    file["train/partitions"] = h5py.ExternalLink("other.hdf5", "/partitions")


def other_partition(file: h5py.File) -> None:
    file.move(GEO, "train/partitions/geo-30k")


@pytest.mark.parametrize(
    "damage, message",
    [
        (row_out_of_range, "split train: partition 'geo-100': a row is out of range (0..6)"),
        (dealt_twice, "partition 'geo-100': it gives an image to two clients"),
        (user_without_images, "partition 'geo-100': its offsets do not rise"),
        (same_user, "partition 'geo-100': user one is there twice"),
        (odd_name, "partition 'geo 100': its name has other characters"),
        (stale_rows, "geo-100/rows does not match its checksum"),
        (no_rows, "geo-100/rows"),
        (elsewhere, "partitions is not an HDF5 group"),
        (other_partition, "its content does not match its checksum"),
    ],
)
def test_each_kind_of_damage_to_a_partition_is_named(
    tmp_path: Path, damage: Callable[[h5py.File], None], message: str
) -> None:
    path = write(tmp_path / "f.hdf5", "jpeg", splits=partitioned())
    validate(path)
    with h5py.File(path, "r+") as file:
        damage(file)
    with pytest.raises(ValueError, match=re.escape(message)):
        validate(path)
