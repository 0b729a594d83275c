"""Clients of different sizes with images from the same distribution (quantity skew).

``quantity-dirichlet``: the shares of the images are drawn from Dir(beta, ..., beta), again while a client has
fewer than ten images (Li, Diao, Chen and He, NIID-Bench, arXiv 2102.02079, Section IV-C). With ``-legacy`` it
draws from numpy's global generator of a seed, as NIID-Bench's code does. ``quantity-linear`` and
``quantity-exponential``: client i has images in proportion to i + 1, or to exp(rate i), as by Flower's
LinearPartitioner and ExponentialPartitioner (rate 1).
"""

from __future__ import annotations

import numpy as np

from dataset.arrays import FloatArray, IntArray
from dataset.partitions.by_class import (
    LEAST_IMAGES,
    MAX_TRIES,
    Generator,
    check_dirichlet,
    legacy_generator,
    never_enough,
)
from dataset.partitions.drawn import Drawing, drawn, of_parts
from dataset.store.index import PartitionIndex


@drawn("quantity-dirichlet", of_any=True)
def by_dirichlet(drawing: Drawing, beta: float) -> PartitionIndex:
    """``beta``: the parameter of each client; the smaller it is, the more sizes differ.

    Raises:
        ValueError: when beta is not above 0, or no try gives each client enough images.
    """
    return _by_dirichlet(drawing, beta, np.random.default_rng(drawing.seed))


@drawn("quantity-dirichlet-legacy", of_any=True)
def _by_dirichlet_legacy(drawing: Drawing, beta: float) -> PartitionIndex:
    """``beta`` and ValueError as for `by_dirichlet`."""
    return _by_dirichlet(drawing, beta, legacy_generator(drawing.seed))


def _by_dirichlet(drawing: Drawing, beta: float, rng: Generator) -> PartitionIndex:
    check_dirichlet(drawing, beta)
    order = rng.permutation(len(drawing.classes))
    for _ in range(MAX_TRIES):
        parts = _cut(order, rng.dirichlet(np.repeat(beta, drawing.num_clients)))
        if min(map(len, parts)) >= LEAST_IMAGES:
            return of_parts(parts)
    raise never_enough(drawing, beta)


@drawn("quantity-linear", numbered=False, of_any=True)
def linear(drawing: Drawing, _: float) -> PartitionIndex:
    """Raises ValueError where a client would have no image."""
    return _in_proportion(drawing, np.arange(1.0, drawing.num_clients + 1))


@drawn("quantity-exponential", of_any=True)
def exponential(drawing: Drawing, rate: float) -> PartitionIndex:
    """``rate``: the logarithm of a client's size over that of the one before; ValueError as `linear`."""
    return _in_proportion(drawing, np.exp(rate * np.arange(1 - drawing.num_clients, 1.0)))


def _in_proportion(drawing: Drawing, sizes: FloatArray) -> PartitionIndex:
    order = np.random.default_rng(drawing.seed).permutation(len(drawing.classes))
    parts = _cut(order, sizes / sizes.sum())
    if not all(map(len, parts)):
        few = min(range(len(parts)), key=lambda client: len(parts[client]))
        raise ValueError(
            f"client {few} of {len(parts)} would get none of the {len(order):,} images: use fewer "
            "clients, or sizes that differ less"
        )
    return of_parts(parts)


def _cut(order: IntArray, shares: FloatArray) -> list[IntArray]:
    return np.split(order, (np.cumsum(shares)[:-1] * len(order)).astype(np.int64))
