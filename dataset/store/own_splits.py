"""Val and test of training users: images of theirs that are set aside, and users who do not train."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from dataset.arrays import BoolArray, IntArray
from dataset.store.annotations import positions
from dataset.store.index import owner as owner_among

MOST_NAMES = 20


def carved(image_ids: Sequence[str], owner: IntArray, user_ids: Sequence[str], share: float) -> BoolArray:
    """Whether each image, ``[N]``, becomes val: of every user those whose hashes are the smallest.

    A user of n images gives floor(n share + h) of them, but not all, where h in [0, 1) is a hash of the user.
    """
    chance = np.array([_uniform("image", image) for image in image_ids], np.float64)
    order = np.lexsort((chance, owner))
    sizes = np.bincount(owner, minlength=len(user_ids))
    rank = np.empty(len(owner), np.int64)
    rank[order] = positions(sizes)
    rounding = np.array([_uniform("user", user) for user in user_ids], np.float64)
    moved = np.minimum(np.floor(sizes * share + rounding), sizes - 1)
    return np.asarray(rank < moved[owner])


def _uniform(purpose: str, name: str) -> float:
    """A number in [0, 1) that is a hash of the arguments."""
    digest = hashlib.blake2b(f"carved val\x1f0\x1f{purpose}\x1f{name}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def check_test_users(names: Sequence[str], trained: Sequence[str]) -> None:
    """Refuse test users who are not among the ``trained`` ones, and all of these.

    Raises:
        ValueError: one line.
    """
    if unknown := sorted({*names} - {*trained}):
        more = f" and {len(trained) - MOST_NAMES:,} more" if len(trained) > MOST_NAMES else ""
        raise ValueError(
            f"data.test_users has {', '.join(map(repr, unknown[:MOST_NAMES]))}, but the training users are "
            f"{', '.join(trained[:MOST_NAMES])}{more}: give some of these, with commas between them"
        )
    if len({*names}) == len({*trained}):
        raise ValueError("data.test_users has all training users, so nobody would train: leave one out")


def belongs_to(names: Sequence[str], user_ids: Sequence[str]) -> BoolArray:
    """Whether each of these users, ``[U]``, is one of ``names``, in any split of a file."""
    return np.array([owner_among(user, names) in names for user in user_ids], bool)
