"""A data set whose images have one class each: CIFAR, iNaturalist, Landmarks, a taxonomy of clothing-flair.

Shape letters: U users, N images of the task's split, K classes, S image side, n rows asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dataset.partitions.dirichlet import known_as, meaning
from dataset.store.annotations import IntArray
from dataset.store.cache import ByteArray, PixelCache
from dataset.store.hdf5 import DataFile
from dataset.store.index import SplitIndex

PARTITIONED = "train"
"""The split that has partitions; the others keep the file's own users."""
CARVED = "val"
"""The split that can be carved from the training images."""


@dataclass(frozen=True)
class SingleLabelView:
    """A file seen as images with one of K classes each.

    Images that have no label, or several, in ``taxonomy`` are left out, and with them users who have no
    other; `num_left_out` counts the images.

    With a ``val_share`` above 0, a file without a val split gets one: that share of each user's training
    images, which then are in ``val`` and no longer in ``train``. They are chosen by a hash of ``val_seed``,
    the user's id and the image's id, and of nothing else. A user keeps at least one training image, so that
    the users of ``train`` stay the same. The expected number of images that a user of n gives is n times the
    share, also where that is below 1.

    Args:
        file: where the images are.
        partition: one of the file's ways to deal the training images to users; None takes the file's users.
        taxonomy: whose labels are the classes.
        image_size: S in pixels.
        cache_bytes: decoded images stay in memory as long as those of all splits together fit into this.
        val_share: share of the training images that become val, from 0 (none) to below 1.
        val_seed: another seed chooses other images.

    Raises:
        ValueError: when the file has no such partition or taxonomy, is not grouped by user, or has a val
            split of its own beside a ``val_share``.
    """

    file: DataFile
    partition: str | None = None
    taxonomy: str = "labels"
    image_size: int = 32
    cache_bytes: int = 0
    val_share: float = 0.0
    val_seed: int = 0

    def __post_init__(self) -> None:
        if not self.file.grouped:
            raise ValueError(
                f"{self.file.path} is not grouped by user: preprocess without --not_group_data_by_user"
            )
        self.file.label_mapping(self.taxonomy)
        names = self.partition_names
        if self.partition is not None and known_as(self.partition, names) not in names:
            known = ", ".join(self.partition_names) or "none, only users of its own"
            raise ValueError(f"{self.file.path} has no partition {self.partition!r}; there are {known}")
        if not 0 <= self.val_share < 1:
            raise ValueError(f"val_share is {self.val_share}; give a number from 0 to below 1")
        if self.val_share and CARVED in self.file.splits:
            raise ValueError(
                f"{self.file.path} has a split {CARVED!r} of its own: set val_share to 0, which uses it"
            )

    @cached_property
    def pixels(self) -> PixelCache:
        """The decoded images of all splits, which every call of `split` shares."""
        return PixelCache(self.file, self.image_size, self.cache_bytes)

    @cached_property
    def splits(self) -> tuple[str, ...]:
        """The splits that `split` can give."""
        return (*self.file.splits, *([CARVED] if self.val_share else []))

    @cached_property
    def label_names(self) -> tuple[str, ...]:
        """The K classes' names, in column order."""
        return tuple(self.file.label_mapping(self.taxonomy))

    @cached_property
    def partition_names(self) -> tuple[str, ...]:
        """The partitions of the training images, besides the file's own users."""
        if PARTITIONED not in self.file.splits:
            return ()
        return tuple(self.file.split(PARTITIONED).partitions)

    @property
    def convention(self) -> str:
        """What the alpha in the partition's name counts, as a clause; empty if it has none."""
        return meaning(self.partition, len(self.label_names))

    def num_left_out(self, name: str) -> int:
        """Images of a split (of its partition, if one is chosen) without exactly one label.

        A carved val has none: they are counted with the training images.
        """
        if self._carves(name) and name == CARVED:
            return 0
        rows = self._dealt(name)[1]
        return len(rows) - int(_has_one(self.file.split(name), self.taxonomy)[rows].sum())

    def split(self, name: str) -> SingleLabelImages:
        """One split as a store of users' images.

        Raises:
            ValueError: when there is no such split, or it has no image with exactly one label.
        """
        if name not in self.splits:
            raise ValueError(f"this file has no images in the split {name!r}")
        return SingleLabelImages(self, name)

    def _file_split(self, name: str) -> str:
        """The file's split that holds the images of one of `splits`."""
        return PARTITIONED if self._carves(name) else name

    def _carves(self, name: str) -> bool:
        return self.val_share > 0 and name in (PARTITIONED, CARVED)

    def _dealt(self, name: str) -> tuple[Sequence[str], IntArray, IntArray]:
        """User ids, rows of the file's split in the users' order, and the user of each of them."""
        file_split = self._file_split(name)
        index = self.file.split(file_split)
        if self.partition is None or file_split != PARTITIONED:
            return index.user_ids, np.arange(index.num_images), index.user_index.astype(np.int64)
        dealt = index.partitions[known_as(self.partition, index.partitions)]
        owner = np.repeat(np.arange(len(dealt.user_ids)), np.diff(dealt.offsets))
        return dealt.user_ids, dealt.rows, owner

    def _members(self, name: str) -> tuple[Sequence[str], IntArray, IntArray]:
        """As `_dealt`, for the images with exactly one label that are in this split."""
        user_ids, rows, owner = self._dealt(name)
        index = self.file.split(self._file_split(name))
        usable = _has_one(index, self.taxonomy)[rows]
        rows, owner = rows[usable], owner[usable]
        if self._carves(name):
            images = (index.image_ids[row] for row in rows.tolist())
            in_val = _carved(images, owner, user_ids, self.val_share, self.val_seed)
            here = in_val if name == CARVED else ~in_val
            rows, owner = rows[here], owner[here]
        return user_ids, rows, owner


