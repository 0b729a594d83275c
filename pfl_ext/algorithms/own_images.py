"""Users' own images: which of them score which user, and the scores of users' models on them.

Letters: U users, M images that are scored.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pfl.internal import ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pydantic import NonNegativeInt
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from dataset.arrays import FloatArray, IntArray
from dataset.files import write_bytes
from pfl_ext.algorithms.per_user import scored_in_batches, spread, user_split
from pfl_ext.configs import STRICT, Fraction
from pfl_ext.data.federated_dataset import FederatedImageDataset, ImageStore, Partition
from pfl_ext.evaluation import LOSS, SCORES, autocast_of
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.workers.distributed import current

FILE = "clients.csv"
"""The file of a run directory that holds each scored user's scores."""


@checked_dataclass(frozen=True, config=STRICT)
class ScoredOptions:
    """How users are scored with models of their own."""

    held_out: Fraction = 0.25
    """Share of each user's training images that is not trained on, to score it; 0: no user is scored."""
    scored_on: Literal["train", "val", "test"] = "train"
    """Split of the images that score a user. train: of its training images, the share `held_out`."""
    split_seed: NonNegativeInt = 0
    """Seed that chooses these images, independent of the run's seed and of the algorithm."""
    score_every: NonNegativeInt = 0
    """Rounds between two scores of all users' personal models, in metrics.jsonl; 0: only at the end."""

    @property
    def set_aside(self) -> float:
        """The share of a user's training images that is not trained on."""
        return self.held_out if self.scored_on == "train" else 0.0

    @property
    def scores_users(self) -> bool:
        """Whether users are scored."""
        return self.scored_on != "train" or self.held_out > 0


@dataclass(frozen=True)
class OwnSplit:
    """The images of val or test that belong to training users."""

    name: str
    store: ImageStore
    rows: Sequence[IntArray]
    """Those of each training user."""


@dataclass(frozen=True)
class OwnImages:
    """A run's users, with the images that each trains on and those on which it is scored."""

    users: FederatedImageDataset
    """The users with only the images that they train on."""
    split: OwnSplit
    """The images that score a user; none for a user without any, and one with a single training image."""

    @classmethod
    def of(cls, users: FederatedImageDataset, options: ScoredOptions, own: OwnSplit | None) -> OwnImages:
        """Choose the images that score each user.

        Without ``own`` a share of a user's training images is set aside, rounded to whole images, at least
        one and not all. The choice is a function of (``split_seed``, user) alone, so every algorithm is
        scored on the same images. A user with one image trains on it and is not scored.
        """
        if own is not None:
            return cls(users, own)
        share, seed = options.set_aside, options.split_seed
        whole, train, held_out = users.partition, list[IntArray](), list[IntArray]()
        for user, name in enumerate(whole.user_ids):
            rows = whole.rows_of(user)
            if share == 0 or len(rows) < 2:
                train.append(rows)
                held_out.append(rows[:0])
            else:
                kept, scored = user_split(name, len(rows), 1 - share, seed)
                train.append(rows[kept])
                held_out.append(rows[scored])
        offsets = np.cumsum([0, *map(len, train)]).astype(np.int64)
        kept = users.of(Partition(whole.user_ids, np.concatenate(train), offsets))
        return cls(kept, OwnSplit("train", users.store, held_out))

    @property
    def scored(self) -> IntArray:
        """The users who have images that score them."""
        return np.flatnonzero([len(rows) > 0 for rows in self.split.rows]).astype(np.int64)

    def training_images(self, users: IntArray) -> dict[str, int]:
        """How many images each of these users trains on, by their ids."""
        trained = self.users.partition
        return {trained.user_ids[user]: int(trained.sizes[user]) for user in users.tolist()}


def check_scored(options: ScoredOptions, own: OwnSplit | None) -> None:
    """Refuse a split in which no training user has images, and options about images that score nobody.

    Raises:
        ValueError: one line with the option.
    """
    if options.scored_on != "train":
        if own is None or not any(map(len, own.rows)):
            raise ValueError(
                f"federated.options.scored_on is {options.scored_on}, but no training user has images there: "
                "users are matched by their names, and clients of a drawn partition only in a val of "
                "data.val_share; set it to train"
            )
        for key in ("held_out", "split_seed"):
            if getattr(options, key) not in (0, getattr(type(options), key)):
                raise ValueError(
                    f"federated.options.{key} has no effect if federated.options.scored_on is "
                    f"{options.scored_on}: leave it out, or set scored_on to train"
                )
    for key in ("score_every", "split_seed"):
        if getattr(options, key) and not options.scores_users:
            raise ValueError(
                f"federated.options.{key} has no effect if federated.options.held_out is 0, because no "
                f"images are held out: set held_out to a share, such as 0.25, or leave {key} out"
            )


@dataclass
class _Scored:
    """One worker's results for the images that it has scored with models of one kind."""

    rows: list[IntArray] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    predictions: list[Tensor] = field(default_factory=list)
    annotations: list[Any] = field(default_factory=list)
    columns: dict[int, list[float]] = field(default_factory=dict)


