"""A data set whose images have one class each: CIFAR, iNaturalist, Landmarks, a taxonomy of clothing-flair.

Shape letters: U users, N images of the task's split, K classes, S image side, n rows asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dataset.flair.hdf5 import FlairFile
from dataset.flair.index import IntArray, SplitIndex
from dataset.flair.task import ByteArray, CachedPixels

PARTITIONED = "train"
"""The split that has partitions; the others keep the file's own users."""


@dataclass(frozen=True)
class SingleLabelTask:
    """A file seen as images with one of K classes each.

    Images that have no label, or several, in ``taxonomy`` are left out, and with them users who have no
    other; `num_left_out` counts the images. ``partition`` names one of the file's ways to deal the training
    images to users; None takes the file's own users. Decoded images are kept in memory if the whole split of
    the file fits into ``cache_bytes``.

    :raises ValueError: when the file has no such partition or taxonomy, or is not grouped by user.
    """

    file: FlairFile
    partition: str | None = None
    taxonomy: str = "labels"
    image_size: int = 32
    cache_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.file.grouped:
            raise ValueError(
                f"{self.file.path} is not grouped by user: preprocess without --not_group_data_by_user"
            )
        self.file.label_mapping(self.taxonomy)
        if self.partition is not None and self.partition not in self.partition_names:
            known = ", ".join(self.partition_names) or "none, only users of its own"
            raise ValueError(f"{self.file.path} has no partition {self.partition!r}; there are {known}")

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

    def num_left_out(self, name: str) -> int:
        """Images of a split (of its partition, if one is chosen) without exactly one label."""
        rows = _dealt(self.file.split(name), self._partition_of(name))[1]
        return len(rows) - int(_has_one(self.file.split(name), self.taxonomy)[rows].sum())

    def split(self, name: str) -> SingleLabelImages:
        """One split as a store of users' images.

        :raises ValueError: when the file lacks it, or has no image with exactly one label in it.
        """
        if name not in self.file.splits:
            raise ValueError(f"this file has no images in the split {name!r}")
        return SingleLabelImages(self, name)

    def _partition_of(self, split: str) -> str | None:
        return self.partition if split == PARTITIONED else None


class SingleLabelImages:
    """The images and classes of one split; any rows, in any order, from any thread.

    Row i of the store is row ``file_rows[i]`` of the file's split.
    """

    def __init__(self, task: SingleLabelTask, name: str) -> None:
        index = task.file.split(name)
        user_ids, rows, owner = _dealt(index, task._partition_of(name))
        usable = _has_one(index, task.taxonomy)[rows]
        self.file_rows: IntArray = rows[usable]
        """``[N]``."""
        if not len(self.file_rows):
            raise ValueError(
                f"no image in the split {name!r} of {task.file.path} has exactly one label in {task.taxonomy}"
            )
        sizes = np.bincount(owner[usable], minlength=len(user_ids))
        self.user_ids: Sequence[str] = [user_ids[int(user)] for user in np.flatnonzero(sizes)]
        """The U users' ids."""
        self.user_offsets: IntArray = np.concatenate([[0], np.cumsum(sizes[sizes > 0])]).astype(np.int64)
        """``[U + 1]``: user u has the rows ``user_offsets[u]:user_offsets[u + 1]``."""
        labels = index.labels[task.taxonomy]
        self.classes: IntArray = labels.indices[labels.indptr[self.file_rows]].astype(np.int64)
        """``[N]``, each in 0..K-1."""
        self._num_classes = len(task.label_names)
        self._pixels = CachedPixels(task.file, name, task.image_size, task.cache_bytes)

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
        return self._pixels.read(self.file_rows[rows]), self.targets(rows)


def _dealt(index: SplitIndex, partition: str | None) -> tuple[Sequence[str], IntArray, IntArray]:
    """User ids, rows of the file in the users' order, and the user of each of them."""
    if partition is None:
        return index.user_ids, np.arange(index.num_images), index.user_index.astype(np.int64)
    dealt = index.partitions[partition]
    owner = np.repeat(np.arange(len(dealt.user_ids)), np.diff(dealt.offsets))
    return dealt.user_ids, dealt.rows, owner


def _has_one(index: SplitIndex, taxonomy: str) -> npt.NDArray[np.bool_]:
    """Whether each image of a split has exactly one label."""
    return np.asarray(np.diff(index.labels[taxonomy].indptr) == 1)
