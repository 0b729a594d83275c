"""A file as training sees it: images, their targets, and whose they are.

Shape letters: U users, N images of a split, K labels or classes, S image side, n rows asked for.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from dataset.arrays import BoolArray, ByteArray, IntArray
from dataset.store.annotations import LabelMatrix, offsets_of
from dataset.store.hdf5 import DataFile
from dataset.store.index import PartitionIndex, known_as, meaning
from dataset.store.own_splits import belongs_to, carved, check_test_users

PARTITIONED = "train"
"""The split that has partitions; the others keep the file's own users."""
CARVED, SCORED = "val", "test"
"""The split that can be carved from the training images, and the one that can be some users' images."""


KINDS = {"mask": "masks", "boxes": "boxes"}
_MISSING, _RESERVED = -1, -2  # a place that a thread is filling is reserved, and cannot be read yet


class PixelCache:
    """The images of a file, or their masks, at one size. Each is decoded once, until the budget is used up.

    Nothing is evicted: users are drawn at random, so that every image is as likely to be asked for again.
    All splits share one block of memory, of which the operating system provides only what has been written.

    Args:
        file: where the images are.
        image_size: S in pixels.
        num_bytes: the budget for the decoded images of all splits together.
        masks: name of the annotation whose masks are read in the place of images.
    """

    def __init__(self, file: DataFile, image_size: int, num_bytes: int, masks: str | None = None) -> None:
        self._file, self._size, self._masks = file, image_size, masks
        shape = (image_size, image_size, 3) if masks is None else (image_size, image_size)
        counts = {name: file.split(name).num_images for name in file.splits} if num_bytes else {}
        self._capacity = min(num_bytes // math.prod(shape), sum(counts.values()))
        self._kept = np.empty((self._capacity, *shape), np.uint8)
        self._place = {name: np.full(count, _MISSING, np.int64) for name, count in counts.items()}
        self._used = 0
        self._lock = threading.Lock()

    def read(self, split: str, rows: IntArray) -> ByteArray:
        """``[n, S, S, 3]``, of masks ``[n, S, S]``: any rows of a split, in any order, from any thread."""
        rows = np.asarray(rows, np.int64)
        if not self._capacity:
            return self._decoded(split, rows)
        place = self._place[split][rows]
        kept = place >= 0
        if kept.all():
            return self._kept[place]
        missing, at = np.unique(rows[~kept], return_inverse=True)
        decoded = self._decoded(split, missing)
        self._keep(split, missing, decoded)
        out = np.empty((len(rows), *decoded.shape[1:]), np.uint8)
        out[kept], out[~kept] = self._kept[place[kept]], decoded[at]
        return out

    def _decoded(self, split: str, rows: IntArray) -> ByteArray:
        if self._masks is None:
            return self._file.read_images(split, rows, self._size)
        return self._file.read_masks(split, rows, self._masks, self._size)

    def _keep(self, split: str, rows: IntArray, images: ByteArray) -> None:
        """Keep as many of these images as there is room for, but for those that another thread keeps."""
        places = self._place[split]
        with self._lock:
            new = np.flatnonzero(places[rows] == _MISSING)[: self._capacity - self._used]
            start, self._used = self._used, self._used + len(new)
            places[rows[new]] = _RESERVED
        self._kept[start : start + len(new)] = images[new]
        places[rows[new]] = np.arange(start, start + len(new))  # after the pixels, for the other threads


class Inputs(Protocol):
    """What a split's images are read from: a `PixelCache`, or what stands for it."""

    def read(self, split: str, rows: IntArray) -> npt.NDArray[Any]:
        """Inputs of any rows of a split of the file, ``[n, ...]``, in their order, from any thread."""
        ...


@dataclass(frozen=True)
class Split:
    """The images and targets of one split; any rows, in any order, from any thread.

    Row i is row ``file_rows[i]`` of the split ``file_split`` of the file.
    """

    user_ids: Sequence[str]  # [U]
    user_offsets: IntArray  # [U + 1]: user u has the rows user_offsets[u]:user_offsets[u + 1]
    file_split: str
    file_rows: IntArray  # [N]
    pixels: Inputs

    @property
    def num_images(self) -> int:
        """N."""
        return len(self.file_rows)

    def targets(self, rows: IntArray) -> npt.NDArray[Any]:
        """Targets of these rows, ``[n, ...]``, in their order."""
        raise NotImplementedError

    def read(self, rows: IntArray) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Images ``[n, S, S, 3]`` (or what ``pixels`` gives for them) and targets ``[n, ...]`` of rows."""
        rows = np.asarray(rows, np.int64)
        return self.pixels.read(self.file_split, self.file_rows[rows]), self.targets(rows)


@dataclass(frozen=True)
class SplitImages(Split):
    """The images of a split, with labels as targets."""

    labels: LabelMatrix  # [N, K]

    @property
    def classes(self) -> IntArray:
        """Each image's class in 0..K-1, ``[N]``, of a split whose images have one label each."""
        return self.labels.indices.astype(np.int64)

    def targets(self, rows: IntArray) -> ByteArray:
        """Multi-hot ``[n, K]``."""
        return self.labels.dense(rows)

    def label_counts(self) -> IntArray:
        """Images of the split with each label, ``[K]``."""
        return self.labels.counts()


class _View:
    """What both views have: the fields that they share, and what follows from them."""

    file: DataFile
    taxonomy: str
    image_size: int
    cache_bytes: int

    @cached_property
    def pixels(self) -> PixelCache:
        """The decoded images of all splits, which every call of `split` shares."""
        return PixelCache(self.file, self.image_size, self.cache_bytes)

    @cached_property
    def label_names(self) -> tuple[str, ...]:
        """The K labels' names, in column order."""
        return tuple(self.file.label_mapping(self.taxonomy))

    def _refuse_ungrouped(self) -> None:
        if not self.file.grouped:
            raise ValueError(
                f"{self.file.path} is not grouped by user: make it again without --not_group_data_by_user"
            )

    def _labels(self, split: str) -> LabelMatrix:
        """The labels of a split's images.

        Raises:
            ValueError: when the annotation has masks or boxes.
        """
        self.file.label_mapping(self.taxonomy)
        found = self.file.split(split).annotations[self.taxonomy]
        if isinstance(found, LabelMatrix):
            return found
        raise ValueError(
            f"{self.taxonomy} of {self.file.path} has {KINDS[found.kind]}, but this task needs a class "
            "or a set of labels for each image: choose another data.taxonomy or another file"
        )


@dataclass(frozen=True)
class LabelSetView(_View):
    """A file seen as images with a set of labels each.

    ``taxonomy`` gives K targets in the order of the label numbers; ``binary_label`` gives one,
    1 where an image has that label of either taxonomy (ml-flair's ``--binary_label``).
    Decoded images are kept in memory as long as those of all splits together fit into ``cache_bytes``.

    Raises:
        ValueError: when the label is in neither taxonomy, or the file is not grouped by user.
    """

    file: DataFile
    taxonomy: str = "labels"
    image_size: int = 256
    binary_label: str | None = None
    cache_bytes: int = 0

    def __post_init__(self) -> None:
        self._refuse_ungrouped()
        if self.binary_label is not None and not self._binary_taxonomies:
            first = next(iter(self.file.annotation_names), None)
            known = ", ".join(self.file.label_mapping(first)) if first else "none"
            raise ValueError(
                f"the label {self.binary_label!r} is in neither taxonomy of this file; its coarse "
                f"labels are {known}"
            )

    @property
    def _binary_taxonomies(self) -> list[str]:
        """The taxonomies that have the binary label."""
        names = self.file.annotation_names
        return [name for name in names if self.binary_label in self.file.label_mapping(name)]

    @cached_property
    def label_names(self) -> tuple[str, ...]:
        """The K targets' names, in column order."""
        return super().label_names if self.binary_label is None else (self.binary_label,)

    def split(self, name: str) -> SplitImages:
        """One split as a store of users' images.

        Raises:
            ValueError: when the file lacks it or has no image in it.
        """
        if name not in self.file.splits or not self.file.split(name).num_images:
            raise ValueError(f"{self.file.path} has no images in the split {name!r}")
        index = self.file.split(name)
        if self.binary_label is None:
            labels = self._labels(name)
        else:
            taxonomy = self._binary_taxonomies[0]
            labels = index.labels[taxonomy].only(self.file.label_mapping(taxonomy)[self.binary_label])
        rows = np.arange(index.num_images)
        return SplitImages(index.user_ids, index.user_offsets, name, rows, self.pixels, labels)


@dataclass(frozen=True)
class SingleLabelView(_View):
    """A file seen as images with one of K classes each.

    Images that have no label, or several, in ``taxonomy`` are left out, and with them users who have no
    other; `num_left_out` counts the images.

    With a ``val_share`` above 0, a file without a val split gets one: that share of each user's training
    images, which then are in ``val`` and no longer in ``train``. They are chosen by a hash of the user's id
    and the image's id, and of nothing else. A user keeps at least one training image, so that the users of
    ``train`` stay the same. The expected number of images that a user of n gives is n times the share, also
    where that is below 1.

    With ``test_users``, the training images of these users are ``test``, in place of the file's, and no
    other split has an image of theirs.

    Args:
        file: where the images are.
        partition: one of the file's ways to deal the training images to users; None takes the file's users.
        taxonomy: whose labels are the classes.
        image_size: S in pixels.
        cache_bytes: decoded images stay in memory as long as those of all splits together fit into this.
        val_share: share of the training images that become val, from 0 (none) to below 1.
        test_users: users (of the partition, if one is chosen) who do not train.
        dealt: the partition called ``partition``, of rows of the file's training images, where it is none of
            the file's.
        lowest: let masks and boxes count as the lowest class that an image contains, as FedML's partitions
            do; without it they are refused.

    Raises:
        ValueError: when the file has no such partition, taxonomy or user, is not grouped by user, has a val
            split of its own beside a ``val_share``, or no user is left to train.
    """

    file: DataFile
    partition: str | None = None
    taxonomy: str = "labels"
    image_size: int = 32
    cache_bytes: int = 0
    val_share: float = 0.0
    test_users: tuple[str, ...] = ()
    dealt: PartitionIndex | None = None
    lowest: bool = False
    needed: ClassVar[str] = "exactly one label"
    """What an image must have to take part."""

    def __post_init__(self) -> None:
        self._refuse_ungrouped()
        self.file.label_mapping(self.taxonomy)
        names = self.partition_names
        if self.dealt is None and self.partition is not None and known_as(self.partition, names) not in names:
            known = ", ".join(self.partition_names) or "none, only its own users (partition none)"
            known += ", and names of partitions to draw, such as lda-0.1-clients-100-seed-0"
            known += " (python -m dataset.partitions --help lists all kinds)"
            raise ValueError(f"{self.file.path} has no partition {self.partition!r}; it has {known}")
        if not 0 <= self.val_share < 1:
            raise ValueError(f"val_share is {self.val_share}; give a number of at least 0 and below 1")
        if self.val_share and CARVED in self.file.splits:
            raise ValueError(
                f"{self.file.path} already has a split {CARVED!r}: set data.val_share to 0 to use it"
            )
        if self.test_users:
            check_test_users(self.test_users, self._owners(PARTITIONED)[0])

    @cached_property
    def splits(self) -> tuple[str, ...]:
        """The splits that `split` can give."""
        more = [*([CARVED] if self.val_share else []), *([SCORED] if self.test_users else [])]
        return (*self.file.splits, *(name for name in more if name not in self.file.splits))

    @cached_property
    def partition_names(self) -> tuple[str, ...]:
        """The partitions of the training images, besides the file's own users."""
        return tuple(self.file.split(PARTITIONED).partitions) if PARTITIONED in self.file.splits else ()

    @property
    def convention(self) -> str:
        """What the alpha in the partition's name counts, as a clause; empty if it has none."""
        return meaning(self.partition, len(self.label_names))

    def num_left_out(self, name: str) -> int:
        """Images of a split (of its partition, if one is chosen) without exactly one label.

        A carved val has none: they are counted with the training images.
        """
        return 0 if self.val_share and name == CARVED else self._members(name)[3]

    def split(self, name: str) -> SplitImages:
        """One split as a store of users' images.

        Raises:
            ValueError: when there is no such split, or it has no image with exactly one label.
        """
        users, offsets, rows = self._owned(name)
        labels = self._labels(self._file_split(name)).take(rows)
        return SplitImages(users, offsets, self._file_split(name), rows, self.pixels, labels)

    def _owned(self, name: str) -> tuple[Sequence[str], IntArray, IntArray]:
        """The users of a split, their offsets, and the rows of the file's split in their order."""
        if name not in self.splits:
            raise ValueError(f"{self.file.path} has no images in the split {name!r}")
        user_ids, rows, owner, _ = self._members(name)
        if not len(rows):
            is_carved = self.val_share and self._file_split(name) == PARTITIONED
            carved = f" at val_share {self.val_share:g}" if is_carved else ""
            raise ValueError(
                f"no image in the split {name!r} of {self.file.path} has {self.needed} in "
                f"{self.taxonomy}{carved}"
            )
        sizes = np.bincount(owner, minlength=len(user_ids))
        present = np.flatnonzero(sizes)
        return [user_ids[user] for user in present.tolist()], offsets_of(sizes[present]), rows

    def _labels(self, split: str) -> LabelMatrix:
        found = self.file.split(split).annotations[self.taxonomy]
        if self.lowest and not isinstance(found, LabelMatrix):
            return self.file.present(split, self.taxonomy).lowest()
        return super()._labels(split)

    def _usable(self, file_split: str) -> BoolArray:
        """Which images of a split of the file can take part, ``[N]``."""
        return np.asarray(np.diff(self._labels(file_split).indptr) == 1)

    def _file_split(self, name: str) -> str:
        """The file's split that holds the images of one of `splits`."""
        moved = {CARVED: self.val_share, SCORED: self.test_users}
        return PARTITIONED if moved.get(name) else name

    def _members(self, name: str) -> tuple[Sequence[str], IntArray, IntArray, int]:
        """User ids; the split's images with one label, as rows of the file's split in the users' order; the
        user of each of them; and how many were left out."""
        file_split = self._file_split(name)
        index = self.file.split(file_split)
        user_ids, rows, owner = self._owners(file_split)
        usable = self._usable(file_split)[rows]
        rows, owner = rows[usable], owner[usable]
        # a client of a partition is nobody in the other splits, which have the file's own users
        if self.test_users and (self.partition is None or file_split == PARTITIONED):
            here = belongs_to(self.test_users, user_ids)[owner] == (name == SCORED)
            rows, owner = rows[here], owner[here]
        if self.val_share and file_split == PARTITIONED and name != SCORED:
            in_val = carved([index.image_ids[row] for row in rows.tolist()], owner, user_ids, self.val_share)
            here = in_val if name == CARVED else ~in_val
            rows, owner = rows[here], owner[here]
        return user_ids, rows, owner, int((~usable).sum())

    def _owners(self, file_split: str) -> tuple[Sequence[str], IntArray, IntArray]:
        """The users of a split of the file, and rows of it with the user of each; see `_members`."""
        index = self.file.split(file_split)
        if self.partition is None or file_split != PARTITIONED:
            return index.user_ids, np.arange(index.num_images), index.user_index.astype(np.int64)
        dealt = self.dealt or index.partitions[known_as(self.partition, index.partitions)]
        owner = np.repeat(np.arange(len(dealt.user_ids)), np.diff(dealt.offsets))
        return dealt.user_ids, dealt.rows, owner
