"""The command line that `dataset.cifar10` and `dataset.cifar100` share."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dataset.cifar import (
    IMAGES_BASE,
    SIDE,
    SPLITS_BASE,
    Cifar,
    Images,
    download,
    official_partitions,
    provenance_text,
    read_images,
    split_index,
)
from dataset.dirichlet import dirichlet_partition
from dataset.flair.arguments import OneLineParser
from dataset.flair.hdf5 import FlairWriter
from dataset.flair.index import DatasetIndex, PartitionIndex

NO_SPLITS = "none"


def write(
    spec: Cifar,
    images: dict[str, Images],
    partitions: dict[str, PartitionIndex],
    provenance: dict[str, object],
    path: Path,
) -> None:
    """Put images and partitions into one file, which appears when it is complete and checked."""
    mapping = {name: column for column, name in enumerate(spec.classes)}
    index = DatasetIndex(
        {
            name: split_index(spec, name, split, partitions if name == "train" else {})
            for name, split in images.items()
        },
        {"labels": mapping, "fine_grained_labels": mapping},
        provenance,
    )
    with FlairWriter(path, index, storage="raw", image_size=SIDE) as writer:
        for name, split in images.items():
            for start in range(0, len(split.classes), 1000):
                pixels = split.pixels[start : start + 1000]
                writer.write(name, np.arange(start, start + len(pixels)), pixels)


def _arguments(spec: Cifar, argv: Sequence[str]) -> argparse.Namespace:
    parser = OneLineParser(
        prog=f"python -m dataset.{spec.name}.download_preprocess",
        description=f"Make one HDF5 file of {spec.name} with federated splits of its training images.",
    )
    add = parser.add_argument
    add("--output_file", type=Path, required=True, help="the HDF5 file to make")
    add("--source", default=IMAGES_BASE, help="a folder, or the address of one, with the images")
    add(
        "--splits",
        help="a folder or zip archive with federated_train*.csv, or the address of its folder, or 'none' "
        f"(a local --source if it holds any, else {SPLITS_BASE})",
    )
    add("--alphas", default="", help="partitions by our own sampler as well: 0.3,1,...")
    add("--seed", type=int, default=0, help="of --alphas (0)")
    add("--clients", type=int, default=100, help="of --alphas (100)")
    add("--images_per_client", type=int, default=500, help="of --alphas (500)")
    add("--download_folder", type=Path, help="(F.download, beside the output); deleted at the end")
    add("--overwrite", action="store_true", help="replace an existing output file")
    return parser.parse_args(argv)


def main(spec: Cifar, argv: Sequence[str]) -> None:
    """Download or read, check, deal and write."""
    given = _arguments(spec, argv)
    output: Path = given.output_file
    if output.is_dir():
        raise ValueError(f"--output_file {output} is a folder; give the name of a file")
    if output.exists() and not given.overwrite:
        raise ValueError(f"{output} exists; give --overwrite to replace it")
    if given.seed < 0:
        raise ValueError(f"--seed is {given.seed}; give a number from 0 on")
    alphas = _alphas(given.alphas)
    folder: Path = given.download_folder or output.with_name(output.name + ".download")
    images_at, splits_at = _remote(given.source), _remote(given.splits)
    local = folder if images_at else Path(given.source)
    if not images_at and not local.is_dir():
        raise ValueError(f"--source {given.source} is neither a folder nor an address (http...)")
    if given.splits is None and (images_at or not _has_splits(spec, local)):
        splits_at = SPLITS_BASE
    download(spec, folder, images_at, splits_at)
    images = read_images(spec, local)
    partitions: dict[str, PartitionIndex] = {}
    place = local
    if given.splits != NO_SPLITS:
        place = _place(spec, folder if splits_at else Path(given.splits or local))
        partitions = official_partitions(spec, place, images["train"].classes)
    for name, alpha in alphas.items():
        partitions[f"dirichlet-{name}-seed-{given.seed}"] = dirichlet_partition(
            images["train"].classes, alpha, given.seed, given.clients, given.images_per_client
        )
    told = provenance_text(
        str(given.source),
        str(splits_at or place) if given.splits != NO_SPLITS else NO_SPLITS,
        list(alphas.values()),
        given.seed,
    )
    told["tool"] = f"dataset.{spec.name}.download_preprocess"
    told["created"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    write(spec, images, partitions, told, output)
    for name in (spec.archive, spec.splits_archive):
        if folder.is_dir():
            (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it is not there, or not empty
        folder.rmdir()
    print(f"{output} is complete; python -m dataset.flair.hdf5 {output} describes it", file=sys.stderr)


def _remote(place: str | None) -> str:
    return place if place is not None and place.startswith(("http://", "https://")) else ""


def _has_splits(spec: Cifar, folder: Path) -> bool:
    return any(folder.rglob("federated_train*.csv")) or any(folder.rglob(spec.splits_archive))


def _place(spec: Cifar, place: Path) -> Path:
    """A folder's CSVs, or the zip archive that it holds."""
    if not place.exists():
        raise ValueError(f"--splits {place} is neither a folder, a zip archive nor an address (http...)")
    if place.is_dir() and not any(place.rglob("federated_train*.csv")):
        return next(iter(sorted(place.rglob(spec.splits_archive))), place)
    return place


def _alphas(text: str) -> dict[str, float]:
    """As written -> value."""
    try:
        return {one.strip(): float(one) for one in text.split(",") if one.strip()}
    except ValueError:
        raise ValueError(f"--alphas is {text!r}; give numbers with commas between them: 0.3,1") from None
