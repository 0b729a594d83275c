"""numpy's ``.npz``: arrays of images and labels by split, as MedMNIST and Keras distribute theirs.

The words of an array's name, between underscores, say what it holds: ``train_images``, ``val_labels``,
``x_test``. Arrays are read in blocks, so that a file of MedMNIST+ need not fit in memory. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import lzma
import math
import struct
import sys
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
from numpy.lib import format as npy

from dataset.convert.pixels import Scale
from dataset.convert.source import NO_CLIENT, Found, Part, Rows
from dataset.convert.text import MAX_CLASSES, Names
from dataset.fetch import source as batches
from dataset.fetch.source import Image
from dataset.files import state_of
from dataset.store.annotations import Kind
from dataset.store.index import SPLIT_NAMES

HELD = {"images": "images", "x": "images", "labels": "labels", "y": "labels", "clients": "clients"}
"""What an array holds, by a word of its name."""
DAMAGE = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, OSError, EOFError, NotImplementedError,
    RuntimeError,
)  # fmt: skip
"""What zipfile raises for a damaged archive."""
WRONG_HEADER = (
    ValueError, LookupError, TypeError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError,
)  # fmt: skip
"""What numpy raises for a damaged header."""
HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


@dataclass(frozen=True)
class Array:
    """An array of the file, read from its beginning on."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def where(self) -> str:
        """Its place, for errors."""
        return f"{self.path}, {self.name}"

    def blocks(self, start: int = 0) -> Iterator[npt.NDArray[Any]]:
        """The array from a row on, in blocks of rows."""
        row_size = self.dtype.itemsize * math.prod(self.shape[1:])
        with _members(self.path) as archive, archive.open(f"{self.name}.npy") as file:
            _header(file, self.where)
            for first in range(0, self.shape[0], batches.BATCH):
                rows = min(batches.BATCH, self.shape[0] - first)
                content = file.read(rows * row_size)
                if len(content) < rows * row_size:
                    raise ValueError(f"{self.where} is damaged: it ends before its last row")
                if first + rows > start:
                    block = np.frombuffer(content, self.dtype).reshape(rows, *self.shape[1:])
                    yield block[max(0, start - first) :]


@dataclass
class Split:
    """The arrays of one split, by what they hold."""

    name: str | None
    arrays: dict[str, Array] = field(default_factory=dict)

    @property
    def columns(self) -> int:
        """Columns of its labels; one where they are a list."""
        return math.prod(self.arrays["labels"].shape[1:])


