"""Partitions in which each class is divided among the clients, so that clients' sizes differ too.

Li, Diao, Chen and He, "Federated Learning on Non-IID Data Silos: An Experimental Study" (NIID-Bench, arXiv
2102.02079), Section IV-A. Shape letters: N images, K classes, U clients.

* ``lda`` (Dirichlet over clients): for each class in turn, its images are shuffled, p ~ Dir(beta, ..., beta)
  over the clients is drawn, clients that already have N / U images or more get 0, and the class is cut at
  ``floor(cumsum(p) N_k)``. All is drawn again while a client has fewer than ten images.
* ``classes`` (``#C=c``): client i owns class ``i mod K`` and c - 1 other classes at random; each class is
  divided evenly among its owners.

The same protocol gives other partitions with other generators. ``lda`` and ``classes`` draw from numpy's
``default_rng(seed)``, as Flower's baseline of NIID-Bench does (whose seed is always 42). ``lda-legacy`` and
``classes-legacy`` draw from numpy's and Python's global generators of a seed, as NIID-Bench's own code does.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from dataset.arrays import IntArray
from dataset.partitions.drawn import Drawing, check_parameter, drawn, of_owners, whole
from dataset.store.index import PartitionIndex

Generator = np.random.Generator | np.random.RandomState
LEAST_IMAGES = 10
MAX_TRIES = 1000


def clients_by_dirichlet(drawing: Drawing, beta: float, rng: Generator) -> PartitionIndex:
    """Deal each class by a Dirichlet distribution over the clients, `LEAST_IMAGES` or more to each client.

    Args:
        drawing: the images' classes and the number of clients.
        beta: the parameter of each client.
        rng: the generator of all draws.

    Raises:
        ValueError: when beta is not above 0, or no try gives each client enough images.
    """
    clients, num_images = drawing.num_clients, len(drawing.classes)
    check_dirichlet(drawing, beta)
    for _ in range(MAX_TRIES):
        owner = np.empty(num_images, np.int64)
        sizes = np.zeros(clients, np.int64)
        for rows in _rows_by_class(drawing.classes):
            rng.shuffle(rows)
            p = rng.dirichlet(np.repeat(beta, clients)) * (sizes < num_images / clients)
            if not p.sum() > 0:  # all mass lies on clients that have enough, or is too small for float64
                break
            ends = (np.cumsum(p / p.sum()) * len(rows)).astype(np.int64)
            ends[-1] = len(rows)
            counts = np.diff(ends, prepend=0)
            owner[rows] = np.repeat(np.arange(clients), counts)
            sizes = sizes + counts
        else:
            if sizes.min() >= LEAST_IMAGES:
                return of_owners(owner, clients)
    raise never_enough(drawing, beta)


def check_dirichlet(drawing: Drawing, beta: float) -> None:
    """Raise ValueError when beta is not above 0, or there are not `LEAST_IMAGES` for each client."""
    check_parameter(beta)
    clients, num_images = drawing.num_clients, len(drawing.classes)
    if clients * LEAST_IMAGES > num_images:
        raise ValueError(
            f"{num_images:,} images are not enough for {clients} clients with at least {LEAST_IMAGES} "
            "images each: use fewer clients"
        )


def never_enough(drawing: Drawing, beta: float) -> ValueError:
    """The error after `MAX_TRIES` tries."""
    return ValueError(
        f"in {MAX_TRIES} tries, Dir({beta:g}) never gave each of {drawing.num_clients} clients "
        f"{LEAST_IMAGES} images: use fewer clients or a larger parameter"
    )


def clients_by_classes(
    drawing: Drawing, number: int, pick: Callable[[], int], rng: Generator
) -> PartitionIndex:
    """Give each client some classes, and divide each class evenly among its owners.

    If there are fewer clients than classes, the images of a class that no client owns are left out.

    Args:
        drawing: the images' classes and the number of clients.
        number: the number of classes of a client.
        pick: draws a class.
        rng: shuffles the images of a class.

    Raises:
        ValueError: for a number that is not from 1 to K, and where an owner of a class gets none of it.
    """
    by_class = _rows_by_class(drawing.classes)
    if not 1 <= number <= len(by_class):
        raise ValueError(
            f"clients cannot have {number} of {len(by_class)} classes: use a number from 1 to {len(by_class)}"
        )
    owned: list[list[int]] = []
    for client in range(drawing.num_clients):
        mine = [client % len(by_class)]
        while len(mine) < number:
            picked = int(pick())
            if picked not in mine:
                mine.append(picked)
        owned.append(mine)
    owner = np.full(len(drawing.classes), -1)
    for k, rows in enumerate(by_class):
        owners = [client for client, mine in enumerate(owned) if k in mine]
        if len(owners) > len(rows):
            raise ValueError(
                f"class {k} has {len(rows)} images, but {len(owners)} clients have this class: use "
                "fewer clients or fewer classes for each client"
            )
        rng.shuffle(rows)
        for client, part in zip(owners, np.array_split(rows, max(len(owners), 1))):
            owner[part] = client
    return of_owners(owner, drawing.num_clients)


@drawn("lda")
def _lda(drawing: Drawing, beta: float) -> PartitionIndex:
    """``beta``: the parameter of each client."""
    return clients_by_dirichlet(drawing, beta, np.random.default_rng(drawing.seed))


@drawn("lda-legacy")
def _lda_legacy(drawing: Drawing, beta: float) -> PartitionIndex:
    """``beta``: the parameter of each client."""
    return clients_by_dirichlet(drawing, beta, legacy_generator(drawing.seed))


@drawn("classes")
def _classes(drawing: Drawing, number: float) -> PartitionIndex:
    """``number``: the classes of each client."""
    rng, num_classes = np.random.default_rng(drawing.seed), int(drawing.classes.max()) + 1
    return clients_by_classes(drawing, whole(number, "classes"), lambda: int(rng.integers(num_classes)), rng)


@drawn("classes-legacy")
def _classes_legacy(drawing: Drawing, number: float) -> PartitionIndex:
    """``number``: the classes of each client."""
    picked, last = random.Random(drawing.seed), int(drawing.classes.max())
    each = whole(number, "classes-legacy")
    return clients_by_classes(drawing, each, lambda: picked.randint(0, last), legacy_generator(drawing.seed))


def legacy_generator(seed: int) -> np.random.RandomState:
    """numpy's global generator after ``numpy.random.seed(seed)``; ValueError for a seed of 2^32 or more."""
    if seed >= 2**32:
        raise ValueError(f"the seed is {seed}; partitions that end in -legacy need a seed below {2**32}")
    return np.random.RandomState(seed)


def _rows_by_class(classes: IntArray) -> list[IntArray]:
    return [np.flatnonzero(classes == k) for k in range(int(classes.max()) + 1)]
