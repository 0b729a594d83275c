"""The command line that `dataset.cifar10` and `dataset.cifar100` share."""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from dataset.cifar10.source import (
    IMAGES_BASE,
    LICENCE,
    SIDE,
    SPLITS_BASE,
    Cifar,
    CifarSource,
    check_official,
    csv_partitions,
    read_images,
)
from dataset.cli import SourceError, is_address
from dataset.fetch.http import below, fetch_checked
from dataset.fetch.source import delete_downloads
from dataset.journal import only_downloader, only_writer
from dataset.partitions.drawn import Recipe, parse_kinds, partition_name, read_name, written_kinds
from dataset.preprocess import Options, checked_places, command_parser, make
from dataset.store.index import PartitionIndex, meaning

NO_SPLITS, OFFICIAL = "none", "official"


def _arguments(spec: Cifar, argv: Sequence[str]) -> argparse.Namespace:
    description = f"Make one HDF5 file of {spec.name} with federated splits of its training images."
    parser = command_parser(spec.name, description, images=False)
    add = parser.add_argument
    add("--source", default=IMAGES_BASE, help="a folder, or the address of one, with the images")
    add(
        "--splits",
        help=f"official: download Google's splits from {SPLITS_BASE}; none; or a folder or zip archive with "
        "federated_train*.csv, or the address of the archive's folder "
        "(default: a local --source that holds any, else official)",
    )
    add("--splits_sha256", default="", help="checksum of the archive, for --splits with an address")
    total = "partitions by our own sampler, alpha being the sum over the classes (Hsu, Qi, Brown): 0.3,1,..."
    add("--dirichlet_total", default="", help=total)
    each = "the same, alpha being that of each class (Flower, FedML, pfl): 0.03,0.1,..."
    add("--dirichlet_per_class", default="", help=each)
    written = f"partitions of our own by any name: {written_kinds()}; or KIND-NUMBER-clients-C-seed-S"
    add("--partition", default="", help=written)
    add("--alphas", default="", help="the old name of --dirichlet_total")
    add("--seed", type=int, default=0, help="seed of our own partitions")
    add("--clients", type=int, default=100, help="number of clients of our own partitions")
    add("--images_per_client", type=int, default=500, help="images of a client in our own partitions")
    arguments = parser.read(argv)
    if not 0 <= arguments.seed < 2**63:  # partitions have it in their names
        raise ValueError(f"--seed is {arguments.seed}; give a number from 0 to {2**63 - 1}")
    for name in ("clients", "images_per_client"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name} is {getattr(arguments, name)}; give at least 1")
    kinds = [part for part in arguments.partition.split(",") if read_name(part.strip()) is None]
    draws = any((arguments.dirichlet_total, arguments.dirichlet_per_class, "".join(kinds), arguments.alphas))
    for name in () if draws else ("seed", "clients", "images_per_client"):
        if getattr(arguments, name) != parser.get_default(name):
            raise ValueError(
                f"--{name} has an effect only when you ask for partitions to be drawn (--partition, "
                "--dirichlet_total or --dirichlet_per_class): leave it out"
            )
    if arguments.splits_sha256 and not re.fullmatch("[0-9a-fA-F]{64}", arguments.splits_sha256):
        raise ValueError("--splits_sha256 is not a SHA-256 checksum: give 64 hexadecimal digits")
    return arguments


def main(spec: Cifar, argv: Sequence[str]) -> None:
    """Download or read images and splits, check them, draw partitions, and write the file."""
    arguments = _arguments(spec, argv)
    output, folder = checked_places(arguments)
    kinds = _drawn_kinds(arguments)
    local = folder if is_address(arguments.source) else Path(arguments.source)
    if local is not folder and not local.is_dir():
        raise ValueError(
            f"--source {arguments.source} is neither an existing folder nor an address (http...)"
        )
    downloading = only_downloader(arguments.download_folder)
    with only_writer(output, arguments.overwrite), downloading:  # before the first download
        _make(spec, arguments, kinds, local, folder)


