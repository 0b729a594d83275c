"""Scores a whole split centrally, in batches; each worker scores its share.

Shape letters: n images of a worker's share.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from pfl.internal import ops
from pfl.internal.ops.pytorch_ops import get_default_device
from pfl.internal.ops.selector import get_default_framework_module as get_ops
from pfl.metrics import Metrics, StringMetricName, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor

from dataset.arrays import IntArray
from dataset.files import prefetched
from pfl_ext.data.federated_dataset import ImageStore
from pfl_ext.data.transfer import pinned
from pfl_ext.data.user_images import Annotations
from pfl_ext.tasks.task import Task

LOSS = StringMetricName("loss")
SCORES = StringMetricName("scores")
KEPT = 0.1
"""Share of a GPU's free memory. A split that takes less stays there from one evaluation to the next."""
Batch = tuple[Tensor, Tensor, Annotations]


def autocast_of(model: PyTorchModel) -> AbstractContextManager[Any]:
    """The context in which the network runs in the run's precision."""
    return model.amp_context or nullcontext()


@dataclass(frozen=True)
class CentralEvaluation:
    """Scores one split."""

    store: ImageStore
    batch_size: int = 256
    threads: int = 2
    _kept: list[Batch] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def num_images(self) -> int:
        """N, the number of images of the split."""
        return int(self.store.user_offsets[-1])

    @torch.no_grad()
    def __call__(self, model: PyTorchModel) -> Metrics:
        """Loss and scores of the split, summed over batches and workers.

        `SCORES` are the statistics of the model's task. Each worker reads only its own contiguous share of
        the rows. On a CUDA device losses and predictions stay there until the end of the share and are copied
        back in one transfer. Images and targets also stay there, if `KEPT` allows, and are not read again.
        """
        world_size, rank = get_ops().distributed.world_size, get_ops().distributed.global_rank
        edges = (np.arange(world_size + 1, dtype=np.int64) * self.num_images) // world_size
        rows = np.arange(edges[rank], edges[rank + 1])
        module = model.pytorch_model
        was_training = module.training
        module.eval()
        metrics = self._share(model, rows)
        module.train(was_training)
        return ops.all_reduce_metrics(metrics) if world_size > 1 else metrics

    def _share(self, model: PyTorchModel, rows: IntArray) -> Metrics:
        """The metrics of some rows ``[n]``."""
        module, device = model.pytorch_model, get_default_device()
        losses, predictions, annotations = [], [], [self.store.targets(rows[:0])]
        for images, targets, stored in self._kept or self._read(module.task, rows, device):
            with autocast_of(model):
                outputs, compared = module.outputs(images, targets)
            scored = module.task.scored(outputs.float().to(targets.device), compared.to(targets.device))
            losses.append(scored[0])
            predictions.append(scored[1])
            annotations.append(stored)
        loss = float(torch.cat(losses).sum()) if losses else 0.0  # no rows: more workers than images
        scores = module.task.statistics(self.num_images, rows, predictions, annotations)
        return Metrics([(LOSS, Weighted(loss, len(rows))), (SCORES, scores)])

    def _read(self, task: Task, rows: IntArray, device: torch.device) -> Iterator[Batch]:
        """Images on the device, targets on the device that scores them, and annotations as stored."""
        on_gpu = device.type == "cuda"
        where = device if on_gpu else torch.device("cpu")  # Apple's devices have no float64
        room = torch.cuda.mem_get_info(device)[0] * KEPT if on_gpu else 0.0

        def read(batch: IntArray) -> tuple[Tensor, Tensor, Annotations]:
            images, stored = self.store.read(batch)
            return pinned(torch.from_numpy(images), device), pinned(task.collate(stored), device), stored

        size = min(self.batch_size, task.scored_together)
        batches = [rows[i : i + size] for i in range(0, len(rows), size)]
        kept: list[Batch] = []
        for images, targets, stored in prefetched(
            read, batches, ahead=2 * self.threads, threads=self.threads
        ):
            batch = images.to(device, non_blocking=True), targets.to(where, non_blocking=True), stored
            if (images.nbytes + targets.nbytes) * len(rows) / len(images) <= room:
                kept.append(batch)
            yield batch
        self._kept.extend(kept)
