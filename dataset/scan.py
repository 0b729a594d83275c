"""The first pass of a preprocessing: records are read, images checked, and compact columns kept."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from dataset.arrays import IntArray
from dataset.fetch.source import Image, Records, Source
from dataset.files import prefetched
from dataset.journal import Journal
from dataset.store.annotations import fault_of_boxes, fault_of_mask
from dataset.store.columns import kinds
from dataset.store.images import DEEP, Transcoding, decode, encoded, jpeg_size, orientation, to_pixels
from dataset.store.index import DatasetIndex
from dataset.store.native import Storage

MISSING = "it is listed, but its file is missing"
_JOURNAL = "blocks of version 4"
_TYPES = {
    "num_bytes": "int64",
    "height": "int32",
    "width": "int32",
    "fault": "string",
    "note": "string",
    "turned": "bool",
    "highest": "int16",
}
_FOUND = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in _TYPES.items()])
"""The columns of `Checked`, which are added to those of a source's records."""


@dataclass(frozen=True)
class Options:
    """Options of the output."""

    output_file: Path
    storage: Storage = "jpeg"
    image_size: int | None = 256
    """Raw: the side in pixels to which images are resized; None keeps each in its own size."""
    grouped: bool = True
    verify: str = "full"
    on_bad_image: str = "fail"
    vocabulary: Mapping[str, list[str]] | None = None
    """The class names of each annotation, in order; see `dataset.store.columns.build_index`."""
    workers: int = 2
    block_images: int = 2048  # the most that is lost when a preprocessing is killed
    transcode: Transcoding | None = None  # of PNG, WebP, GIF, BMP and TIFF images; None: they are bad images
    tool: str = "dataset.preprocess"  # the command, for the provenance
    ids_are_positions: bool = False
    """Image ids are positions in their split: images stay in the source's order, and two splits may have the
    same ids."""
    finish: Callable[[DatasetIndex], DatasetIndex] | None = None  # a last change to the index
    overwrite: bool = False  # an existing output file, also one that another process has made meanwhile
    locked: bool = False
    """Whether the caller is the output's `dataset.journal.only_writer`, because it downloads beforehand."""

    @classmethod
    def of(cls, arguments: argparse.Namespace, name: str, **more: Any) -> Options:
        """The options by the arguments that the commands of data sets share (`dataset.preprocess`).

        Args:
            arguments: of the command line.
            name: of the data set.
            more: the other options.
        """
        return cls(
            arguments.output_file,
            arguments.storage,
            arguments.image_size,
            verify=arguments.verify,
            on_bad_image=arguments.on_bad_image,
            workers=arguments.workers,
            tool=f"dataset.{name}.download_preprocess",
            overwrite=arguments.overwrite,
            **more,
        )


@dataclass(frozen=True)
class Checked:
    """The results of checking an image."""

    num_bytes: int  # as it is kept; -1 if it is listed, but nowhere
    height: int = 0
    width: int = 0
    fault: str | None = None  # what is wrong with it
    note: str | None = None  # what was done to it, if it is no JPEG
    turned: bool = False  # by its EXIF orientation
    highest: int | None = None  # of an image of 16 bits the highest of its pixels' upper 8 bits


