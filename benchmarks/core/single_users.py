"""How the model that a run reports does on each user by itself: ``clients`` of ``results.json``.

Users of val and test are scored one by one, those who have training images (``seen``) apart from others
(``new``): seen users on val, where they have images there, and else on test; new ones on test, and else on
val. So a val of `data.val_share` scores each training user on images of its own that were set aside. A split
that belongs to fewer than two users of a kind says nothing about differences between users, and is left out.

Algorithms with a model for each user write ``clients`` themselves, in the same form.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from pfl.model.pytorch import PyTorchModel

from benchmarks.core.config.trees import Tree
from benchmarks.core.experiment import Experiment
from benchmarks.core.features import Inputs
from dataset.arrays import IntArray
from dataset.store.index import in_another_split
from dataset.store.views import PARTITIONED, Split
from pfl_ext.algorithms.own_images import Scores, write_users
from pfl_ext.data.federated_dataset import ImageStore, natural_partition
from pfl_ext.data.schedule import longest_first
from pfl_ext.workers.distributed import apart, begin_work, current, is_main

ORDER = {"seen": ("val", "test"), "new": ("test", "val")}
"""The splits in which the users of a kind are looked for, in turn."""


def scores_of_users(
    experiment: Experiment[Any], model: PyTorchModel, inputs: Inputs, directory: Path
) -> Tree:
    """The scores by kind of user; those of each user are written. All workers call this.

    Args:
        experiment: of the run, which is not private.
        model: is scored where it stands.
        inputs: what it is fed.
        directory: of the run.

    Returns:
        By kind, as `Scores.summary` has it for the model ``server``, and the ``split``; empty without users.
    """
    found, rows = {}, list[Tree]()
    for kind, splits in ORDER.items():
        for name in splits:
            if name == "val" and experiment.followed != "val":
                continue  # it is test, by another name
            if name != "val" and name not in experiment.final_splits:
                continue
            store, trained = inputs.split(name), trained_users(experiment, name)
            users = _users(store, trained, kind == "seen")
            if len(users) > 1:
                scores = _scored(store, users, model)
                found[kind] = {"split": name, **scores.summary(["server"])}
                ids = [store.user_ids[user] for user in users.tolist()]
                rows += scores.each(kind, name, {user: trained.get(user, 0) for user in ids})
                break
    if rows and is_main():
        write_users(directory, rows)
    return {"clients": found} if found else {}


def trained_users(experiment: Experiment[Any], split: str) -> dict[str, int]:
    """How many training images the users have who have any, by the ids that they have in a split.

    These are the file's own users, also where a drawn partition deals their images to clients: a client has
    the name of nobody in another split of the file. Only a val that is carved from train belongs to clients.
    """
    train, partition, images = experiment.split("train"), experiment.partition(), experiment.split(split)
    owners = natural_partition(train) if partition is None else partition
    clients = dict(zip(owners.user_ids, owners.sizes.tolist()))
    if isinstance(images, Split) and images.file_split == PARTITIONED:
        return clients
    users = dict[str, int]()
    if isinstance(train, Split):
        index = experiment.file.split(train.file_split)
        found, counts = np.unique(index.user_index[train.file_rows[owners.rows]], return_counts=True)
        users = {index.user_ids[user]: count for user, count in zip(found.tolist(), counts.tolist())}
    if experiment.protected().partition is None:
        users |= clients
    return users | {in_another_split(user, split): count for user, count in users.items()}


def _users(store: ImageStore, trained: Collection[str], seen: bool) -> IntArray:
    """The numbers of the users with images, who have training images, or have none."""
    kind = np.array([(user in trained) == seen for user in store.user_ids], bool)
    return np.flatnonzero(kind & (np.diff(store.user_offsets) > 0)).astype(np.int64)


def _scored(store: ImageStore, users: IntArray, model: PyTorchModel) -> Scores:
    offsets, workers = store.user_offsets, current()
    rows = [np.arange(offsets[user], offsets[user + 1]) for user in users.tolist()]
    scores = Scores(store, rows, model)
    sizes = np.array([len(each) for each in rows], np.float64)
    mine = longest_first(sizes, 1 if workers is None else workers.world_size)
    begin_work(single_users=len(users))
    with apart():
        scores.add("server", sorted(mine[0 if workers is None else workers.global_rank]))
    return scores
