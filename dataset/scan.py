"""The first pass of a preprocessing: records are read, images checked, and compact columns kept."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tqdm import tqdm

from dataset.fetch.source import Image, Records, Source
from dataset.files import prefetched
from dataset.journal import Journal
from dataset.store.annotations import fault_of_boxes, fault_of_mask
from dataset.store.columns import kinds
from dataset.store.images import Transcoding, decode, jpeg_size, other_format, to_jpeg, to_pixels
from dataset.store.index import DatasetIndex
from dataset.store.native import Storage

MISSING = "it is listed, but its file is missing"
_JOURNAL = "blocks of version 2"
_FOUND = ("num_bytes", "height", "width", "fault", "note")
"""The columns that `Block.packed` adds to a table."""


@dataclass(frozen=True)
class Options:
    """What the output is to be."""

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
    block_images: int = 2048
    """What is lost at most when a preprocessing is killed."""
    transcode: Transcoding | None = None
    """How PNG, WebP and GIF images become JPEGs; None: they are bad images."""
    tool: str = "dataset.preprocess"
    """The command, for the provenance."""
    ids_are_positions: bool = False
    """Image ids are positions in their split: images stay in the source's order, and two splits may have the
    same ids."""
    finish: Callable[[DatasetIndex], DatasetIndex] | None = None
    """What is still to be done to the index, once it is known which images there are."""


@dataclass(frozen=True)
class Block:
    """What was found of some images of a part, from image ``start`` on; B of them."""

    part: int
    start: int
    table: pa.Table  # columns.schema
    num_bytes: npt.NDArray[np.int64]  # [B]; -1: listed, but nowhere
    sizes: npt.NDArray[np.int32]  # [B, 2]: height and width; 0 where there are none
    faults: dict[int, str]  # by position in the block
    notes: dict[int, str]  # likewise: what was done to an image that is no JPEG
    last: bool  # of its part

    def __len__(self) -> int:
        return len(self.num_bytes)

    def packed(self) -> bytes:
        """For the journal: an Arrow stream."""
        table = self.table.append_column("num_bytes", pa.array(self.num_bytes))
        for place, name in enumerate(("height", "width")):
            table = table.append_column(name, pa.array(self.sizes[:, place]))
        for name, said in (("fault", self.faults), ("note", self.notes)):
            column = pa.array([said.get(at) for at in range(len(self))], pa.string())
            table = table.append_column(name, column)
        table = table.replace_schema_metadata({"last": str(self.last)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        return bytes(sink.getvalue())

    @classmethod
    def unpacked(cls, part: int, start: int, content: bytes) -> Block:
        """What `packed` gave."""
        table = pa.ipc.open_stream(content).read_all()
        faults, notes = (
            {at: said for at, said in enumerate(table[name].to_pylist()) if said is not None}
            for name in ("fault", "note")
        )
        last = table.schema.metadata[b"last"] == b"True"
        columns = table.select(table.schema.names[: -len(_FOUND)]).replace_schema_metadata(None)
        sizes = np.stack([table[name].to_numpy() for name in ("height", "width")], axis=1)
        return cls(part, start, columns, table["num_bytes"].to_numpy(), sizes, faults, notes, last)


@dataclass
class Scan:
    """What the first pass keeps of R records; masks, a few kB each, are among it."""

    blocks: list[Block]
    table: pa.Table
    num_bytes: npt.NDArray[np.int64]  # [R]
    sizes: npt.NDArray[np.int32]  # [R, 2]
    faults: dict[int, str]  # by record
    notes: dict[int, str]  # by record

    def transcoded(self) -> dict[str, int]:
        """How many of the images that are kept are no JPEGs, by what was done to them."""
        return dict(Counter(note for record, note in self.notes.items() if record not in self.faults))


def scan(source: Source, options: Options, journal: Journal) -> Scan:
    """The first pass: read every record, check every image, and keep what was found.

    Raises:
        ValueError: that names user and image for an image that cannot be used, unless such are skipped.
    """
    blocks: list[Block] = []
    with progress(source, "1/2 check") as bar:
        for part, key in enumerate(source.parts):
            for block in _check(source, part, key, options, journal):
                blocks.append(block)
                bar.update(len(block))
    num_bytes = np.concatenate([np.zeros(0, np.int64), *(block.num_bytes for block in blocks)])
    starts = np.cumsum([0, *map(len, blocks)])
    faults = {int(at) + here: f for at, block in zip(starts, blocks) for here, f in block.faults.items()}
    notes = {int(at) + here: n for at, block in zip(starts, blocks) for here, n in block.notes.items()}
    if len(num_bytes) == len(faults):
        raise ValueError(f"{source.provenance['source']} holds no usable image")
    table = pa.concat_tables(block.table for block in blocks)
    sizes = np.concatenate([block.sizes for block in blocks])
    return Scan(blocks, table, num_bytes.clip(0), sizes, faults, notes)


def _check(source: Source, part: int, key: str, options: Options, journal: Journal) -> Iterator[Block]:
    """The blocks of a part: those that an earlier process checked, then the others."""
    decodes = options.verify == "full" and options.storage == "jpeg"
    what = f"{_JOURNAL} {key} {decodes} {options.storage} {options.transcode}"
    entry = f"checked-{hashlib.sha256(what.encode()).hexdigest()[:32]}"
    start = 0
    while (kept := journal.get(f"{entry}-{start}")) is not None:
        block = Block.unpacked(part, start, kept)
        for at, known in block.faults.items():
            refuse(block.table, at, known, options)
        source.skip(part, block.table.filter(pa.array(block.num_bytes >= 0)))
        yield block
        if block.last:
            return
        start += len(block)

    def check(batch: Records) -> tuple[Records, list[Checked]]:
        found = [_checked(image, options, decodes) for image in batch.images]
        return batch, _with_annotations(batch.table, found, options)

    tables: list[pa.Table] = []
    num_bytes, sizes, faults, notes = array("q"), array("i"), dict[int, str](), dict[int, str]()

    def finished(last: bool) -> Block:
        table = pa.concat_tables([source.schema.empty_table(), *tables])
        shapes = np.array(sizes, np.int32).reshape(-1, 2)
        lengths = np.array(num_bytes, np.int64)
        block = Block(part, start, table, lengths, shapes, dict(faults), dict(notes), last)
        journal.put(f"{entry}-{start}", block.packed())
        return block

    for batch, found in prefetched(
        check, source.records(part, start), ahead=2 * options.workers, threads=options.workers
    ):
        for at, image in enumerate(found):
            if image.fault is not None:
                refuse(batch.table, at, f"{batch.origin}: {image.fault}", options)
                faults[len(num_bytes)] = image.fault
            if image.note is not None:
                notes[len(num_bytes)] = image.note
            num_bytes.append(image.num_bytes)
            sizes.extend(image.size)
        tables.append(batch.table)
        if len(num_bytes) >= options.block_images:
            yield finished(last=False)
            start += len(num_bytes)
            tables, num_bytes, sizes, faults, notes = [], array("q"), array("i"), {}, {}
    yield finished(last=True)


@dataclass(frozen=True)
class Checked:
    """What was found of an image."""

    num_bytes: int
    """As it is kept."""
    fault: str | None = None
    """What is wrong with it."""
    note: str | None = None
    """What was done to it, if it is no JPEG."""
    size: tuple[int, int] = (0, 0)
    """Height and width."""


def _checked(image: Image, options: Options, decodes: bool) -> Checked:
    if image is None:
        return Checked(-1, MISSING)
    if isinstance(image, np.ndarray):
        return Checked(image.nbytes, None, None, image.shape[:2])
    note, jpeg = None, image
    try:
        if options.transcode is not None and other_format(image) is not None:
            if options.storage == "raw":
                pixels, note = to_pixels(image, options.transcode.background)
                return Checked(len(image), None, note, pixels.shape[:2])
            jpeg, note = to_jpeg(image, options.transcode)
    except ValueError as error:
        return Checked(len(image), str(error))
    try:
        width, height = jpeg_size(jpeg)
        if decodes:
            decode(jpeg, None)
    except ValueError as error:
        return Checked(len(jpeg), str(error), note)
    return Checked(len(jpeg), None, note, (height, width))


def _with_annotations(table: pa.Table, found: list[Checked], options: Options) -> list[Checked]:
    """What was found of a batch's images, with what is wrong with their masks and boxes."""
    for name, kind in kinds(table.schema).items():
        if kind not in ("mask", "boxes"):
            continue
        num_classes = len((options.vocabulary or {}).get(name, ()))
        for at, value in enumerate(table[name].to_pylist()):
            if found[at].fault is not None:
                continue
            if kind == "mask":
                fault = fault_of_mask(value, found[at].size, num_classes)
            else:
                fault = fault_of_boxes(np.array([box["corners"] for box in value]), found[at].size)
            found[at] = dataclasses.replace(found[at], fault=fault)
    return found


def refuse(table: pa.Table, at: int, fault: str, options: Options) -> None:
    """Raise ValueError for an image that cannot be used, unless the options say that such are skipped."""
    if options.on_bad_image == "fail" or (options.on_bad_image == "skip-missing" and MISSING not in fault):
        user, image = table["user_id"][at].as_py(), table["image_id"][at].as_py()
        raise ValueError(
            f"image {image} of user {user} cannot be used, {fault}; repair the source, or leave such images "
            "out with --on_bad_image skip"
        )


def progress(source: Source, what: str) -> Any:
    """A bar over a source's images."""
    return tqdm(total=source.num_images, desc=what, unit="image", mininterval=0.5, file=sys.stderr)
