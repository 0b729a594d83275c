"""A table of every client: its images, and how many objects, or images, of each class it has."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from dataset.arrays import IntArray
from dataset.files import write_bytes
from dataset.partitions.statistics import OWN_USERS
from dataset.store.annotations import Boxes, present
from dataset.store.hdf5 import DataFile
from dataset.store.index import PartitionIndex
from dataset.store.views import PARTITIONED

MOST_CLASSES = 200
"""With more, a table of all clients has no columns for classes: FLAIR's would have 84 million numbers."""


def write_clients(file: DataFile, taxonomy: str, new: Mapping[str, PartitionIndex], path: Path) -> None:
    """Write a CSV with a line for each client of each partition, and for each user of each split.

    Args:
        file: the data file.
        taxonomy: the annotation with the classes. Each box counts; of labels and masks, each image that has
            the class. More than `MOST_CLASSES` are not listed.
        new: further partitions of the training images, which replace those of the same names.
        path: of the CSV.
    """
    text = io.StringIO(newline="")
    rows = csv.writer(text, lineterminator="\n")
    boxes = any(isinstance(file.split(name).annotations[taxonomy], Boxes) for name in file.splits)
    facts = ("split", "dealt by", "client", "images", *(["boxes"] if boxes else []))
    names = [*file.label_mapping(taxonomy)]
    listed = slice(len(names) if len(names) <= MOST_CLASSES else 0)
    rows.writerow([*facts, *names[listed]])
    for split in file.splits:
        index = file.split(split)
        annotation = index.annotations[taxonomy]
        if isinstance(annotation, Boxes):
            classes, indptr = annotation.classes.astype(np.int64), annotation.indptr
        else:
            found = present(annotation)
            classes, indptr = found.indices.astype(np.int64), found.indptr
        images = np.repeat(np.arange(index.num_images), np.diff(indptr))
        dealt = {**index.partitions, **new} if split == PARTITIONED else {}
        owners = {name: (part.user_ids, _owners(part, index.num_images)) for name, part in dealt.items()}
        owners[OWN_USERS] = index.user_ids, index.user_index.astype(np.int64)
        for name, (users, owner) in owners.items():
            sizes = np.bincount(owner[owner >= 0], minlength=len(users))
            for user, size, counts in zip(
                users, sizes.tolist(), _counts(owner[images], classes, len(users), annotation.num_labels)
            ):
                rows.writerow(
                    [split, name, user, size, *([int(counts.sum())] if boxes else []), *counts[listed]]
                )
    write_bytes(path, text.getvalue().encode())


def _owners(partition: PartitionIndex, num_images: int) -> IntArray:
    """The client of each image, ``[N]``; -1 for nobody."""
    owner = np.full(num_images, -1, np.int64)
    owner[partition.rows] = np.repeat(np.arange(len(partition.user_ids)), np.diff(partition.offsets))
    return owner


def _counts(owner: IntArray, classes: IntArray, num_clients: int, num_classes: int) -> Iterator[IntArray]:
    """How many there are of each class ``[K]``, client by client."""
    order = np.argsort(owner, kind="stable")
    ends = np.searchsorted(owner[order], np.arange(num_clients + 1))
    for first, end in itertools.pairwise(ends):
        yield np.bincount(classes[order[first:end]], minlength=num_classes)
