"""Measures how unequal the users of a single-label data set are, for each partition of its images.

The distance of a client's class distribution q_k from the population's p is the L1 norm, in [0, 2]. Hsu, Qi
and Brown (Section 6.1) call it the earth mover's distance (EMD). ``python -m dataset.partitions`` prints and
draws these statistics.

Shape letters: U clients, N images, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tabulate import tabulate

from dataset.arrays import FloatArray, IntArray
from dataset.store.hdf5 import DataFile
from dataset.store.index import PartitionIndex
from dataset.store.views import PARTITIONED, SingleLabelView

OWN_USERS = "users"
"""The name of the file's own users, in a list with its partitions."""
SHOWN = 50
"""Clients whose images are counted class by class, for the picture."""
MEANING = (
    "EMD: distance between a client's shares of the classes and those of all images, from 0 (equal) to 2,\n"
    "the mean by images; at random: the EMD if images were assigned at random to clients of these sizes;\n"
    "size cv: standard deviation of the clients' sizes divided by their mean."
)
"""What the columns of `as_text` are."""


@dataclass(frozen=True)
class Spread:
    """Summary of a number that each client has."""

    min: float
    median: float
    mean: float
    max: float

    @classmethod
    def of(cls, values: IntArray) -> Spread:
        """The summary of ``values``, ``[U]``, one for each client."""
        return cls(*map(float, (values.min(), np.median(values), values.mean(), values.max())))


@dataclass(frozen=True)
class Statistics:
    """The statistics of one partition of a split."""

    split: str
    name: str
    clients: int
    images: int
    classes: int  # that occur
    images_left_out: int  # without exactly one label
    images_of_nobody: int  # that belong to no client of the partition
    taxonomy: str  # whose labels are the classes
    images_per_client: Spread
    classes_per_client: Spread
    emd: float  # sum over clients of n_k / n * ||q_k - p||_1
    emd_at_random: float  # were the images dealt at random to clients of the same sizes
    size_variation: float  # standard deviation of the clients' sizes, divided by their mean
    share_of_largest_tenth: float  # of the images, held by the largest 10 % of the clients (rounded up)
    convention: str  # what the alpha in the partition's name counts; empty if it has none


@dataclass(frozen=True)
class Dealt:
    """A partition's numbers by client, from which its statistics are computed."""

    split: str
    name: str
    sizes: IntArray  # [U]
    classes_per_client: IntArray  # [U]
    distances: FloatArray  # [U]: ||q_k - p||_1
    mixes: IntArray  # [at most SHOWN, K]: images of each class, of clients from the largest to the smallest

    @property
    def emd(self) -> float:
        """The mean of the distances, weighted by the clients' sizes."""
        return mean_emd(self.distances, self.sizes)


def distances(classes: IntArray, owner: IntArray, num_clients: int) -> tuple[FloatArray, IntArray]:
    """||q_k - p||_1 of each client, and how many classes it has, ``[U]`` each.

    Args:
        classes: of each image, ``[N]``; p is the distribution of all of them.
        owner: the client of each image, ``[N]``.
        num_clients: U.
    """
    num_classes = int(classes.max()) + 1
    p = np.bincount(classes, minlength=num_classes) / len(classes)
    sizes = np.bincount(owner, minlength=num_clients)
    pairs, counts = np.unique(owner * num_classes + classes, return_counts=True)
    who, which = pairs // num_classes, pairs % num_classes
    q = counts / sizes[who]
    # A class that a client lacks is off by p; all of them together by what p leaves beside those it has.
    off = np.bincount(who, np.abs(q - p[which]) - p[which], minlength=num_clients)
    return np.asarray(off + 1.0, np.float64), np.bincount(who, minlength=num_clients).astype(np.int64)


def mean_emd(distance: FloatArray, sizes: IntArray) -> float:
    """The mean of the distances, weighted by the clients' sizes."""
    return float((distance * sizes).sum() / sizes.sum())


