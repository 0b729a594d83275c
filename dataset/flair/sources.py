"""Where FLAIR comes from: Hugging Face's parquet, Apple's archives, or a local copy of either.

A source is read twice, in the same order, a batch at a time: `Source.records` for everything, `Source.images`
for the images alone. Remote files are fetched one at a time, when they are first needed.
"""

from __future__ import annotations

import json
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from dataset.flair.columns import COLUMNS, SCHEMA
from dataset.flair.index import TAXONOMIES

METADATA = "labels_and_metadata.json"
LICENCE = (
    "FLAIR: annotations CC BY-NC 4.0, each image under its Flickr owner's licence (ATTRIBUTION.txt); "
    "non-commercial, do not redistribute"
)
BATCH = 64  # images in a batch

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

    def records(self) -> Iterator[Records]:
        """Everything, batch by batch."""
        ...

    def images(self) -> Iterator[Sequence[Image]]:
        """The images alone, in the order of `records`."""
        ...

    @property
    def discard(self) -> Callable[[], None]:
        """Deletes what was downloaded."""
        ...


def nothing() -> None:
    """What there is to delete of a local source."""


@dataclass(frozen=True)
class Shard:
    """One file of a source; ``fetch`` makes sure that it is on the disk and says where."""

    name: str
    size: int
    fetch: Callable[[], Path]


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

    def records(self) -> Iterator[Records]:
        """As `Source.records`."""
        for shard in self.shards:
            for batch in _parquet(shard, [*COLUMNS, "image"]):
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

    def images(self) -> Iterator[Sequence[Image]]:
        """As `Source.images`."""
        for shard in self.shards:
            for batch in _parquet(shard, ["image"]):
                yield _binary(shard, batch)


def _parquet(shard: Shard, columns: list[str]) -> Iterator[Any]:
    path = shard.fetch()
    try:
        # A buffer, rather than whole column chunks, bounds the memory whatever the size of a row group.
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            missing = [name for name in columns if name not in file.schema_arrow.names]
            if missing:
                raise ValueError(f"it has no column {missing[0]!r}, as apple/flair has")
            for group in range(file.num_row_groups):
                yield from file.iter_batches(BATCH, row_groups=[group], columns=columns, use_threads=False)
    except (OSError, ValueError) as error:  # pyarrow's errors are of these types
        raise ValueError(f"{path} cannot be read as parquet: {error}") from None


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
    Images that the JSON does not list are left out; those that it lists and no archive holds come last, as
    None.
    """

    metadata: Shard
    archives: Sequence[Shard]
    files: Path | None
    num_images: int
    image_bytes: int
    provenance: dict[str, Any]
    download_bytes: int = 0
    discard: Callable[[], None] = nothing
    _listed: tuple[pa.Table, dict[str, int]] | None = field(default=None, repr=False)

    def records(self) -> Iterator[Records]:
        """As `Source.records`."""
        table, row_of = self.listed()
        for origin, ids, images in self._batches():
            yield Records(table.take([row_of[image_id] for image_id in ids]), images, origin)

    def images(self) -> Iterator[Sequence[Image]]:
        """As `Source.images`."""
        return (images for _, _, images in self._batches())

    def listed(self) -> tuple[pa.Table, dict[str, int]]:
        """The records of the JSON, and each image's row among them."""
        if self._listed is None:
            table = read_metadata(self.metadata.fetch())
            ids = table["image_id"].to_pylist()
            row_of = {image_id: row for row, image_id in enumerate(ids)}
            if len(row_of) < len(ids):
                twice = next(image_id for row, image_id in enumerate(ids) if row_of[image_id] != row)
                raise ValueError(f"{METADATA} lists image {twice} twice")
            self._listed = table, row_of
        return self._listed

    def _batches(self) -> Iterator[tuple[str, list[str], list[Image]]]:
        _, row_of = self.listed()
        seen = bytearray(len(row_of))
        for shard, members in self._streams():
            ids: list[str] = []
            images: list[Image] = []
            for image_id, image in members:
                if image_id not in row_of:
                    continue
                seen[row_of[image_id]] = 1
                ids.append(image_id)
                images.append(image)
                if len(ids) == BATCH:
                    yield shard, ids, images
                    ids, images = [], []
            if ids:
                yield shard, ids, images
        missing = [image_id for image_id, row in row_of.items() if not seen[row]]
        for start in range(0, len(missing), BATCH):
            ids = missing[start : start + BATCH]
            yield METADATA, ids, [None] * len(ids)

    def _streams(self) -> Iterator[tuple[str, Iterator[tuple[str, Image]]]]:
        for shard in self.archives:
            yield shard.name, _tar(shard.fetch())
        if self.files is not None:
            yield self.files.name, _jpegs(self.files, self.listed()[1])


def _jpegs(folder: Path, image_ids: dict[str, int]) -> Iterator[tuple[str, Image]]:
    for image_id in image_ids:
        path = folder / f"{image_id}.jpg"
        if Path(image_id).name == image_id and path.is_file():
            yield image_id, path.read_bytes()


def _tar(path: Path) -> Iterator[tuple[str, Image]]:
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                name = Path(member.name)
                if member.isfile() and name.suffix.lower() in (".jpg", ".jpeg"):
                    content = archive.extractfile(member)
                    assert content is not None
                    yield name.stem, content.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it and run the command again") from None


def read_metadata(path: Path) -> pa.Table:
    """Apple's JSON list of records as a table, read object by object and held in compact columns."""
    tables: list[pa.Table] = []
    rows: list[dict[str, Any]] = []
    for number, entry in enumerate(_json_list(path)):
        try:
            row: dict[str, Any] = {name: str(entry[name]) for name in COLUMNS[:3]}
            row |= {name: [str(label) for label in entry[name]] for name in TAXONOMIES}
        except (KeyError, TypeError) as error:
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
            except json.JSONDecodeError as error:
                more = file.read(block)
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
    if files is not None:
        archives = []  # the same images, unpacked
    size = sum(path.stat().st_size for path in (archives if files is None else files.iterdir()))
    shards = [_on_disk(path, folder) for path in archives]
    source = ArchiveSource(
        _on_disk(listing, folder), shards, files, 0, size, {**provenance, "format": "archives"}
    )
    source.num_images = len(source.listed()[1])
    return source


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _on_disk(path: Path, folder: Path) -> Shard:
    return Shard(str(path.relative_to(folder)), path.stat().st_size, lambda: path)


def _num_rows(path: Path) -> int:
    try:
        return int(pq.read_metadata(path).num_rows)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as parquet: {error}") from None
