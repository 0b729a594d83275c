"""A file as training sees it, if each image has boxes.

Shape letters: U users, N images of a split, C classes, S image side, M boxes of the image with most boxes, n
rows asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from dataset.arrays import Float32Array, IntArray
from dataset.store.annotated_view import AnnotatedView
from dataset.store.annotations import CROWD, Boxes, positions
from dataset.store.views import Split

COLUMNS = 6
NO_BOX = -1
"""The class of a row without a box."""


@dataclass(frozen=True)
class SplitBoxes(Split):
    """The images of a split, with boxes as targets."""

    boxes: Boxes  # of the file's split
    scale: Float32Array  # of each image of the file's split: S over width and height, [..., 2]
    most: int  # M

    def targets(self, rows: IntArray) -> Float32Array:
        """Left, top, right and bottom in pixels of ``[S, S]``, class and flags, ``[n, M, 6]``.

        An image's boxes come first; the rows after them have the class `NO_BOX`.
        """
        file_rows = self.file_rows[np.asarray(rows, np.int64)]
        taken = self.boxes.take(file_rows)
        counts = np.diff(taken.indptr)
        out = np.zeros((len(file_rows), self.most, COLUMNS), np.float32)
        out[..., 4] = NO_BOX
        images = np.repeat(np.arange(len(file_rows)), counts)
        corners = taken.corners * np.tile(self.scale[file_rows], 2)[images]
        columns = [corners, taken.classes[:, None], taken.flags[:, None]]
        out[images, positions(counts)] = np.concatenate(columns, 1)
        return out


@dataclass(frozen=True)
class BoxView(AnnotatedView):
    """A file seen as images with any number of boxes.

    Width and height of an image that is no square are scaled separately, and its boxes with it. This does not
    change the overlap of two boxes.
    """

    taxonomy: str = "objects"
    kind = Boxes
    purpose: ClassVar[str] = "a class and a box for each object"
    needed: ClassVar[str] = "boxes"
    truth: ClassVar[str] = "box of a single object"

    @cached_property
    def most(self) -> int:
        """M, of all splits; at least 1."""
        counts = [np.diff(self._annotation(name).indptr).max(initial=1) for name in self.file.splits]
        return int(max(counts))

    def split(self, name: str) -> SplitBoxes:  # type: ignore[override]  # another kind of store
        """One split as a store of users' images and boxes.

        Raises:
            ValueError: when there is no such split, or no image in it.
        """
        users, offsets, rows = self._owned(name)
        file_split = self._file_split(name)
        sizes = self.file.split(file_split).image_sizes
        assert sizes is not None, "a file with boxes has the images' sizes"
        scale = (self.image_size / sizes[:, ::-1]).astype(np.float32)
        boxes = self._annotation(file_split)
        return SplitBoxes(users, offsets, file_split, rows, self.pixels, boxes, scale, self.most)

    def has_truth(self, split: str) -> bool:
        """Whether a split has a box that a detector should find, which a crowd's is not."""
        store = self.split(split)
        return bool((store.boxes.take(store.file_rows).flags & CROWD == 0).any())

    def _annotation(self, file_split: str) -> Boxes:
        """The boxes of a split of the file."""
        found = self.file.split(file_split).annotations[self.taxonomy]
        assert isinstance(found, Boxes)
        return found
