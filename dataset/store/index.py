"""The index of a data set, without its pixels: users, images and annotations, in consistent columns.

Shape letters: U users, N images, K classes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from dataset.arrays import IntArray
from dataset.store.annotations import Annotation, Boxes, LabelMatrix, Masks, check_annotation, rises, within

SPLIT_NAMES = {
    "train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "test": "test",
}  # fmt: skip
"""The names that sources have for splits (such as Hugging Face's validation), and those of the file."""
SPLITS = ("train", "val", "test")
"""The names of the splits. Users are disjoint between them."""

FOUND_CLASSES = "found_classes"
"""Key of a file's provenance: the annotations whose classes are those that its images happen to have."""


def in_another_split(user: str, split: str) -> str:
    """The name in val or test of a user who may have images in train, too: users are disjoint by name."""
    return f"{split}-{user}"


def owner(user: str, trained: Collection[str]) -> str:
    """The user among ``trained`` who has this name in val or test (`in_another_split`); else ``user``."""
    if user not in trained:
        for split in SPLITS[1:]:
            name = user.removeprefix(f"{split}-")
            if name in trained:
                return name
    return user


TAXONOMIES = ("labels", "fine_grained_labels")
"""The label sets of a file of version 1 or 2, and of the predecessors' files."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,79}")
BAD_NAME = "its name has other characters than letters, digits and ._+-"
"""The error for a name of an annotation or partition that does not match `NAME`."""
_ALPHA = re.compile(
    r"(?:alpha|dirichlet)(?:-(total|per-class))?-([0-9.eE+-]+?)(?:-clients-[0-9]+)?(?:-seed-[0-9]+)?"
)
_OF_CLIENTS = re.compile(r"lda(?:-legacy)?-([0-9.e+-]+?)(?:-clients-[0-9]+)?-seed-[0-9]+")
_OLD_NAME = re.compile(r"dirichlet-(?=[0-9.])")


class IdColumn(Sequence[str]):
    """User or image ids as a fixed-width byte array. An id becomes a string only when it is read."""

    def __init__(self, raw: npt.NDArray[np.bytes_]) -> None:
        self.raw = raw

    @classmethod
    def of(cls, ids: Sequence[str]) -> IdColumn:
        """Pack strings (UTF-8)."""
        if isinstance(ids, IdColumn):
            return ids
        encoded = [text.encode() for text in ids]
        return cls(np.array(encoded, f"S{max(map(len, encoded), default=1) or 1}"))

    def __len__(self) -> int:
        return len(self.raw)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> IdColumn: ...
    def __getitem__(self, at: int | slice) -> str | IdColumn:
        if isinstance(at, slice):
            return IdColumn(self.raw[at])
        return bytes(self.raw[at]).decode()

    def __iter__(self) -> Iterator[str]:
        return (raw.decode() for raw in self.raw.tolist())


@dataclass(frozen=True)
class PartitionIndex:
    """Another way to deal a split's images to users: V users, M of the N images, each at most once.

    The images of user v are the rows ``rows[offsets[v]:offsets[v + 1]]`` of the split.
    """

    user_ids: Sequence[str]  # [V]
    rows: IntArray  # [M]
    offsets: IntArray  # [V + 1]


@dataclass(frozen=True)
class SplitIndex:
    """One split. The images of user u are the rows ``user_offsets[u]:user_offsets[u + 1]``.

    In the layout that is not grouped by user (``grouped=False`` in `DatasetIndex`) rows are in the source's
    order, ``user_offsets`` is empty, and only ``user_index`` has an image's owner.
    """

    user_ids: Sequence[str]  # [U]
    user_offsets: IntArray  # [U + 1], or empty when not grouped
    user_index: npt.NDArray[np.int32]  # [N]: which user each image belongs to
    image_ids: Sequence[str]  # [N]
    annotations: Mapping[str, Annotation]  # by name, each of N images
    partitions: Mapping[str, PartitionIndex] = field(default_factory=dict)  # by name
    image_sizes: npt.NDArray[np.int32] | None = None  # [N, 2]: each image's own height and width

    @property
    def labels(self) -> dict[str, LabelMatrix]:
        """The annotations that are label sets or classes, by name."""
        return {name: found for name, found in self.annotations.items() if isinstance(found, LabelMatrix)}

    @property
    def num_users(self) -> int:
        """U."""
        return len(self.user_ids)

    @property
    def num_images(self) -> int:
        """N."""
        return len(self.image_ids)


@dataclass(frozen=True)
class DatasetIndex:
    """All splits, the class names of the annotations, and where the data came from.

    A label mapping is class name -> class number, from 0, in the order of the numbers.
    """

    splits: Mapping[str, SplitIndex]
    label_mappings: Mapping[str, Mapping[str, int]]  # by annotation
    provenance: Mapping[str, Any] = field(default_factory=dict)
    grouped: bool = True

    def with_partitions(self, partitions: Mapping[str, PartitionIndex]) -> DatasetIndex:
        """The same index, with other ways to deal the training images."""
        train = replace(self.splits["train"], partitions=partitions)
        return replace(self, splits={**self.splits, "train": train})


def check_index(index: DatasetIndex) -> None:
    """Raise ValueError, with a sentence that says where, if an index contradicts itself."""
    kinds = [
        {name: found.kind for name, found in split.annotations.items()} for split in index.splits.values()
    ]
    if any(other != kinds[0] for other in kinds):
        raise ValueError("its splits have different annotations")
    for name in kinds[0] if kinds else ():
        if not NAME.fullmatch(name):
            raise ValueError(f"annotation {name!r}: {BAD_NAME}")
        mapping = index.label_mappings.get(name) or {}
        if list(mapping.values()) != list(range(len(mapping))):
            raise ValueError(f"the mapping of {name} is not numbered from 0 in its order")
    unknown = set(index.splits) - set(SPLITS)
    if unknown:
        raise ValueError(f"{sorted(unknown)[0]!r} is not a split; there are {', '.join(SPLITS)}")
    owners: dict[bytes, str] = {}
    for name, split in index.splits.items():
        try:
            check_split(split, index.grouped, index.label_mappings)
        except ValueError as error:
            raise ValueError(f"split {name}: {error}") from None
        for user in IdColumn.of(split.user_ids).raw.tolist():
            if owners.setdefault(user, name) != name:
                raise ValueError(f"user {user.decode()} is in two splits, {owners[user]} and {name}")


def check_split(
    split: SplitIndex, grouped: bool, mappings: Mapping[str, Mapping[str, int]], ids: bool = True
) -> None:
    """Raise ValueError if the columns of a split contradict one another; and its ids, which takes longer."""
    users, images = split.num_users, split.num_images
    for what, column in (("user", split.user_ids), ("image", split.image_ids)) if ids else ():
        _check_ids(what, column)
    if grouped and not rises(split.user_offsets, users, images, least=1):
        raise ValueError("user_offsets do not rise from 0 to the number of images")
    if len(split.user_index) != images or not within(split.user_index, users):
        raise ValueError("user_index does not give each image one of the users")
    if grouped:
        if not np.array_equal(split.user_index, np.repeat(np.arange(users), np.diff(split.user_offsets))):
            raise ValueError("user_index contradicts user_offsets")
    elif len(split.user_offsets):
        raise ValueError("there are user_offsets although images are not grouped by user")
    for name, annotation in split.annotations.items():
        if annotation.num_labels != len(mappings[name]):
            raise ValueError(f"{name} has {annotation.num_labels} columns but {len(mappings[name])} names")
        check_annotation(name, annotation, images)
    _check_sizes(split)
    for name, partition in split.partitions.items():
        try:
            _check_partition(name, partition, images, ids)
        except ValueError as error:
            raise ValueError(f"partition {name!r}: {error}") from None


def _check_sizes(split: SplitIndex) -> None:
    """Raise ValueError if sizes are missing where annotations refer to them, or boxes reach beyond them."""
    sizes = split.image_sizes
    if sizes is not None and (sizes.shape != (split.num_images, 2) or (sizes < 1).any()):
        raise ValueError("image_sizes does not give each image a height and a width")
    for name, annotation in split.annotations.items():
        if isinstance(annotation, (Masks, Boxes)) and sizes is None:
            raise ValueError(f"{name} needs image_sizes, which are missing")
        if isinstance(annotation, Boxes) and sizes is not None:
            bounds = np.repeat(sizes[:, ::-1], np.diff(annotation.indptr), axis=0)
            if (annotation.corners[:, 2:] > bounds).any():
                raise ValueError(f"{name}: a box reaches beyond its image")


def _check_partition(name: str, partition: PartitionIndex, images: int, ids: bool) -> None:
    if not NAME.fullmatch(name):
        raise ValueError(BAD_NAME)
    if ids:
        _check_ids("user", partition.user_ids)
    check_dealt(partition, images)


def check_dealt(partition: PartitionIndex, images: int) -> None:
    """Refuse a partition that does not give each user some of so many images, and each to one user at most.

    Raises:
        ValueError: one clause with the reason.
    """
    if not len(partition.user_ids):
        raise ValueError("it has no user")
    if not rises(partition.offsets, len(partition.user_ids), len(partition.rows), least=1):
        raise ValueError("its offsets do not rise from 0 to the number of its images")
    if not within(partition.rows, images):
        raise ValueError(f"a row is out of range (0..{images - 1})")
    if np.bincount(partition.rows).max() > 1:
        raise ValueError("it gives an image to two clients")


def _check_ids(what: str, column: Sequence[str]) -> None:
    raw = IdColumn.of(column).raw
    if len(raw) and np.frombuffer(raw.tobytes(), np.uint8).max() > 127:  # not all are ASCII
        for identifier in raw.tolist():
            try:
                identifier.decode()
            except UnicodeDecodeError:
                raise ValueError(f"a {what} has the id {identifier!r}, which is not UTF-8") from None
    ordered = np.sort(raw)
    if len(ordered) and not ordered[0]:
        raise ValueError(f"a {what} has an empty id")
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise ValueError(f"{what} {ordered[twice[0]].decode()} is there twice")


def known_as(name: str, names: Collection[str]) -> str:
    """The name among ``names`` of the partition called ``name``.

    ``dirichlet-0.3-seed-0`` is the old name of ``dirichlet-total-0.3-seed-0``: either finds the other. A name
    that finds nothing is returned as it is.
    """
    other = _OLD_NAME.sub("dirichlet-total-", name)
    if other == name:
        other = name.replace("dirichlet-total-", "dirichlet-", 1)
    return other if other in names and name not in names else name


def meaning(partition: str | None, num_classes: int) -> str:
    """A clause that says what alpha means in a partition's name; empty for a partition without an alpha.

    Args:
        partition: ``dirichlet-total-0.3-seed-0``, its old form ``dirichlet-0.3-seed-0``, or ``alpha-0.30`` of
            Google's splits, which are totals; or ``dirichlet-per-class-0.3-seed-0``.
        num_classes: K.
    """
    if found := _OF_CLIENTS.fullmatch(partition or ""):
        return (
            f"each class is dealt by a Dirichlet distribution with {found[1]} for each client (as in FedML, "
            "NIID-Bench)"
        )
    found = _ALPHA.fullmatch(partition or "")
    if found is None:
        return ""
    try:
        alpha = float(found[2])
    except ValueError:
        return ""
    if found[1] == "per-class":
        return (
            f"alpha {alpha:g} is per class (as in Flower, FedML, pfl); the total over the {num_classes} "
            f"classes (as in Hsu, Qi, Brown) is {alpha * num_classes:g}"
        )
    return (
        f"alpha {alpha:g} is the total over the {num_classes} classes (as in Hsu, Qi, Brown); per class "
        f"(as in Flower, FedML, pfl) it is {alpha / num_classes:g}"
    )
