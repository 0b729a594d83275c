"""The common result of every format's reader: records by user with their images, as a pipeline's source."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dataset.convert.splits import Dealing, deal
from dataset.convert.text import Names, checked_text, shown
from dataset.fetch import source
from dataset.fetch.source import Image, Records, Source, digest_of
from dataset.store.annotations import Kind
from dataset.store.columns import ID_COLUMNS, schema
from dataset.store.index import FOUND_CLASSES

NO_CLIENT = "all"
"""The user of all images of a source without clients."""
_CHUNK = 1 << 14


@dataclass(frozen=True)
class Part:
    """Some records, usually those of one file, in the order of their images.

    Attributes:
        name: the name of the file or folder.
        key: identifies the images' bytes, for example by size and time of the file.
        table: the columns of `dataset.store.columns.schema`; the partition is null if the source has none.
        place: returns the place of a record, for errors: ``labels.csv, line 7``.
        images: yields all images from a record on.
    """

    name: str
    key: str
    table: pa.Table
    place: Callable[[int], str]
    images: Callable[[int], Iterator[Image]]


@dataclass(frozen=True)
class Found:
    """The result of a reader.

    Attributes:
        parts: the records.
        kinds: the kinds of the annotations, by name.
        names: the classes of the annotations, by name.
        image_bytes: approximate size of all images in bytes.
        side: side of square arrays of pixels; 0: other shapes; None: the images are files, such as JPEGs.
        empty_users: users that the source lists without an image.
        clients: whether the source says whose each image is; if not, all are of the user `NO_CLIENT`.
        files: the files whose names hold the splits, each with its own.
    """

    parts: Sequence[Part]
    kinds: Mapping[str, Kind]
    names: Mapping[str, Names]
    image_bytes: int
    side: int | None = None
    empty_users: Sequence[str] = ()
    clients: bool = True
    files: Sequence[tuple[Path, str | None]] = ()


class Rows:
    """Collects the records of a part, in compact columns.

    Args:
        kinds: the kinds of the annotations, by name.
        names: the classes of the annotations, by name.
    """

    def __init__(self, kinds: Mapping[str, Kind], names: Mapping[str, Names]) -> None:
        self._schema = schema(kinds)
        self._kinds, self._names = kinds, names
        self._columns: list[list[Any]] = [[] for _ in self._schema]
        self._tables: list[pa.Table] = []

    def add(
        self, where: str, client: object, image: object, split: str | None, labels: Sequence[Any]
    ) -> None:
        """Add one record; ``labels`` has a label, or a list of labels, for each annotation.

        Raises:
            ValueError: for an invalid id or label; the message has ``where``.
        """
        found: list[Any] = [
            checked_text(client, "client", where),
            checked_text(image, "image id", where),
            split,
        ]
        for (name, kind), label in zip(self._kinds.items(), labels):
            known = self._names[name]
            if kind == "class":
                found.append(known.name(label, where))
            else:
                found.append([known.name(one, where) for one in label])
        for column, value in zip(self._columns, found):
            column.append(value)
        if len(self._columns[0]) >= _CHUNK:
            self._flush()

    def _flush(self) -> None:
        self._tables.append(pa.table(self._columns, self._schema))
        self._columns = [[] for _ in self._schema]

    def table(self) -> pa.Table:
        """The records that were added, as one table."""
        self._flush()
        return pa.concat_tables(self._tables)


@dataclass(kw_only=True)
class ConvertedSource(Source):
    """Parts as a source of `dataset.preprocess`."""

    found: Sequence[Part]

    @property
    def parts(self) -> Sequence[str]:
        """The key of each part; see `Source.parts`."""
        return [part.key for part in self.found]

    def records(self, part: int, start: int = 0) -> Iterator[Records]:
        """The records of a part; see `Source.records`."""
        chosen = self.found[part]
        for images in self.images(part, start):
            if start + len(images) > len(chosen.table):
                break
            table = chosen.table.slice(start, len(images))
            places = [chosen.place(row) for row in range(start, start + len(images))]
            yield Records(table, images, chosen.name, places)
            start += len(images)
        if start != len(chosen.table):
            raise ValueError(f"{chosen.name} changed while it was read: run the command again")

    def images(self, part: int, start: int = 0) -> Iterator[Sequence[Image]]:
        """The images of a part; see `Source.images`."""
        images = self.found[part].images(start)
        while batch := list(islice(images, source.BATCH)):
            yield batch


def assembled(found: Found, dealing: Dealing, provenance: Mapping[str, Any]) -> ConvertedSource:
    """The source for a reader's result, with its images dealt to splits.

    Raises:
        ValueError: for an image id that occurs twice, with both places; and as `dataset.convert.splits.deal`.
    """
    parts = [part for part in found.parts if len(part.table)]
    if not parts:
        raise ValueError(f"{provenance['source']} has no image")
    table = pa.concat_tables(part.table for part in parts)
    _refuse_twice(parts, table["image_id"])
    ids = deal(table["user_id"], table["image_id"], table["partition"], dealing)
    for name in ID_COLUMNS:
        table = table.set_column(table.schema.get_field_index(name), name, ids[name])
    digest = digest_of(table.combine_chunks())
    placed, start = [], 0
    for part in parts:
        key = hashlib.sha256(f"{part.key} {start} {digest}".encode()).hexdigest()
        placed.append(replace(part, key=key, table=table.slice(start, len(part.table)).combine_chunks()))
        start += len(part.table)
    return ConvertedSource(
        found=placed,
        schema=table.schema,
        num_images=len(table),
        image_bytes=found.image_bytes,
        provenance={
            **provenance,
            **dealing.provenance(),
            FOUND_CLASSES: [name for name, names in found.names.items() if names.class_names is None],
            "records_sha256": digest,
        },
    )


def _refuse_twice(parts: Sequence[Part], ids: pa.ChunkedArray) -> None:
    """Raise ValueError for an image id that occurs twice, in one part or in two."""
    raw = np.array(ids.cast(pa.binary()).to_pylist())
    order = np.argsort(raw, kind="stable")
    twice = np.flatnonzero(raw[order[1:]] == raw[order[:-1]])
    if not len(twice):
        return
    at = int(order[twice + 1].min())  # the first record that repeats an earlier one
    first = int(order[np.searchsorted(raw[order], raw[at])])
    raise ValueError(
        f"{_place(parts, at)} has the image {shown(ids[at].as_py())} a second time (the first is "
        f"{_place(parts, first)}): remove one"
    )


def _place(parts: Sequence[Part], record: int) -> str:
    for part in parts:
        if record < len(part.table):
            return part.place(record)
        record -= len(part.table)
    raise AssertionError("there is no such record")
