"""Splits into training and scoring: the source's own splits, or splits that are dealt here.

If splits are dealt by users, each has whole users, as in FLAIR. If they are dealt by images, each user keeps
some of its own images for scoring. Both are pure functions of the seed and the ids. They depend neither on
the order of the source nor on the number of processes, and a further user changes the splits of few others.

A file's users are disjoint between splits. If a source has images of one user in two splits, the users of
``val`` and ``test`` are called ``val-USER`` and ``test-USER``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dataset.store.index import SPLITS, in_another_split

OTHERS = ("val", "test")


@dataclass(frozen=True)
class Dealing:
    """How images come into splits.

    Attributes:
        keep: whether to keep the source's own splits; shares are then for the splits that it lacks.
        by: what is dealt, ``users`` or ``images``.
        shares: the shares of the users, or of each user's images, that become ``val`` and ``test``.
        seed: the seed of the dealing.
    """

    keep: bool
    by: str
    shares: Mapping[str, float]
    seed: int

    def __post_init__(self) -> None:
        for name, share in self.shares.items():
            if not 0 <= share < 1:
                raise ValueError(f"--{name}_share is {share:g}: give a number of at least 0 and below 1")
        if sum(self.shares.values()) >= 1:
            raise ValueError("--val_share and --test_share leave no images for training: give smaller shares")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed is {self.seed}; give a number from 0 to {2**63 - 1}")

    def provenance(self) -> dict[str, object]:
        """How the images were dealt, for the data file."""
        dealt = {"dealt_by": self.by, "seed": self.seed} if any(self.shares.values()) else {}
        return {"splits": "the source's" if self.keep else "dealt", "shares": dict(self.shares), **dealt}


def deal(
    users: pa.ChunkedArray, images: pa.ChunkedArray, splits: pa.ChunkedArray, dealing: Dealing
) -> pa.Table:
    """The user, image and split of each record, with the columns ``user_id``, ``image_id``, ``partition``.

    Args:
        users: the users of the R records, as text.
        images: their image ids, as text, each once.
        splits: the source's splits; null if it has none.
        dealing: how they are dealt.

    Raises:
        ValueError: when there are too few users for the shares, or a user's new name is another user's.
    """
    owners = pc.dictionary_encode(users).combine_chunks()
    if isinstance(owners, pa.ChunkedArray):
        owners = owners.chunk(0)
    names, owner = owners.dictionary.to_pylist(), owners.indices.to_numpy()
    number = np.zeros(len(users), np.int8)
    if dealing.keep:
        for position, name in enumerate(SPLITS):
            number[pc.fill_null(pc.equal(splits, name), False).to_numpy(zero_copy_only=False)] = position
        for name in OTHERS:
            if dealing.shares[name] and (number == SPLITS.index(name)).any():
                raise ValueError(
                    f"--{name}_share has no effect, because the source already has the split {name}: "
                    "leave it out"
                )
    free = np.flatnonzero(number == 0)
    if any(dealing.shares.values()) and dealing.by == "users":
        number[free] = _by_users(names, owner[free], dealing)
    elif any(dealing.shares.values()):
        number[free] = _by_images(names, owner[free], images.take(pa.array(free)).to_pylist(), dealing)
    if not (number == 0).any():
        raise ValueError(
            "there is no image for training: name a split of the source train, or split all images "
            "again with --splits deal"
        )
    new = _names_of(names, owner, number)
    places = number.astype(np.int64) * len(names) + owner
    return pa.table(
        {
            "user_id": pa.DictionaryArray.from_arrays(pa.array(places), new).cast(pa.string()),
            "image_id": images,
            "partition": pa.DictionaryArray.from_arrays(pa.array(number), pa.array(SPLITS)).cast(pa.string()),
        }
    )


def _names_of(names: list[str], owner: npt.NDArray[np.int32], number: npt.NDArray[np.int8]) -> pa.Array:
    """The names of the users of train, then of val and of test, ``[3 U]``."""
    held = np.zeros((len(SPLITS), len(names)), bool)
    held[number, owner] = True
    if held.sum(axis=0).max() <= 1:
        return pa.array(names * len(SPLITS))
    first = {names[user] for user in np.flatnonzero(held[0]).tolist()}
    renamed = [[in_another_split(name, split) for name in names] for split in OTHERS]
    for split, found in enumerate(renamed, start=1):
        for user in np.flatnonzero(held[split]).tolist():
            if found[user] in first:
                raise ValueError(
                    f"user {names[user]!r} has images in several splits and is renamed {found[user]!r} "
                    f"in {SPLITS[split]}, but train already has a user of this name: rename one of the "
                    "two"
                )
    return pa.array([*names, *renamed[0], *renamed[1]])


def _order(seed: int, *words: str) -> int:
    """A pseudo-random number for these words: 64 bits of their SHA-256."""
    text = "\0".join(["dataset.convert", str(seed), *words])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _by_users(names: list[str], owner: npt.NDArray[np.int32], dealing: Dealing) -> npt.NDArray[np.int8]:
    """The split of each record, by whole users. Their numbers follow the shares, rounded, at least one."""
    here = sorted(
        set(owner.tolist()), key=lambda user: (_order(dealing.seed, "users", names[user]), names[user])
    )
    split_of = np.zeros(len(names), np.int8)
    done = 0
    for name in OTHERS:
        share = dealing.shares[name]
        count = max(1, math.floor(share * len(here) + 0.5)) if share else 0
        split_of[here[done : done + count]] = SPLITS.index(name)
        done += count
    if done >= len(here):
        raise ValueError(
            f"{len(here)} users are not enough for {1 + sum(map(bool, dealing.shares.values()))} splits: "
            "give --split_by images, or set a share to 0"
        )
    return split_of[owner]


def _by_images(
    names: list[str], owner: npt.NDArray[np.int32], images: list[str], dealing: Dealing
) -> npt.NDArray[np.int8]:
    """The split of each record, within its user.

    A share of n images is ``floor(share n + u)`` images, with u drawn for the user in [0, 1), so that small
    users give their share on average. At least one image stays in train.
    """
    keys = np.array([_order(dealing.seed, "images", image) for image in images], np.uint64)
    order = np.lexsort((keys, owner))
    counts = np.bincount(owner, minlength=len(names))
    split = np.zeros(len(images), np.int8)
    start = 0
    for user, count in enumerate(counts.tolist()):
        mine, left = order[start : start + count], count - 1
        for name in reversed(OTHERS):
            drawn = _order(dealing.seed, name, names[user]) / 2**64
            take = max(min(math.floor(dealing.shares[name] * count + drawn), left), 0)
            split[mine[left - take + 1 : left + 1]] = SPLITS.index(name)
            left -= take
        start += count
    for name in OTHERS:
        if dealing.shares[name] and not (split == SPLITS.index(name)).any():
            raise ValueError(f"no user has enough images to give one to {name}: give a larger --{name}_share")
    return split
