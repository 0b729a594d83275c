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
    """pfl's sum, kept in ``dtype``, and over workers one reduction for statistics and metrics together.

    float64 makes the sum the same, to 1e-15, in whatever order and on however many workers users come; in
    float32 the order shows at 1e-7 of a round's update.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self._dtype = dtype

    def accumulate(self, *, accumulated: Any, user_stats: Any) -> Any:
        """The sum so far and one user more."""
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
        """Sums of all workers, on every worker."""
        workers = current()
        assert workers is not None, "several workers, but not connected through pfl_ext.workers.distributed"
        metadata, tensors = aggregated_worker_stats.get_weights()
        vectors = [get_ops().to_tensor(v) for v in aggregated_worker_metrics.to_vectors()]
        workers.sum_model([metadata, *vectors], tensors)
        return (
            aggregated_worker_stats.from_weights(metadata, tensors),
            aggregated_worker_metrics.from_vectors([get_ops().to_numpy(v) for v in vectors]),
        )
