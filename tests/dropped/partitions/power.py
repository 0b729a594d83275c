"""Clients whose sizes are a power of their numbers, with images drawn alike."""

from __future__ import annotations

import numpy as np

from dataset.partitions.drawn import Drawing, drawn, of_parts
from dataset.store.index import PartitionIndex


@drawn("power")
def power(drawing: Drawing, exponent: float) -> PartitionIndex:
    """Client i has images in proportion to ``(i + 1) ** exponent``."""
    shares = np.arange(1.0, drawing.num_clients + 1) ** exponent
    ends = (np.cumsum(shares / shares.sum())[:-1] * len(drawing.classes)).astype(np.int64)
    parts = np.split(np.random.default_rng(drawing.seed).permutation(len(drawing.classes)), ends)
    if not all(map(len, parts)):
        raise ValueError(f"{len(parts)} clients cannot all have images at a power of {exponent:g}")
    return of_parts(parts)
