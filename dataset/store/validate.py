"""``python -m dataset.store F``: find damage in a file, and describe it.

Shape letters: U users, N images, K labels.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from dataset.cli import OneLineParser
from dataset.store import probe
from dataset.store.annotations import (
    CROWD,
    DIFFICULT,
    Annotation,
    Boxes,
    Masks,
    fault_of_mask,
    is_background,
)
from dataset.store.foreign import ForeignReader
from dataset.store.hdf5 import DataFile
from dataset.store.images import jpeg_size
from dataset.store.index import check_index, meaning
from dataset.store.native import (
    PARTITION_COLUMNS,
    PARTITIONS,
    NativeReader,
    check_sum,
    column,
    content_checksum,
    dataset,
    opened,
    partition_names,
)

_BLOCK = 32  # images that a thread checks at once
MOST_LABELS = 100
"""Most labels of a taxonomy that are listed one by one: all of FLAIR's 17, not its 1,628."""


def main(argv: Sequence[str]) -> None:
    """Describe a file on standard output, and check every byte of it; the first damage is an error."""
    parser = OneLineParser(prog="python -m dataset.store", description=main.__doc__)
    parser.add_argument("file", type=Path)
    path = parser.read(argv).file
    probe.probe(path)
    validate(path)
    with DataFile(path) as file:
        print(describe(file))


def validate(path: Path, *, images: bool = True) -> None:
    """Check every byte of a file of ours; of a file of another make, its index and the first images.

    Args:
        path: the file.
        images: false: leave out the images, so that it takes seconds.

    Raises:
        ValueError: in one sentence, at the first damage.
    """
    with DataFile(path) as file, opened(path) as content:
        reader = file.reader
        _check_columns(content, reader)
        check_index(file.index())
        if not isinstance(reader, NativeReader):
            for split in reader.splits:
                reader.stored(split, np.arange(1))
            return
        for split in reader.splits if images else ():
            _check_images(content, file, split)
        _check_content(content, reader)


def check_columns(path: Path) -> None:
    """Check all that a file of ours holds besides images, such as users and labels, against its checksums.

    It takes about 0.1 s for 51,414 users with 431,645 images. A file of another make has no checksums.

    Raises:
        ValueError: in one sentence, at the first damage.
    """
    with DataFile(path) as file, opened(path) as content:
        _check_columns(content, file.reader)
        _check_content(content, file.reader)


def describe(file: DataFile) -> str:
    """A summary for people: size, storage, users and images of each split, labels, provenance."""
    size = f", {file.image_size} pixels" if file.image_size else ""
    layout = "grouped by user" if file.grouped else "not grouped by user"
    lines = [f"{file.path}: {file.path.stat().st_size / 1e6:,.1f} MB, {file.storage}{size}, {layout}, valid"]
    num_classes = len(next(iter(file.reader.label_mappings.values()), {}))  # to which partitions refer
    for name in file.splits:
        split = file.split(name)
        if not split.num_images:
            lines.append(f"{name:>6}: no images")
            continue
        images = np.bincount(split.user_index, minlength=split.num_users)
        elements = {
            key: len(found) if isinstance(found, Masks) else int(found.counts().sum())
            for key, found in split.annotations.items()
        }
        per_image = ", ".join(f"{n / split.num_images:.3f} {key}/image" for key, n in elements.items())
        lines.append(f"{name:>6}: {_users(images)}; {per_image}")
        for part, dealt in split.partitions.items():
            clause = meaning(part, num_classes)
            lines.append(
                f"        partition {part}: {_users(np.diff(dealt.offsets))}{clause and f'; {clause}'}"
            )
    lines += _label_lines(file)
    if file.reader.content_sha256 is not None:
        lines.append(f"content sha256: {file.reader.content_sha256}")
    lines += ["provenance:", *(f"  {key}: {value}" for key, value in file.provenance.items())]
    return "\n".join(lines)


def _users(images: npt.NDArray[Any]) -> str:
    """How many users have how many images, ``[U]``."""
    return (
        f"{len(images):,} users, {images.sum():,} images (per user: median {np.median(images):g}, "
        f"mean {images.mean():.2f}, max {images.max():,})"
    )


