"""Download FLAIR, or take a local copy, and make one HDF5 file of it.

    python -m dataset.flair.download_preprocess --output_file F [--source hf|apple|DIR] [--storage jpeg|raw]

Two passes over the source, each with bounded memory. The first reads users, labels and image sizes, checks
each image and keeps compact columns, from which every image's place in the file follows; the second puts each
image at its place. The output has its name only when it is complete and checked; dataset/store/hdf5.py
describes its schema.

A download or a preprocessing that was killed, or stopped by SIGTERM, SIGINT (Ctrl-C) or SIGUSR1 (exit code
75), or that lost the network, goes on with the same command: what was downloaded, and each block of 2,048
images that was checked or written, is kept in F.partial until the output is complete.

--verify full, the default, decodes every image to the end of its stream, strictly: damage is found now, and
not after days of training, or never, as most decoders paint over it. For all of FLAIR it costs a few minutes
on two cores, once. --verify header reads headers and end markers only, which finds files that are cut off or
are no images. With --storage raw every image is decoded in any case, in the second pass.

PNG, WebP and GIF images become JPEGs of --jpeg_quality (or pixels, with --storage raw); transparent ones are
laid over --background, 16 bits become 8, of an animation the first frame is taken. The counts are printed and
recorded in the file.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import sys
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL
import pyarrow as pa
from tqdm import tqdm

from dataset.cli import OneLineParser, cores, input_file, output_file, output_folder, run
from dataset.files import prefetched
from dataset.flair import remote
from dataset.flair.sources import Image, Records, Source, local
from dataset.journal import Journal, free
from dataset.store.columns import SCHEMA, Placement, build_index
from dataset.store.hdf5 import DataWriter, Storage
from dataset.store.images import decode, jpeg_size, resized
from dataset.store.index import TAXONOMIES, DatasetIndex, IntArray
from dataset.store.transcode import BACKGROUNDS, Transcoding, other_format, to_jpeg, to_pixels

TOOL_VERSION = "1.0"
MISSING = "it is listed, but its file is missing"


@dataclass(frozen=True)
class Options:
    """What the output is to be."""

    output_file: Path
    storage: Storage = "jpeg"
    image_size: int = 256
    grouped: bool = True
    verify: str = "full"
    on_bad_image: str = "fail"
    vocabulary: Mapping[str, list[str]] | None = None
    workers: int = 2
    block_images: int = 2048
    """What is lost at most when a preprocessing is killed."""
    transcode: Transcoding | None = None
    """How PNG, WebP and GIF images become JPEGs; None: they are bad images."""
    finish: Callable[[DatasetIndex], DatasetIndex] | None = None
    """What is still to be done to the index, once it is known which images there are."""


@dataclass(frozen=True)
class Block:
    """What was found of some images of a part, from image ``start`` on; B of them."""

    part: int
    start: int
    table: pa.Table  # columns.SCHEMA
    num_bytes: npt.NDArray[np.int64]  # [B]; -1: listed, but nowhere
    faults: dict[int, str]  # by position in the block
    notes: dict[int, str]  # likewise: what was done to an image that is no JPEG
    last: bool  # of its part

    def __len__(self) -> int:
        return len(self.num_bytes)

    def packed(self) -> bytes:
        """For the journal: an Arrow stream."""
        table = self.table.append_column("num_bytes", pa.array(self.num_bytes))
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
        columns = table.select(SCHEMA.names).replace_schema_metadata(None)
        return cls(part, start, columns, table["num_bytes"].to_numpy(), faults, notes, last)


@dataclass
class Scan:
    """What the first pass keeps of R records."""

    blocks: list[Block]
    table: pa.Table
    num_bytes: npt.NDArray[np.int64]  # [R]
    faults: dict[int, str]  # by record
    notes: dict[int, str]  # by record

    def transcoded(self) -> dict[str, int]:
        """How many of the images that are kept are no JPEGs, by what was done to them."""
        return dict(Counter(note for record, note in self.notes.items() if record not in self.faults))


def preprocess(source: Source, options: Options) -> None:
    """Make ``options.output_file`` from a source, going on where an earlier call was stopped.

    Raises ValueError that names user and image for an image that cannot be used (unless such are skipped),
    and for records that contradict one another; OSError if the disk is full.
    """
    with Journal(options.output_file) as journal:
        scan = _scan(source, options, journal)
        _say_transcoded(scan, options)
        while True:
            index, placement = _index(scan, source, options)
            found = _write(source, scan, index, placement, options, journal)
            if not found:
                break
            scan.faults.update(found)  # raw storage found images that cannot be decoded: again, without them
    source.discard()


def _scan(source: Source, options: Options, journal: Journal) -> Scan:
    blocks: list[Block] = []
    with _progress(source, "1/2 check") as progress:
        for part, key in enumerate(source.parts):
            for block in _check(source, part, key, options, journal):
                blocks.append(block)
                progress.update(len(block))
    num_bytes = np.concatenate([np.zeros(0, np.int64), *(block.num_bytes for block in blocks)])
    starts = np.cumsum([0, *map(len, blocks)])
    faults = {int(at) + here: f for at, block in zip(starts, blocks) for here, f in block.faults.items()}
    notes = {int(at) + here: n for at, block in zip(starts, blocks) for here, n in block.notes.items()}
    if len(num_bytes) == len(faults):
        raise ValueError(f"{source.provenance['source']} holds no usable image")
    return Scan(blocks, pa.concat_tables(block.table for block in blocks), num_bytes.clip(0), faults, notes)


def _check(source: Source, part: int, key: str, options: Options, journal: Journal) -> Iterator[Block]:
    """The blocks of a part: those that an earlier process checked, then the others."""
    decodes = options.verify == "full" and options.storage == "jpeg"
    what = f"{key} {decodes} {options.storage} {options.transcode}"
    entry = f"checked-{hashlib.sha256(what.encode()).hexdigest()[:32]}"
    start = 0
    while (kept := journal.get(f"{entry}-{start}")) is not None:
        block = Block.unpacked(part, start, kept)
        for at, known in block.faults.items():
            _bad(block.table, at, known, options)
        source.skip(part, block.table.filter(pa.array(block.num_bytes >= 0)))
        yield block
        if block.last:
            return
        start += len(block)

    def check(batch: Records) -> tuple[Records, list[Checked]]:
        return batch, [_checked(image, options, decodes) for image in batch.images]

    tables: list[pa.Table] = []
    num_bytes, faults, notes = array("q"), dict[int, str](), dict[int, str]()

    def finished(last: bool) -> Block:
        table = pa.concat_tables([SCHEMA.empty_table(), *tables])
        block = Block(part, start, table, np.array(num_bytes, np.int64), dict(faults), dict(notes), last)
        journal.put(f"{entry}-{start}", block.packed())
        return block

    for batch, found in prefetched(
        check, source.records(part, start), ahead=2 * options.workers, threads=options.workers
    ):
        for at, image in enumerate(found):
            if image.fault is not None:
                _bad(batch.table, at, f"{batch.origin}: {image.fault}", options)
                faults[len(num_bytes)] = image.fault
            if image.note is not None:
                notes[len(num_bytes)] = image.note
            num_bytes.append(image.num_bytes)
        tables.append(batch.table)
        if len(num_bytes) >= options.block_images:
            yield finished(last=False)
            start += len(num_bytes)
            tables, num_bytes, faults, notes = [], array("q"), {}, {}
    yield finished(last=True)


@dataclass(frozen=True)
class Checked:
    """What was found of an image: its length as it is kept, what is wrong with it, what was done to it."""

    num_bytes: int
    fault: str | None = None
    note: str | None = None


def _checked(image: Image, options: Options, decodes: bool) -> Checked:
    if image is None or options.transcode is None or other_format(image) is None:
        return Checked(-1 if image is None else len(image), _fault(image, decodes))
    try:
        if options.storage == "raw":
            return Checked(len(image), None, to_pixels(image, options.transcode.background)[1])
        jpeg, note = to_jpeg(image, options.transcode)
        return Checked(len(jpeg), _fault(jpeg, decodes), note)
    except ValueError as error:
        return Checked(len(image), str(error))


def _fault(image: Image, decodes: bool) -> str | None:
    """What is wrong with an image, or None."""
    if image is None:
        return MISSING
    try:
        jpeg_size(image)
        if decodes:
            decode(image, None)
    except ValueError as error:
        return str(error)
    return None


def _bad(table: pa.Table, at: int, fault: str, options: Options) -> None:
    if options.on_bad_image == "fail" or (options.on_bad_image == "skip-missing" and MISSING not in fault):
        user, image = table["user_id"][at].as_py(), table["image_id"][at].as_py()
        raise ValueError(
            f"image {image} of user {user} cannot be used, {fault}; mend the source, or leave such images "
            "out with --on_bad_image skip"
        )


def _index(scan: Scan, source: Source, options: Options) -> tuple[DatasetIndex, Placement]:
    keep = np.ones(len(scan.num_bytes), bool)
    keep[list(scan.faults)] = False
    skipped = [
        {
            "user_id": scan.table["user_id"][record].as_py(),
            "image_id": scan.table["image_id"][record].as_py(),
            "reason": fault,
        }
        for record, fault in sorted(scan.faults.items())
    ]
    provenance: dict[str, Any] = {
        **source.provenance,
        "counts": {},
        "verify": "full" if options.storage == "raw" else options.verify,
        "skipped_images": skipped,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "tool": "dataset.flair.download_preprocess",
        "tool_version": TOOL_VERSION,
        "pillow_version": PIL.__version__,
    }
    if done := scan.transcoded():
        assert options.transcode is not None
        told: dict[str, Any] = {"images": done, "background": options.transcode.background}
        if options.storage == "jpeg":
            told |= {"jpeg_quality": options.transcode.quality, "chroma_subsampling": "4:4:4"}
        provenance["transcoded"] = told
    index, placement = build_index(
        scan.table,
        keep,
        grouped=options.grouped,
        vocabulary=options.vocabulary or {},
        provenance=provenance,
    )
    provenance["counts"] = {
        name: {"users": split.num_users, "images": split.num_images} for name, split in index.splits.items()
    }
    return (options.finish(index) if options.finish else index), placement


def _write(
    source: Source,
    scan: Scan,
    index: DatasetIndex,
    placement: Placement,
    options: Options,
    journal: Journal,
) -> dict[int, str]:
    """The second pass; returns the images that it found undecodable, in which case nothing was written."""
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
    found: dict[int, str] = {}
    changed = ValueError(f"{source.provenance['source']} changed while it was read: run the command again")

    def put(batch: tuple[int, Sequence[Image]]) -> int:
        start, images = batch
        if not raw and options.transcode is not None:
            images = [_kept(image, options.transcode) for image in images]
        if start + len(images) > len(scan.num_bytes):
            raise changed
        records = np.arange(start, start + len(images))
        for number, name in enumerate(placement.names):
            here = records[placement.split[records] == number]
            here = here[np.argsort(placement.row[here])]
            picked = [image for record in here.tolist() if (image := images[record - start]) is not None]
            if list(map(len, picked)) != scan.num_bytes[here].tolist():
                raise changed
            rows = placement.row[here]
            if not raw:
                writer.write(name, rows, picked)
                continue
            pixels = np.empty((len(picked), options.image_size, options.image_size, 3), np.uint8)
            for i, image in enumerate(picked):
                try:
                    if options.transcode is not None and other_format(image):
                        found_pixels, _ = to_pixels(image, options.transcode.background)
                        pixels[i] = resized(found_pixels, options.image_size)
                    else:
                        decode(image, options.image_size, pixels[i])
                except ValueError as error:
                    _bad(scan.table, int(here[i]), str(error), options)
                    found[int(here[i])] = str(error)
            writer.write(name, rows, pixels)
        return len(images)

    def rows_of(start: int, stop: int) -> dict[str, IntArray]:
        split, row = placement.split[start:stop], placement.row[start:stop]
        return {name: row[split == number] for number, name in enumerate(placement.names)}

    try:
        with writer, _progress(source, "2/2 write") as progress:
            first = 0
            for _, blocks in groupby(scan.blocks, key=lambda block: block.part):
                left = deque(blocks)
                while left and writer.already(str(first), rows_of(first, first + len(left[0]))):
                    first += len(left[0])
                    progress.update(len(left.popleft()))
                if not sum(map(len, left)):
                    continue
                done, images = first, source.images(left[0].part, left[0].start)
                for count in prefetched(
                    put, _numbered(images, first), ahead=2 * options.workers, threads=options.workers
                ):
                    done += count
                    progress.update(count)
                    while left and done >= first + len(left[0]) and not found:
                        writer.put_down(str(first), rows_of(first, first + len(left[0])))
                        first += len(left.popleft())
                if left and sum(map(len, left)) and not found:
                    raise changed
                first += sum(map(len, left))
            if found:
                raise _UndecodableError
    except _UndecodableError:
        return found
    return {}


def _kept(image: Image, how: Transcoding) -> Image:
    """The bytes that jpeg storage keeps; those of a bad image, which has no place, do not matter."""
    if image is None or other_format(image) is None:
        return image
    with contextlib.suppress(ValueError):
        return to_jpeg(image, how)[0]
    return image


def _say_transcoded(scan: Scan, options: Options) -> None:
    """One line on the screen, if there are images that are no JPEGs."""
    done = scan.transcoded()
    if not done:
        return
    assert options.transcode is not None
    into = f"JPEGs of quality {options.transcode.quality}" if options.storage == "jpeg" else "pixels"
    parts = "; ".join(f"{count:,} {note}" for note, count in sorted(done.items()))
    print(f"{sum(done.values()):,} images are no JPEGs and become {into}: {parts}", file=sys.stderr)


class _UndecodableError(Exception):
    """Leaves the writer's block so that nothing is kept."""


