"""The users of a split's images, which users and images are shown, and how unequal the users are.

Shape letters: U users, N images of a split, K classes, P labels of all images together.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dataset.arrays import IntArray
from dataset.partitions.drawn import read_name
from dataset.partitions.of_file import default_taxonomy, drawn_of
from dataset.partitions.statistics import distances, mean_emd
from dataset.store.annotations import LabelMatrix, Masks, has_background, offsets_of, present
from dataset.store.hdf5 import DataFile
from dataset.store.index import SplitIndex
from dataset.store.views import PARTITIONED

MOST_MASKS = 2000
"""Most masks, of whole users, that are decoded for the label skew; they take about ten seconds."""
SKEW_BINS = 10
LONGEST = 2.0
"""The greatest L1 distance of two distributions."""


@dataclass(frozen=True)
class Owners:
    """The users of a split, and the rows of each: those of user u are ``rows[offsets[u]:offsets[u + 1]]``."""

    user_ids: Sequence[str]  # [U]
    rows: IntArray  # [N], or fewer where a partition leaves images out
    offsets: IntArray  # [U + 1]

    @property
    def sizes(self) -> IntArray:
        """Images of each user, ``[U]``."""
        return np.diff(self.offsets)

    def of(self, user: int) -> IntArray:
        """The rows of one user."""
        return self.rows[int(self.offsets[user]) : int(self.offsets[user + 1])]


def owners_of(file: DataFile, split: str, partition: str | None) -> Owners:
    """The file's own users, or the clients of a partition of the training images.

    Args:
        file: the data file.
        split: a split of the file.
        partition: a partition of the file, or a name that says how to draw one
            (``lda-0.5-clients-10-seed-42``); None: the file's users.

    Raises:
        ValueError: when there is no such partition.
    """
    index = file.split(split)
    if partition is None:
        order = np.argsort(index.user_index, kind="stable").astype(np.int64)
        counts = np.bincount(index.user_index, minlength=index.num_users)
        return Owners(index.user_ids, order, offsets_of(counts))
    if (dealt := index.partitions.get(partition)) is None:
        recipe = read_name(partition)
        if recipe is None or split != PARTITIONED:
            held = ", ".join(index.partitions) or "none"
            names = "; you can also give a name such as lda-0.5-clients-10-seed-42"
            raise ValueError(
                f"--partition {partition}: the split {split} of {file.path} has no such partition; it has "
                f"{held}{names if split == PARTITIONED else ''}"
            )
        dealt = drawn_of(file, recipe, default_taxonomy(file))
    return Owners(dealt.user_ids, dealt.rows, dealt.offsets)


def chosen(owners: Owners, number: int, seed: int) -> list[int]:
    """Draw ``number`` of the users who have images, by the seed; in the order of the draw."""
    known = np.flatnonzero(owners.sizes > 0)
    rng = np.random.default_rng([zlib.crc32(b"browsed users"), seed])
    return [int(user) for user in rng.permutation(known)[:number]]


def chosen_rows(owners: Owners, user: int, number: int, seed: int) -> IntArray:
    """Draw ``number`` images of a user, by the seed and the user's id; in the order of the file."""
    own = zlib.crc32(owners.user_ids[user].encode())
    rng = np.random.default_rng([zlib.crc32(b"browsed images"), seed, own])
    return np.sort(rng.permutation(owners.of(user))[:number])


def size_counts(sizes: IntArray) -> dict[str, int]:
    """Number of users by number of images: by single numbers if there are few, else by powers of two."""
    found = sizes[sizes > 0]
    if not len(found):
        return {}
    if found.max() <= SKEW_BINS:
        return {str(size): int((found == size).sum()) for size in range(1, int(found.max()) + 1)}
    low = 1 << (int(found.min()).bit_length() - 1)
    counts = {}
    while low <= found.max():
        name = str(low) if low == 1 else f"{low:,} to {2 * low - 1:,}"
        counts[name] = int(((found >= low) & (found < 2 * low)).sum())
        low *= 2
    return counts


@dataclass(frozen=True)
class Skew:
    """The distances of users' label distributions from that of all counted users."""

    users: int
    """Number of users with at least one label."""
    histogram: Mapping[str, int]
    """Users by their L1 distance, in [0, 2]."""
    mean: float
    """Mean of the distances, weighted by each user's number of labels."""
    at_random: float
    """The mean if labels were dealt to users at random: the part that comes from few labels a user."""
    classes: Mapping[str, int]
    """Users by the number of classes that they have."""


def label_counts(file: DataFile, split: str, name: str, rows: IntArray) -> LabelMatrix:
    """The classes that each of these images contains, without background."""
    annotation = file.split(split).annotations[name]
    if isinstance(annotation, Masks):
        mapping = file.label_mapping(name)
        return present(annotation.take(rows), int(has_background(mapping)))
    return present(annotation).take(rows)


def looked_at(owners: Owners, split: SplitIndex, name: str, seed: int) -> list[int]:
    """The users whose labels are counted: all, or for masks as many as `MOST_MASKS` allows."""
    users = chosen(owners, len(owners.user_ids), seed)
    if not isinstance(split.annotations[name], Masks):
        return users
    fit = int((np.cumsum(owners.sizes[users]) <= MOST_MASKS).sum())
    return users[: max(fit, 1)]


def skew_of(found: LabelMatrix, sizes: IntArray, seed: int) -> Skew | None:
    """The skew of users with ``sizes`` images each, of the classes ``found``; None without labels.

    The distance of a user is the L1 norm of q - p, where q is the distribution of the user's labels over the
    classes and p that of all labels. An image with several labels counts once for each.
    """
    owner = np.repeat(np.repeat(np.arange(len(sizes)), sizes), np.diff(found.indptr))
    labels = found.indices.astype(np.int64)
    if not len(labels):
        return None
    counts = np.bincount(owner, minlength=len(sizes))
    known = counts > 0
    each, classes = distances(labels, owner, len(sizes))
    mixed = np.random.default_rng([zlib.crc32(b"browsed skew"), seed]).permutation(labels)
    random, _ = distances(mixed, owner, len(sizes))
    edges = np.linspace(0, LONGEST, SKEW_BINS + 1)
    binned, _ = np.histogram(np.clip(each[known], 0, LONGEST), edges)
    names = [f"{low:.1f} to {high:.1f}" for low, high in itertools.pairwise(edges)]
    return Skew(
        int(known.sum()),
        dict(zip(names, binned.tolist())),
        mean_emd(each[known], counts[known]),
        mean_emd(random[known], counts[known]),
        size_counts(classes[known]),
    )


def per_class(found: LabelMatrix, mapping: Mapping[str, int], most: int) -> tuple[dict[str, int], int]:
    """Number of images with each of the ``most`` commonest classes, and how many other classes occur."""
    counts: IntArray = found.counts()
    names = {number: name for name, number in mapping.items()}
    order = [int(k) for k in np.argsort(-counts, kind="stable") if counts[k]]
    return {names[k]: int(counts[k]) for k in order[:most]}, max(len(order) - most, 0)
