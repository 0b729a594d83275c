"""The pipeline that every data set uses: from a source of images to one HDF5 file, in two passes that resume.

Each pass has bounded memory. The first reads users, annotations and image sizes, checks each image, and keeps
compact columns, from which every image's place in the file follows. The second writes each image to its
place. The output gets its name only when it is complete and checked. dataset/store/hdf5.py describes its
schema.

A stopped preprocessing continues when it is called again. Downloads, and each block of images that was
checked or written, are kept in F.partial until the output is complete (`dataset.journal`).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pyarrow as pa

from dataset.arrays import IntArray
from dataset.cli import OneLineParser, cores, output_file, output_folder
from dataset.fetch.source import Image, Source
from dataset.files import prefetched
from dataset.journal import Journal, disk_of, free
from dataset.scan import Options, Scan, progress, refuse, scan
from dataset.store.annotations import check_num_labels
from dataset.store.columns import Placement, build_index, kinds
from dataset.store.images import Pixels, Transcoding, decode, resized, to_jpeg, to_pixels
from dataset.store.index import DatasetIndex
from dataset.store.writer import DataWriter

__all__ = ["Options", "check_room", "checked_places", "command_parser", "make", "preprocess"]

TOOL_VERSION = "1.0"
SIDE = 256
"""Pixels, of images that are stored as pixels."""
DARK = 14
"""The most bits in use of images of 16 bits for a warning: with 14, the brightest has a quarter of white."""
NAMES = 3
"""The most images that a line on the screen names."""
UPRIGHT = "turn photos as their EXIF orientation says, which makes them new JPEGs"
"""The help of an option."""


def preprocess(source: Source, options: Options) -> None:
    """Make ``options.output_file`` from a source, continuing where an earlier call was stopped.

    Raises:
        ValueError: for an image that cannot be used (unless such images are skipped), and for records that
            contradict one another; the message names user and image. For an output that another process
            writes, or that exists and is not to be replaced. For more classes than a file can have.
        OSError: if the disk is full.
    """
    for name, classes in (options.vocabulary or {}).items():
        check_num_labels(name, len(classes))
    with Journal(options.output_file, options.overwrite, options.locked) as journal:
        found = scan(source, options, journal)
        _say_transcoded(found, options)
        undecodable: dict[int, str] | None = None
        while undecodable is None or undecodable:  # a second time without the images that have no pixels
            found.faults |= undecodable or {}
            undecodable = _write(source, found, options, journal)
    _say_dark(found)
    _say_left_out(found)
    _say_turned(found, options)
    source.discard()


def _index(scan: Scan, source: Source, options: Options) -> tuple[DatasetIndex, Placement]:
    keep = np.ones(len(scan.num_bytes), bool)
    keep[list(scan.faults)] = False
    records = pa.array(sorted(scan.faults), pa.int64())
    left_out = scan.table.select(["user_id", "image_id"]).take(records).to_pylist()
    skipped = [{**ids, "reason": scan.faults[row]} for ids, row in zip(left_out, records.to_pylist())]
    provenance: dict[str, Any] = {
        **source.provenance,
        "counts": {},
        "verify": "full" if options.storage == "raw" else options.verify,
        "skipped_images": skipped,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "tool": options.tool,
        "tool_version": TOOL_VERSION,
        "pillow_version": PIL.__version__,
    }
    if done := scan.transcoded():
        assert options.transcode is not None
        transcoded: dict[str, Any] = {"images": done, "background": options.transcode.background}
        if options.storage == "jpeg":
            transcoded |= {"jpeg_quality": options.transcode.quality, "chroma_subsampling": "4:4:4"}
        provenance["transcoded"] = transcoded
    index, placement = build_index(
        scan.table,
        keep,
        grouped=options.grouped,
        vocabulary=options.vocabulary or {},
        provenance=provenance,
        sizes=scan.sizes if _needs_sizes(source, options) else None,
        ids_are_positions=options.ids_are_positions,
    )
    provenance["counts"] = {
        name: {"users": split.num_users, "images": split.num_images} for name, split in index.splits.items()
    }
    return (options.finish(index) if options.finish else index), placement


def _write(source: Source, scan: Scan, options: Options, journal: Journal) -> dict[int, str]:
    """The second pass; returns the images that it found undecodable, in which case nothing was written."""
    index, placement = _index(scan, source, options)
    image_bytes = {}
    for number, name in enumerate(placement.names):
        here = np.flatnonzero(placement.split == number)
        image_bytes[name] = np.empty(len(here), np.int64)
        image_bytes[name][placement.row[here]] = scan.num_bytes[here]
    raw = options.storage == "raw"
    writer = DataWriter(
        options.output_file,
        index,
        storage=options.storage,
        image_bytes=None if raw else image_bytes,
        image_size=options.image_size if raw else None,
        journal=journal,
        origin=" ".join([*source.parts, str(options.transcode)]),
    )
    second = _SecondPass(source, scan, placement, options, writer)
    with contextlib.suppress(_UndecodableError), writer, progress(source, "2/2 write") as bar:
        second.run(bar)
        if second.undecodable:
            raise _UndecodableError
    return second.undecodable


@dataclass
class _SecondPass:
    """Writes every image to its place. A record is a position in the source's order."""

    source: Source
    scan: Scan
    placement: Placement
    options: Options
    writer: DataWriter
    undecodable: dict[int, str] = field(default_factory=dict)
    """The faults of unusable images, by record."""

    def run(self, bar: Any) -> None:
        """Write, block by block, what no earlier process has written."""
        first = 0
        for _, blocks in groupby(self.scan.blocks, key=lambda block: block.part):
            left = deque(blocks)
            while left and self.writer.already(str(first), self._rows(first, len(left[0]))):
                first += len(left[0])
                bar.update(len(left.popleft()))
            if not sum(map(len, left)):
                continue
            batches = _numbered(self.source.images(left[0].part, left[0].start), first)
            workers, done = self.options.workers, first
            for count in prefetched(self._put, batches, ahead=2 * workers, threads=workers):
                done += count
                bar.update(count)
                while left and done >= first + len(left[0]) and not self.undecodable:
                    self.writer.put_down(str(first), self._rows(first, len(left[0])))
                    first += len(left.popleft())
            if left and sum(map(len, left)) and not self.undecodable:
                raise self._changed()
            first += sum(map(len, left))

    def _rows(self, start: int, count: int) -> dict[str, IntArray]:
        """The rows of some records, by split."""
        split, row = (column[start : start + count] for column in (self.placement.split, self.placement.row))
        return {name: row[split == number] for number, name in enumerate(self.placement.names)}

    def _changed(self) -> ValueError:
        origin = self.source.provenance["source"]
        return ValueError(f"{origin} changed while it was read: run the command again")

    def _put(self, batch: tuple[int, Sequence[Image]]) -> int:
        """Write a batch of images, which begins at a record; returns their number."""
        (start, images), scan, options = batch, self.scan, self.options
        raw = options.storage == "raw"
        if not raw and options.transcode is not None:
            images = [_kept(image, options.transcode) for image in images]
        if start + len(images) > len(scan.num_bytes):
            raise self._changed()
        records = np.arange(start, start + len(images))
        for number, name in enumerate(self.placement.names):
            here = records[self.placement.split[records] == number]
            here = here[np.argsort(self.placement.row[here])]
            picked = [image for record in here.tolist() if (image := images[record - start]) is not None]
            if list(map(_length, picked)) != scan.num_bytes[here].tolist():
                raise self._changed()
            content = [self._decoded(*pair) for pair in zip(here.tolist(), picked)] if raw else picked
            self.writer.write(name, self.placement.row[here], content)
        return len(images)

    def _decoded(self, record: int, image: bytes | memoryview | Pixels) -> Pixels:
        """An image in the form of raw storage; zeros, and a noted fault, if it cannot be decoded."""
        side = self.options.image_size
        try:
            if isinstance(image, np.ndarray):
                pixels = image
            elif (transcode := self.options.transcode) is not None and transcode.changes(image):
                pixels = to_pixels(image, transcode.background, transcode.upright)[0]
            else:
                return decode(image, side)
            return pixels if side is None else resized(pixels, side)
        except ValueError as error:
            refuse(self.scan.table, record, str(error), self.options)
            self.undecodable[record] = str(error)
            height, width = (side, side) if side else self.scan.sizes[record]
            return np.zeros((height, width, 3), np.uint8)


