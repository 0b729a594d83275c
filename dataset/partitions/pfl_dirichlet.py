"""The clients of pfl-research's CIFAR-10 benchmark, whose classes are drawn one image at a time.

pfl 0.6.0, `pfl.data.partition.partition_by_dirichlet_class_distribution`, on images in a random order. Each
client has a distribution of classes p ~ Dir(alpha, ..., alpha) of its own. Classes are drawn from p until the
client has its n images; a class of which none is left is drawn in vain. Every 20 n draws each p(k) grows
by 0.02, so that p comes nearer to the uniform distribution; this happens to the last clients only. pfl also
sets the last p(k) to 1 then, which counts from the second time on, and so does this.

numpy's global generator is drawn from in the same order as by pfl after ``numpy.random.seed(seed)``, so that
the partition is the same.
"""

from __future__ import annotations

import numpy as np

from dataset.partitions.by_class import legacy_generator
from dataset.partitions.drawn import Drawing, check_parameter, drawn, of_parts
from dataset.store.index import PartitionIndex

PATIENCE = 20
"""Draws for each image of a client, after which p is spread."""
SPREAD = 0.02
"""The number by which each p(k) grows."""


@drawn("pfl-dirichlet")
def pfl_dirichlet(drawing: Drawing, alpha: float) -> PartitionIndex:
    """``alpha``: the parameter of each class.

    Raises:
        ValueError: when alpha is not above 0 or too close to it, or there are fewer images than to be dealt.
    """
    classes, each = drawing.classes, drawing.images_per_client
    check_parameter(alpha)
    if each < 1 or drawing.num_clients * each > len(classes):
        raise ValueError(
            f"{len(classes):,} images are not enough for {drawing.num_clients} clients with {each} "
            "images each: use fewer clients"
        )
    rng = legacy_generator(drawing.seed)
    order = rng.permutation(len(classes))
    left = [order[classes[order] == k].tolist() for k in range(int(classes.max()) + 1)]
    parts = []
    for _ in range(drawing.num_clients):
        p = rng.dirichlet([alpha] * len(left))
        if not np.isfinite(p).all():
            raise ValueError(f"Dir({alpha:g}) is too small for float64: give a larger number")
        bounds = np.cumsum(p)
        bounds[-1] = 1.0
        part: list[int] = []
        draws = 0
        while len(part) < each:
            k = int(np.argmax(rng.uniform() < bounds))
            if left[k]:
                part.append(left[k].pop())
            draws += 1
            if draws % (PATIENCE * each) == 0:
                p = (p + SPREAD) / (p + SPREAD).sum()
                bounds = np.cumsum(p)
                p[-1] = 1.0
        parts.append(np.array(part, np.int64))
    return of_parts(parts)
