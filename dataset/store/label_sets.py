"""A file seen as images with a set of labels each: which labels, at which image size.

Shape letters: U users, N images of a split, K labels, S image side, n rows asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dataset.store.annotations import IntArray
from dataset.store.cache import ByteArray, PixelCache
from dataset.store.hdf5 import DataFile
from dataset.store.index import SplitIndex


@dataclass(frozen=True)
class LabelSetView:
    """A file seen as images and targets.

    ``taxonomy`` gives K targets in the alphabetical order of the labels; ``binary_label`` gives one,
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
        if not self.file.grouped:
            raise ValueError("this file is not grouped by user: preprocess without --not_group_data_by_user")
        if self.binary_label is not None and self._binary_taxonomy is None:
            first = next(iter(self.file.annotation_names), None)
            known = ", ".join(self.file.label_mapping(first)) if first else "none"
            raise ValueError(
                f"the label {self.binary_label!r} is in neither taxonomy of this file; "
                f"its coarse labels are {known}"
            )

    @property
    def _binary_taxonomy(self) -> str | None:
        found = [
            name for name in self.file.annotation_names if self.binary_label in self.file.label_mapping(name)
        ]
        return found[0] if found else None

    @cached_property
    def label_names(self) -> tuple[str, ...]:
        """The K targets' names, in column order."""
        if self.binary_label is not None:
            return (self.binary_label,)
        return tuple(self.file.label_mapping(self.taxonomy))

    @cached_property
    def pixels(self) -> PixelCache:
        """The decoded images of all splits, which every call of `split` shares."""
        return PixelCache(self.file, self.image_size, self.cache_bytes)

    def targets(self, split: str, rows: IntArray) -> ByteArray:
        """Multi-hot ``[n, K]``."""
        labels = self.file.split(split).labels
        if self.binary_label is None:
            return labels[self.taxonomy].dense(rows)
        taxonomy = self._binary_taxonomy
        assert taxonomy is not None
        column = self.file.label_mapping(taxonomy)[self.binary_label]
        return labels[taxonomy].dense(rows)[:, column : column + 1]

    def split(self, name: str) -> SplitImages:
        """One split as a store of users' images.

        Raises:
            ValueError: when the file lacks it or has no image in it.
        """
        if name not in self.file.splits or not self.file.split(name).num_images:
            raise ValueError(f"this file has no images in the split {name!r}")
        return SplitImages(self, name)


class SplitImages:
    """The images and targets of one split; any rows, in any order, from any thread."""

    def __init__(self, task: LabelSetView, name: str) -> None:
        self._task, self._name, self._pixels = task, name, task.pixels
        self._index: SplitIndex = task.file.split(name)

    @property
    def user_ids(self) -> Sequence[str]:
        """The U users' ids."""
        return self._index.user_ids

    @property
    def user_offsets(self) -> IntArray:
        """``[U + 1]``: user u has the rows ``user_offsets[u]:user_offsets[u + 1]``."""
        return self._index.user_offsets

    @property
    def num_images(self) -> int:
        """N."""
        return self._index.num_images

    def targets(self, rows: IntArray) -> ByteArray:
        """Multi-hot ``[n, K]``."""
        return self._task.targets(self._name, rows)

    def label_counts(self) -> IntArray:
        """Images of the split with each label, ``[K]``."""
        if self._task.binary_label is None:
            return self._index.labels[self._task.taxonomy].counts()
        return np.asarray(self.targets(np.arange(self.num_images)).sum(0), np.int64)

    def read(self, rows: IntArray) -> tuple[ByteArray, ByteArray]:
        """Images ``[n, S, S, 3]`` and targets ``[n, K]`` of these rows, in their order."""
        rows = np.asarray(rows, np.int64)
        return self._pixels.read(self._name, rows), self.targets(rows)
