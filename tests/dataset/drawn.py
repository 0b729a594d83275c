"""Tiny data sets whose pixels say which image they are, so that pairs can be checked after any journey."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from dataset.arrays import ByteArray
from dataset.store.annotations import LabelMatrix
from dataset.store.hdf5 import DataFile
from dataset.store.index import TAXONOMIES

SIDE = 32
_CELLS, _CELL = 4, 8  # 16 bits in a grid of black and white cells


def draw(number: int, side: int = SIDE) -> ByteArray:
    """The number's 16 bits as a chequered picture, ``[side, side, 3]``."""
    bits = (number >> np.arange(_CELLS * _CELLS)) & 1
    grid = (bits.reshape(_CELLS, _CELLS) * 255).astype(np.uint8)
    return np.repeat(
        np.kron(grid, np.ones((side // _CELLS, side // _CELLS), np.uint8))[:, :, None], 3, axis=2
    )


def png(pixels: ByteArray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def png_of(header: bytes, data: bytes) -> bytes:
    """A PNG that Pillow does not write: of this header, and of this data before its compression."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        )

    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(data)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def content_hash(path: Path) -> str:
    """The hash of its content that a file holds."""
    with h5py.File(path) as file:
        return str(file.attrs["content_sha256"])


def jpeg(number: int, side: int = SIDE) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(draw(number, side)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def number_in(pixels: ByteArray) -> int:
    """The number that was drawn, at any side that is a multiple of four."""
    cell = pixels.shape[0] // _CELLS
    means = pixels.astype(float).mean(axis=2).reshape(_CELLS, cell, _CELLS, cell).mean(axis=(1, 3))
    return int(((means.ravel() > 127) << np.arange(_CELLS * _CELLS)).sum())


def label_rows(rows: Sequence[Sequence[int]], num_labels: int) -> LabelMatrix:
    """The labels of each image, given as one sequence for each."""
    images = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    return LabelMatrix.from_pairs(images, np.array([k for row in rows for k in row]), len(rows), num_labels)


@dataclass
class Record:
    """One image; all that belongs to it follows from its number."""

    number: int
    image: bytes | None = None

    def __post_init__(self) -> None:
        self.image = jpeg(self.number) if self.image is None else self.image

    @property
    def image_id(self) -> int:
        return 10_000 + self.number * 7 % 9_973  # not in the numbers' order

    @property
    def user_id(self) -> str:
        return f"user-{self.number * 5 % 11:02d}@N00"

    @property
    def partition(self) -> str:
        return {0: "val", 1: "test"}.get(self.number * 5 % 11, "train")

    @property
    def labels(self) -> list[str]:
        return [f"coarse{self.number % 5}", *(["coarse9"] if self.number % 3 == 0 else [])]

    @property
    def fine_grained_labels(self) -> list[str]:
        return [f"fine{self.number % 13:02d}", f"fine{(self.number * 3 + 1) % 13:02d}"]

    def row(self) -> dict[str, object]:
        return {
            "user_id": self.user_id,
            "image_id": self.image_id,
            "labels": self.labels,
            "partition": self.partition,
            "fine_grained_labels": self.fine_grained_labels,
        }


def records(count: int = 60) -> list[Record]:
    """Records in an order in which users and splits are mixed."""
    order = np.random.default_rng(1).permutation(count) + 1
    return [Record(int(number)) for number in order]


def write_parquet(folder: Path, rows: Sequence[Record], shards: int = 3) -> Path:
    """``apple/flair``'s layout, with shards in ``data/`` in small row groups."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        content = [
            {**one.row(), "image": {"bytes": one.image, "path": f"{one.image_id}.jpg"}}
            for one in rows[shard::shards]
        ]
        path = folder / "data" / f"train-{shard:05d}-of-{shards:05d}.parquet"
        pq.write_table(pa.Table.from_pylist(content), path, row_group_size=9)
    return folder


def write_metadata(folder: Path, rows: Sequence[Record]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = [{**one.row(), "image_id": str(one.image_id)} for one in rows]
    (folder / "labels_and_metadata.json").write_text(json.dumps(content))


def write_files(folder: Path, rows: Sequence[Record]) -> Path:
    """Apple's layout, unpacked."""
    write_metadata(folder, rows)
    (folder / "small_images").mkdir()
    for one in rows:
        assert one.image is not None
        (folder / "small_images" / f"{one.image_id}.jpg").write_bytes(one.image)
    return folder


def add_member(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def write_archives(folder: Path, rows: Sequence[Record], archives: int = 2) -> Path:
    """Apple's layout as it is downloaded."""
    write_metadata(folder, rows)
    for number in range(archives):
        with tarfile.open(folder / f"small_images-{number:02d}.tar.gz", "w:gz") as archive:
            for one in rows[number::archives]:
                assert one.image is not None
                add_member(archive, f"small_images/{one.image_id}.jpg", one.image)
    return folder


def write_mixed(folder: Path, rows: Sequence[Record]) -> Path:
    """Two thirds of the images in an archive, the last half as files: some are in both places."""
    write_files(folder, rows)
    for one in rows[: len(rows) // 2]:
        (folder / "small_images" / f"{one.image_id}.jpg").unlink()
    with tarfile.open(folder / "small_images-00.tar.gz", "w:gz") as archive:
        for one in rows[: 2 * len(rows) // 3]:
            assert one.image is not None
            add_member(archive, f"small_images/{one.image_id}.jpg", one.image)
    return folder


def write_predecessor(path: Path, rows: Sequence[Record], maker: str, grouped: bool) -> Path:
    """A file as pfl-research's (``pfl``) or ml-flair's script makes it."""
    names = {t: sorted({name for one in rows for name in getattr(one, t)}) for t in TAXONOMIES}
    suffix = "mapping" if maker == "pfl" else "counter"
    columns = maker == "pfl" and grouped
    with h5py.File(path, "w") as file:
        for taxonomy, key in zip(TAXONOMIES, ("label", "fine_grained_label")):
            counts = {name: 1000 - i for i, name in enumerate(names[taxonomy])}
            values = {name: i for i, name in enumerate(names[taxonomy])} if columns else counts
            file[f"/metadata/{key}_{suffix}"] = json.dumps(values)
        if not grouped:
            for one in rows:
                group = file.create_group(f"{one.partition}/{one.image_id}")
                group["image"], group["user_id"] = draw(one.number), one.user_id
                for taxonomy in TAXONOMIES:
                    group[taxonomy] = "|".join(getattr(one, taxonomy))
            return path
        for user in dict.fromkeys(one.user_id for one in rows):
            mine = [one for one in rows if one.user_id == user]
            group = file.create_group(f"{mine[0].partition}/{user}")
            group["images"] = np.stack([draw(one.number) for one in mine])
            group["image_ids"] = np.asarray([str(one.image_id) for one in mine], "S")
            for taxonomy in TAXONOMIES:
                labels = [getattr(one, taxonomy) for one in mine]
                if maker == "pfl":
                    pairs = [(i, names[taxonomy].index(name)) for i, row in enumerate(labels) for name in row]
                    group[f"{taxonomy}_row"], group[f"{taxonomy}_col"] = np.array(pairs, np.uint16).T
                else:
                    group[taxonomy] = np.asarray(["|".join(row) for row in labels], "S")
    return path


def assert_paired(path: Path, expected: Sequence[Record], image_size: int = SIDE) -> None:
    """Every record is there once, and each image stands with its own id, user, split and labels."""
    numbers = []
    with DataFile(path) as file:
        for name in file.splits:
            split = file.split(name)
            rows = np.arange(split.num_images)
            pixels = file.read_images(name, rows, image_size)
            assert pixels.shape == (len(rows), image_size, image_size, 3)
            names = {t: list(file.label_mapping(t)) for t in TAXONOMIES}
            assert all(list(file.label_mapping(t).values()) == list(range(len(names[t]))) for t in TAXONOMIES)
            for row in rows.tolist():
                one = Record(number_in(pixels[row]), b"-")
                numbers.append(one.number)
                assert split.image_ids[row] == str(one.image_id)
                assert split.user_ids[int(split.user_index[row])] == one.user_id
                assert name == one.partition
                for taxonomy in TAXONOMIES:
                    dense = split.labels[taxonomy].dense(np.array([row]))[0]
                    assert {names[taxonomy][k] for k in np.flatnonzero(dense)} == set(getattr(one, taxonomy))
            if file.grouped:
                owners = np.repeat(np.arange(split.num_users), np.diff(split.user_offsets))
                assert np.array_equal(owners, split.user_index)
            else:
                assert len(split.user_offsets) == 0
    assert sorted(numbers) == sorted(one.number for one in expected)
