"""Asynchronous training as a list of events, all of them known before anybody trains.

At any time ``concurrency`` users are in flight, each at most once. A user who finishes is followed at once by
another, drawn alike from those who are not in flight, who starts from the newest version of the model. The
server takes K updates in the order in which they arrive, makes a step, and its version grows by one. How long
a user takes follows from its device and its images (`pfl_ext.devices.fleet`), so nothing here looks at a
weight, and whoever comes for a step can be trained together.

Letters: M users in flight, K updates of a step, U users.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pfl_ext.privacy.sampling import private_cohort
from pfl_ext.randomness import stream

FloatArray = npt.NDArray[np.float64]


class Job(NamedTuple):
    """A user who trained for a server step."""

    user: int
    version: int
    """Of the model from which it started: so many server steps were done."""


@dataclass(frozen=True)
class ServerStep:
    """One step of the server."""

    jobs: tuple[Job, ...]
    """Of the K users, in the order of their arrival."""
    stale: int
    """Updates that came since the step before and were too old."""
    lost: int
    """Users who dropped out since then."""
    end: float
    """Virtual seconds from the run's start."""


class _Free:
    """Users who are not in flight."""

    def __init__(self, num_users: int, seed: int) -> None:
        self._num_users, self._seed, self.busy = num_users, seed, set[int]()

    def take(self, number: int) -> int:
        """The user of the job of this number; with nobody in flight the one of a cohort of one."""
        count = self._num_users - len(self.busy)
        user = int(private_cohort("fixed", self._seed, number, count, 1)[0])
        for other in sorted(self.busy):
            user += user >= other
        self.busy.add(user)
        return user


def server_steps(
    seconds: FloatArray,
    *,
    concurrency: int,
    buffer: int,
    max_staleness: int | None,
    drop_out: float,
    num_steps: int,
    seed: int,
) -> list[ServerStep]:
    """The steps of a run.

    Args:
        seconds: that each user takes, ``[U]``, above 0.
        concurrency: M, at most U.
        buffer: K.
        max_staleness: server steps since its start after which an update is not taken; None: any is.
        drop_out: probability of a user to be lost at its end.
        num_steps: how many steps there are.
        seed: of the run.
    """
    free, heap = _Free(len(seconds), seed), list[tuple[float, int, Job]]()
    steps: list[ServerStep] = []
    jobs, stale, lost, begun = list[Job](), 0, 0, 0

    def begin(now: float) -> None:
        nonlocal begun
        user = free.take(begun)
        heapq.heappush(heap, (now + float(seconds[user]), begun, Job(user, len(steps))))
        begun += 1

    for _ in range(concurrency):
        begin(0.0)
    while len(steps) < num_steps:
        now, number, job = heapq.heappop(heap)
        free.busy.remove(job.user)
        if drop_out and stream(seed, "drop-out of a job", number).random() < drop_out:
            lost += 1
        elif max_staleness is not None and len(steps) - job.version > max_staleness:
            stale += 1
        else:
            jobs.append(job)
        if len(jobs) == buffer:
            steps.append(ServerStep(tuple(jobs), stale, lost, now))
            jobs, stale, lost = [], 0, 0
        begin(now)
    return steps
