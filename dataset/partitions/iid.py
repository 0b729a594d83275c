"""Independent and identically distributed clients: the images in a random order, cut into equal parts."""

from __future__ import annotations

import numpy as np

from dataset.partitions.drawn import Drawing, drawn
from dataset.store.index import PartitionIndex


@drawn("iid", numbered=False)
def iid(drawing: Drawing, _: float) -> PartitionIndex:
    """Every image is dealt; clients' sizes differ by one at most.

    Raises:
        ValueError: for more clients than images.
    """
    clients, num_images = drawing.num_clients, len(drawing.classes)
    if clients > num_images:
        raise ValueError(f"{clients} clients cannot be had of {num_images:,} images")
    order = np.random.default_rng(drawing.seed).permutation(num_images)
    parts = [np.sort(part) for part in np.array_split(order, clients)]
    offsets = np.cumsum([0, *map(len, parts)]).astype(np.int64)
    return PartitionIndex([str(client) for client in range(clients)], np.concatenate(parts), offsets)
