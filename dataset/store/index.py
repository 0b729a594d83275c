"""What is known of a data set without its pixels: users, images and annotations, in columns.

Shape letters: U users, N images, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dataset.store.annotations import Annotation, IntArray, LabelMatrix

SPLITS = ("train", "val", "test")
"""The names of the splits. Users are disjoint between them."""

TAXONOMIES = ("labels", "fine_grained_labels")
"""The label sets of a file of version 1 or 2, and of the predecessors' files."""


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
    annotations: Mapping[str, Annotation]  # by name, each of N images
    partitions: Mapping[str, PartitionIndex] = field(default_factory=dict)  # by name
    image_sizes: npt.NDArray[np.int32] | None = None  # [N, 2]: each image's own height and width

    @property
    def labels(self) -> dict[str, LabelMatrix]:
        """The annotations that are label sets or classes, by name."""
        return {name: one for name, one in self.annotations.items() if isinstance(one, LabelMatrix)}

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

    A label mapping is class name -> class number, from 0; that of a label set is alphabetical.
    """

    splits: Mapping[str, SplitIndex]
    label_mappings: Mapping[str, Mapping[str, int]]  # by annotation
    provenance: Mapping[str, Any] = field(default_factory=dict)
    grouped: bool = True
