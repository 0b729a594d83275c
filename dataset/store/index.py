"""What is known of a FLAIR-like data set without its pixels: users, images and labels, in columns.

Shape letters: U users, N images, K labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

SPLITS = ("train", "val", "test")
"""The names of the three splits; users are disjoint between them (FLAIR paper, Section 4.1)."""

TAXONOMIES = ("labels", "fine_grained_labels")
"""The two levels of FLAIR's labels, under the column names of ``apple/flair``: 17 coarse, 1,628 fine."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LabelMatrix:
    """A sparse N x K 0/1 matrix in CSR form; column indices are sorted and unique within a row."""

    indptr: IntArray  # [N + 1]
    indices: npt.NDArray[np.uint16]  # [number of positives]
    num_labels: int  # K

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]], num_labels: int) -> LabelMatrix:
        """Build from one sequence of label indices per image; repeated labels count once."""
        unique = [sorted(set(row)) for row in rows]
        indptr = np.zeros(len(unique) + 1, np.int64)
        np.cumsum([len(row) for row in unique], out=indptr[1:])
        flat = np.fromiter((k for row in unique for k in row), np.int64, count=int(indptr[-1]))
        if flat.size and (flat.min() < 0 or flat.max() >= num_labels):
            raise ValueError(f"a label index lies outside 0..{num_labels - 1}")
        return cls(indptr, flat.astype(np.uint16), num_labels)

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def dense(self, rows: IntArray) -> npt.NDArray[np.uint8]:
        """The multi-hot rows asked for, ``[len(rows), K]`` uint8."""
        rows = np.asarray(rows, np.int64)
        starts, counts = self.indptr[rows], self.indptr[rows + 1] - self.indptr[rows]
        out = np.zeros((len(rows), self.num_labels), np.uint8)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        columns = self.indices[np.repeat(starts, counts) + within]
        out[np.repeat(np.arange(len(rows)), counts), columns] = 1
        return out

    def counts(self) -> IntArray:
        """Number of images with each label, ``[K]``."""
        return np.bincount(self.indices, minlength=self.num_labels).astype(np.int64)


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

    In the layout that is not grouped by user (``grouped=False`` in `DatasetIndex`) rows stand in the
    source's order, ``user_offsets`` is empty, and ``user_index`` alone says whose an image is.
    """

    user_ids: Sequence[str]  # [U]
    user_offsets: IntArray  # [U + 1], or empty when not grouped
    user_index: npt.NDArray[np.int32]  # [N]: which user each image belongs to
    image_ids: Sequence[str]  # [N]
    labels: Mapping[str, LabelMatrix]  # by taxonomy, each N x K
    partitions: Mapping[str, PartitionIndex] = field(default_factory=dict)  # by name

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
    """All splits, the label mappings (name -> column, alphabetical) and where the data came from."""

    splits: Mapping[str, SplitIndex]
    label_mappings: Mapping[str, Mapping[str, int]]  # by taxonomy
    provenance: Mapping[str, Any] = field(default_factory=dict)
    grouped: bool = True