@dataclass(frozen=True)
class Block:
    """The results for some images of a part, from image ``start`` on."""

    part: int
    start: int
    table: pa.Table  # the columns of the source's records, and of `Checked`
    last: bool  # of its part

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def packed(self) -> bytes:
        """The block as an Arrow stream, for the journal."""
        table = self.table.replace_schema_metadata({"last": str(self.last)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        return bytes(sink.getvalue())

    @classmethod
    def unpacked(cls, part: int, start: int, content: bytes) -> Block:
        """The block from the result of `packed`."""
        table = pa.ipc.open_stream(content).read_all()
        last = table.schema.metadata[b"last"] == b"True"
        return cls(part, start, table.replace_schema_metadata(None), last)


@dataclass
class Scan:
    """The results of the first pass for R records, with masks of a few kB each."""

    blocks: list[Block]
    table: pa.Table  # the source's records
    num_bytes: IntArray  # [R]
    sizes: npt.NDArray[np.int32]  # [R, 2]: height and width; 0 where there are none
    faults: dict[int, str]  # by record
    notes: dict[int, str]  # by record
    turned: int = 0  # the number of images that an EXIF orientation turns
    deep: int = 0  # the number of images of 16 bits
    highest: int = 0  # the highest of the upper 8 bits of all their pixels

    def transcoded(self) -> dict[str, int]:
        """How many of the images that are kept are no JPEGs, by what was done to them."""
        return dict(Counter(note for record, note in self.notes.items() if record not in self.faults))


def scan(source: Source, options: Options, journal: Journal) -> Scan:
    """The first pass: read every record, check every image, and keep the results.

    Raises:
        ValueError: for an image that cannot be used, unless such images are skipped; it names user and image.
    """
    blocks: list[Block] = []
    with progress(source, "1/2 check") as bar:
        for part, key in enumerate(source.parts):
            for block in _check(source, part, key, options, journal):
                blocks.append(block)
                bar.update(len(block))
    table = pa.concat_tables(block.table for block in blocks)
    faults, notes = _said(table, "fault"), _said(table, "note")
    if table.num_rows == len(faults):
        raise ValueError(f"{source.provenance['source']} has no usable image")
    sizes = np.stack([table["height"].to_numpy(), table["width"].to_numpy()], axis=1)
    num_bytes = table["num_bytes"].to_numpy().clip(0)
    return Scan(
        blocks,
        table.select(source.schema.names),
        num_bytes,
        sizes,
        faults,
        notes,
        pc.sum(table["turned"]).as_py(),
        pc.count(table["highest"]).as_py(),
        pc.max(table["highest"]).as_py() or 0,
    )


def _said(table: pa.Table, name: str) -> dict[int, str]:
    """The texts of a column by row, without the empty ones."""
    return {row: text for row, text in enumerate(table[name].to_pylist()) if text is not None}


def _check(source: Source, part: int, key: str, options: Options, journal: Journal) -> Iterator[Block]:
    """The blocks of a part: those that an earlier process checked, then the others."""
    decodes = options.verify == "full" and options.storage == "jpeg"
    what = f"{_JOURNAL} {key} {decodes} {options.storage} {options.transcode} {options.vocabulary}"
    entry = f"checked-{hashlib.sha256(what.encode()).hexdigest()[:32]}"
    start = 0
    while (kept := journal.get(f"{entry}-{start}")) is not None:
        block = Block.unpacked(part, start, kept)
        for row, fault in _said(block.table, "fault").items():
            refuse(block.table, row, fault, options)
        source.skip(part, block.table.filter(pc.field("num_bytes") >= 0))
        yield block
        if block.last:
            return
        start += len(block)
    columns = pa.schema([*source.schema, *_FOUND])

    def check(batch: Records) -> pa.Table:
        found = [_checked(image, options, decodes) for image in batch.images]
        found = _with_annotations(batch.table, found, options)
        for row, image in enumerate(found):
            if image.fault is not None:
                refuse(batch.table, row, f"{batch.place(row)}: {image.fault}", options)
        added = pa.Table.from_pylist([dataclasses.asdict(image) for image in found], _FOUND)
        return pa.table([*batch.table.columns, *added.columns], schema=columns)

    def finished(last: bool) -> Block:
        block = Block(part, start, pa.concat_tables([columns.empty_table(), *tables]), last)
        journal.put(f"{entry}-{start}", block.packed())
        return block

    tables: list[pa.Table] = []
    for table in prefetched(
        check, source.records(part, start), ahead=2 * options.workers, threads=options.workers
    ):
        tables.append(table)
        if (count := sum(map(len, tables))) >= options.block_images:
            yield finished(last=False)
            start += count
            tables = []
    yield finished(last=True)


def _checked(image: Image, options: Options, decodes: bool) -> Checked:
    if image is None:
        return Checked(-1, fault=MISSING)
    if isinstance(image, np.ndarray):
        return Checked(image.nbytes, *image.shape[:2])
    note, jpeg, highest = None, image, None
    turned = options.transcode is not None and orientation(image) != 1
    try:
        if options.transcode is not None and options.transcode.changes(image):
            pixels, note = to_pixels(image, options.transcode.background, options.transcode.upright)
            highest = int(pixels.max()) if DEEP in note else None
            if options.storage == "raw":
                height, width = pixels.shape[:2]
                return Checked(len(image), height, width, None, note, turned, highest)
            jpeg = encoded(pixels, options.transcode.quality)
        width, height = jpeg_size(jpeg)
        if decodes:
            decode(jpeg, None)
    except ValueError as error:
        return Checked(len(jpeg), fault=str(error), note=note)
    return Checked(len(jpeg), height, width, None, note, turned, highest)


def _with_annotations(table: pa.Table, found: list[Checked], options: Options) -> list[Checked]:
    """The results for a batch's images, with the faults of their masks and boxes."""
    for name, kind in kinds(table.schema).items():
        if kind not in ("mask", "boxes"):
            continue
        num_classes = len((options.vocabulary or {}).get(name, ()))
        for row, (value, image) in enumerate(zip(table[name].to_pylist(), found)):
            if image.fault is not None:
                continue
            size = image.height, image.width
            if value is None:
                fault: str | None = "it has no annotation"
            elif kind == "mask":
                fault = fault_of_mask(value, size, num_classes)
            else:
                fault = fault_of_boxes(np.array([box["corners"] for box in value]), size)
            found[row] = dataclasses.replace(image, fault=fault)
    return found


def refuse(table: pa.Table, row: int, fault: str, options: Options) -> None:
    """Raise ValueError for an image that cannot be used, unless the options skip such images."""
    if options.on_bad_image == "fail" or (options.on_bad_image == "skip-missing" and MISSING not in fault):
        user, image = table["user_id"][row].as_py(), table["image_id"][row].as_py()
        raise ValueError(
            f"image {image} of user {user} cannot be used, {fault}; repair the source, or leave such images "
            "out with --on_bad_image skip"
        )


def progress(source: Source, what: str) -> Any:
    """A bar over a source's images."""
    return tqdm(total=source.num_images, desc=what, unit="image", mininterval=0.5, file=sys.stderr)
