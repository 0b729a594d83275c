"""Scoring a whole split centrally, in batches, each worker its share.

Shape letters: N images, K labels, B batch.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pfl.internal import ops
from pfl.internal.ops.pytorch_ops import get_default_device
from pfl.internal.ops.selector import get_default_framework_module as get_ops
from pfl.metrics import Metrics, StringMetricName, Weighted
from pfl.model.pytorch import PyTorchModel

from pfl_ext.federated_dataset import ByteArray, ImageStore, IntArray
from pfl_ext.metrics import MultiLabelScores
from pfl_ext.prefetch import prefetched

FloatArray = npt.NDArray[np.floating[Any]]

LOSS = StringMetricName("loss")
SCORES = StringMetricName("scores")


@dataclass(frozen=True)
class CentralEvaluation:
    """One split to be scored, and how."""

    store: ImageStore
    batch_size: int = 256
    threads: int = 2

    @property
    def num_images(self) -> int:
        """N."""
        return int(self.store.user_offsets[-1])

    @torch.no_grad()
    def __call__(self, model: PyTorchModel) -> Metrics:
        """Loss and scores of the split, summed over batches and workers.

        Each worker reads only its own contiguous share of the rows.
        """
        world_size, rank = get_ops().distributed.world_size, get_ops().distributed.global_rank
        edges = (np.arange(world_size + 1, dtype=np.int64) * self.num_images) // world_size
        mine = np.arange(edges[rank], edges[rank + 1])
        batches = [mine[i : i + self.batch_size] for i in range(0, len(mine), self.batch_size)]
        module = model.pytorch_model
        was_training = module.training
        module.eval()
        total: Any = None
        for rows, (images, targets) in zip(
            batches, prefetched(self.store.read, batches, ahead=2 * self.threads, threads=self.threads)
        ):
            metrics = self._one_batch(model, rows, images, targets)
            total = metrics if total is None else total + metrics
        module.train(was_training)
        if total is None:  # more workers than images
            targets = self.store.read(mine)[1]
            total = self._metrics(mine, np.empty(0), np.empty(targets.shape, np.float32), targets)
        return ops.all_reduce_metrics(total) if world_size > 1 else total

    def _one_batch(
        self, model: PyTorchModel, rows: IntArray, images: ByteArray, targets: ByteArray
    ) -> Metrics:
        with model.amp_context or contextlib.nullcontext():
            logits = model.pytorch_model(torch.from_numpy(images).to(get_default_device())).float().cpu()
        truth = torch.from_numpy(targets).float()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, truth, reduction="none")
        return self._metrics(rows, loss.double().mean(1).numpy(), torch.sigmoid(logits).numpy(), targets)

    def _metrics(self, rows: IntArray, losses: FloatArray, scores: FloatArray, targets: ByteArray) -> Metrics:
        return Metrics(
            [
                (LOSS, Weighted(float(losses.sum()), len(rows))),
                (SCORES, MultiLabelScores.from_batch(self.num_images, rows, scores, targets)),
            ]
        )
