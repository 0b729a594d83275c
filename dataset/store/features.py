"""Features of a file's images on disk, computed once: for each split a matrix, row by row.

Numbers are kept as float32 or rounded to float16, and always read as float32.

They are beside the data file, in ``F.features/KEY``, where the key is a digest of everything that they depend
on. Rows are computed in blocks of `BLOCK`. A block is valid once its checksum is written, after its numbers,
so a killed run loses only its current block.

Shape letters: N images of a split, n rows asked for, D features of an image.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataset.arrays import Float32Array, IntArray
from dataset.files import sync, write_json, written
from dataset.journal import free

BLOCK = 1024
"""Number of rows in a block."""
FULL = "float32"
"""The format in which features are computed, by numpy's name."""


class FeatureColumn:
    """The features of one split, ``[N, D]``.

    Args:
        folder: the folder for all splits.
        split: the name of the split.
        num_rows: N.
        width: D.
        kind: the format in which numbers are kept, by numpy's name.
    """

    def __init__(self, folder: Path, split: str, num_rows: int, width: int, kind: str) -> None:
        self._kind = np.dtype(kind).newbyteorder("<")
        self._numbers = folder / f"{split}.f{8 * self._kind.itemsize}"
        self._sums = folder / f"{split}.json"
        self.num_rows, self._width = num_rows, width
        self._done: dict[int, int] = {}
        self._matrix: npt.NDArray[np.floating[Any]] | None = None

    @property
    def _row_bytes(self) -> int:
        return self._width * self._kind.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes on disk, when it is complete."""
        return self.num_rows * self._row_bytes

    def num_bytes_of(self, block: int) -> int:
        """Bytes on disk of a block."""
        return len(self.rows_of(block)) * self._row_bytes

    def missing(self, rows: IntArray) -> list[int]:
        """The blocks of these rows that are not on disk, or were changed there since they were written."""
        self._done = self._checked()
        wanted = np.unique(np.asarray(rows, np.int64) // BLOCK).tolist()
        return [block for block in wanted if block not in self._done]

    def rows_of(self, block: int) -> IntArray:
        """The rows of a block."""
        return np.arange(block * BLOCK, min((block + 1) * BLOCK, self.num_rows), dtype=np.int64)

    def put(self, block: int, features: Float32Array) -> None:
        """Write a block.

        Args:
            block: the block's number.
            features: the features of its rows, ``[n, D]``.

        Raises:
            ValueError: when they are not finite, or outside the range of the format in which they are kept.
            OSError: one clause with the path, for example when the disk is full.
        """
        assert features.shape == (len(self.rows_of(block)), self._width)
        if not np.isfinite(features).all():
            raise ValueError(
                "the frozen layers compute numbers that are not finite: check that the weights are not "
                "damaged"
            )
        largest, end = float(np.abs(features).max(initial=0)), float(np.finfo(self._kind).max)
        if largest > end:
            raise ValueError(
                f"the frozen layers compute numbers of up to {largest:.6g}, but model.feature_format "
                f"{self._kind.name} has a maximum of {end:.6g}: set it to {FULL}"
            )
        content = np.ascontiguousarray(features, self._kind).tobytes()
        with written(self._numbers):
            self._numbers.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._numbers, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                offset, rest = block * BLOCK * self._row_bytes, memoryview(content)
                while rest:
                    count = os.pwrite(descriptor, rest, offset)
                    offset, rest = offset + count, rest[count:]
            finally:
                os.close(descriptor)
            sync(self._numbers)
        self._done[block] = zlib.crc32(content)
        write_json(self._sums, {"block": BLOCK, "width": self._width, "sums": self._done})

    def read(self, rows: IntArray) -> Float32Array:
        """``[n, D]`` float32, of rows whose blocks are on disk, in their order."""
        if self._matrix is None or len(self._matrix) <= int(rows.max(initial=-1)):
            height = self._numbers.stat().st_size // self._row_bytes
            self._matrix = np.memmap(self._numbers, self._kind, "r", shape=(height, self._width))
        return np.asarray(self._matrix[rows], np.float32)

    def _checked(self) -> dict[int, int]:
        """The checksums of the blocks that are on disk as they were written."""
        try:
            kept = json.loads(self._sums.read_text(encoding="utf-8"))
            sums = {int(block): int(value) for block, value in kept["sums"].items()}
            if (kept["block"], kept["width"]) != (BLOCK, self._width):
                return {}
            found = {}
            with open(self._numbers, "rb") as file:
                for block, value in sorted(sums.items()):
                    file.seek(block * BLOCK * self._row_bytes)
                    if zlib.crc32(file.read(len(self.rows_of(block)) * self._row_bytes)) == value:
                        found[block] = value
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return {}
        return found


class FeatureCache:
    """The features of a file's splits, which are read like a view's pixels.

    Args:
        data: the data file, beside which they are kept.
        depends_on: everything that they depend on; it and ``kind`` determine the folder.
        counts: N of each split.
        width: D.
        kind: the format in which they are kept, by numpy's name.
    """

    def __init__(
        self,
        data: Path,
        depends_on: Mapping[str, object],
        counts: Mapping[str, int],
        width: int,
        kind: str = FULL,
    ) -> None:
        # the key of full precision does not name the format, so that older folders stay valid
        self._about = {**depends_on, **({} if kind == FULL else {"format": kind})}
        key = hashlib.sha256(json.dumps(self._about, sort_keys=True).encode()).hexdigest()
        self.folder = data.with_name(f"{data.name}.features") / key[:16]
        self.width = width
        self._columns = {
            name: FeatureColumn(self.folder, name, count, width, kind) for name, count in counts.items()
        }

    @property
    def num_bytes(self) -> int:
        """Size of the columns of all splits."""
        return sum(column.num_bytes for column in self._columns.values())

    def missing(self, wanted: Mapping[str, IntArray]) -> list[tuple[str, int]]:
        """The blocks that are not on disk: split and number.

        Args:
            wanted: the rows of each split.
        """
        return [(name, block) for name, rows in wanted.items() for block in self._columns[name].missing(rows)]

    def block_size(self, split: str, block: int) -> int:
        """Rows of a block."""
        return len(self._columns[split].rows_of(block))

    def fill(self, blocks: list[tuple[str, int]], compute: Callable[[str, IntArray], Float32Array]) -> None:
        """Compute blocks, one after another.

        Args:
            blocks: split and number of each.
            compute: the features of some rows of a split.

        Raises:
            ValueError: when the disk has not enough space for all of them.
            OSError: one clause with the path.
        """
        need = sum(self._columns[name].num_bytes_of(block) for name, block in blocks)
        if blocks and (room := free(self.folder)) < need:
            raise ValueError(
                f"the features need {need / 1e9:.2g} GB in {self.folder}, but only {room / 1e9:.2g} GB "
                "are free: free some space, or set runtime.cache_features to false"
            )
        if blocks:
            write_json(self.folder / "about.json", self._about)
        for name, block in blocks:
            column = self._columns[name]
            column.put(block, compute(name, column.rows_of(block)))

    def read(self, split: str, rows: IntArray) -> Float32Array:
        """``[n, D]`` float32: rows of a split of the file, in any order, from any thread."""
        return self._columns[split].read(np.asarray(rows, np.int64))
