"""Where FLAIR comes from: Hugging Face's parquet, Apple's archives, or a local copy of either.

A source has parts (its files, mostly), each read twice, in the same order, a batch at a time, from any image
on: `Source.records` for everything, `Source.images` for the images alone. Remote files are fetched one at a
time, when they are first needed.

Files may come from anywhere, so no size that they declare is believed: neither that of an archive's member or
of its header, nor that of a record or of an id.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import tarfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol, cast

import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import Self

from dataset.store.columns import COLUMNS, SCHEMA
from dataset.store.index import TAXONOMIES

METADATA = "labels_and_metadata.json"
LICENCE = (
    "FLAIR: annotations CC BY-NC 4.0, each image under its Flickr owner's licence (ATTRIBUTION.txt); "
    "non-commercial, do not redistribute"
)
BATCH = 64  # images in a batch
MAX_IMAGE_BYTES = 1 << 26
MAX_RECORD_CHARACTERS = 1 << 22  # of one record in Apple's JSON
_MAX_HEADER_BYTES = 1 << 20  # of a long name in a tar archive
_HEADERS = frozenset((b"L", b"K", b"x", b"g", b"X", b"N", b"V"))  # tar members that are headers of the next

Image = memoryview | bytes | None
"""An image's bytes; None where the source lists an image that it does not hold."""


@dataclass(frozen=True)
class Records:
    """A batch: `columns.SCHEMA`'s columns, the images' bytes, and the file that they come from."""

    table: pa.Table
    images: Sequence[Image]
    origin: str


class Source(Protocol):
    """Users' images with their labels, readable twice in the same order."""

    @property
    def num_images(self) -> int:
        """How many images there are (an estimate will do: for the progress bar and the disk)."""
        ...

    @property
    def image_bytes(self) -> int:
        """About how many bytes the images have together."""
        ...

    @property
    def download_bytes(self) -> int:
        """How many bytes are still to be downloaded."""
        ...

    @property
    def provenance(self) -> dict[str, Any]:
        """Source, revision, licence."""
        ...

    @property
    def parts(self) -> Sequence[str]:
        """What identifies the content of each part: as long as it is the same, so are the bytes."""
        ...

    def records(self, part: int, start: int = 0) -> Iterator[Records]:
        """Everything of a part, batch by batch, from image ``start`` on."""
        ...

    def images(self, part: int, start: int = 0) -> Iterator[Sequence[Image]]:
        """The images alone, in the order of `records`."""
        ...

    def skip(self, part: int, table: pa.Table) -> None:
        """Take note that an earlier process read these records of a part."""
        ...

    @property
    def discard(self) -> Callable[[], None]:
        """Deletes what was downloaded."""
        ...


def nothing() -> None:
    """What there is to delete of a local source."""


@dataclass(frozen=True)
class Shard:
    """One file of a source; ``fetch`` makes sure that it is on the disk and says where.

    ``key`` identifies its bytes without reading them: commit and hash, or size and time.
    """

    name: str
    size: int
    fetch: Callable[[], Path]
    key: str


@dataclass
class ParquetSource:
    """Parquet shards with the columns of ``apple/flair``."""

    shards: Sequence[Shard]
    num_images: int
    provenance: dict[str, Any]
    download_bytes: int = 0
    discard: Callable[[], None] = nothing

    @property
    def image_bytes(self) -> int:
        """The shards' size: a JPEG does not compress any further."""
        return sum(shard.size for shard in self.shards)

    @property
    def parts(self) -> Sequence[str]:
        """As `Source.parts`: the shards."""
        return [shard.key for shard in self.shards]

    def skip(self, part: int, table: pa.Table) -> None:
        """As `Source.skip`."""

    def records(self, part: int, start: int = 0) -> Iterator[Records]:
        """As `Source.records`."""
        shard = self.shards[part]
        for batch in _parquet(shard, [*COLUMNS, "image"], start):
            table = pa.Table.from_batches([batch.select(COLUMNS)])
            try:
                table = table.cast(SCHEMA)
            except pa.ArrowException as error:
                raise ValueError(
                    f"{shard.name} has columns of other types than apple/flair: {error}"
                ) from None
            for name in COLUMNS:
                if table[name].null_count:
                    raise ValueError(f"{shard.name} has records without {name}")
            yield Records(table, _binary(shard, batch), shard.name)

    def images(self, part: int, start: int = 0) -> Iterator[Sequence[Image]]:
        """As `Source.images`."""
        for batch in _parquet(self.shards[part], ["image"], start):
            yield _binary(self.shards[part], batch)


