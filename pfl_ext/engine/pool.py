"""The threads of the lanes, which live from the first round to the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from pfl_ext.engine.card import begin_thread, fits, release
from pfl_ext.engine.lane import Lane
from pfl_ext.engine.plan import Plan, Task

Work = Callable[[Lane, Sequence[Task]], None]


def as_many(make: Callable[[], Lane], wanted: int) -> list[Lane]:
    """Make ``wanted`` lanes, or as many as fit into the device's memory."""
    lanes: list[Lane] = []
    while len(lanes) < wanted and fits(lambda: lanes.append(make())):
        pass
    return lanes


def keep(lanes: list[Lane], count: int) -> None:
    """Give up the lanes after the first ``count``, once their device has done all that they asked of it.

    Their memory was made on the caller's stream, which could otherwise hand it out while they still use it.
    """
    device = lanes[0].layout.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    del lanes[count:]
    release(device)


class LanePool:
    """Runs a plan's tasks, with a thread for each lane if there are several."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads: ThreadPoolExecutor | None = None

    def run(self, lanes: Sequence[Lane], tasks: Plan, work: Work) -> list[RuntimeError]:
        """Do ``work`` on all tasks. Returns the RuntimeErrors of torch or the device, after all lanes ended.

        Raises:
            Exception: any other exception of ``work``.
        """
        if len(lanes) == 1:
            return self._caught([lambda: work(lanes[0], [*tasks.wide, *tasks.lanes[0]])])
        if tasks.wide and (faults := self._caught([lambda: work(lanes[0], tasks.wide)])):
            return faults
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(lanes), "lane", begin_thread, (self._device,))
        running = [self._threads.submit(work, lane, mine) for lane, mine in zip(lanes, tasks.lanes)]
        for future in running:
            future.exception()  # waits: all must end before an error is raised
        return self._caught([future.result for future in running])

    @staticmethod
    def _caught(calls: Sequence[Callable[[], Any]]) -> list[RuntimeError]:
        faults = []
        for call in calls:
            try:
                call()
            except RuntimeError as fault:
                faults.append(fault)
        return faults

    def close(self) -> None:
        """Stop the threads."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
