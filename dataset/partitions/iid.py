"""Independent and identically distributed clients: the images in a random order, cut into equal parts."""

from __future__ import annotations

import numpy as np

from dataset.partitions.drawn import Drawing, drawn, of_parts
from dataset.store.index import PartitionIndex


@drawn("iid", numbered=False, of_any=True)
def iid(drawing: Drawing, _: float) -> PartitionIndex:
    """Every image is dealt; clients' sizes differ by one at most.

    Raises:
        ValueError: for more clients than images.
    """
    clients, num_images = drawing.num_clients, len(drawing.classes)
    if clients > num_images:
        raise ValueError(f"{num_images:,} images are not enough for {clients} clients: use fewer clients")
    order = np.random.default_rng(drawing.seed).permutation(num_images)
    return of_parts(np.array_split(order, clients))