def measure(
    file: DataFile, taxonomy: str = "labels", new: Mapping[str, PartitionIndex] | None = None
) -> list[tuple[Statistics, Dealt]]:
    """The statistics of each partition of the training images, and of each split with more than one user.

    Args:
        file: the data file.
        taxonomy: the annotation with the classes; an image with a mask or boxes counts as the lowest class
            that it contains.
        new: further partitions of the training images, which replace those of the same names.
    """
    plain, new = SingleLabelView(file, taxonomy=taxonomy, lowest=True), new or {}
    views = [replace(plain, partition=name) for name in plain.partition_names if name not in new]
    views += [replace(plain, partition=name, dealt=dealt) for name, dealt in new.items()]
    ways = [(view, PARTITIONED) for view in views]
    ways += [(plain, split) for split in file.splits if file.split(split).num_users > 1]
    if not ways:
        raise ValueError(
            f"{file.path} has no partition and one user in each split, so there is nothing to compare; "
            "add --partition NAME to draw one"
        )
    return [_measured(*way) for way in ways]


def _measured(task: SingleLabelView, split: str) -> tuple[Statistics, Dealt]:
    store = task.split(split)
    sizes = np.diff(store.user_offsets)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    distance, held = distances(store.classes, owner, len(sizes))
    mixed = np.random.default_rng(0).permutation(store.classes)
    left_out = task.num_left_out(split)
    tenth = np.sort(sizes)[::-1][: -(-len(sizes) // 10)]
    name = task.partition or OWN_USERS
    statistics = Statistics(
        split,
        name,
        clients=len(sizes),
        images=store.num_images,
        classes=int((store.label_counts() > 0).sum()),
        images_left_out=left_out,
        images_of_nobody=task.file.split(split).num_images - store.num_images - left_out,
        taxonomy=task.taxonomy,
        images_per_client=Spread.of(sizes),
        classes_per_client=Spread.of(held),
        emd=mean_emd(distance, sizes),
        emd_at_random=mean_emd(distances(mixed, owner, len(sizes))[0], sizes),
        size_variation=float(sizes.std() / sizes.mean()),
        share_of_largest_tenth=float(tenth.sum() / sizes.sum()),
        convention=task.convention,
    )
    return statistics, Dealt(split, name, sizes, held, distance, _mixes(store.classes, owner, sizes, task))


def _mixes(classes: IntArray, owner: IntArray, sizes: IntArray, task: SingleLabelView) -> IntArray:
    """Images of each class ``[at most SHOWN, K]``, of clients at even distances in order of size."""
    ranks = np.linspace(0, len(sizes) - 1, min(len(sizes), SHOWN)).round().astype(np.int64)
    chosen = np.argsort(-sizes, kind="stable")[ranks]
    rows = np.full(len(sizes), -1)
    rows[chosen] = np.arange(len(chosen))
    counts = np.zeros((len(chosen), len(task.label_names)), np.int64)
    known = rows[owner] >= 0
    np.add.at(counts, (rows[owner][known], classes[known]), 1)
    return counts


def as_text(rows: Sequence[Statistics]) -> str:
    """A table for people."""
    table = []
    for row in rows:
        per = row.images_per_client
        table.append(
            {
                "split": row.split,
                "dealt by": row.name,
                "clients": f"{row.clients:,}",
                "images": f"{row.images:,}",
                "classes": f"{row.classes:,}",
                "images/client (min median mean max)": (
                    f"{per.min:g} {per.median:g} {per.mean:.1f} {per.max:,g}"
                ),
                "classes/client (mean)": f"{row.classes_per_client.mean:.2f}",
                "EMD": f"{row.emd:.3f}",
                "at random": f"{row.emd_at_random:.3f}",
                "size cv": f"{row.size_variation:.2f}",
                "largest 10 % hold": f"{100 * row.share_of_largest_tenth:.1f} %",
            }
        )
    lines = [tabulate(table, "keys", tablefmt="plain", disable_numparse=True), MEANING]
    lines += [f"{row.name}: {row.convention}" for row in rows if row.convention]
    lines += [
        (
            f"{row.split} by {row.name}: {row.images_left_out:,} of {row.images + row.images_left_out:,} "
            f"images are left out, because they have no class or several labels in {row.taxonomy}"
        )
        for row in rows
        if row.images_left_out
    ]
    lines += [
        (
            f"{row.split} by {row.name}: {row.images_of_nobody:,} of "
            f"{row.images + row.images_left_out + row.images_of_nobody:,} images belong to no client"
        )
        for row in rows
        if row.images_of_nobody
    ]
    return "\n".join(lines)