def _parquet(shard: Shard, columns: list[str], start: int) -> Iterator[Any]:
    path = shard.fetch()
    try:
        # A buffer, rather than whole column chunks, bounds the memory whatever the size of a row group.
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            missing = [name for name in columns if name not in file.schema_arrow.names]
            if missing:
                raise ValueError(f"it has no column {missing[0]!r}, as apple/flair has")
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if start >= rows:
                    start -= rows
                    continue
                batches = file.iter_batches(BATCH, row_groups=[group], columns=columns, use_threads=False)
                for batch in batches:
                    if start < len(batch):
                        yield batch.slice(start)
                    start = max(0, start - len(batch))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ValueError(f"{path} cannot be read as parquet: {' '.join(str(error).split())}") from None


def _binary(shard: Shard, batch: Any) -> list[Image]:
    column = batch.column("image")
    if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
        column = column.flatten()[column.type.get_field_index("bytes")]
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        raise ValueError(f"{shard.name}: the column 'image' holds {column.type}, not the images' bytes")
    return [memoryview(value.as_buffer()).cast("B") if value.is_valid else None for value in column]


@dataclass
class ArchiveSource:
    """``labels_and_metadata.json`` and the images it lists, in tar archives or as files ``<image_id>.jpg``.

    Archives are read as streams and never unpacked, and only the last part of a member's name is looked at.
    A file whose image is in an archive, too, is left out. Images that the JSON does not list are left out;
    those that it lists and that are nowhere come last, as None.
    """

    metadata: Shard
    archives: Sequence[Shard]
    files: Path | None
    num_images: int
    image_bytes: int
    provenance: dict[str, Any]
    download_bytes: int = 0
    discard: Callable[[], None] = nothing
    read_listing: Callable[[Path], pa.Table] = field(default_factory=lambda: read_metadata)
    paths: Mapping[str, Path] | None = None
    """Where the images lie below ``files``, if not at ``<image_id>.jpg``."""
    _listed: tuple[pa.Table, dict[str, int]] | None = field(default=None, repr=False)
    _claimed: array[int] = field(default_factory=lambda: array("l"), repr=False)
    """``[R]``: 1 + the first part that has each image; 0 if none has it so far."""

    @property
    def parts(self) -> Sequence[str]:
        """As `Source.parts`: archives, or the folder of files; then what is listed and in none of them."""
        keys = [shard.key for shard in self.archives]
        if self.files is not None:
            keys.append(_folder_key(self.files, self._found()))
        return [f"{self.metadata.key} {key}" for key in [*keys, f"missing of {' '.join(keys)}"]]

    def skip(self, part: int, table: pa.Table) -> None:
        """As `Source.skip`."""
        _, row_of = self.listed()
        for image_id in table["image_id"].to_pylist():
            self._claim(part, row_of[image_id])

    def _claim(self, part: int, row: int) -> None:
        """Note that a part has an image, unless an earlier part has it, too."""
        if not self._claimed[row]:
            self._claimed[row] = part + 1

    def records(self, part: int, start: int = 0) -> Iterator[Records]:
        """As `Source.records`."""
        table, row_of = self.listed()
        for ids, images in self._batches(part, start):
            rows = [row_of[image_id] for image_id in ids]
            yield Records(table.take(rows), images, self._origin(part))

    def images(self, part: int, start: int = 0) -> Iterator[Sequence[Image]]:
        """As `Source.images`; all `records` must have been read, or skipped, before."""
        return (images for _, images in self._batches(part, start))

    def _origin(self, part: int) -> str:
        if part < len(self.archives):
            return self.archives[part].name
        is_files = self.files is not None and part == len(self.archives)
        return self.files.name if self.files is not None and is_files else self.metadata.name

    def listed(self) -> tuple[pa.Table, dict[str, int]]:
        """The records of the JSON, and each image's row among them."""
        if self._listed is None:
            table = self.read_listing(self.metadata.fetch())
            ids = table["image_id"].to_pylist()
            row_of = {image_id: row for row, image_id in enumerate(ids)}
            if len(row_of) < len(ids):
                twice = next(image_id for row, image_id in enumerate(ids) if row_of[image_id] != row)
                raise ValueError(f"{self.metadata.name} lists image {twice} twice")
            self._listed, self._claimed = (table, row_of), array("l", [0]) * len(row_of)
        return self._listed

    def _batches(self, part: int, start: int) -> Iterator[tuple[list[str], list[Image]]]:
        _, row_of = self.listed()
        ids: list[str] = []
        images: list[Image] = []
        for image_id, image in self._members(part):
            if image is not None:
                self._claim(part, row_of[image_id])
            if start:
                start -= 1
                continue
            ids.append(image_id)
            images.append(image() if callable(image) else image)
            if len(ids) == BATCH:
                yield ids, images
                ids, images = [], []
        if ids:
            yield ids, images

    def _members(self, part: int) -> Iterator[tuple[str, Callable[[], bytes] | None]]:
        """The listed images of a part, each with how to read it; None if it is nowhere."""
        _, row_of = self.listed()
        if part < len(self.archives):
            return ((name, read) for name, read in tar_images(self.archives[part].fetch()) if name in row_of)
        if self.files is not None and part == len(self.archives):
            free = (0, part + 1)
            return _jpegs(one for one in self._found() if self._claimed[row_of[one[0]]] in free)
        return ((name, None) for name, row in row_of.items() if not self._claimed[row])

    def _found(self) -> Iterator[tuple[str, Path]]:
        """The listed images that are files, with their paths."""
        assert self.files is not None
        for image_id in self.listed()[1]:
            path = self.files / f"{image_id}.jpg" if self.paths is None else self.paths.get(image_id)
            if path is not None and Path(image_id).name == image_id and path.is_file():
                yield image_id, path


