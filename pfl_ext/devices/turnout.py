"""Which users of a round's cohort report, after how many steps, and when. All is known before training.

A round begins at a virtual time. It asks ``over_selection`` times the cohort's size of users. With traces it
asks only users who are on at that time; if none is, the round begins when the next device is switched on.

* Some users are *lost*: each drops out with probability ``drop_out``, or if its device is off when it would
  have finished.
* A straggler (FedProx, Li et al. 2020, 5.2) has time for ``U{1..E-1}`` of E epochs. A user who does not
  finish by ``deadline_s`` has time for the steps that fit. With ``late: partial`` such users make that many
  steps, at least one, and report; otherwise they are *late*.
* If more users were asked, the first ``cohort_size`` of the remaining ones to finish are kept; others are
  late.

The round ends when the last kept user has reported, or at the deadline if a user misses it. If no user
reports and there is no deadline, it ends when the slowest would have finished.

Partial work is only a smaller number of steps: a user trains on the first of its batches, and its weight is
still that of all its images that take part. A round in which no image is trained on changes only the time.

With privacy: only `drop_out` is argued. An independent coin, which no data influences, decides whether a user
is lost. So a user's part in a sum is its clipped update or 0, at most the bound long, and no other user's
part depends on it. Each accountant here assumes exactly this; the drawing of the cohort is unchanged. (Given
all coins, it is the same mechanism on the users who are not lost.) The divisor remains the expected cohort's
size: dividing by the number of reports would make the sensitivity depend on it. A deadline, over-selection,
stragglers by share of a cohort and traces are refused, since they make whether one user reports depend on
others' images, or the time depend on images.

Letters: n users who are asked, U users.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dataset.arrays import BoolArray, FloatArray, IntArray
from pfl_ext.devices.config import DevicesConfig
from pfl_ext.devices.fleet import Fleet, Traffic
from pfl_ext.devices.traces import Availability, sha256_of
from pfl_ext.randomness import stream


class Work(Protocol):
    """How a user's images become steps; `pfl_ext.data.sampling.BatchConfig` implements it."""

    @property
    def num_epochs(self) -> int:
        """E, passes over a user's images."""
        ...

    def num_steps(self, sizes: IntArray) -> IntArray:
        """Number of steps in all epochs of users with ``sizes`` images."""
        ...

    def steps_of_epochs(self, sizes: IntArray, epochs: IntArray) -> IntArray:
        """Number of steps of users with ``sizes`` images, each in its own number of ``epochs``."""
        ...

    def images_of_steps(self, sizes: IntArray, steps: IntArray) -> IntArray:
        """Number of images in the first ``steps`` steps of users with ``sizes`` images."""
        ...


class Users(Protocol):
    """The users to draw from; `pfl_ext.data.federated_dataset.FederatedImageDataset` implements it."""

    @property
    def sizes(self) -> IntArray:
        """Images of each user, ``[U]``."""
        ...

    @property
    def sampling(self) -> Work:
        """How images become steps."""
        ...

    def draw_cohort(self, cohort_size: int, number: int, among: IntArray | None = None) -> IntArray:
        """Draw a cohort of ``cohort_size`` users from all users, or from ``among``."""
        ...


@dataclass(frozen=True)
class Turnout:
    """The outcome of one round's cohort."""

    users: IntArray
    """The users who reported, in the cohort's order."""
    steps: IntArray
    """The number of steps that each of them made."""
    selected: int
    """How many users were asked."""
    lost: int
    """How many of them dropped out."""
    late: int
    """How many of them were not waited for."""
    start: float
    end: float
    """Virtual seconds from the run's start."""

    @cached_property
    def steps_of(self) -> dict[int, int]:
        """`steps` by user."""
        return dict(zip(self.users.tolist(), self.steps.tolist()))