def _needs_sizes(source: Source, options: Options) -> bool:
    """Whether the index says how large each image is."""
    refers = {"mask", "boxes"} & {*kinds(source.schema).values()}
    return bool(refers) or (options.storage == "raw" and options.image_size is None)


def _length(image: bytes | memoryview | Pixels) -> int:
    return image.nbytes if isinstance(image, np.ndarray) else len(image)


def _kept(image: Image, transcoding: Transcoding) -> Image:
    """The bytes in jpeg storage. Those of a bad image do not matter, since it has no place."""
    if image is None or isinstance(image, np.ndarray) or not transcoding.changes(image):
        return image
    with contextlib.suppress(ValueError):
        return to_jpeg(image, transcoding)[0]
    return image


def _say_transcoded(scan: Scan, options: Options) -> None:
    """One line on the screen, if there are images that are not kept as they are."""
    done = scan.transcoded()
    if not done:
        return
    assert options.transcode is not None
    into = f"JPEGs of quality {options.transcode.quality}" if options.storage == "jpeg" else "pixels"
    parts = "; ".join(f"{count:,} {note}" for note, count in sorted(done.items()))
    print(f"{sum(done.values()):,} images become {into}: {parts}", file=sys.stderr)


def _say_dark(scan: Scan) -> None:
    """A warning, if all images of 16 bits have values of fewer: these are nearly black with 8 bits."""
    bits = 8 + scan.highest.bit_length()
    if scan.deep and bits <= DARK:
        print(
            f"WARNING: the {scan.deep:,} images of 16 bits use only the lowest {bits} bits, so they are "
            f"nearly black in the file, which keeps the upper 8: multiply their values by {1 << 16 - bits:,} "
            "and convert them again, and do the same with images that you predict",
            file=sys.stderr,
        )


