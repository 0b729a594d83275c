"""A store in memory whose images carry their own row number, so that a lost pairing shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dataset.arrays import ByteArray, IntArray


class NumberedStore:
    """Image r is filled with the three base-256 digits of r; its label is column r mod K."""

    def __init__(self, sizes: Sequence[int], num_labels: int = 5, side: int = 8) -> None:
        self.user_ids = [f"user-{u}" for u in range(len(sizes))]
        self.user_offsets: IntArray = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.num_labels, self.side = num_labels, side
        self.reads = 0

    def read(self, rows: IntArray) -> tuple[ByteArray, ByteArray]:
        self.reads += 1
        digits = np.stack([rows // 65536, rows // 256 % 256, rows % 256], axis=-1).astype(np.uint8)
        images = np.broadcast_to(digits[:, None, None, :], (len(rows), self.side, self.side, 3)).copy()
        return images, self.targets(rows)

    def targets(self, rows: IntArray) -> ByteArray:
        targets = np.zeros((len(rows), self.num_labels), np.uint8)
        targets[np.arange(len(rows)), rows % self.num_labels] = 1
        return targets


def rows_of(images: ByteArray) -> IntArray:
    """The row numbers painted into a batch of images."""
    pixel = images[:, 0, 0].astype(np.int64)
    return np.asarray(pixel @ np.array([65536, 256, 1]), np.int64)
