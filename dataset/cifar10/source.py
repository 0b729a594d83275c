"""CIFAR-10 and CIFAR-100 with federated splits of their training images, as one HDF5 file of raw pixels.

The images come from the official binary archives (those for Python hold pickles, which this project does
not load) or from parquet files as on Hugging Face. Both have the official order, to which the image ids of
Google's splits refer. Shape letters: N images of a split, K classes.

The file has one user for each split, who owns all of its images. Each CSV ``federated_train_alpha_A.csv``
becomes the partition ``alpha-A``. Our own sampler (`dataset.partitions.dirichlet`) draws the partitions
``dirichlet-total-A-seed-S`` and ``dirichlet-per-class-A-seed-S``.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image as Picture

from dataset.arrays import ByteArray, IntArray
from dataset.cli import SourceError
from dataset.fetch.archives import archive_members
from dataset.fetch.parquet import batches, readable
from dataset.fetch.source import BATCH, Image, Records, Source
from dataset.files import file_digest
from dataset.partitions.assignments import (
    TRAIN_CSV,
    check_classes,
    csv_texts,
    partition_name,
    partition_of,
    read_listing,
    rows_digest,
)
from dataset.store.columns import schema
from dataset.store.index import PartitionIndex

SIDE = 32
PIXELS = SIDE * SIDE * 3
MAX_ROWS = 1 << 20
SPLITS_BASE = "https://storage.googleapis.com/gresearch/federated-vision-datasets/"
IMAGES_BASE = "https://www.cs.toronto.edu/~kriz/"
LICENCE = (
    "CIFAR: Krizhevsky, Learning Multiple Layers of Features from Tiny Images (2009); no licence is stated"
)


@dataclass(frozen=True)
class Cifar:
    """The description of one of the two data sets, and where to download it."""

    name: str
    classes: tuple[str, ...]  # [K], in the order of the labels' numbers, which is alphabetical
    archive: str
    md5: str
    members: Mapping[str, Sequence[str]]  # by split
    label_bytes: int  # before each image of the binary form; the last of them is the class
    label_column: str  # of the parquet form
    splits_archive: str
    old_splits: str  # version 1.0, whose image ids are wrong
    official: Mapping[str, str]  # partition of the official splits -> `rows_digest`, where that is known
    planes_as_rows: bool = False  # pixels as pfl-research's script writes them: `planes_as_rows`

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.classes)


@dataclass(frozen=True)
class Images:
    """One split, in the official order."""

    pixels: ByteArray  # [N, 32, 32, 3]
    classes: IntArray  # [N]


class CifarSource(Source):
    """The two splits. All images of a split have one user."""

    def __init__(self, spec: Cifar, splits: Mapping[str, Images], **details: Any) -> None:
        count, columns = sum(len(images.classes) for images in splits.values()), schema({"labels": "class"})
        super().__init__(schema=columns, num_images=count, image_bytes=count * PIXELS, **details)
        self.spec, self.splits = spec, splits

    @cached_property
    def parts(self) -> Sequence[str]:
        """The key of each split, which is a part; see `Source.parts`."""
        return [
            f"{name} {hashlib.sha256(images.pixels.tobytes() + images.classes.tobytes()).hexdigest()}"
            for name, images in self.splits.items()
        ]

    def records(self, part: int, start: int = 0) -> Iterator[Records]:
        """The records of a split; image ids are positions in the official order. See `Source.records`."""
        name, images = [*self.splits.items()][part]
        for first, pixels in zip(range(start, len(images.classes), BATCH), self.images(part, start)):
            rows = range(first, first + len(pixels))
            columns = {
                "user_id": [f"all-{name}"] * len(rows),
                "image_id": [str(row) for row in rows],
                "partition": [name] * len(rows),
                "labels": [self.spec.classes[k] for k in images.classes[rows.start : rows.stop].tolist()],
            }
            yield Records(pa.table(columns, self.schema), pixels, self.spec.name)

    def images(self, part: int, start: int = 0) -> Iterator[Sequence[Image]]:
        """The images of a split; see `Source.images`."""
        pixels = [*self.splits.values()][part].pixels
        for first in range(start, len(pixels), BATCH):
            yield list(pixels[first : first + BATCH])


def read_images(spec: Cifar, folder: Path) -> dict[str, Images]:
    """The images in a folder: parquet, the official binary archive, or what it holds.

    Raises:
        ValueError: when there are no images, or they are damaged or have an unknown class.
    """
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    parquet = [path for path in found if path.suffix == ".parquet"]
    archive = next((path for path in found if path.name == spec.archive), None)
    wanted = {member for members in spec.members.values() for member in members}
    if parquet:
        splits = {
            name: _of_parquet(spec, [path for path in parquet if path.name.startswith(name)], folder)
            for name in ("train", "test")
        }
    elif archive is not None:
        digest = file_digest(archive, "md5")
        if digest != spec.md5:
            raise ValueError(
                f"{archive} is damaged (MD5 {digest}, not {spec.md5}); delete it and download it again"
            )
        most = MAX_ROWS * (PIXELS + 2)
        held = {
            member.name: read()
            for member, size, read in archive_members(archive)
            if member.suffix == ".bin" and size <= most
        }
        splits = _of_binary(spec, held, str(archive))
    elif loose := {path.name: path.read_bytes() for path in found if path.name in wanted}:
        splits = _of_binary(spec, loose, str(folder))
    else:
        raise ValueError(
            f"--source {folder} has neither *.parquet files nor {spec.archive}: give a folder that has "
            "them (the archive of the Python version contains pickle files, which are not read)"
        )
    _check_classes(spec, splits, folder)
    if not spec.planes_as_rows:
        return splits
    return {name: Images(planes_as_rows(images.pixels), images.classes) for name, images in splits.items()}


def _check_classes(spec: Cifar, splits: Mapping[str, Images], folder: Path) -> None:
    """Refuse classes that the data set has not."""
    for name, images in splits.items():
        bad = np.flatnonzero((images.classes < 0) | (images.classes >= spec.num_classes))
        if len(bad):
            raise ValueError(
                f"image {bad[0]} of {name} in {folder} has class {images.classes[bad[0]]}, but {spec.name} "
                f"has the classes 0 to {spec.num_classes - 1}; check that --source is {spec.name}"
            )


def planes_as_rows(pixels: ByteArray) -> ByteArray:
    """The pixels' bytes in the order of colour planes, read as if in pixel order; ``[N, 32, 32, 3]`` both.

    A pixel of the result is three neighbours in one colour of the image, and a row of it is three rows of the
    image. The top third is from red, the middle from green and the bottom from blue.
    """
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)).reshape(pixels.shape)


def _of_binary(spec: Cifar, contents: Mapping[str, bytes], origin: str) -> dict[str, Images]:
    splits = {}
    for name, members in spec.members.items():
        parts = []
        for member in members:
            if member not in contents:
                raise ValueError(f"{origin} has no file {member}; download {spec.archive} again")
            raw, width = np.frombuffer(contents[member], np.uint8), PIXELS + spec.label_bytes
            if not len(raw) or len(raw) % width:
                raise ValueError(
                    f"{origin}: {member} has {len(raw):,} bytes, which is not a multiple of {width}; "
                    "download it again"
                )
            parts.append(raw.reshape(-1, width))
        rows = np.concatenate(parts)
        planes = rows[:, spec.label_bytes :].reshape(-1, 3, SIDE, SIDE)
        pixels = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
        splits[name] = Images(pixels, rows[:, spec.label_bytes - 1].astype(np.int64))
    return splits


def _of_parquet(spec: Cifar, paths: Sequence[Path], folder: Path) -> Images:
    pixels: list[ByteArray] = []
    classes: list[int] = []
    if not paths:
        raise ValueError(
            f"--source {folder} has *.parquet files, but the names of the files must begin with train "
            "and test"
        )
    for path in paths:
        for batch in batches(path, ["img", spec.label_column]):
            with readable(path):
                numbers = batch.column(spec.label_column).cast(pa.int64())
                classes += (int(number) for number in numbers.to_pylist())
                for row in batch.column("img").to_pylist():
                    pixels.append(_lossless(row["bytes"], path, len(pixels)))
    if not pixels:
        raise ValueError(f"{paths[0]} has no image; download it again")
    return Images(np.stack(pixels), np.array(classes, np.int64))


def _lossless(content: bytes, path: Path, row: int) -> ByteArray:
    """The pixels of a PNG, or of a WebP that says it is lossless (a chunk VP8L, RFC 9649)."""
    try:
        if content[8:12] == b"WEBP" and content[12:16] != b"VP8L":
            raise ValueError("it is a lossy WebP file")
        with Picture.open(io.BytesIO(content), formats=["PNG", "WEBP"]) as image:
            if image.size != (SIDE, SIDE):
                raise ValueError(f"it has {image.size[0]} x {image.size[1]} pixels, not {SIDE} x {SIDE}")
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, TypeError) as error:
        raise ValueError(f"{path}: image {row} cannot be used ({error}); download the file again") from None


def csv_partitions(
    spec: Cifar, place: Path, classes: IntArray
) -> tuple[dict[str, PartitionIndex], dict[str, str]]:
    """The partitions of the CSVs in a folder or zip archive, and the `rows_digest` of each.

    Args:
        classes: of the training images, ``[N]``; each row's class is checked against its image's.

    Raises:
        ValueError: when there is no such CSV, or one does not fit the images.
    """
    if place.name == spec.old_splits:
        raise ValueError(
            f"{place} is version 1.0 of the splits, which has wrong image ids; use {spec.splits_archive} "
            "instead"
        )
    row_of = {str(row): row for row in range(len(classes))}
    partitions: dict[str, PartitionIndex] = {}
    digests: dict[str, str] = {}
    for name, text in sorted(csv_texts(place).items()):
        if TRAIN_CSV.fullmatch(name):
            part = partition_name(name)
            listing = read_listing(text, f"{place}: {name}", {"user_id": part})
            check_classes(listing, row_of, classes)
            partitions[part] = partition_of(listing, part, row_of)
            digests[part] = rows_digest(listing, part)
    if not partitions:
        raise ValueError(
            f"--splits {place} has no federated_train*.csv: give the folder that has them, or "
            f"{spec.splits_archive}"
        )
    return partitions, digests


def check_official(spec: Cifar, archive: Path, digests: Mapping[str, str]) -> None:
    """Delete a downloaded archive and raise SourceError if its partitions are not the official ones.

    Nothing is checked for a data set whose official digests are not known here.
    """
    for name, expected in spec.official.items():
        if digests.get(name) != expected:
            archive.unlink(missing_ok=True)
            raise SourceError(
                f"{spec.splits_archive} was damaged in the download, or is not the official file: the "
                f"rows of {name} have the SHA-256 {digests.get(name, 'of no row')}, not {expected}; run "
                "the command again, or give a copy that you trust with --splits DIR"
            )
