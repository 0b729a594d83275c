"""Images in tar archives, read as streams and never unpacked, and in folders.

Files may be untrusted. So the declared sizes of an archive's members and headers are checked before memory is
allocated.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import tarfile
import zipfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, cast

import pyarrow as pa
from typing_extensions import Self

from dataset.fetch import source
from dataset.fetch.source import Image, Records, Shard, Source
from dataset.files import state_of

MAX_IMAGE_BYTES = 1 << 26
JPEG_SUFFIXES = (".jpg", ".jpeg")
IMAGE_SUFFIXES = (*JPEG_SUFFIXES, ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
Member = tuple[PurePosixPath, int, Callable[[], bytes]]
"""A file of an archive: its path there, its size in bytes, and how to read it."""
_DAMAGE = (
    tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, OSError,
    NotImplementedError, RuntimeError,
)  # fmt: skip
"""The libraries' exceptions for a damaged archive; the last two are zipfile's, for a method or a password."""
_MAX_HEADER_BYTES = 1 << 20  # of a long name in a tar archive
_HEADERS = frozenset((b"L", b"K", b"x", b"g", b"X", b"N", b"V"))  # tar members that are headers of the next


@dataclass
class ArchiveSource(Source):
    """Images that a file lists, in tar or zip archives or as files ``<image_id>.jpg``.

    Archives are read as streams and never unpacked, and only the last part of a member's name is used. A file
    whose image is also in an archive is left out. Images that are not listed are left out. Listed images that
    are nowhere come last, as None.
    """

    listing: Shard
    read_listing: Callable[[Path], pa.Table]
    archives: Sequence[Shard]
    files: Path | None
    paths: Mapping[str, Path] | None = None
    """The images' paths below ``files``, if they are not at ``<image_id>.jpg``."""
    suffixes: Sequence[str] = JPEG_SUFFIXES
    """Suffixes of images in the archives, in lower case."""

    @cached_property
    def listed(self) -> tuple[pa.Table, dict[str, int]]:
        """The records that are listed, and each image's row among them."""
        table = self.read_listing(self.listing.fetch())
        ids = table["image_id"].to_pylist()
        row_of = {image_id: row for row, image_id in enumerate(ids)}
        if len(row_of) < len(ids):
            twice = next(image_id for row, image_id in enumerate(ids) if row_of[image_id] != row)
            raise ValueError(f"{self.listing.name} lists image {twice} twice")
        return table, row_of

    @cached_property
    def _claimed(self) -> array[int]:
        """``[R]``: 1 + the first part that has each image; 0 if none has it so far."""
        return array("l", [0]) * len(self.listed[1])

    @property
    def parts(self) -> Sequence[str]:
        """Keys of the archives, the folder of files, and what is listed and in none; see `Source.parts`."""
        keys = [shard.key for shard in self.archives]
        if self.files is not None:
            keys.append(_folder_key(self.files, self._found()))
        return [f"{self.listing.key} {key}" for key in [*keys, f"missing of {' '.join(keys)}"]]

    def skip(self, part: int, table: pa.Table) -> None:
        """Note that a part has the images of these records; see `Source.skip`."""
        _, row_of = self.listed
        for image_id in table["image_id"].to_pylist():
            self._claim(part, row_of[image_id])

    def _claim(self, part: int, row: int) -> None:
        """Note that a part has an image, unless an earlier part has it, too."""
        if not self._claimed[row]:
            self._claimed[row] = part + 1

    def records(self, part: int, start: int = 0) -> Iterator[Records]:
        """The records of a part; see `Source.records`."""
        table, row_of = self.listed
        for ids, images in self._batches(part, start):
            rows = [row_of[image_id] for image_id in ids]
            yield Records(table.take(rows), images, self._origin(part))

    def images(self, part: int, start: int = 0) -> Iterator[Sequence[Image]]:
        """The images of a part; see `Source.images`."""
        return (images for _, images in self._batches(part, start))

    def _origin(self, part: int) -> str:
        if part < len(self.archives):
            return self.archives[part].name
        has_files = self.files is not None and part == len(self.archives)
        return self.files.name if self.files is not None and has_files else self.listing.name

    def _batches(self, part: int, start: int) -> Iterator[tuple[list[str], list[Image]]]:
        def wanted() -> Iterator[tuple[str, Image]]:
            for place, (image_id, read) in enumerate(self._members(part)):
                if read is not None:
                    self._claim(part, self.listed[1][image_id])
                if place >= start:
                    yield image_id, read and read()

        images = wanted()
        while batch := list(islice(images, source.BATCH)):
            yield [image_id for image_id, _ in batch], [image for _, image in batch]

    def _members(self, part: int) -> Iterator[tuple[str, Callable[[], bytes] | None]]:
        """The listed images of a part, each with how to read it; None if it is nowhere."""
        _, row_of = self.listed
        if part < len(self.archives):
            images = archive_images(self.archives[part].fetch(), self.suffixes)
            yield from (found for found in images if found[0] in row_of)
        elif self.files is not None and part == len(self.archives):
            for image_id, path in self._found():
                if self._claimed[row_of[image_id]] in (0, part + 1):
                    _bounded(str(path), path.stat().st_size)
                    yield image_id, path.read_bytes
        else:
            yield from ((image_id, None) for image_id, row in row_of.items() if not self._claimed[row])

    def _found(self) -> Iterator[tuple[str, Path]]:
        """The listed images that are files, with their paths."""
        assert self.files is not None
        for image_id in self.listed[1]:
            path = self.files / f"{image_id}.jpg" if self.paths is None else self.paths.get(image_id)
            if path is not None and Path(image_id).name == image_id and path.is_file():
                yield image_id, path


