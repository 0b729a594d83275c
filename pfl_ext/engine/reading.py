"""Users' images as the batches that lanes train on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from pfl_ext.data.federated_dataset import FederatedImageDataset, Member
from pfl_ext.data.transfer import pinned
from pfl_ext.engine.plan import Task as Work
from pfl_ext.engine.training import Batch, LocalTraining, joined, settled
from pfl_ext.tasks.task import Task


class Reading:
    """Reads batches for a task, into memory that a device fetches from."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task, self._device = task, device

    def read(
        self, dataset: FederatedImageDataset, local: LocalTraining, once: bool, task: Work
    ) -> tuple[list[Batch], list[Batch], list[int]]:
        """The batches of these users' steps; if ``once``, each image once besides; `together`'s sizes."""
        if task.together:
            whole, sizes = self.together(dataset, task.members, local)
            return [whole], [], sizes
        user = dataset.read(task.members[0])
        besides = self.settled(user.once()) if once else ()
        return list(self.batches(user, local)), list(besides), []

    def batches(self, dataset: Any, local: LocalTraining) -> Iterator[Batch]:
        """The batches of a user's local training, one a step."""
        return self.settled(_raw(dataset, local))

    def settled(self, batches: Iterable[Any]) -> Iterator[Batch]:
        """These batches with what the task makes of their targets."""
        return settled(batches, self._task, self._device)

    def together(
        self, dataset: FederatedImageDataset, members: Sequence[Member], local: LocalTraining
    ) -> tuple[Batch, list[int]]:
        """The only batches of users with one step, as one, and their sizes."""
        rows = dataset.single_features(members)
        if rows is None:
            each = (batch for m in members for batch in _raw(dataset.read(m), local))
            whole, sizes = joined(list(settled(each, self._task, torch.device("cpu"))))
        else:
            features, targets, crops = rows
            alone = [self._task.settled(row) for row in torch.split(targets, 1)]
            whole = Batch(features, torch.cat([t for t, _ in alone]), crops, torch.cat([s for _, s in alone]))
            sizes = [1] * len(members)
        return Batch(*(pinned(t, self._device) for t in whole)), sizes


def _raw(dataset: Any, local: LocalTraining) -> Iterator[Any]:
    return (batch for _ in range(local.num_epochs) for batch in dataset.iter(local.batch_size))