def _jpegs(found: Iterable[tuple[str, Path]]) -> Iterator[tuple[str, Callable[[], bytes]]]:
    for image_id, path in found:
        _bounded(str(path), path.stat().st_size)
        yield image_id, path.read_bytes


def _folder_key(folder: Path, found: Iterable[tuple[str, Path]]) -> str:
    """SHA-256 over names, sizes and times of the images in a folder."""
    digest = hashlib.sha256(str(folder).encode())
    for image_id, path in found:
        stat = path.stat()
        digest.update(f"{image_id} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _bounded(name: str, size: int) -> None:
    """ValueError for the size of no image."""
    if size > MAX_IMAGE_BYTES:
        raise ValueError(
            f"{name} has {size:,} bytes, more than {MAX_IMAGE_BYTES:,}: that is no image of FLAIR"
        )


class BoundedHeader(tarfile.TarInfo):
    """Refuses headers (long names, say) of a size that no header has: tarfile reads them into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """As tarfile's; raises ReadError for such a header."""
        found = super().frombuf(buf, encoding, errors)
        if found.type in _HEADERS and found.size > _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {found.size:,} bytes")
        return found


def tar_images(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """The JPEGs of an archive, in its order; each must be read before the next is asked for."""
    with archive_errors(path), ExitStack() as stack:
        stream: IO[bytes] = stack.enter_context(open(path, "rb"))
        if stream.read(2) == b"\x1f\x8b":  # tarfile itself does not look at gzip's checksum
            stream.seek(0)
            stream = cast(IO[bytes], stack.enter_context(gzip.GzipFile(fileobj=stream)))
        stream.seek(0)
        archive = stack.enter_context(tarfile.open(fileobj=stream, mode="r|", tarinfo=BoundedHeader))
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # it would keep all of them
            name = Path(member.name)
            if member.isreg() and name.suffix.lower() in (".jpg", ".jpeg"):
                _bounded(f"{path}: {member.name!r}", member.size)
                content = archive.extractfile(member)
                assert content is not None
                yield name.stem, partial(_read, path, content)
        while stream.read(1 << 20):  # to gzip's checksum, which stands at the end
            pass


def _read(path: Path, content: IO[bytes]) -> bytes:
    with archive_errors(path):
        return content.read()


@contextmanager
def archive_errors(path: Path) -> Iterator[None]:
    """Turn what a damaged archive raises into one ValueError that names it."""
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it and run the command again") from None


def read_metadata(path: Path) -> pa.Table:
    """Apple's JSON list of records as a table, read object by object and held in compact columns."""
    tables: list[pa.Table] = []
    rows: list[dict[str, Any]] = []
    for number, entry in enumerate(_json_list(path)):
        try:
            row: dict[str, Any] = {name: str(entry[name]) for name in COLUMNS[:3]}
            row |= {name: [str(label) for label in entry[name]] for name in TAXONOMIES}
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path}: record {number} lacks {error}; it needs {', '.join(COLUMNS)}"
            ) from None
        rows.append(row)
        if len(rows) == 4096:
            tables.append(pa.Table.from_pylist(rows, SCHEMA))
            rows = []
    return pa.concat_tables([*tables, pa.Table.from_pylist(rows, SCHEMA)]).combine_chunks()