class SingleLabelImages:
    """The images and classes of one split; any rows, in any order, from any thread.

    Row i of the store is row ``file_rows[i]`` of the split of the file that holds its images.
    """

    def __init__(self, task: SingleLabelView, name: str) -> None:
        user_ids, self.file_rows, owner = task._members(name)
        """``[N]``."""
        if not len(self.file_rows):
            carved = f" at val_share {task.val_share:g}" if task._carves(name) else ""
            raise ValueError(
                f"no image in the split {name!r} of {task.file.path} has exactly one label in "
                f"{task.taxonomy}{carved}"
            )
        sizes = np.bincount(owner, minlength=len(user_ids))
        self.user_ids: Sequence[str] = [user_ids[int(user)] for user in np.flatnonzero(sizes)]
        """The U users' ids."""
        self.user_offsets: IntArray = np.concatenate([[0], np.cumsum(sizes[sizes > 0])]).astype(np.int64)
        """``[U + 1]``: user u has the rows ``user_offsets[u]:user_offsets[u + 1]``."""
        self._file_split = task._file_split(name)
        labels = task.file.split(self._file_split).labels[task.taxonomy]
        self.classes: IntArray = labels.indices[labels.indptr[self.file_rows]].astype(np.int64)
        """``[N]``, each in 0..K-1."""
        self._num_classes = len(task.label_names)
        self._pixels = task.pixels

    @property
    def num_images(self) -> int:
        """N."""
        return len(self.file_rows)

    def targets(self, rows: IntArray) -> ByteArray:
        """One-hot ``[n, K]``."""
        classes = self.classes[np.asarray(rows, np.int64)]
        out = np.zeros((len(classes), self._num_classes), np.uint8)
        out[np.arange(len(classes)), classes] = 1
        return out

    def label_counts(self) -> IntArray:
        """Images of each class, ``[K]``."""
        return np.bincount(self.classes, minlength=self._num_classes).astype(np.int64)

    def read(self, rows: IntArray) -> tuple[ByteArray, ByteArray]:
        """Images ``[n, S, S, 3]`` and one-hot classes ``[n, K]`` of these rows, in their order."""
        rows = np.asarray(rows, np.int64)
        return self._pixels.read(self._file_split, self.file_rows[rows]), self.targets(rows)


def _carved(
    image_ids: Iterable[str], owner: IntArray, user_ids: Sequence[str], share: float, seed: int
) -> npt.NDArray[np.bool_]:
    """Whether each image, ``[N]``, becomes val: of every user those whose hashes are the smallest.

    A user of n images gives floor(n share + h) of them, but not all, where h in [0, 1) is a hash of the user.
    """
    chance = np.array([_uniform(seed, "image", image) for image in image_ids], np.float64)
    order = np.lexsort((chance, owner))
    sizes = np.bincount(owner, minlength=len(user_ids))
    rank = np.empty(len(owner), np.int64)
    rank[order] = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    rounding = np.array([_uniform(seed, "user", user) for user in user_ids], np.float64)
    moved = np.minimum(np.floor(sizes * share + rounding), sizes - 1)
    return np.asarray(rank < moved[owner])


def _uniform(seed: int, purpose: str, name: str) -> float:
    """A number in [0, 1) that is a hash of the arguments."""
    digest = hashlib.blake2b(f"carved val\x1f{seed}\x1f{purpose}\x1f{name}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def _has_one(index: SplitIndex, taxonomy: str) -> npt.NDArray[np.bool_]:
    """Whether each image of a split has exactly one label."""
    return np.asarray(np.diff(index.labels[taxonomy].indptr) == 1)
