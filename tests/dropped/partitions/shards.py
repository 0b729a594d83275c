"""Shards: the images in order of their classes, cut into equal parts that are dealt to the clients at random
(McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data",
arXiv 1602.05629, Section 3).
"""

from __future__ import annotations

import numpy as np

from dataset.partitions.drawn import Drawing, drawn
from dataset.store.index import PartitionIndex


@drawn("shards")
def shards(drawing: Drawing, number: float) -> PartitionIndex:
    """``number``: the shards of each client."""
    clients, each = drawing.num_clients, int(number)
    if each < 1 or clients * each > len(drawing.classes):
        raise ValueError(
            f"{clients} clients of {number:g} shards cannot be had of {len(drawing.classes):,} images"
        )
    rng = np.random.default_rng(drawing.seed)
    parts = np.array_split(np.argsort(drawing.classes, kind="stable"), clients * each)
    dealt = rng.permutation(len(parts)).reshape(clients, each)
    rows = [np.concatenate([parts[part] for part in mine]) for mine in dealt]
    offsets = np.concatenate([[0], np.cumsum([len(own) for own in rows])]).astype(np.int64)
    return PartitionIndex([str(client) for client in range(clients)], np.concatenate(rows), offsets)
