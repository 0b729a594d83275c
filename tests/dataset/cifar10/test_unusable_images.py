"""Sources of CIFAR whose images cannot be used are named in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataset.cifar10.source import Cifar
from tests.dataset.cifar10.made_cifar import (
    CIFAR10,
    CIFAR100,
    write_binary,
    write_parquet,
)
from tests.dataset.cifar10.test_cifar import make


def flipped(folder: Path, spec: Cifar) -> None:
    whole = bytearray((folder / spec.archive).read_bytes())
    whole[len(whole) // 2] ^= 1
    (folder / spec.archive).write_bytes(whole)


def cut(folder: Path, spec: Cifar) -> None:
    whole = (folder / spec.archive).read_bytes()
    (folder / spec.archive).write_bytes(whole[: len(whole) // 2])


def loose_and_cut(folder: Path, spec: Cifar) -> None:
    (folder / spec.archive).unlink()
    (folder / "data_batch_1.bin").write_bytes(b"\0" * 5000)


def one_missing(folder: Path, spec: Cifar) -> None:
    (folder / spec.archive).unlink()
    (folder / "data_batch_1.bin").write_bytes(b"\0" * 3073)


def class_too_large(folder: Path, spec: Cifar) -> None:
    (folder / spec.archive).unlink()
    for member in (*spec.members["train"], *spec.members["test"]):
        (folder / member).write_bytes(b"\x0a" + b"\0" * 3072)


def nothing_there(folder: Path, spec: Cifar) -> None:
    (folder / spec.archive).unlink()
    (folder / "cifar-10-python.tar.gz").touch()


def lossy(folder: Path, spec: Cifar) -> None:
    write_parquet(spec, folder, "WEBP", quality=80)


def jpegs(folder: Path, spec: Cifar) -> None:
    write_parquet(spec, folder, "JPEG")


def no_parquet(folder: Path, spec: Cifar) -> None:
    write_parquet(spec, folder)
    (folder / "test-00000-of-00001.parquet").write_bytes(b"PAR1nonsense")


def other_column(folder: Path, spec: Cifar) -> None:
    write_parquet(CIFAR100, folder)


def classes_of(values: list[Any], folder: Path, spec: Cifar) -> None:
    write_parquet(spec, folder)
    path = folder / "test-00000-of-00001.parquet"
    table = pq.read_table(path)
    column = pa.array([values[row % len(values)] for row in range(len(table))])
    place = table.schema.get_field_index(spec.label_column)
    pq.write_table(table.set_column(place, spec.label_column, column), path)


@pytest.mark.parametrize(
    "damage, said",
    [
        (partial(classes_of, [1.0, 1.5]), r"test-.* cannot be read as parquet: .* 1\.5.* truncated"),
        (partial(classes_of, [1, None]), r"test-.* cannot be read as parquet: .*NoneType"),
        (partial(classes_of, ["cat"]), r"test-.* cannot be read as parquet: .*'cat'"),
        (flipped, r"cifar-10-binary\.tar\.gz is damaged \(MD5 .*delete it"),
        (cut, r"cifar-10-binary\.tar\.gz is damaged \(MD5 .*delete it"),
        (loose_and_cut, r"data_batch_1\.bin has 5,000 bytes, which is not a multiple of 3073"),
        (one_missing, r"has no file data_batch_2\.bin"),
        (class_too_large, r"image 0 of train in .* has class 10, but cifar10 has the classes 0 to 9; check"),
        (nothing_there, r"neither \*\.parquet files nor cifar-10-binary\.tar\.gz.*pickle"),
        (lossy, r"image 0 cannot be used \(it is a lossy WebP file\)"),
        (jpegs, r"image 0 cannot be used"),
        (no_parquet, r"test-00000-of-00001\.parquet cannot be read as parquet"),
        (other_column, r"it has no column 'label'"),
    ],
)
def test_images_that_cannot_be_used_are_named_in_one_line(
    tmp_path: Path, damage: Callable[[Path, Cifar], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = write_binary(CIFAR10, tmp_path / "in")
    damage(tmp_path / "in", spec)
    assert make(spec, tmp_path / "f.hdf5", "--source", tmp_path / "in", "--splits", "none") == 2
    line = capsys.readouterr().err
    assert re.search(said, line)
    assert (line.startswith("error: "), line.count("\n")) == (True, 1)
    assert not (tmp_path / "f.hdf5").exists()