def _say_left_out(scan: Scan) -> None:
    """One line on the screen, if there are images that cannot be used: how many, and the first of them."""
    if not scan.faults:
        return
    first = sorted(scan.faults)[:NAMES]
    listed = ", ".join(f"{scan.table['image_id'][row].as_py()} ({scan.faults[row]})" for row in first)
    more = f" and {len(scan.faults) - NAMES:,} more" if len(scan.faults) > NAMES else ""
    count = f"left out, since they cannot be used: {len(scan.faults):,} of {len(scan.num_bytes):,} images"
    print(f"{count}: {listed}{more}", file=sys.stderr)


def _say_turned(scan: Scan, options: Options) -> None:
    """One line on the screen, if there are images that do not stand upright in the file."""
    if scan.turned and options.transcode is not None and not options.transcode.upright:
        print(
            f"{scan.turned:,} images have an EXIF orientation, like photos of a phone: the file keeps "
            "them as they are stored, so their boxes and masks must belong to the unrotated images; "
            "--upright rotates them",
            file=sys.stderr,
        )


class _UndecodableError(Exception):
    """Leaves the writer's block so that nothing is kept."""


def _numbered(batches: Iterable[Sequence[Image]], start: int) -> Iterator[tuple[int, Sequence[Image]]]:
    for images in batches:
        yield start, images
        start += len(images)


def check_room(download: int, folder: Path) -> None:
    """Raise OSError if the disk of the download folder has no room for so many bytes."""
    available = free(folder)
    if download > available:
        raise OSError(
            f"the download needs {download / 1e9:.2f} GB, but only {available / 1e9:.2f} GB are free at "
            f"{folder}: free some space or choose another --download_folder"
        )


def check_disk(source: Source, options: Options, downloads: Path | None) -> None:
    """Raise OSError if the disk of the output has no room for it, or that of the download folder for what is
    to be downloaded; if they are the same disk, for both together."""
    output = source.image_bytes
    if options.storage == "raw":
        side = options.image_size  # a photograph's JPEG is about a tenth of its pixels
        output = source.num_images * side**2 * 3 if side else 10 * output
    folder, download = options.output_file.parent, source.download_bytes
    if downloads is not None and disk_of(downloads) != disk_of(folder):
        check_room(download, downloads)
        download = 0
    need = output - Journal(options.output_file).size() + download
    available = free(folder)
    if need > available:
        also = f"{download / 1e9:.2f} GB for the download and " if download else ""
        raise OSError(
            f"{also}{output / 1e9:.2f} GB for {options.output_file} are needed, but only "
            f"{available / 1e9:.2f} GB are free there: free some space or choose another disk"
        )


def side_or_own(text: str) -> int | None:
    """A value of ``--image_size``: a side in pixels, or ``own`` (None), which keeps each image's own size.

    Raises:
        ArgumentTypeError: for anything else.
    """
    try:
        return None if text == "own" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"it is {text!r}: give a side in pixels, or the word own") from None


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, where there are any."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


def command_parser(name: str, description: str | None, images: bool = True) -> OneLineParser:
    """The arguments that every ``dataset.NAME.download_preprocess`` has.

    Args:
        name: of the data set.
        description: for ``--help``.
        images: whether the form in which images are kept can be chosen.
    """
    parser = OneLineParser(
        prog=f"python -m dataset.{name}.download_preprocess", description=description, formatter_class=_Help
    )
    add = parser.add_argument
    add("--output_file", type=Path, required=True, help="the HDF5 file to make")
    add("--download_folder", type=Path, help="(F.download, beside the output); deleted at the end")
    add("--overwrite", action="store_true", help="replace an existing output file")
    if images:
        add("--storage", choices=("jpeg", "raw"), default="jpeg", help="the original bytes, or pixels")
        size = "raw: side in pixels of the squares, or the word own: each image keeps its size"
        add("--image_size", type=side_or_own, default=SIDE, help=size)
        add("--verify", choices=("header", "full"), default="full", help="how far each image is decoded")
        add("--workers", type=int, default=cores(), help="threads")
    return parser


def checked_places(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """The output file and the download folder of a command; its other plain arguments are checked as well.

    Raises:
        ValueError: one line that names the argument.
    """
    output = output_file("--output_file", arguments.output_file, arguments.overwrite)
    for name in ("image_size", "workers"):
        if (value := getattr(arguments, name, None)) is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1")
    if getattr(arguments, "storage", "raw") == "jpeg" and arguments.image_size != SIDE:
        raise ValueError("--image_size needs --storage raw: add --storage raw, or leave it out")
    folder = arguments.download_folder or output.with_name(output.name + ".download")
    return output, output_folder("--download_folder", folder)


def make(source: Source, options: Options, downloads: Path | None = None) -> None:
    """`preprocess`, if the disk has room for it, and a line that says so.

    Args:
        source: of the images.
        options: of the output.
        downloads: the folder of what is downloaded; None: beside the output.
    """
    check_disk(source, options, downloads)
    preprocess(source, options)
    output = options.output_file
    print(f"{output} is complete; to see what it has: python -m dataset.store {output}", file=sys.stderr)
