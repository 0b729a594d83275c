"""A data set with CIFAR's layouts and few images: each pixel says which image it belongs to."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from dataset.arrays import ByteArray
from dataset.cifar10.download_preprocess import CIFAR10
from dataset.cifar10.source import Cifar
from dataset.cifar100.download_preprocess import CIFAR100
from tests.dataset.drawn import add_member

SIZES = {"train": 60, "test": 20}
FIRST = {"train": 1, "test": 5001}


def pixels(split: str, row: int) -> ByteArray:
    """``[32, 32, 3]``; no two of its rows, columns or channels are alike."""
    rng = np.random.default_rng(FIRST[split] + row)
    return rng.integers(0, 256, (32, 32, 3)).astype(np.uint8)


def class_of(spec: Cifar, row: int) -> int:
    return row * 7 % spec.num_classes


def write_binary(spec: Cifar, folder: Path) -> Cifar:
    """The official archive; returns the spec with its MD5."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / spec.archive, "w:gz") as archive:
        for split, members in spec.members.items():
            for part, rows in zip(members, np.array_split(np.arange(SIZES[split]), len(members))):
                content = b""
                for row in rows.tolist():
                    label = bytes([99] * (spec.label_bytes - 1) + [class_of(spec, row)])
                    content += label + pixels(split, row).transpose(2, 0, 1).tobytes()
                add_member(archive, f"cifar-binary/{part}", content)
    digest = hashlib.md5((folder / spec.archive).read_bytes()).hexdigest()
    return dataclasses.replace(spec, md5=digest)


def write_parquet(spec: Cifar, folder: Path, kind: str = "PNG", **options: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in SIZES.items():
        rows = []
        for row in range(count):
            buffer = io.BytesIO()
            Image.fromarray(pixels(split, row)).save(buffer, kind, **options)
            rows.append(
                {"img": {"bytes": buffer.getvalue(), "path": None}, spec.label_column: class_of(spec, row)}
            )
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet")


def csv_text(spec: Cifar, users: Mapping[str, Sequence[int]]) -> str:
    """A split as Google publishes them, its lines in no order."""
    lines = [f"{user},{row},{class_of(spec, row)}" for user, rows in users.items() for row in rows]
    np.random.default_rng(0).shuffle(lines)
    return "\n".join(["user_id,image_id,class", *lines]) + "\n"


def write_splits(spec: Cifar, folder: Path, zipped: bool = False) -> dict[str, dict[str, list[int]]]:
    """Two partitions, the second without row 3; returns them."""
    folder.mkdir(parents=True, exist_ok=True)
    dealt = {
        "alpha-0.00": {"10": list(range(0, 20)), "9": list(range(20, 60))},
        "alpha-1.00": {"0": list(range(0, 60, 2)), "1": list(range(5, 60, 2))},
    }
    texts = {
        f"federated_train_{name.replace('-', '_')}.csv": csv_text(spec, users)
        for name, users in dealt.items()
    }
    texts["test.csv"] = "image_id,class\n0,0\n"
    if zipped:
        with zipfile.ZipFile(folder / spec.splits_archive, "w") as archive:
            for name, text in texts.items():
                archive.writestr(f"cifar/{name}", text)
    else:
        for name, text in texts.items():
            (folder / name).write_text(text)
    return dealt


__all__ = [
    "CIFAR10",
    "CIFAR100",
    "class_of",
    "csv_text",
    "pixels",
    "write_binary",
    "write_parquet",
    "write_splits",
]