class Turnouts:
    """The turnouts of a run's rounds, as functions of the config, the seed and the users' numbers of images.

    Args:
        config: the devices' config.
        users: the run's users.
        user_ids: their ids, ``[U]``.
        cohort_size: number of reports that a round needs.
        seed: the run's seed.
        sent: bytes that a user receives and sends in a round.

    Raises:
        ValueError: one line, when a file cannot be read, or more users are needed than there are.
    """

    def __init__(
        self,
        config: DevicesConfig,
        users: Users,
        user_ids: Iterable[str],
        *,
        cohort_size: int,
        seed: int,
        sent: Traffic,
    ) -> None:
        self._config, self._users, self._seed, self.sent = config, users, seed, sent
        ids = list(user_ids)
        self._fleet, self._cohort_size = Fleet(config, ids, seed), cohort_size
        self._asked = math.ceil(config.over_selection * cohort_size - 1e-9)
        if config.over_selection > 1 and self._asked > len(ids):
            raise ValueError(
                f"devices.over_selection draws {self._asked} users, but there are only {len(ids)}: set "
                f"it to at most {len(ids) / cohort_size:g}"
            )
        self._availability: Availability | None = None
        if config.availability is not None:
            path, period = Path(config.availability), config.availability_period_s
            assert period is not None
            sha256_of("devices.availability", path, config.availability_sha256)
            self._availability = Availability(path, period, ids, seed)
        self._starts = [0.0]
        self._last: tuple[int, Turnout] | None = None

    def check_deadline(self) -> None:
        """Raise ValueError, one line, if no user at all can meet the deadline."""
        deadline, sizes = self._config.deadline_s, self._users.sizes
        if deadline is None:
            return
        whole = self._users.sampling.num_steps(sizes)
        users = np.flatnonzero(whole > 0)
        steps = whole[users] if self._config.late == "drop" else np.ones(len(users), np.int64)
        least = self._seconds(users, steps).min(initial=math.inf)
        if deadline < least < math.inf:
            work = "all of its steps" if self._config.late == "drop" else "one step"
            raise ValueError(
                f"devices.deadline_s is {deadline:g}, but the fastest user needs {least:.3g} s for "
                f"{work} and for sending: raise it"
            )

    def of(self, number: int) -> Turnout:
        """The turnout of a round; the times of the rounds before it are computed when first needed."""
        while len(self._starts) <= number:
            self._starts.append(self._turnout(len(self._starts) - 1, self._starts[-1]).end)
        if self._last is None or self._last[0] != number:
            self._last = number, self._turnout(number, self._starts[number])
        return self._last[1]

    def line(self, number: int) -> dict[str, Any]:
        """A round's entries in ``metrics.jsonl``; ``virtual_seconds`` is the time at its end."""
        turnout = self.of(number)
        line: dict[str, Any] = {
            "selected": turnout.selected,
            "reported": len(turnout.users),
            "lost": turnout.lost,
            "late": turnout.late,
            "bytes_down": turnout.selected * self.sent.down,
            "bytes_up": len(turnout.users) * self.sent.up,
        }
        clock = {"virtual_seconds": round(turnout.end, 4)} if self._config.has_clock else {}
        return line | clock

    def _turnout(self, number: int, start: float) -> Turnout:
        config, sampling = self._config, self._users.sampling
        if self._availability is None:
            users = self._users.draw_cohort(self._asked, number)
        else:
            everybody = np.arange(len(self._users.sizes))
            among = everybody[self._availability.on(everybody, start)]
            if not len(among):
                start = self._availability.next_on(start)
                among = everybody[self._availability.on(everybody, start)]
            users = self._users.draw_cohort(min(self._asked, len(among)), number, among)
        sizes = self._users.sizes[users]
        whole = sampling.num_steps(sizes)
        steps, stragglers = self._of_stragglers(users, number, sizes, whole)
        steps = self._in_time(users, steps)
        late = (steps == 0) & (whole > 0)
        if config.deadline_s is not None:
            late |= self._seconds(users, steps) > config.deadline_s
        if config.late == "drop":
            late |= stragglers | (steps < whole)
        seconds = self._seconds(users, np.where(late, whole, steps))
        lost = stream(self._seed, "drop-outs", number).random(len(self._users.sizes))[users] < config.drop_out
        if self._availability is not None:
            lost |= ~self._availability.on(users, start + seconds)
        late &= ~lost
        reported = ~lost & ~late
        wanted = len(users)
        if config.over_selection > 1:
            wanted = min(self._cohort_size, len(users))
            first = np.flatnonzero(reported)[np.argsort(seconds[reported], kind="stable")]
            late[first[wanted:]], reported[first[wanted:]] = True, False
        kept = np.flatnonzero(reported)
        missed = len(kept) < wanted
        if config.deadline_s is not None and missed:
            length = config.deadline_s
        else:
            length = float(seconds[kept if len(kept) else slice(None)].max(initial=0))
        counts = int(lost.sum()), int(late.sum())
        return Turnout(users[kept], steps[kept], len(users), *counts, start, start + length)

    def _of_stragglers(
        self, users: IntArray, number: int, sizes: IntArray, whole: IntArray
    ) -> tuple[IntArray, BoolArray]:
        """By FedProx's protocol: the steps for which each user has time, and who is a straggler; ``[n]``."""
        count, chosen = round(self._config.stragglers * len(users)), np.zeros(len(users), bool)
        if not count:
            return whole, chosen
        steps, sampling = whole.copy(), self._users.sampling
        places = stream(self._seed, "stragglers", number).permutation(len(users))[:count]
        draws = stream(self._seed, "stragglers' epochs", number).random(len(self._users.sizes))[users[places]]
        epochs = 1 + np.floor(draws * (sampling.num_epochs - 1)).astype(np.int64)
        steps[places], chosen[places] = sampling.steps_of_epochs(sizes[places], epochs), True
        return steps, chosen

    def _in_time(self, users: IntArray, steps: IntArray) -> IntArray:
        """``[n]``: these steps, or as many as fit before the deadline."""
        deadline = self._config.deadline_s
        if deadline is None:
            return steps
        steps = steps.copy()
        for place in np.flatnonzero(self._seconds(users, steps) > deadline):
            one = users[place : place + 1]

            def seconds(count: int, user: IntArray = one) -> float:
                return float(self._seconds(user, np.array([count]))[0])

            steps[place] = max(bisect_right(range(steps[place]), deadline, key=seconds) - 1, 0)
        return steps

    def _seconds(self, users: IntArray, steps: IntArray) -> FloatArray:
        images = self._users.sampling.images_of_steps(self._users.sizes[users], steps)
        return self._fleet.seconds(users, images, self.sent)