def _json_list(path: Path, block: int = 1 << 20) -> Iterator[Any]:
    decoder, text, at = json.JSONDecoder(), "", 0
    with open(path, encoding="utf-8") as file:
        text = file.read(block).lstrip()
        if not text.startswith("["):
            raise ValueError(f"{path} is not a JSON list")
        at = 1
        while True:
            while at < len(text) and text[at] in " \t\r\n,":
                at += 1
            if text[at : at + 1] == "]":
                return
            try:
                value, at = decoder.raw_decode(text, at)
            except RecursionError:
                raise ValueError(f"{path} is nested too deeply to be FLAIR's metadata") from None
            except json.JSONDecodeError as error:
                more = file.read(block) if len(text) - at < MAX_RECORD_CHARACTERS else ""
                if not more:
                    raise ValueError(f"{path} is not valid JSON, or is cut off ({error.msg})") from None
                text, at = text[at:] + more, 0
                continue
            yield value


def local(folder: Path) -> Source:
    """A folder that holds parquet shards somewhere below it, or Apple's JSON with archives or images."""
    if not folder.is_dir():
        raise ValueError(f"--source {folder} is neither hf, apple nor a folder")
    provenance = {
        "source": f"local folder {folder.resolve()}",
        "revision": None,
        "licence": f"the source's; {LICENCE}",
    }
    found = sorted(path for path in folder.rglob("*") if not _hidden(path.relative_to(folder)))
    parquet = [path for path in found if path.suffix == ".parquet"]
    if parquet:
        count = sum(_num_rows(path) for path in parquet)
        shards = [_on_disk(path, folder) for path in parquet]
        return ParquetSource(shards, count, {**provenance, "format": "parquet"})
    listing = next((path for path in found if path.name == METADATA), None)
    if listing is None:
        raise ValueError(f"--source {folder} holds neither *.parquet nor {METADATA}")
    files = next((path for path in found if path.name == "small_images" and path.is_dir()), None)
    archives = [path for path in found if path.name.endswith((".tar.gz", ".tgz", ".tar"))]
    if files is None and not archives:
        raise ValueError(f"--source {folder} holds {METADATA} but neither small_images/ nor *.tar.gz")
    unpacked = sum(path.stat().st_size for path in files.iterdir()) if files is not None else 0
    size = max(unpacked, sum(path.stat().st_size for path in archives))
    shards = [_on_disk(path, folder) for path in archives]
    source = ArchiveSource(
        _on_disk(listing, folder), shards, files, 0, size, {**provenance, "format": "archives"}
    )
    source.num_images = len(source.listed()[1])
    return source


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _on_disk(path: Path, folder: Path) -> Shard:
    stat, name = path.stat(), str(path.relative_to(folder))
    return Shard(name, stat.st_size, lambda: path, f"{name} {stat.st_size} {stat.st_mtime_ns}")


def _num_rows(path: Path) -> int:
    try:
        return int(pq.read_metadata(path).num_rows)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ValueError(f"{path} cannot be read as parquet: {' '.join(str(error).split())}") from None