def _numbered(batches: Iterable[Sequence[Image]], start: int) -> Iterator[tuple[int, Sequence[Image]]]:
    for images in batches:
        yield start, images
        start += len(images)


def _progress(source: Source, what: str) -> Any:
    return tqdm(total=source.num_images, desc=what, unit="image", mininterval=0.5, file=sys.stderr)


def check_disk(source: Source, options: Options) -> None:
    """Raise OSError if the disk of the output has no room for the download and the output together."""
    raw = source.num_images * options.image_size**2 * 3
    output = raw if options.storage == "raw" else source.image_bytes
    need = output - Journal(options.output_file).size() + source.download_bytes
    available = free(options.output_file.parent)
    if need > available:
        download = f"{source.download_bytes / 1e9:.2f} GB to download and " if source.download_bytes else ""
        raise OSError(
            f"{download}{output / 1e9:.2f} GB for {options.output_file} are needed, but only "
            f"{available / 1e9:.2f} GB are free there: free some or choose another disk"
        )


def read_vocabulary(path: Path) -> dict[str, list[str]]:
    """The names of each taxonomy from JSON ``{"labels": [...], ...}``, or from {name: anything} for each."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--label_mapping {path} is not JSON ({error})") from None
    if not isinstance(content, dict) or not content or set(content) - set(TAXONOMIES):
        raise ValueError(f"--label_mapping {path} needs an object with the keys {' and '.join(TAXONOMIES)}")
    for taxonomy, names in content.items():
        if not isinstance(names, (list, dict)) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"--label_mapping {path}: {taxonomy} is neither a list of names nor an object")
    return {taxonomy: sorted(set(names)) for taxonomy, names in content.items()}


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m dataset.flair.download_preprocess",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--output_file", type=Path, required=True, help="the HDF5 file to make")
    add(
        "--source",
        default="hf",
        help="hf: apple/flair on Hugging Face (default); apple: Apple's; or a folder",
    )
    add("--storage", choices=("jpeg", "raw"), default="jpeg", help="the original bytes (default), or pixels")
    add("--image_size", type=int, default=256, help="raw: side in pixels (256); other images are resized")
    add("--not_group_data_by_user", action="store_true", help="keep the source's order (centralised)")
    add("--jpeg_quality", type=int, default=95, help="of PNG, WebP and GIF images, made JPEGs (95)")
    add("--background", choices=BACKGROUNDS, default="white", help="below transparent images (white)")
    add("--verify", choices=("header", "full"), default="full", help="see above")
    add(
        "--on_bad_image", choices=("fail", "skip"), default="fail", help="skip leaves them out and lists them"
    )
    add(
        "--label_mapping", type=Path, help="JSON that fixes the labels: {labels: [], fine_grained_labels: []}"
    )
    add("--revision", help=f"commit, for --source hf ({remote.REVISION})")
    add("--download_folder", type=Path, help="(F.download, beside the output); deleted at the end")
    add("--workers", type=int, default=cores(), help="threads (the number of cores)")
    add("--overwrite", action="store_true", help="replace an existing output file")
    return parser.read(argv)


def checked_output(given: argparse.Namespace) -> Path:
    """``--output_file`` of a preprocessing command, whose other plain arguments are checked, too.

    :raises ValueError: one line that names the argument.
    """
    output = output_file("--output_file", given.output_file, given.overwrite)
    for name in ("image_size", "workers"):
        if getattr(given, name) < 1:
            raise ValueError(f"--{name} must be at least 1")
    return output


def main(argv: Sequence[str]) -> None:
    """The command line."""
    given = _arguments(argv)
    output = checked_output(given)
    if given.revision is not None and given.source != "hf":
        raise ValueError("--revision is for --source hf: leave it out")
    if given.download_folder is not None:
        if given.source not in ("hf", "apple"):
            raise ValueError("--download_folder is for --source hf or apple: leave it out")
        output_folder("--download_folder", given.download_folder)
    if given.label_mapping is not None:
        input_file("--label_mapping", given.label_mapping)
    options = Options(
        output,
        given.storage,
        given.image_size,
        not given.not_group_data_by_user,
        given.verify,
        given.on_bad_image,
        read_vocabulary(given.label_mapping) if given.label_mapping else None,
        given.workers,
        transcode=Transcoding(given.jpeg_quality, given.background),
    )
    folder = given.download_folder or output.with_name(output.name + ".download")
    source: Source
    if given.source == "hf":
        source = remote.hugging_face(folder, given.revision or remote.REVISION)
    elif given.source == "apple":
        source = remote.apple(folder)
    else:
        source = local(Path(given.source))
    check_disk(source, options)
    preprocess(source, options)
    print(f"{output} is complete; python -m dataset.store {output} describes it", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run(main))