def _folder_key(folder: Path, found: Iterable[tuple[str, Path]]) -> str:
    """SHA-256 over names, sizes and times of the images in a folder."""
    digest = hashlib.sha256(str(folder).encode())
    for image_id, path in found:
        digest.update(f"{image_id} {state_of(path)}\n".encode())
    return digest.hexdigest()


def _bounded(name: str, size: int) -> None:
    """Raise ValueError for a size that no image has."""
    if size > MAX_IMAGE_BYTES:
        raise ValueError(f"{name} has {size:,} bytes; an image may have at most {MAX_IMAGE_BYTES:,}")


class BoundedHeader(tarfile.TarInfo):
    """Refuses headers (such as long names) of an impossible size, since tarfile reads them into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """The header, as tarfile reads it; raises ReadError for one of such a size."""
        found = super().frombuf(buf, encoding, errors)
        if found.type in _HEADERS and found.size > _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {found.size:,} bytes")
        return found


def archive_images(
    path: Path, suffixes: Sequence[str] = JPEG_SUFFIXES
) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """The images of a tar or zip archive, in its order: the name without suffix, and how to read it.

    Each must be read before the next is asked for.

    Args:
        path: of the archive.
        suffixes: of images, in small letters.

    Raises:
        ValueError: when the archive is damaged, or an image has more bytes than any photograph.
    """
    for name, size, read in archive_members(path):
        if name.suffix.lower() in suffixes:
            _bounded(f"{path}: {str(name)!r}", size)
            yield name.stem, read


def archive_members(path: Path) -> Iterator[Member]:
    """The files of a tar or zip archive, in its order; each must be read before the next is asked for.

    Raises:
        ValueError: when the archive is damaged.
    """
    with archive_errors(path), open(path, "rb") as file:
        zipped = file.read(2) == b"PK"
    return _zip_members(path) if zipped else _tar_members(path)


def _zip_members(path: Path) -> Iterator[Member]:
    with archive_errors(path), zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if not member.is_dir():
                yield PurePosixPath(member.filename), member.file_size, partial(_unzip, path, archive, member)


def _tar_members(path: Path) -> Iterator[Member]:
    with archive_errors(path), ExitStack() as stack:
        stream: IO[bytes] = stack.enter_context(open(path, "rb"))
        if stream.read(2) == b"\x1f\x8b":  # tarfile itself does not look at gzip's checksum
            stream.seek(0)
            stream = cast(IO[bytes], stack.enter_context(gzip.GzipFile(fileobj=stream)))
        stream.seek(0)
        archive = stack.enter_context(tarfile.open(fileobj=stream, mode="r|", tarinfo=BoundedHeader))
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # it would keep all of them
            if member.isreg():
                content = archive.extractfile(member)
                assert content is not None
                yield PurePosixPath(member.name), member.size, partial(_read, path, content)
        while stream.read(1 << 20):  # to gzip's checksum, which stands at the end
            pass


def _read(path: Path, content: IO[bytes]) -> bytes:
    with archive_errors(path):
        return content.read()


def _unzip(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    with archive_errors(path):
        return archive.read(member)


@contextmanager
def archive_errors(path: Path) -> Iterator[None]:
    """Turn what a damaged archive raises into one ValueError that names it."""
    try:
        yield
    except _DAMAGE as error:
        raise ValueError(f"{path} is damaged ({error}); delete it and run the command again") from None
