"""Training steps that are recorded as CUDA graphs and replayed: one launch instead of hundreds a step.

A graph has one batch size. So batches are padded to the next of a few sizes with images of weight zero, which
changes nothing, since no layer mixes images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pfl_ext.engine.training import Batch, LocalTraining

Step = Callable[[LocalTraining, bool, Batch], None]
WARM_UPS = 3
"""Steps before a lane's first recording, as torch's notes on CUDA graphs ask for."""
ONCE = 1
"""Steps before each further recording, in which libraries choose what they do for its sizes."""


def padded(size: int) -> int:
    """The batch size that ``size`` images are padded to: 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    power = 1
    while power < size:
        power *= 2
    return 3 * power // 4 if power >= 4 and size <= 3 * power // 4 else power


@dataclass
class _Recorded:
    batch: Batch  # on the device; what a replay reads
    replay: Callable[[], Any]


class StepGraphs:
    """The recordings of one lane, by batch size, by place (first step or later) and by the form of a step.

    ``changed`` returns the tensors that a step writes. Recording restores their content.
    """

    def __init__(self, device: torch.device, changed: Callable[[], Sequence[Tensor]]) -> None:
        self._device, self._changed = device, changed
        self._recorded: dict[tuple[int, bool, LocalTraining], _Recorded] = {}
        self._pool: Any = None

    def record(self, step: Step, local: LocalTraining, most: int, sample: Batch) -> None:
        """Record steps for all batch sizes up to that of ``most`` images; other recordings are dropped.

        The largest size is recorded first, so that the others fit into its memory. ``sample`` is any batch.
        """
        self._recorded.clear()
        sizes = sorted({padded(n) for n in range(1, most + 1)}, reverse=True)
        for size in sizes:
            for first in (True, False):
                self._recorded[size, first, local] = self._prepared(step, local, first, size, sample)

    def run(self, step: Step, local: LocalTraining, first: bool, batch: Batch) -> None:
        """Run ``step`` on this CPU batch (best pinned), by replay if it was recorded."""
        n = len(batch.images)
        graph = self._recorded.get((padded(n), first, local))
        if graph is None:
            step(local, first, batch.on(self._device))
            return
        held = graph.batch
        for ours, fresh in zip(held, batch):
            ours[:n].copy_(fresh, non_blocking=True)
        if n < len(held.images):
            held.shares[n:].zero_()
            held.crops[n:].copy_(held.crops[:1].expand(len(held.crops) - n, -1))  # any crop inside the image
        graph.replay()

    def _prepared(self, step: Step, local: LocalTraining, first: bool, size: int, sample: Batch) -> _Recorded:
        static = Batch(*(p[:1].to(self._device).repeat(size, *[1] * (p.ndim - 1)) for p in sample))
        static.shares.zero_()

        def call() -> None:
            step(local, first, static)

        vectors = self._changed()
        before = [vector.clone() for vector in vectors]
        replay = self._capture(call) if self._device.type == "cuda" else call
        for vector, old in zip(vectors, before):
            vector.copy_(old)
        return _Recorded(static, replay)

    def _capture(self, call: Callable[[], None]) -> Callable[[], None]:
        for _ in range(ONCE if self._recorded else WARM_UPS):
            call()
        stream = torch.cuda.current_stream(self._device)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            call()
        return graph.replay
