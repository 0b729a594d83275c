"""The interface of a source of images: parts that can be read twice, in the same order, batch by batch.

A source has parts (usually its files), which can be read from any image on: `Source.records` reads
everything, `Source.images` only the images. Remote files are fetched one at a time, when they are first
needed.
"""

from __future__ import annotations

import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from dataset.arrays import ByteArray
from dataset.files import state_of

BATCH = 64
"""Number of images in a batch."""

Image = memoryview | bytes | ByteArray | None
"""An image's bytes, or pixels ``[H, W, 3]``; None for an image that the source lists but does not hold."""


@dataclass(frozen=True)
class Records:
    """A batch: the columns of `dataset.store.columns.ID_COLUMNS` and annotations, images, and their file."""

    table: pa.Table
    images: Sequence[Image]
    origin: str
    places: Sequence[str] = ()
    """The place of each record, if the source knows more than its file."""

    def place(self, row: int) -> str:
        """The place of a row's record, for errors."""
        return self.places[row] if self.places else self.origin


def nothing() -> None:
    """Delete nothing: a local source has no downloads."""


@dataclass(kw_only=True)
class Source(ABC):
    """Users' images with their annotations, readable twice in the same order."""

    schema: pa.Schema
    """The columns of the records: `dataset.store.columns.schema`."""
    num_images: int
    """Number of images; an estimate suffices for the progress bar and the disk."""
    image_bytes: int
    """Approximate size of all images in bytes."""
    provenance: dict[str, Any]
    """Source, revision, licence."""
    download_bytes: int = 0
    """Number of bytes that are still to be downloaded."""
    discard: Callable[[], None] = nothing
    """Deletes what was downloaded."""

    @property
    @abstractmethod
    def parts(self) -> Sequence[str]:
        """A key for each part's content: while the key is the same, so are the bytes."""

    @abstractmethod
    def records(self, part: int, start: int = 0) -> Iterator[Records]:
        """Everything of a part, batch by batch, from image ``start`` on."""

    @abstractmethod
    def images(self, part: int, start: int = 0) -> Iterator[Sequence[Image]]:
        """The images alone, in the order of `records`; all `records` were read, or skipped, before."""

    def skip(self, part: int, table: pa.Table) -> None:  # noqa: B027
        """Note that an earlier process has read these records of a part."""


@dataclass(frozen=True)
class Shard:
    """One file of a source. ``fetch`` makes sure that it is on the disk, and returns its path.

    ``key`` identifies its bytes without reading them: by commit and hash, or by size and time.
    """

    name: str
    size: int
    fetch: Callable[[], Path]
    key: str

    @classmethod
    def on_disk(cls, path: Path, name: str) -> Shard:
        """A local file."""
        return cls(name, path.stat().st_size, lambda: path, f"{name} {state_of(path)}")


def digest_of(table: pa.Table) -> str:
    """SHA-256 of a table's rows and schema, in hexadecimal."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return hashlib.sha256(sink.getvalue()).hexdigest()


def delete_downloads(folder: Path, names: Sequence[str]) -> None:
    """Delete these files of a download folder, and folders that this leaves empty; nothing else."""
    for name in names:
        for path in (folder / name, folder / f"{name}.checked"):
            path.unlink(missing_ok=True)
    above = {parent for name in names for parent in (folder / name).parents if parent.is_relative_to(folder)}
    for parent in sorted({folder, *above}, key=lambda path: len(path.parts), reverse=True):
        with contextlib.suppress(OSError):  # it is not empty
            parent.rmdir()


def bytes_to_download(shards: Sequence[Shard], folder: Path) -> int:
    """How many bytes of the shards are not in the download folder yet."""
    here = {path.name: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    return sum(shard.size for shard in shards if here.get(Path(shard.name).name) != shard.size)
