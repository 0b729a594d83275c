"""TensorFlow Federated's HDF5: ``examples/CLIENT/`` with ``pixels`` or ``image``, and labels.

FedML and others distribute EMNIST (``fed_emnist_train.h5``) and CIFAR-100 (``fed_cifar100_train.h5``) so.
What TensorFlow Federated distributes today is SQLite (`dataset.convert.tff_sqlite`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from dataset.convert.pixels import Scale, shape_of
from dataset.convert.source import Found, Part, Rows
from dataset.convert.text import Names, shown, split_by_names
from dataset.convert.tff_sqlite import LABELS, PIXELS, is_sqlite
from dataset.convert.tff_sqlite import read as read_sqlite
from dataset.fetch import source as batches
from dataset.fetch.source import Image
from dataset.files import state_of
from dataset.store.annotations import Kind
from dataset.store.index import SPLIT_NAMES
from dataset.store.native import dataset, member, opened
from dataset.store.probe import probe

EXAMPLES = "examples"


def hdf5_files(source: Path) -> list[tuple[Path, str | None]]:
    """The files of a folder, each with the split that its name holds, or one file without a split.

    Raises:
        ValueError: for a file of a folder whose name holds none, and where there are no files.
    """
    if source.is_file():
        return [(source, None)]
    paths = sorted([*source.glob("*.h5"), *source.glob("*.hdf5")])
    if not paths:
        raise ValueError(f"--source {source} is neither an HDF5 file nor a folder with *.h5 files")
    splits = split_by_names(source, paths)
    if None in splits:
        raise ValueError(f"{paths[0]} has no split ({', '.join(SPLIT_NAMES)}) in its name: rename or move it")
    return [*zip(paths, splits)]


def read(source: Path, class_names: list[str] | None, prefix: str | None = None) -> Found:
    """Read TensorFlow Federated's files.

    Args:
        source: a folder with ``*_train.h5`` and ``*_test.h5``, or a file; or a file of SQLite.
        class_names: the class names of ``label`` by number.
        prefix: of the names of SQLite's splits; see `dataset.convert.tff_sqlite`.

    Raises:
        ValueError: one line that names file, client and data set.
    """
    if is_sqlite(source):
        return read_sqlite(source, class_names, prefix)
    if prefix is not None and source.exists():
        raise ValueError(
            f"--prefix can be used only with SQLite files, but {source} is not one: leave it out"
        )
    files = hdf5_files(source)
    for path, _ in files:
        probe(path)
    coarse = all(_has_coarse(path) for path, _ in files)
    chosen = list(LABELS)[: 2 if coarse else 1]
    kinds: Mapping[str, Kind] = {LABELS[leaf]: "class" for leaf in chosen}
    names = {name: Names(class_names if name == "labels" else None, numbered=True) for name in kinds}
    scale, parts, empty, size = Scale(), [], [], 0
    for path, split in files:
        rows = Rows(kinds, names)
        with opened(path) as file:
            clients = member(file, EXAMPLES)
            if not isinstance(clients, h5py.Group):
                raise ValueError(f"{path}: {EXAMPLES} is not an HDF5 group")
            for client in clients:
                where = f"{path}, {EXAMPLES}/{client}"
                images, labels = _of_client(clients, client, chosen, where)
                empty += [] if len(images) else [client]
                if len(images):
                    shape = scale.shape_of(images.shape[1:], where)
                for number in range(len(images)):
                    stem = f"{split}/{client}" if split else client
                    values = [int(column[number]) for column in labels]
                    rows.add(where, client, f"{stem}/{number}", split, values)
                for block in _blocks(images):
                    scale.note(block, where)
                    size += len(block) * shape[0] * shape[1] * 3
        parts.append(_part(path, rows, scale))
    return Found(parts, kinds, names, size, scale.side(source), empty, files=files)


def _has_coarse(path: Path) -> bool:
    with opened(path) as file:
        clients = member(file, EXAMPLES)
        first = next(iter(clients), None) if isinstance(clients, h5py.Group) else None
        return first is not None and "coarse_label" in member(clients, first)


def _of_client(
    clients: h5py.Group, client: str, chosen: list[str], where: str
) -> tuple[h5py.Dataset, list[npt.NDArray[Any]]]:
    """The images of a client, which are not read yet, and its labels."""
    group = member(clients, client)
    leaf = next((name for name in PIXELS if isinstance(group, h5py.Group) and name in group), None)
    if leaf is None:
        raise ValueError(f"{where} has none of {', '.join(PIXELS)}")
    images = dataset(group, leaf)
    if images.dtype.kind not in "uif" or not images.ndim:
        raise ValueError(f"{where}/{leaf} has the type {images.dtype}, which is not one of pixels")
    labels = []
    for name in chosen:
        column = dataset(group, name)
        if (
            column.dtype.kind not in "ui"
            or column.size != len(images)
            or column.shape[:1] != images.shape[:1]
        ):
            raise ValueError(
                f"{where}/{name} is not a list of {len(images)} class numbers, one for each image"
            )
        labels.append(np.asarray(column[()]).reshape(-1))
    return images, labels


def _blocks(images: h5py.Dataset, start: int = 0) -> Iterator[npt.NDArray[Any]]:
    """The images of a client from ``start`` on, in blocks."""
    for first in range(start, len(images), batches.BATCH):
        yield np.asarray(images[first : first + batches.BATCH])


def _part(path: Path, rows: Rows, scale: Scale) -> Part:
    def images(start: int) -> Iterator[Image]:
        with opened(path) as file:
            clients = member(file, EXAMPLES)
            for client in clients:
                found, _ = _of_client(clients, client, [], f"{path}, {EXAMPLES}/{client}")
                for block in _blocks(found, start):
                    shape = shape_of(block.shape[1:], shown(client))
                    yield from (scale.pixels(image, shape) for image in block)
                start = max(0, start - len(found))

    return Part(str(path), f"{path} {state_of(path)}", rows.table(), lambda row: str(path), images)
