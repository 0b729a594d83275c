"""The updates of a round on disk, from which a rule reads blocks of coordinates for all users.

The updates of 200 ResNets take 9 GB. Only one block of their coordinates, of `BLOCK_BYTES`, is in memory.

Letters: n users of a round, P numbers of an update, w coordinates of a block.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dataset.arrays import Float32Array, FloatArray, IntArray
from dataset.files import written

BLOCK_BYTES = 2**25
"""Size of a block in float64."""


class Spool:
    """``[n, P]`` float32 in a file without a name, which disappears with the process.

    Args:
        rows: n.
        length: P.
        folder: the folder of the file; None: that of temporary files.

    Raises:
        OSError: when the disk is full; one clause with the folder.
    """

    def __init__(self, rows: int, length: int, folder: Path | None = None) -> None:
        self.length = length
        where = Path(tempfile.gettempdir()) if folder is None else folder
        with written(where):
            where.mkdir(parents=True, exist_ok=True)
            self._file, name = tempfile.mkstemp(dir=where)
            Path(name).unlink()
            os.truncate(self._file, max(1, 4 * rows * length))
        weakref.finalize(self, os.close, self._file)
        self._where = where
        mapped = mmap.mmap(self._file, max(1, 4 * rows * length))
        self._all: Float32Array = np.frombuffer(mapped, "<f4", rows * length).reshape(rows, length)
        self.weights: FloatArray = np.zeros(rows)
        """The weights ``[n]``; 0 for a row that was not written."""

    def write(self, row: int, values: npt.ArrayLike, weight: float) -> None:
        """Write one user's update ``[P]``, with its weight in a mean, above 0."""
        content = np.ascontiguousarray(values, "<f4")
        assert content.shape == (self.length,)
        left, offset = content.data.cast("B"), 4 * row * self.length
        with written(self._where):
            while left:
                done = os.pwrite(self._file, left, offset)
                left, offset = left[done:], offset + done
        self.weights[row] = weight

    def overwrite(self, rows: IntArray, part: slice, values: FloatArray) -> None:
        """Write the same values ``[w]`` at some coordinates of all ``rows``, which were written before."""
        self._all[rows, part] = values

    def read(self, row: int) -> Float32Array:
        """A view of one user's update ``[P]``."""
        found: Float32Array = self._all[row]
        return found

    def written_rows(self) -> IntArray:
        """The rows that hold an update."""
        return np.flatnonzero(self.weights > 0)

    def finite_rows(self) -> IntArray:
        """The written rows whose numbers are all finite."""
        rows = self.written_rows()
        known = np.ones(len(rows), bool)
        for _, block in self.coordinates(rows, np.float32):
            known &= np.isfinite(block).all(1)
        return rows[known]

    def coordinates(self, rows: IntArray, kind: type = np.float64) -> Iterator[tuple[slice, npt.NDArray]]:  # type: ignore[type-arg]
        """Read some rows, one block of coordinates after another.

        Args:
            rows: ``[n']``; row i of each block is ``rows[i]``.
            kind: the type of the numbers.

        Yields:
            The coordinates of a block, and a copy of their values ``[n', w]``.
        """
        width = max(1, BLOCK_BYTES // (8 * max(1, len(rows))))
        for first in range(0, self.length, width):
            part = slice(first, min(first + width, self.length))
            yield part, self._all[rows, part].astype(kind)

    def bucketed(self, groups: Sequence[IntArray], folder: Path | None) -> Spool:
        """A new spool with the weighted mean of each group of rows, and the sum of its weights."""
        made = Spool(len(groups), self.length, folder)
        for number, rows in enumerate(groups):
            mean = np.zeros(self.length, np.float32)
            weights = self.weights[rows] / self.weights[rows].sum()
            for part, block in self.coordinates(rows):
                mean[part] = weights @ block
            made.write(number, mean, float(self.weights[rows].sum()))
        return made
