"""The command line that `dataset.inaturalist` and `dataset.landmarks` share."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dataset.cli import input_file, is_address
from dataset.fetch.archives import ArchiveSource
from dataset.fetch.listed import (
    SPLITS,
    ListedSet,
    Lists,
    fetch_lists,
    image_files,
    largest,
    read_lists,
    remote_shard,
)
from dataset.fetch.source import Shard, delete_downloads, digest_of
from dataset.files import write_bytes
from dataset.journal import only_downloader, only_writer
from dataset.partitions.assignments import NOBODY, deal, partition_of
from dataset.partitions.geo import geo_partition, leaf_ids, read_coordinates
from dataset.preprocess import Options, checked_places, command_parser, make
from dataset.store.index import DatasetIndex, PartitionIndex

MISSING_COLUMNS = ("image_id", "user_id", "reason")
Places = Mapping[str, tuple[float, float]]


def _arguments(specs: Mapping[str, ListedSet], argv: Sequence[str]) -> argparse.Namespace:
    first = next(iter(specs.values()))
    description = f"Make one HDF5 file of {first.title}: the images that its CSVs list, and no others."
    parser = command_parser(first.name, description)
    add = parser.add_argument
    if len(specs) > 1:
        add("--subset", choices=tuple(specs), default=next(iter(specs)), help="which lists")
    images = "address below which the archives are, or a folder with them or with images"
    add("--source", default=first.images_base, help=images)
    lists = (
        "folder, zip archive or address of the CSVs; by default --source, if it has any, or the public ones"
    )
    add("--splits", help=lists)
    bad = "leave out and list images that are missing; these and damaged ones; or none"
    add("--on_bad_image", choices=("skip-missing", "skip", "fail"), default="skip-missing", help=bad)
    add("--coordinates", type=Path, help="CSV image_id,latitude,longitude: adds partitions by S2 cells")
    add("--n_max", default="30000,3000,1000,100", help="with --coordinates: most images of a cell, for each")
    arguments = parser.read(argv)
    if arguments.coordinates is None and arguments.n_max != parser.get_default("n_max"):
        raise ValueError("--n_max can be used only with --coordinates: leave it out")
    return arguments


def main(specs: Mapping[str, ListedSet], argv: Sequence[str]) -> None:
    """Lists, images, partitions, file."""
    arguments = _arguments(specs, argv)
    spec = specs[arguments.subset] if len(specs) > 1 else next(iter(specs.values()))
    output, folder = checked_places(arguments)
    if not is_address(arguments.source) and not Path(arguments.source).is_dir():
        raise ValueError(
            f"--source {arguments.source} is neither an existing folder nor an address (http...)"
        )
    places: Places = {}
    n_max: Sequence[int] = []
    if arguments.coordinates is not None:
        places = read_coordinates(input_file("--coordinates", arguments.coordinates))
        n_max = _sizes(arguments.n_max)
    downloading = only_downloader(arguments.download_folder)
    with only_writer(output, arguments.overwrite), downloading:  # before the first download
        _make(spec, arguments, folder, places, n_max)


def _make(
    spec: ListedSet,
    arguments: argparse.Namespace,
    folder: Path,
    places: Places,
    n_max: Sequence[int],
) -> None:
    output: Path = arguments.output_file
    lists = read_lists(_splits(spec, arguments, folder))
    table = lists.table(spec.natural)
    source = _source(spec, arguments.source, folder, lists, table)
    finish = _Finish(lists, spec.natural, places, n_max, output.with_name(output.name + ".missing.csv"))
    vocabulary = lists.vocabulary(table)
    options = Options.of(arguments, spec.name, locked=True, vocabulary=vocabulary, finish=finish)
    make(source, options, folder)
    finish.report(len(table))


def _splits(spec: ListedSet, arguments: argparse.Namespace, folder: Path) -> Path:
    """The path of the CSVs, after a download if they are to be downloaded."""
    if is_address(arguments.splits):
        return fetch_lists(spec, arguments.splits, folder)
    if arguments.splits is not None:
        if not Path(arguments.splits).exists():
            raise ValueError(
                f"--splits {arguments.splits} does not exist: give a folder, a zip archive or an "
                "address (http...)"
            )
        return Path(arguments.splits)
    source = Path(arguments.source)
    if not is_address(arguments.source) and source.is_dir():
        zipped = [
            path for part in spec.splits if part.path.endswith(".zip") for path in source.rglob(part.path)
        ]
        if any(source.rglob("*train*.csv")):
            return source
        if zipped:
            return zipped[0]
    return fetch_lists(spec, spec.splits_base, folder)


def _source(spec: ListedSet, place: str, folder: Path, lists: Lists, table: pa.Table) -> ArchiveSource:
    ids = table["image_id"].to_pylist()
    wanted = {image: row for row, image in enumerate(ids)}
    digest = digest_of(table)
    listing = Shard(Path(lists.origin).name, 0, lambda: folder, digest)
    provenance: dict[str, Any] = {
        "source": place,
        "splits": lists.origin,
        "licence": spec.licence,
        "lists_sha256": digest,
    }
    estimate = spec.mean_image_bytes * len(ids)
    source = partial(
        ArchiveSource,
        listing,
        lambda _: table,
        schema=table.schema,
        num_images=len(ids),
        provenance=provenance,
    )
    if is_address(place):
        shards = [remote_shard(archive, place, folder, wanted) for archive in spec.archives]

        def discard() -> None:
            lists = [f"{SPLITS}/{part.path}" for part in spec.splits]
            delete_downloads(folder, [*lists, *(shard.name for shard in shards)])

        need = 0
        if not all((folder / shard.name).is_file() for shard in shards):
            have = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            need = max(estimate + largest(spec, place) - have, 0)
        return source(shards, None, image_bytes=estimate, download_bytes=need, discard=discard)
    root = Path(place)
    files = image_files(root, wanted)
    archives = sorted(p for p in root.rglob("*") if p.name.endswith((".tar", ".tar.gz", ".tgz")))
    if not files and not archives:
        raise ValueError(
            f"--source {place} has none of the images that the CSV files list, and no *.tar or *.tar.gz files"
        )
    shards = [Shard.on_disk(path, path.name) for path in archives]
    size = max(sum(path.stat().st_size for path in files.values()), estimate if shards else 0)
    return source(shards, root if files else None, image_bytes=size, paths=files)


def _sizes(text: str) -> list[int]:
    sizes = [size.strip() for size in text.split(",") if size.strip()]
    if not sizes or not all(size.isascii() and size.isdigit() and int(size) for size in sizes):
        raise ValueError(f"--n_max is {text!r}; give whole numbers of at least 1, separated by commas")
    return [int(size) for size in sizes]


@dataclasses.dataclass
class _Finish:
    """Adds the partitions to an index, once it is known which images there are, and notes the others."""

    lists: Lists
    natural: str
    places: Places
    n_max: Sequence[int]
    missing_file: Path
    skipped: Sequence[Mapping[str, str]] = ()
    dropped: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __call__(self, index: DatasetIndex) -> DatasetIndex:
        if "train" not in index.splits:
            raise ValueError(f"none of the training images in {self.lists.origin} is in --source")
        train = index.splits["train"]
        row_of = {image: row for row, image in enumerate(train.image_ids)}
        partitions: dict[str, PartitionIndex] = {}
        dropped: dict[str, int] = {}
        for listing in self.lists.listings:
            for name in listing.users:
                dealt = partition_of(listing, name, row_of)
                dropped[name] = len(set(listing.users[name]) - {NOBODY}) - len(dealt.user_ids)
                if name != self.natural or len(self.lists.partition_names) > 1:
                    partitions[name] = dealt
        partitions |= self._by_place(list(train.image_ids))
        self.skipped, self.dropped = index.provenance["skipped_images"], dropped
        provenance = {
            **index.provenance,
            "skipped_images": {
                "count": len(self.skipped),
                "reasons": dict(Counter(entry["reason"] for entry in self.skipped)),
                "listed_in": self.missing_file.name,
            },
            "users_without_images": dropped,
        }
        return dataclasses.replace(index.with_partitions(partitions), provenance=provenance)

    def _by_place(self, image_ids: Sequence[str]) -> dict[str, PartitionIndex]:
        if not self.n_max:
            return {}
        rows = np.array([row for row, image in enumerate(image_ids) if image in self.places], np.int64)
        if not len(rows):
            raise ValueError(
                "--coordinates has none of the training images; check that it uses the image ids of "
                "the CSV files"
            )
        places = [self.places[image_ids[row]] for row in rows.tolist()]
        leaves = leaf_ids([place[0] for place in places], [place[1] for place in places])
        found = {}
        for most in self.n_max:
            cells = geo_partition(leaves, most)
            here = [i for i, cell in enumerate(cells) if cell != NOBODY]
            found[f"s2-{most}"] = deal([cells[i] for i in here], rows[here])
        return found

    def report(self, listed: int) -> None:
        """Say what is not there, and list it in a file."""
        self.missing_file.unlink(missing_ok=True)
        if not self.skipped:
            return
        text = io.StringIO()
        lines = csv.writer(text, lineterminator="\n")
        lines.writerow(MISSING_COLUMNS)
        lines.writerows([entry[name] for name in MISSING_COLUMNS] for entry in self.skipped)
        write_bytes(self.missing_file, text.getvalue().encode())
        gone = ", ".join(f"{count:,} of {name}" for name, count in self.dropped.items() if count)
        print(
            (f"{len(self.skipped):,} of {listed:,} listed images are missing; {self.missing_file} lists them")
            + (f"; users who are left out because all their images are missing: {gone}" if gone else ""),
            file=sys.stderr,
        )
