"""Decoded images that stay in memory, within one budget for all splits of a task.

Shape letters: N images of a split, S image side, n rows asked for.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from dataset.store.annotations import IntArray
from dataset.store.hdf5 import DataFile

ByteArray = npt.NDArray[np.uint8]

_MISSING, _RESERVED = -1, -2  # a place that a thread is filling is reserved, and cannot be read yet


class PixelCache:
    """The images of a file at one size. Each image is decoded once and kept, until the budget is used up.

    Nothing is evicted: users are drawn at random, so that every image is as likely to be asked for again.
    All splits share one block of memory, of which the operating system provides only what has been written.

    Args:
        file: where the images are.
        image_size: S in pixels.
        num_bytes: the budget for the decoded images of all splits together.
    """

    def __init__(self, file: DataFile, image_size: int, num_bytes: int) -> None:
        self._file, self._size = file, image_size
        counts = {name: file.split(name).num_images for name in file.splits} if num_bytes else {}
        self._capacity = min(num_bytes // (image_size**2 * 3), sum(counts.values()))
        self._kept = np.empty((self._capacity, image_size, image_size, 3), np.uint8)
        self._place = {name: np.full(count, _MISSING, np.int64) for name, count in counts.items()}
        self._used = 0
        self._lock = threading.Lock()

    def read(self, split: str, rows: IntArray) -> ByteArray:
        """``[n, S, S, 3]``: any rows of a split of the file, in any order, from any thread."""
        rows = np.asarray(rows, np.int64)
        if not self._capacity:
            return self._file.read_images(split, rows, self._size)
        place = self._place[split][rows]
        kept = place >= 0
        if kept.all():
            return self._kept[place]
        missing, at = np.unique(rows[~kept], return_inverse=True)
        decoded = self._file.read_images(split, missing, self._size)
        self._keep(split, missing, decoded)
        out = np.empty((len(rows), *decoded.shape[1:]), np.uint8)
        out[kept], out[~kept] = self._kept[place[kept]], decoded[at]
        return out

    def _keep(self, split: str, rows: IntArray, images: ByteArray) -> None:
        """Keep as many of these images as there is room for, but for those that another thread keeps."""
        places = self._place[split]
        with self._lock:
            new = np.flatnonzero(places[rows] == _MISSING)[: self._capacity - self._used]
            start, self._used = self._used, self._used + len(new)
            places[rows[new]] = _RESERVED
        self._kept[start : start + len(new)] = images[new]
        places[rows[new]] = np.arange(start, start + len(new))  # after the pixels, for the other threads