def _label_lines(file: DataFile) -> list[str]:
    """The classes of each annotation, and how many images or objects of each split have them."""
    lines: list[str] = []
    before: tuple[Any, ...] = ()
    for taxonomy, mapping in file.reader.label_mappings.items():
        names, found = list(mapping), [file.split(name).annotations[taxonomy] for name in file.splits]
        counts = np.array(
            [
                (file.present(name, taxonomy) if isinstance(annotation, Masks) else annotation).counts()
                for name, annotation in zip(file.splits, found)
            ]
        )
        if before == (names, counts.tolist()):
            lines.append(f"{taxonomy}: the same {len(names):,}")
            continue
        before = names, counts.tolist()
        what = {"boxes": "objects", "mask": "masks"}.get(found[0].kind, "images")
        lines.append(f"{taxonomy}: {len(names):,}, with {what} in {', '.join(file.splits)}{_flags(found)}")
        order = np.argsort(-counts.sum(0), kind="stable")
        if isinstance(found[0], Masks):  # `DataFile.present` counts no background
            order = order[[not (k == 0 and is_background(names[k])) for k in order]]
        lines += [
            f"  {names[k]}: {', '.join(f'{count:,}' for count in counts[:, k])}" for k in order[:MOST_LABELS]
        ]
        if len(order) > MOST_LABELS:
            rest = counts[:, order[MOST_LABELS:]].sum(1)
            lines.append(
                f"  {len(order) - MOST_LABELS:,} more, together: {', '.join(f'{count:,}' for count in rest)}"
            )
    return lines


def _flags(found: Sequence[Annotation]) -> str:
    """How many of an annotation's boxes have a flag."""
    flags = [annotation.flags for annotation in found if isinstance(annotation, Boxes)]
    counts = {
        word: sum(int(np.count_nonzero(column & flag)) for column in flags)
        for flag, word in ((CROWD, "surround a crowd"), (DIFFICULT, "are difficult"))
    }
    return "".join(f"; {count:,} {word}" for word, count in counts.items() if count)


def _check_columns(file: h5py.File, reader: NativeReader | ForeignReader) -> None:
    """Raise ValueError for a column of a file of ours that is missing, of another type, or not as written."""
    if not isinstance(reader, NativeReader):
        return
    for split in reader.splits:
        group = file[split]
        names = partition_names(group)
        parts = [f"{PARTITIONS}/{part}/{leaf}" for part in names for leaf in PARTITION_COLUMNS]
        for name in [*reader.column_names(), *parts]:
            found = column(group, name)
            check_sum(group[name], found)
        images = dataset(group, "images")
        if images.dtype != np.uint8:
            raise ValueError(f"{split}/images has type {images.dtype}, not uint8")
        size = reader.image_size
        if size is not None and images.shape != (len(group["image_ids"]), size, size, 3):
            raise ValueError(f"{split}/images has the wrong shape")


def _check_content(file: h5py.File, reader: NativeReader | ForeignReader) -> None:
    """Raise ValueError for a file of ours whose checksums of columns are not those that it was made with."""
    if isinstance(reader, NativeReader) and reader.content_sha256 != content_checksum(file):
        raise ValueError("its content does not match its checksum")


def _check_images(content: h5py.File, file: DataFile, name: str) -> None:
    """Raise ValueError for an image of a split that is not as written, or is no JPEG where it should be."""
    group, count = content[name], len(content[name]["image_ids"])
    if len(group["image_crc32"]) != count:
        raise ValueError(f"{name}/image_crc32 has the wrong length")
    crc, index = group["image_crc32"][()], file.split(name)
    masks = [found for found in index.annotations.values() if isinstance(found, Masks)]

    def fault_of(row: int, image: Any) -> str | None:
        if zlib.crc32(image) != crc[row]:
            return "it does not match its checksum"
        for mask in masks:
            assert index.image_sizes is not None
            height, width = index.image_sizes[row].tolist()
            if fault := fault_of_mask(mask.encoded(row), (height, width), mask.num_labels):
                return fault
        try:
            if isinstance(image, memoryview):
                jpeg_size(image)
        except ValueError as error:
            return str(error)
        return None

    def damage(start: int) -> str | None:
        rows = np.arange(start, min(start + _BLOCK, count))
        for row, image in zip(rows.tolist(), file.reader.stored(name, rows)):
            if fault := fault_of(row, image):
                user, image_id = index.user_ids[int(index.user_index[row])], index.image_ids[row]
                return f"image {image_id} of user {user} ({name}, row {row}): {fault}"
        return None

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for fault in pool.map(damage, range(0, count, _BLOCK)):
            if fault:
                raise ValueError(fault)
