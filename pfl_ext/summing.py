"""pfl's sum over users, and over workers."""

from __future__ import annotations

from typing import Any

import torch
from pfl.aggregate.base import SumAggregator
from pfl.context import CentralContext
from pfl.internal.ops.selector import get_default_framework_module as get_ops
from pfl.metrics import Metrics

from pfl_ext.workers.distributed import current


class FlatSumAggregator(SumAggregator):
    """pfl's sum in ``dtype``, with one reduction over workers for statistics and metrics together.

    In float64 the sum is the same up to 1e-15 for any order of users and any number of workers. In float32
    the order changes it by about 1e-7 of a round's update.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def accumulate(self, *, accumulated: Any, user_stats: Any) -> Any:
        """Add one more user to the sum so far."""
        if accumulated is None:
            return user_stats.apply_elementwise(lambda tensor: tensor.to(self._dtype))
        return super().accumulate(accumulated=accumulated, user_stats=user_stats)

    def worker_reduce(
        self,
        *,
        aggregated_worker_stats: Any,
        central_context: CentralContext,
        aggregated_worker_metrics: Metrics,
    ) -> tuple[Any, Metrics]:
        """The sums over all workers, on every worker."""
        workers = current()
        assert workers is not None, "several workers, but not connected through pfl_ext.workers.distributed"
        metadata, tensors = aggregated_worker_stats.get_weights()
        vectors = [get_ops().to_tensor(v) for v in aggregated_worker_metrics.to_vectors()]
        workers.sum_model([metadata, *vectors], tensors)
        return (
            aggregated_worker_stats.from_weights(metadata, tensors),
            aggregated_worker_metrics.from_vectors([get_ops().to_numpy(v) for v in vectors]),
        )
