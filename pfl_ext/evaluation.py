"""Scoring a whole split centrally, in batches, each worker its share.

Shape letters: N images, K labels, B batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pfl.internal import ops
from pfl.internal.ops.pytorch_ops import get_default_device
from pfl.internal.ops.selector import get_default_framework_module as get_ops
from pfl.metrics import Metrics, StringMetricName, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor

from dataset.files import prefetched
from pfl_ext.data.federated_dataset import ByteArray, ImageStore, IntArray
from pfl_ext.data.transfer import pinned
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.tasks.accuracy import ClassCounts
from pfl_ext.tasks.metrics import MultiLabelScores
from pfl_ext.tasks.objectives import MULTI_LABEL, Objective

LOSS = StringMetricName("loss")
SCORES = StringMetricName("scores")
KEPT = 0.1
"""Of a GPU's free memory: a split that takes less stays there from one evaluation to the next."""
Batch = tuple[Tensor, Tensor, ByteArray]


@dataclass(frozen=True)
class CentralEvaluation:
    """One split to be scored, and how."""

    store: ImageStore
    batch_size: int = 256
    threads: int = 2
    _kept: list[Batch] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def num_images(self) -> int:
        """N."""
        return int(self.store.user_offsets[-1])

    @torch.no_grad()
    def __call__(self, model: PyTorchModel) -> Metrics:
        """Loss and scores of the split, summed over batches and workers.

        `SCORES` is a `MultiLabelScores`, or a `ClassCounts` where the objective is single_label. Each worker
        reads only its own contiguous share of the rows. On a CUDA device losses and predictions stay there
        to the end of the share and come back in one transfer; images and targets stay too where `KEPT`
        allows, and are not read again.
        """
        world_size, rank = get_ops().distributed.world_size, get_ops().distributed.global_rank
        edges = (np.arange(world_size + 1, dtype=np.int64) * self.num_images) // world_size
        mine = np.arange(edges[rank], edges[rank + 1])
        module = model.pytorch_model
        objective = module.objective if isinstance(module, ImageClassifier) else MULTI_LABEL
        was_training = module.training
        module.eval()
        found = self._share(model, objective, mine)
        module.train(was_training)
        metrics = self._metrics(objective, mine, *found)
        return ops.all_reduce_metrics(metrics) if world_size > 1 else metrics

    def _share(
        self, model: PyTorchModel, objective: Objective, rows: IntArray
    ) -> tuple[float, npt.NDArray[Any], ByteArray]:
        """Sum of losses, predictions ``[n, K]`` or ``[n]``, and targets ``[n, K]`` of n rows."""
        device = get_default_device()
        losses, predictions, truth = [], [], []
        for images, targets, own in self._kept or self._read(rows, device):
            with model.amp_context or contextlib.nullcontext():
                logits = model.pytorch_model(images).float()
            batch = objective.scored(logits.to(targets.device), targets)
            losses.append(batch[0])
            predictions.append(batch[1])
            truth.append(own)
        if not len(rows):  # more workers than images
            none = self.store.read(rows)[1]
            return 0.0, np.empty(none.shape if objective.per_label else 0, np.float32), none
        total = torch.cat(losses).sum()
        return float(total), torch.cat(predictions).cpu().numpy(), np.concatenate(truth)

    def _read(self, rows: IntArray, device: torch.device) -> Iterator[Batch]:
        """Images on the device, targets where they are scored, and on the CPU."""
        on_gpu = device.type == "cuda"
        where = device if on_gpu else torch.device("cpu")  # Apple's devices have no float64
        room = torch.cuda.mem_get_info(device)[0] * KEPT if on_gpu else 0.0

        def read(batch: IntArray) -> tuple[Tensor, Tensor]:
            images, targets = self.store.read(batch)
            return pinned(torch.from_numpy(images), device), pinned(torch.from_numpy(targets), device)

        batches = [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]
        kept: list[Batch] = []
        for images, targets in prefetched(read, batches, ahead=2 * self.threads, threads=self.threads):
            batch = (
                images.to(device, non_blocking=True),
                targets.to(where, non_blocking=True),
                targets.numpy(),
            )
            if (images.nbytes + targets.nbytes) * len(rows) / len(images) <= room:
                kept.append(batch)
            yield batch
        self._kept.extend(kept)

    def _metrics(
        self,
        objective: Objective,
        rows: IntArray,
        loss: float,
        predictions: npt.NDArray[Any],
        targets: ByteArray,
    ) -> Metrics:
        scores = (
            MultiLabelScores.from_batch(self.num_images, rows, predictions, targets)
            if objective.per_label
            else ClassCounts.from_batch(predictions, targets)
        )
        return Metrics([(LOSS, Weighted(loss, len(rows))), (SCORES, scores)])
