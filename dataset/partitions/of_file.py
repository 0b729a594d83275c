"""Partitions of a file: drawn from its training images, read from a CSV, and written into a copy of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from tqdm import tqdm

from dataset.files import replacing, utf8
from dataset.journal import free
from dataset.partitions.assignments import NOBODY, csv_rows, deal
from dataset.partitions.drawn import Images, Recipe, deals_any
from dataset.store.annotations import LabelMatrix
from dataset.store.hdf5 import DataFile
from dataset.store.index import BAD_NAME, NAME, PartitionIndex, check_index
from dataset.store.views import PARTITIONED, SingleLabelView
from dataset.store.writer import put_partitions

COPIED = 1 << 26
"""Number of bytes that are copied at once."""

MOST_ALIKE = 0.95
"""From this share of images of one class on, clients that are dealt by class differ in size alone."""
LOWEST = "the class of an image with a mask or boxes is the lowest class number in it, except background"
"""The rule of `drawn_of` in words."""


def default_taxonomy(file: DataFile) -> str:
    """The annotation that is used if none is named: ``labels``, or else the file's first."""
    return "labels" if "labels" in file.annotation_names else next(iter(file.annotation_names), "labels")


def drawn_of(
    file: DataFile, recipe: Recipe, taxonomy: str = "labels", several: bool = False
) -> PartitionIndex:
    """The partition of the training images that have one class in ``taxonomy``, as rows of the file.

    The class of an image with a mask or boxes is the lowest that it contains, as in FedML for masks
    (background is no class). An image without any class is dealt only by kinds that do not use classes; so is
    every image where images have ``several`` labels, or none.

    Raises:
        ValueError: when it cannot be drawn from these images.
    """
    view = SingleLabelView(file, taxonomy=taxonomy, lowest=True)
    index, annotation = file.split(PARTITIONED), file.split(PARTITIONED).annotations[taxonomy]
    present = file.present(PARTITIONED, taxonomy)
    if (isinstance(annotation, LabelMatrix) and not several) or not deals_any(recipe.kind):
        rows = np.sort(view.split(PARTITIONED).file_rows)  # a partition ignores the file's own users
        classes = present.lowest().take(rows).indices.astype(np.int64)
    else:
        rows = np.arange(index.num_images)
        classes = np.full(len(rows), -1)
        lowest = present.lowest()
        classes[np.diff(lowest.indptr) > 0] = lowest.indices
    users = [index.user_ids[owner] for owner in index.user_index[rows].tolist()]
    ids = [index.image_ids[row] for row in rows.tolist()]
    dealt = recipe.draw(classes, Images(present.take(rows), ids, users))
    return replace(dealt, rows=rows[dealt.rows])


def is_lowest(file: DataFile, taxonomy: str) -> bool:
    """Whether `LOWEST` is the rule by which training images have a class in an annotation."""
    return PARTITIONED in file.splits and not isinstance(
        file.split(PARTITIONED).annotations[taxonomy], LabelMatrix
    )


def alike(file: DataFile, taxonomy: str) -> str | None:
    """A warning where by `LOWEST` nearly all training images have one class, so that dealing by class means
    nothing; else None."""
    if not is_lowest(file, taxonomy):
        return None
    counts = np.bincount(file.present(PARTITIONED, taxonomy).lowest().indices, minlength=1)
    if not counts.any() or counts.max() < MOST_ALIKE * counts.sum():
        return None
    name = [*file.label_mapping(taxonomy)][counts.argmax()]
    return (
        f"WARNING: {100 * counts.max() / counts.sum():.0f} % of the training images count as {name}, "
        f"because {LOWEST}. With these images, a partition by class, such as lda, differs between "
        "clients only in their sizes"
    )


def read_csv(file: DataFile, path: Path) -> PartitionIndex:
    """The partition in a CSV with the columns ``image_id,user_id``. Images that it does not list, or whose
    user is ``NA``, have no owner.

    Raises:
        ValueError: for a CSV that cannot be read, or an image that is not one of the training images; the
            message names file and line.
    """
    text = utf8(path.read_bytes(), str(path))
    ids = file.split(PARTITIONED).image_ids
    row_of = {image: row for row, image in enumerate(ids)}
    users, rows = [], []
    for where, line in csv_rows(text, str(path), ("image_id", "user_id"), ("user_id",)):
        if line["image_id"] not in row_of:
            raise ValueError(f"{where}: {line['image_id']!r} is not a training image of {file.path}")
        if not line["user_id"]:
            raise ValueError(f"{where} has an empty user_id; write {NOBODY} if the image has no user")
        if line["user_id"] != NOBODY:
            users.append(line["user_id"])
            rows.append(row_of[line["image_id"]])
    if not users:
        raise ValueError(f"{path} gives no image to any user")
    return deal(users, np.array(rows, np.int64))


def write_with(
    file: DataFile, output: Path, partitions: Mapping[str, PartitionIndex], drawn: Mapping[str, Any]
) -> None:
    """Write a copy of a file with these additional partitions, which replace those of the same names.

    Args:
        file: a file in our own format.
        output: the path of the copy, which may be that of the file. The caller is its `only_writer`, and was
            that before it read the file.
        partitions: the partitions by name.
        drawn: how each drawn partition was drawn, for the provenance.

    Raises:
        ValueError: for a file in another format, one that was replaced since it was opened, a name that a
            partition cannot have, and a partition that does not fit these images.
        OSError: if the disk is full.
    """
    if file.reader.content_sha256 is None:
        raise ValueError(
            f"{file.path} is not in the HDF5 format of this project: make such a file with python -m "
            "dataset.NAME.download_preprocess or python -m dataset.convert"
        )
    for name in partitions:
        if not NAME.fullmatch(name):
            raise ValueError(f"a partition cannot be named {name!r}: {BAD_NAME}")
    index = file.index()
    index = index.with_partitions({**index.splits[PARTITIONED].partitions, **partitions})
    check_index(index)
    provenance = {**index.provenance, "drawn": {**index.provenance.get("drawn", {}), **drawn}}
    size = file.path.stat().st_size
    if size > free(output.parent):
        raise OSError(
            f"{output} needs {size / 1e9:.2f} GB, but the disk has less free: free some space or choose "
            "another disk"
        )
    with replacing(output) as temporary:
        with (
            file.path.open("rb") as original,
            temporary.open("wb") as copy,
            tqdm(
                total=size, desc=f"copying {file.path.name}", unit="B", unit_scale=True, disable=None
            ) as bar,
        ):
            while block := original.read(COPIED):
                copy.write(block)
                bar.update(len(block))
        with h5py.File(temporary, "r+", libver=("v108", "v108")) as stored:
            if stored.attrs.get("content_sha256") != file.reader.content_sha256:
                raise ValueError(f"{file.path} was replaced while it was read: run the same command again")
            text = json.dumps(provenance, sort_keys=True, ensure_ascii=False)
            put_partitions(stored, PARTITIONED, partitions, text)
        DataFile(temporary).split(PARTITIONED)