class Scores:
    """Scores of users' models on their own images. A user may have models of several kinds.

    Args:
        split: has the images.
        users: those who are scored, as places in ``split.rows``. There is at least one, each with an image.
        model: is scored with the weights that it has when `add` is called.
    """

    def __init__(self, split: OwnSplit, users: IntArray, model: PyTorchModel) -> None:
        module: ImageClassifier = model.pytorch_model
        self._split, self._module, self._model = split, module, model
        self._own = [split.rows[user] for user in users.tolist()]
        self._sizes = np.array([*map(len, self._own)], np.int64)
        self._offsets = np.cumsum([0, *self._sizes.tolist()]).astype(np.int64)
        self._batch = module.task.scored_together
        self._scored = defaultdict[str, _Scored](_Scored)
        self._names = list(self._columns(*self._score(self._own[0][:1])))
        self._tables: dict[str, FloatArray] = {}

    def _score(self, rows: IntArray) -> tuple[Tensor, Tensor, Any]:
        """Losses ``[m]`` and predictions ``[m, ...]`` of m rows, and their annotations."""
        images, annotations = self._split.store.read(rows)
        amp = autocast_of(self._model)
        losses, predictions = zip(*scored_in_batches(self._module, images, annotations, amp))
        return torch.cat(losses), torch.cat(predictions), annotations

    def _columns(self, losses: Tensor, predictions: Tensor, annotations: Any) -> Mapping[str, float]:
        """The scores of one user."""
        columns = self._module.task.user_columns(predictions, annotations)
        return {"loss": float(losses.mean()), **columns}

    def add(self, kind: str, places: Sequence[int]) -> None:
        """Score the network's present weights as these users' model of this kind, on this worker alone."""
        own = [self._own[place] for place in places]
        first = 0
        while first < len(places):  # users share a forward pass
            stop, count = first + 1, len(own[first])
            while stop < len(places) and count + len(own[stop]) <= self._batch:
                count += len(own[stop])
                stop += 1
            self._add(kind, places[first:stop], own[first:stop])
            first = stop

    def _add(self, kind: str, places: Sequence[int], own: Sequence[IntArray]) -> None:
        losses, predictions, annotations = self._score(np.concatenate(own))
        scored = self._scored[kind]
        scored.losses.append(losses)
        scored.predictions.append(predictions)
        scored.annotations.append(annotations)
        first = 0
        for place, rows in zip(places, own):
            part = slice(first, first + len(rows))
            columns = self._columns(losses[part], predictions[part], annotations[part])
            scored.columns[place] = [columns[name] for name in self._names]
            scored.rows.append(np.arange(self._offsets[place], self._offsets[place + 1]))
            first += len(rows)

    def summary(self, kinds: Sequence[str]) -> dict[str, Any]:
        """The scores that all workers have added, for ``results.json``. All workers call this.

        ``split`` names the images, ``images`` is M, and ``least images`` the number for the user with the
        fewest. For each kind
        ``pooled`` has the task's columns over all images together, and ``users`` has each column's `spread`
        over users, each of whom counts once.
        """
        return {
            "split": self._split.name,
            "users": len(self._sizes),
            "images": int(self._sizes.sum()),
            "least images": int(self._sizes.min()),
            **{kind: self._summary_of(kind) for kind in kinds},
        }

    def each(self, group: str, training_images: Mapping[str, int]) -> list[dict[str, Any]]:
        """A row for each user and kind of model that `summary` had, for `write_users`.

        Args:
            group: ``seen`` or ``new``.
            training_images: how many the users have, by their ids, in the order of the users.
        """
        return [
            {
                **{"group": group, "split": self._split.name, "user": user, "images": int(size)},
                **{"training_images": trained, "model": kind},
                **{name: round(float(value), 4) for name, value in zip(self._names, values)},
            }
            for kind, table in self._tables.items()
            for (user, trained), size, values in zip(training_images.items(), self._sizes, table)
        ]

    def _summary_of(self, kind: str) -> dict[str, Any]:
        task, workers, scored = self._module.task, current(), self._scored[kind]
        table = torch.zeros(len(self._sizes), len(self._names), dtype=torch.float64)
        for place, values in scored.columns.items():
            table[place] = torch.tensor(values, dtype=torch.float64)
        rows = np.concatenate([np.empty(0, np.int64), *scored.rows])
        annotations = [self._split.store.targets(np.empty(0, np.int64)), *scored.annotations]
        loss = float(torch.cat(scored.losses).sum()) if scored.losses else 0.0
        statistics = task.statistics(int(self._sizes.sum()), rows, scored.predictions, annotations)
        metrics = Metrics([(LOSS, Weighted(loss, len(rows))), (SCORES, statistics)])
        if workers is not None:
            (table,) = workers.all_reduce([table.to(self._module.mean.device)])
            metrics = ops.all_reduce_metrics(metrics)
        self._tables[kind] = table.cpu().numpy()
        pooled = {"loss": float(metrics[LOSS].overall_value), **task.summarise(metrics[SCORES])}
        return {
            "pooled": {name: round(value, 4) for name, value in pooled.items()},
            "users": {
                name: spread(values, self._sizes, name in task.shares_of_images)
                for name, values in zip(self._names, self._tables[kind].T)
            },
        }


def write_users(directory: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write `FILE`, a line for each of the rows of `Scores.each`."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_bytes(directory / FILE, text.getvalue().encode())
