"""A file as training sees it, if each image has a mask.

Shape letters: U users, N images of a split, C classes, S image side, n rows asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from dataset.arrays import ByteArray, IntArray
from dataset.store.annotated_view import AnnotatedView
from dataset.store.annotations import VOID, Masks
from dataset.store.views import PixelCache, Split


@dataclass(frozen=True)
class SplitMasks(Split):
    """The images of a split, with masks as targets."""

    masks: PixelCache

    def targets(self, rows: IntArray) -> ByteArray:
        """Class numbers, ``[n, S, S]``; 255 is no class."""
        return self.masks.read(self.file_split, self.file_rows[np.asarray(rows, np.int64)])


@dataclass(frozen=True)
class MaskView(AnnotatedView):
    """A file seen as images with a class for each pixel.

    Decoded images and masks are kept within ``cache_bytes`` together, three parts for images and one for
    masks.
    """

    taxonomy: str = "mask"
    kind = Masks
    purpose: ClassVar[str] = "a class for each pixel"
    needed: ClassVar[str] = "a mask"
    truth: ClassVar[str] = "pixel with a class"

    @cached_property
    def pixels(self) -> PixelCache:
        """The decoded images of all splits, which every call of `split` shares."""
        return PixelCache(self.file, self.image_size, self.cache_bytes // 4 * 3)

    @cached_property
    def masks(self) -> PixelCache:
        """The decoded masks of all splits."""
        return PixelCache(self.file, self.image_size, self.cache_bytes // 4, self.taxonomy)

    def split(self, name: str) -> SplitMasks:  # type: ignore[override]  # another kind of store
        """One split as a store of users' images and masks.

        Raises:
            ValueError: when there is no such split, or no image in it.
        """
        users, offsets, rows = self._owned(name)
        return SplitMasks(users, offsets, self._file_split(name), rows, self.pixels, self.masks)

    def has_truth(self, split: str) -> bool:
        """Whether any pixel of a split has a class; masks are read up to the first that has one."""
        store = self.split(split)
        return any((store.targets(np.array([row])) != VOID).any() for row in range(len(store.file_rows)))

    def only_class(self, split: str) -> str | None:
        """The class of all pixels of a split that have one; None if there are several, or none.

        Masks are read up to the second class.
        """
        store, found = self.split(split), set[int]()
        for row in range(len(store.file_rows)):
            found |= {*np.unique(store.targets(np.array([row]))).tolist()} - {VOID}
            if len(found) > 1:
                return None
        return self.label_names[found.pop()] if found else None
