"""How the model that a run reports does on each user by itself: ``clients`` of ``results.json``.

Users of val and test are scored one by one, those who have training images (``seen``) apart from others
(``new``), on test where they have images there, and else on val. Only a val of `data.val_share` comes before
test for seen users: it has images of each client's own, also of clients whose images a partition dealt. A
split that belongs to fewer than two users of a kind says nothing about differences between users, and is left
out.

Algorithms with a model for each user write ``clients`` themselves, in the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import pairwise
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
from pfl_ext.algorithms.own_images import OwnSplit, Scores, write_users
from pfl_ext.data.federated_dataset import ImageStore, Partition, natural_partition
from pfl_ext.data.schedule import longest_first
from pfl_ext.workers.distributed import apart, begin_work, current, is_main


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
    of_clients = _has(experiment, "val") and _is_carved(experiment, "val")
    for kind in ("seen", "new"):
        for name in ("val", "test") if kind == "seen" and of_clients else ("test", "val"):
            if not _has(experiment, name):
                continue
            store, trained = inputs.split(name), trained_users(experiment, name)
            users = _users(store, trained, kind == "seen")
            if len(users) > 1:
                scores = _scored(OwnSplit(name, store, _rows(store)), users, model)
                found[kind] = scores.summary(["server"])
                ids = [store.user_ids[user] for user in users.tolist()]
                names = {in_another_split(user, name): user for user in trained}
                rows += scores.each(kind, {names.get(user, user): trained.get(user, 0) for user in ids})
                break
    if rows and is_main():
        write_users(directory, rows)
    return {"clients": found} if found else {}


def own_split(experiment: Experiment[Any], stores: Callable[[str], ImageStore]) -> OwnSplit | None:
    """The images that score users' own models, by `federated.options.scored_on`; None: those of train.

    Args:
        experiment: of the run.
        stores: the images of a split.

    Raises:
        ValueError: when the benchmark has no such split.
    """
    config = experiment.config
    name = getattr(config.federated.chosen_options, "scored_on", "train")
    if config.mode != "federated" or name == "train":
        return None
    if not _has(experiment, name):
        raise ValueError(
            f"federated.options.scored_on is {name}, but this run has no such split: set it to train or "
            f"{'test' if name == 'val' else 'val'}"
        )
    store, of_user = stores(name), dict[str, IntArray]()
    owners, of_clients = _training_users(experiment), _is_carved(experiment, name)
    if of_clients or experiment.protected().partition is None:
        of_user = dict(zip(store.user_ids, _rows(store)))
    none = np.empty(0, np.int64)
    either = [
        (of_user.get(user, none), of_user.get(in_another_split(user, name), none)) for user in owners.user_ids
    ]
    return OwnSplit(name, store, [np.concatenate(rows) for rows in either])


def _has(experiment: Experiment[Any], split: str) -> bool:
    """Whether a run has val or test; where it follows test, its val is test by another name."""
    return experiment.followed == "val" if split == "val" else split in experiment.final_splits


def _training_users(experiment: Experiment[Any]) -> Partition:
    partition = experiment.partition()
    return natural_partition(experiment.split("train")) if partition is None else partition


def _is_carved(experiment: Experiment[Any], split: str) -> bool:
    """Whether a split was set aside from train, so that it belongs to the training users."""
    images = experiment.split(split)
    return isinstance(images, Split) and images.file_split == PARTITIONED


def trained_users(experiment: Experiment[Any], split: str) -> dict[str, int]:
    """How many training images the users have who have any, by the ids that they have in a split.

    These are the file's own users, also where a drawn partition deals their images to clients: a client has
    the name of nobody in another split of the file. Only a val that is carved from train belongs to clients.
    """
    train, owners = experiment.split("train"), _training_users(experiment)
    clients = dict(zip(owners.user_ids, owners.sizes.tolist()))
    if _is_carved(experiment, split):
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


def _rows(store: ImageStore) -> list[IntArray]:
    """Those of each user."""
    return [np.arange(*bounds) for bounds in pairwise(store.user_offsets.tolist())]


def _scored(split: OwnSplit, users: IntArray, model: PyTorchModel) -> Scores:
    scores, workers = Scores(split, users, model), current()
    sizes = np.array([len(split.rows[user]) for user in users.tolist()], np.float64)
    mine = longest_first(sizes, 1 if workers is None else workers.world_size)
    begin_work(single_users=len(users))
    with apart():
        scores.add("server", sorted(mine[0 if workers is None else workers.global_rank]))
    return scores