@contextlib.contextmanager
def _members(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except DAMAGE as fault:
        raise ValueError(f"{path} is not a complete .npz file ({fault}): copy or download it again") from None


def _header(file: IO[bytes], where: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of an array whose file is then at its first number."""
    try:
        shape, by_columns, dtype = HEADERS[npy.read_magic(file)](file)
    except WRONG_HEADER as fault:
        why = " ".join(str(fault).split())[:100]
        raise ValueError(f"{where} is not a numpy array ({why})") from None
    if dtype.hasobject or not dtype.itemsize:
        raise ValueError(
            f"{where} has the type {dtype}, not numbers or text, and Python objects are not read: save "
            "it as an array of numbers"
        )
    if by_columns and len(shape) > 1:
        raise ValueError(f"{where} is stored in Fortran order: save numpy.ascontiguousarray(...) of it")
    return shape, dtype


def _array(path: Path, archive: zipfile.ZipFile, member: str) -> Array:
    """An array of a file, of which the header alone is read."""
    with archive.open(member) as file:
        array = Array(path, member.removesuffix(".npy"), *_header(file, f"{path}, {member}"))
        content = archive.getinfo(member).file_size - file.tell()
    if content != math.prod(array.shape) * array.dtype.itemsize:
        raise ValueError(
            f"{array.where} is damaged: {content:,} bytes do not fit an array of shape {array.shape}"
        )
    return array


def splits_of(path: Path) -> list[Split]:
    """The arrays of a file by split, those with images.

    Raises:
        ValueError: where there are none, or images without labels, or arrays of several lengths.
    """
    found: dict[str | None, Split] = {}
    unread = []
    with _members(path) as archive:
        for member in archive.namelist():
            words = member.removesuffix(".npy").lower().split("_")
            held = [HELD[word] for word in words if word in HELD]
            of = [SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES]
            if len(held) != 1 or len(of) > 1 or not member.endswith(".npy"):
                unread.append(repr(member)[1:-1])
                continue
            array = _array(path, archive, member)
            split = found.setdefault(of[0] if of else None, Split(of[0] if of else None))
            if held[0] in split.arrays:
                raise ValueError(
                    f"{array.where} and {split.arrays[held[0]].name} are both read as {held[0]} of the "
                    "same split: rename or remove one"
                )
            split.arrays[held[0]] = array
    if unread:
        print(f"{path}: these arrays are not read: {', '.join(unread)}"[:400], file=sys.stderr)
    splits = [split for split in found.values() if "images" in split.arrays]
    if not splits:
        raise ValueError(
            f"{path} has no array of images: name the arrays, for example, train_images and "
            "train_labels, or x_train and y_train"
        )
    if None in found and len(found) > 1:
        first = next(iter(found[None].arrays.values()))
        raise ValueError(
            f"{first.where} has no split (train, val, test) in its name, but other arrays have one: rename it"
        )
    for split in found.values():
        if "images" not in split.arrays:
            alone = next(iter(split.arrays.values()))
            raise ValueError(f"{alone.where} has no array of images for it: add one, or remove this array")
    for split in splits:
        _check(split, splits[0])
    return splits


def _check(split: Split, first: Split) -> None:
    """Refuse arrays that do not go together, or hold something else than their names say."""
    images, labels, clients = (split.arrays.get(held) for held in ("images", "labels", "clients"))
    assert images is not None
    if labels is None:
        raise ValueError(f"{images.where} has no array of labels for it: add one")
    if images.dtype.kind not in "uif" or len(images.shape) < 2:
        raise ValueError(
            f"{images.where} has the type {images.dtype} and the shape {images.shape}, which are not "
            "images: save numbers of the shape [N, H, W] or [N, H, W, 3]"
        )
    if labels.dtype.kind not in "ui" or len(labels.shape) not in (1, 2) or not split.columns:
        raise ValueError(
            f"{labels.where} has the type {labels.dtype} and the shape {labels.shape}: give one whole "
            "number for each image (its class), or for several labels of an image one column of 0 and "
            "1 for each class"
        )
    if split.columns >= MAX_CLASSES:
        raise ValueError(f"{labels.where} has {split.columns:,} columns; give at most {MAX_CLASSES - 1:,}")
    if split.columns != first.columns:
        raise ValueError(
            f"{labels.where} has {split.columns} columns, but {first.arrays['labels'].name} has "
            f"{first.columns}: use the same columns in all splits"
        )
    if (clients is None) != ("clients" not in first.arrays):
        raise ValueError(
            f"{images.where}: one split has an array of clients, but another has none: add it, or remove it"
        )
    if clients is not None and (clients.dtype.kind not in "uiU" or len(clients.shape) != 1):
        raise ValueError(
            f"{clients.where} has the type {clients.dtype} and the shape {clients.shape}: give a list "
            "of names or whole numbers"
        )
    for array in split.arrays.values():
        if array.shape[0] != images.shape[0]:
            raise ValueError(
                f"{array.where} has {array.shape[0]:,} rows, but {images.name} has {images.shape[0]:,}: "
                "they must have the same number of rows"
            )


def read(path: Path, class_names: list[str] | None) -> Found:
    """Read a ``.npz`` file.

    Args:
        path: the file. Labels are class numbers, ``[n]`` or ``[n, 1]``, or ``[n, K]`` of 0 and 1 for several
            labels of an image; clients are ``[n]`` whole numbers or text.
        class_names: the class names by number.

    Raises:
        ValueError: one line that names file and array.
    """
    splits = splits_of(path)
    columns = splits[0].columns
    kind: Kind = "class" if columns == 1 else "label set"
    if kind == "label set":
        class_names = [str(number) for number in range(columns)] if class_names is None else class_names
        if len(class_names) != columns:
            where = splits[0].arrays["labels"].where
            raise ValueError(
                f"--classes has {len(class_names)} names, but {where} has {columns} columns: give one name "
                "for each column"
            )
    names, scale = {"labels": Names(class_names, numbered=True)}, Scale()
    parts, size = [], 0
    for split in splits:
        images = split.arrays["images"]
        shape = scale.shape_of(images.shape[1:], images.where)
        size += images.shape[0] * shape[0] * shape[1] * 3
        for block in images.blocks():
            scale.note(block, images.where)
            if images.dtype == np.uint8 and block.max() > 1:
                break  # these are levels, and none is out of range
        parts.append(_part(split, _rows(split, {"labels": kind}, names), scale, shape))
    side = scale.side(path)
    if kind == "label set" and _one_each(parts):
        raise ValueError(
            f"{splits[0].arrays['labels'].where}: each image has exactly one label, given as columns of "
            "0 and 1: save class numbers instead, by numpy.argmax(labels, axis=1)"
        )
    return Found(parts, {"labels": kind}, names, size, side, clients="clients" in splits[0].arrays)


def _rows(split: Split, kinds: Mapping[str, Kind], names: Mapping[str, Names]) -> Rows:
    rows = Rows(kinds, names)
    labels, clients = split.arrays["labels"], split.arrays.get("clients")
    whose = repeat(NO_CLIENT) if clients is None else _each(clients)
    for number, (label, client) in enumerate(zip(_each(labels), whose)):
        where, value = f"{labels.where}, row {number}", np.ravel(label)
        if kinds["labels"] == "label set" and not np.isin(value, (0, 1)).all():
            raise ValueError(
                f"{where} has numbers other than 0 and 1: for several labels of an image, give columns "
                "of 0 and 1"
            )
        found = int(value[0]) if kinds["labels"] == "class" else np.flatnonzero(value).tolist()
        name = f"{split.name}/{number}" if split.name else str(number)
        rows.add(where, client, name, split.name, [found])
    return rows


def _one_each(parts: Sequence[Part]) -> bool:
    """Whether every image has a single label."""
    columns = [part.table["labels"] for part in parts]
    return any(map(len, columns)) and all(
        pc.all(pc.equal(pc.list_value_length(column), 1)).as_py() is not False for column in columns
    )


def _each(array: Array) -> Iterator[Any]:
    """The rows of an array, as Python's numbers, text or lists."""
    for block in array.blocks():
        try:
            rows = block.tolist()
        except SystemError as fault:  # a letter that Unicode does not have
            raise ValueError(f"{array.where} is damaged ({fault})") from None
        yield from rows


def _part(split: Split, rows: Rows, scale: Scale, shape: tuple[int, int, int]) -> Part:
    array = split.arrays["images"]

    def images(start: int) -> Iterator[Image]:
        for block in array.blocks(start):
            yield from (scale.pixels(image, shape) for image in block)

    key = f"{array.path} {array.name} {state_of(array.path)}"
    return Part(array.where, key, rows.table(), lambda row: f"{array.where}, row {row}", images)