def _make(
    spec: Cifar,
    arguments: argparse.Namespace,
    kinds: Mapping[str, Recipe],
    local: Path,
    folder: Path,
) -> None:
    output: Path = arguments.output_file
    asked: str = arguments.splits or (
        OFFICIAL if local is folder or not _has_splits(spec, local) else str(local)
    )
    images = None if local is folder else read_images(spec, local)
    splits = _splits(spec, asked, arguments.splits_sha256, folder)
    if images is None:
        archive = below(arguments.source, spec.archive)
        fetch_checked(archive, folder / spec.archive, "md5", spec.md5)
        images = read_images(spec, folder)
    provenance: dict[str, object] = {"source": arguments.source, "licence": LICENCE}
    partitions: dict[str, PartitionIndex] = {}
    classes = images["train"].classes
    if splits is not None:
        partitions, digests = csv_partitions(spec, splits, classes)
        if asked == OFFICIAL:
            check_official(spec, splits, digests)
        provenance["splits_sha256"] = digests
    provenance["splits"] = SPLITS_BASE if asked == OFFICIAL else asked
    partitions |= {name: recipe.draw(classes) for name, recipe in kinds.items()}
    _print_partitions(spec, partitions)
    if kinds:
        provenance["drawn"] = {name: recipe.provenance for name, recipe in kinds.items()}
    dirichlet = {name: of for name, of in kinds.items() if of.kind.startswith("dirichlet-")}
    if dirichlet:
        provenance["dirichlet"] = {
            name: {"alpha": of.number, "alpha_is": of.kind.removeprefix("dirichlet-"), "seed": of.seed}
            for name, of in dirichlet.items()
        }
    downloaded = [spec.archive] if local is folder else []
    downloaded += [splits.name] if splits is not None and splits.parent == folder else []
    options = Options(
        output,
        "raw",
        SIDE,
        overwrite=arguments.overwrite,
        locked=True,
        vocabulary={"labels": list(spec.classes)},
        tool=f"dataset.{spec.name}.download_preprocess",
        ids_are_positions=True,
        finish=lambda index: index.with_partitions(partitions),
    )
    discard = partial(delete_downloads, folder, downloaded)
    make(CifarSource(spec, images, provenance=provenance, discard=discard), options)


def _print_partitions(spec: Cifar, partitions: Mapping[str, PartitionIndex]) -> None:
    for name, partition in partitions.items():
        clause = meaning(name, spec.num_classes)
        users = f"{len(partition.user_ids)} users"
        print(f"partition {name}: {users}{clause and f'; {clause}'}", file=sys.stderr)
    if not partitions:
        options = "--dirichlet_total A or --dirichlet_per_class A"
        print(
            f"the file has no partition, so one user owns all images: {options} adds partitions",
            file=sys.stderr,
        )


def _splits(spec: Cifar, asked: str, sha256: str, folder: Path) -> Path | None:
    """The path of the CSVs, after a download if one is asked for; None if none are wanted."""
    if sha256 and not is_address(asked):
        raise ValueError(
            "--splits_sha256 is the checksum of a download: give --splits an address, or leave "
            "--splits_sha256 out"
        )
    if asked == NO_SPLITS:
        return None
    if asked != OFFICIAL and not is_address(asked):
        return _place(spec, Path(asked))
    if asked.startswith("http://") and not sha256:
        raise ValueError(
            f"--splits {asked}: files from http addresses cannot be trusted; give an https address, or "
            f"the SHA-256 of {spec.splits_archive} with --splits_sha256"
        )
    url = below(SPLITS_BASE if asked == OFFICIAL else asked, spec.splits_archive)
    # The name holds the address, so an archive from another address is never used.
    target = folder / f"{hashlib.sha256(url.encode()).hexdigest()[:12]}-{spec.splits_archive}"
    try:
        fetch_checked(url, target, "sha256", sha256.lower())
    except SourceError as error:
        if asked != OFFICIAL:
            raise
        raise SourceError(
            f"{error}; or give a copy of {spec.splits_archive} with --splits DIR; or draw partitions "
            "instead, with --splits none --dirichlet_total A"
        ) from None
    return target


def _has_splits(spec: Cifar, folder: Path) -> bool:
    return any(folder.rglob("federated_train*.csv")) or any(folder.rglob(spec.splits_archive))


def _place(spec: Cifar, place: Path) -> Path:
    """The folder with the CSVs, or the zip archive in it."""
    if not place.exists():
        raise ValueError(
            f"--splits {place} does not exist: give official, none, a folder, a zip archive or an "
            "address (http...)"
        )
    if place.is_dir() and not any(place.rglob("federated_train*.csv")):
        return next(iter(sorted(place.rglob(spec.splits_archive))), place)
    return place


def _drawn_kinds(arguments: argparse.Namespace) -> dict[str, Recipe]:
    """The partitions that the arguments ask to draw."""
    if arguments.alphas:
        print(
            "--alphas is the old name of --dirichlet_total, whose alpha is the sum over all classes; "
            "use --dirichlet_per_class to give the alpha of each class",
            file=sys.stderr,
        )
    parts = [part.strip() for part in arguments.partition.split(",")]
    whole = {part: recipe for part in parts if (recipe := read_name(part)) is not None}
    pairs = [
        *parse_kinds("alphas", arguments.alphas, "dirichlet-total"),
        *parse_kinds("dirichlet_total", arguments.dirichlet_total, "dirichlet-total"),
        *parse_kinds("dirichlet_per_class", arguments.dirichlet_per_class, "dirichlet-per-class"),
        *parse_kinds("partition", ",".join(part for part in parts if part not in whole)),
    ]
    sizes, seed = (arguments.clients, arguments.images_per_client), arguments.seed
    by_kind = {partition_name(*pair, seed): Recipe(*pair, *sizes, seed) for pair in pairs}
    return by_kind | whole
