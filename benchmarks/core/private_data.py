"""What the data file of a private run must be like, besides what its config says."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import numpy as np

from benchmarks.core.experiment import Experiment
from dataset.store.hdf5 import DataFile
from dataset.store.index import FOUND_CLASSES, owner
from dataset.store.validate import validate
from dataset.store.views import Split
from pfl_ext.models.pretrained import source_in


def check_private_data(experiment: Experiment[Any]) -> None:
    """Refuse a data file with which a private run's guarantee would not hold, before anything is written.

    * A user of val or test who also trains: its images there would be scored exactly, and could choose the
      best model, although the guarantee is for all images of a user.
    * With ``privacy.release: public``, classes that were found in the images: a class that one user alone has
      would give that user away.
    * So many users that ``local_privacy.delta`` would allow that one of them is published outright.
    * A file that was changed in place: a run that goes on would release other data with the same noise. Its
      images are checked when they are read (`DataFile`).
    * First weights that another run of ours trained on this data, whose budget is not counted here, if it has
      one. A private run with ``privacy.release: public`` names no data in its model, so that its own model is
      not recognised.

    Raises:
        ValueError: one line with the reason.
    """
    validate(experiment.file.path, images=False)
    weights = experiment.run.weights
    source = None if weights is None else source_in(experiment.config.model.arch, weights)
    if source is not None and experiment.file.fingerprint in source.learnt_from:
        raise ValueError(
            f"--weights {weights} was trained on images of {experiment.file.path}, which this run's "
            "privacy budget does not include: start from weights of other data, or without --weights"
        )
    privacy = experiment.config.privacy
    found = _found_classes(experiment.file)
    if privacy is not None and privacy.release == "public" and found:
        raise ValueError(
            f"privacy.release public would publish the classes of {', '.join(found)}, which were found "
            "in the images and may reveal a user: make the file again with a list of all classes, "
            "python -m dataset.convert --classes FILE"
        )
    partition = experiment.partition()
    trained = set((experiment.split("train") if partition is None else partition).user_ids)
    local = experiment.config.local_privacy
    if local is not None and local.delta * len(trained) >= 1:
        raise ValueError(
            f"local_privacy.delta is {local.delta:g}, but must be below 1 / {len(trained):,}, one "
            "divided by the number of users, because the guarantee could fail completely for one of "
            "them: lower it"
        )
    if experiment.protected().partition is None:  # else clients are protected, who have images of train alone
        _check_users(experiment, trained)


def _check_users(experiment: Experiment[Any], trained: Set[str]) -> None:
    """Refuse users who train and have images elsewhere, or of whom the file does not know it."""
    unknown = trained - set(experiment.file.split("train").user_ids)
    if unknown:
        raise ValueError(
            "privacy protects a user with all its images, but data.partition does not say which images "
            f"of val and test belong to its {len(unknown):,} users, for example {min(unknown)}: make "
            "the file with these users, or give the partition a name that does not begin with user, so "
            "that it has clients"
        )
    if moved := _moved(experiment):
        raise ValueError(
            "privacy protects a user with all its images, but data.partition gives an image of user "
            f"{moved[0]} to {moved[1]}: make the file with the partition's users, or give the partition a "
            "name that does not begin with user, so that it has clients"
        )
    followed = ["val"] if experiment.followed == "val" else []  # else it is test
    for name in (*followed, *experiment.final_splits):
        both = [user for user in experiment.split(name).user_ids if owner(user, trained) in trained]
        if both:
            raise ValueError(
                f"privacy protects a user with all its images, but {len(both):,} users of {name} are "
                f"also in train, for example {owner(both[0], trained)}: make the file again with each user "
                "in one split, or choose a data.partition, whose clients are then protected: drawn, or by a "
                "CSV of yours (python -m dataset.partitions F --csv)"
            )


def _moved(experiment: Experiment[Any]) -> tuple[str, str] | None:
    """An image's user by the file and by the partition, where the two differ."""
    partition, train = experiment.partition(), experiment.split("train")
    if not isinstance(train, Split):  # a store of a benchmark's own has no partitions of the file
        return None
    index = experiment.file.split(train.file_split)
    numbers = {user: number for number, user in enumerate(index.user_ids)}
    if partition is None:
        ids, offsets, rows = train.user_ids, train.user_offsets, train.file_rows
    else:
        ids, offsets, rows = partition.user_ids, partition.offsets, train.file_rows[partition.rows]
    dealt = np.repeat(np.array([numbers[user] for user in ids], np.int64), np.diff(offsets))
    theirs = index.user_index[rows]
    differ = np.flatnonzero(dealt != theirs)
    if not len(differ):
        return None
    return index.user_ids[theirs[differ[0]]], index.user_ids[dealt[differ[0]]]


def _found_classes(file: DataFile) -> list[str]:
    """The annotations whose classes depend on which users the file has."""
    made_by_convert = "users_without_images" in file.provenance
    return list(file.provenance.get(FOUND_CLASSES, file.annotation_names if made_by_convert else ()))
