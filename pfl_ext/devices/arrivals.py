"""Asynchronous training as a list of events, all of which are known before training.

M different users train at any time. When one finishes, another user starts at once from the newest version of
the model; it is drawn uniformly from those who do not train. The server takes updates in the order of their
arrival. With K of them it makes a step, and the version grows by one. The time that a user takes follows from
its device and its images (`pfl_ext.devices.fleet`), so nothing here depends on weights.

Letters: M users at a time, K updates of a step, U users, n users of a step.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dataset.arrays import FloatArray, IntArray
from pfl_ext.privacy.sampling import private_cohort
from pfl_ext.randomness import stream


class Job(NamedTuple):
    """The training of one user."""

    user: int
    version: int
    """Version of the model from which it started: the number of server steps made before."""


@dataclass(frozen=True)
class ServerStep:
    """One step of the server."""

    jobs: tuple[Job, ...]
    """K jobs, in the order of their arrival."""
    stale: int
    """Number of updates since the last step that were too old."""
    lost: int
    """Number of users who dropped out since the last step."""
    end: float
    """Virtual seconds from the run's start."""

    def by_version(self) -> dict[int, IntArray]:
        """The users ``[n]`` by the version from which they started, the oldest version first."""
        found: dict[int, list[int]] = {}
        for job in self.jobs:
            found.setdefault(job.version, []).append(job.user)
        return {version: np.array(users, np.int64) for version, users in sorted(found.items())}


class _Drawn:
    """The users who train at present."""

    def __init__(self, num_users: int, seed: int) -> None:
        self._num_users, self._seed, self.users = num_users, seed, set[int]()

    def add(self, number: int) -> int:
        """Draw the user of job ``number``. If no user trains, it is the cohort of one of that round."""
        others = self._num_users - len(self.users)
        user = int(private_cohort("fixed", self._seed, number, others, 1)[0])
        for other in sorted(self.users):  # from an index among the others to a user's number
            user += user >= other
        self.users.add(user)
        return user


def server_steps(
    seconds: FloatArray,
    *,
    concurrency: int,
    buffer_size: int,
    max_staleness: int | None,
    drop_out: float,
    num_steps: int,
    seed: int,
) -> list[ServerStep]:
    """The steps of a run.

    Args:
        seconds: virtual seconds that each user takes, ``[U]``, above 0.
        concurrency: M, at most U.
        buffer_size: K.
        max_staleness: greatest age in server steps at which an update is used; None: all are used.
        drop_out: probability that a user is lost when it would have finished.
        num_steps: number of server steps.
        seed: the run's seed.
    """
    drawn, heap = _Drawn(len(seconds), seed), list[tuple[float, int, Job]]()
    steps, jobs, stale, lost, begun = list[ServerStep](), list[Job](), 0, 0, 0

    def begin(now: float) -> None:
        nonlocal begun
        user = drawn.add(begun)
        heapq.heappush(heap, (now + float(seconds[user]), begun, Job(user, len(steps))))
        begun += 1

    for _ in range(concurrency):
        begin(0.0)
    while len(steps) < num_steps:
        now, number, job = heapq.heappop(heap)
        drawn.users.remove(job.user)
        if drop_out and stream(seed, "drop-out of a job", number).random() < drop_out:
            lost += 1
        elif max_staleness is not None and len(steps) - job.version > max_staleness:
            stale += 1
        else:
            jobs.append(job)
        if len(jobs) == buffer_size:
            steps.append(ServerStep(tuple(jobs), stale, lost, now))
            jobs, stale, lost = [], 0, 0
        begin(now)
    return steps
