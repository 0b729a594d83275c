"""Partitions by what images contain, or by when they were taken: `most-frequent` and `windows`.

``most-frequent`` (He et al., FedCV, arXiv 2111.11066, for COCO): all images with the most frequent category
go to client 0. The same is repeated with the remaining images for the next client, and so on. The last client
gets the rest. ``windows`` divides each user's images, sorted by id, into stretches of neighbours. Parts of a
drive, for example, differ because the streets do.

Shape letters: N images, K classes, C clients.
"""

from __future__ import annotations

import heapq
import re

import numpy as np

from dataset.partitions.drawn import Drawing, Images, drawn, of_owners, of_parts
from dataset.store.index import PartitionIndex

_DIGITS = re.compile(r"(\d+)")


@drawn("most-frequent", numbered=False, of_any=True)
def most_frequent(drawing: Drawing, _: float) -> PartitionIndex:
    """Each client in turn gets the images left of the most frequent category; the last gets all others.

    If several categories are equally frequent, the lowest comes first. The seed changes nothing.

    Raises:
        ValueError: where a client would have no image.
    """
    matrix, clients = _known(drawing, "most-frequent").present, drawing.num_clients
    owner_of = np.repeat(np.arange(len(matrix)), np.diff(matrix.indptr))  # the image of each label
    client_of = np.full(len(matrix), clients - 1)
    left = np.ones(len(matrix), bool)
    for client in range(clients - 1):
        here = left[owner_of]
        counts = np.bincount(matrix.indices[here], minlength=matrix.num_labels)
        if not counts.any():
            raise ValueError(
                f"no image with an object is left for client {client} of {clients}: use fewer clients"
            )
        chosen = owner_of[here & (matrix.indices == counts.argmax())]
        client_of[chosen], left[chosen] = client, False
    if not left.any():
        raise ValueError(f"no image is left for client {clients - 1} of {clients}: use fewer clients")
    return of_owners(client_of, clients)


@drawn("windows", numbered=False, of_any=True)
def windows(drawing: Drawing, _: float) -> PartitionIndex:
    """C stretches of neighbouring images, each of one user, with sizes as equal as possible.

    Repeatedly, the user with the largest windows gets one more window. Digits in ids are sorted as numbers.
    The k-th window of a user has the name ``USER-k``. The seed changes nothing.

    Raises:
        ValueError: for fewer clients than users, or more clients than images.
    """
    images, clients = _known(drawing, "windows"), drawing.num_clients
    rows_of: dict[str, list[int]] = {}
    for row in sorted(range(len(images.ids)), key=lambda row: _natural(images.ids[row])):
        rows_of.setdefault(images.users[row], []).append(row)
    users = sorted(rows_of)
    if not len(users) <= clients <= len(images.ids):
        raise ValueError(
            f"{clients} clients cannot have one window of images each: use at least {len(users):,}, the "
            f"number of users, and at most {len(images.ids):,}, the number of images"
        )
    cuts = dict.fromkeys(users, 1)
    largest = [(-float(len(rows_of[user])), user) for user in users]
    heapq.heapify(largest)
    for _ in range(clients - len(users)):
        user = heapq.heappop(largest)[1]
        cuts[user] += 1
        heapq.heappush(largest, (-len(rows_of[user]) / cuts[user], user))
    parts = {
        f"{user}-{k}": part
        for user in users
        for k, part in enumerate(np.array_split(np.array(rows_of[user], np.int64), cuts[user]))
    }
    return of_parts([*parts.values()], [*parts])


def _natural(image_id: str) -> list[tuple[int, str]]:
    """A key by which ``frame-9`` comes before ``frame-10``."""
    parts = enumerate(_DIGITS.split(image_id))
    return [(int(part), part) if place % 2 else (0, part) for place, part in parts]


def _known(drawing: Drawing, kind: str) -> Images:
    if drawing.images is None:
        raise ValueError(
            f"{kind} needs the images of a file: make the file first, then run python -m "
            "dataset.partitions FILE"
        )
    return drawing.images
