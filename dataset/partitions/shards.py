"""Clients of a few shards: the images in order of their classes, cut into equal parts, some for each client.

McMahan, Moore, Ramage, Hampson and Aguera y Arcas, "Communication-Efficient Learning of Deep Networks from
Decentralized Data" (arXiv 1602.05629), Section 3: MNIST's 60,000 images, 100 clients of two shards of 300.
"""

from __future__ import annotations

import numpy as np

from dataset.partitions.drawn import Drawing, drawn, of_parts, whole
from dataset.store.index import PartitionIndex


@drawn("shards")
def shards(drawing: Drawing, number: float) -> PartitionIndex:
    """``number``: the shards of each client. Within a class the images stand in a random order.

    Images that are left over when all shards have the same size are left out.

    Raises:
        ValueError: for more shards than images.
    """
    each, num_images = whole(number, "shards"), len(drawing.classes)
    total = each * drawing.num_clients
    if total > num_images:
        raise ValueError(
            f"{num_images:,} images are not enough for {total} shards: use fewer clients or fewer "
            "shards for each client"
        )
    rng = np.random.default_rng(drawing.seed)
    mixed = rng.permutation(num_images)
    ordered = mixed[np.argsort(drawing.classes[mixed], kind="stable")]
    parts = ordered[: num_images // total * total].reshape(total, -1)
    owned = rng.permutation(total).reshape(drawing.num_clients, each)
    return of_parts([parts[mine].ravel() for mine in owned])
