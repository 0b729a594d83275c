"""Plans a round: which users are trained together, on which worker and in which lane, by predicted work.

A plan depends on the cohort alone, so the order of every floating-point sum is the same in each repetition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pfl_ext.data.federated_dataset import Member
from pfl_ext.data.schedule import longest_first

MAX_USERS = 16
"""Most users of a group where every user's norm is needed, since their gradients are in memory together."""
MAX_USERS_OF_FEATURES = 256
"""`MAX_USERS` for training on features, where a gradient is stored as its two factors."""
STEP, FUSED = 5.0, 1.3
"""Predicted work, in passes of one image: of a step in addition to its images, and of an image in a group."""
WIDE = 0.8
"""Speed of one step after another on all cores, relative to one step on each core at the same time."""

ROUNDING = 1e-9
"""More than sums of work in another order can differ by, relatively."""


@dataclass(frozen=True)
class Task:
    """Users who are trained together: one user, or several with one step each."""

    members: tuple[Member, ...]
    together: bool

    @property
    def work(self) -> float:
        """Predicted work, in passes of one image."""
        if self.together:
            return FUSED * sum(m.num_passes for m in self.members) + STEP
        (member,) = self.members
        return member.num_passes + STEP * member.num_steps


@dataclass(frozen=True)
class Arrangement:
    """How an engine arranges every round. It changes the sums only by rounding."""

    lanes: int
    fuse: bool
    """Whether users with one step share a pass, in groups."""
    images: int
    """Most images of a group."""

    def __str__(self) -> str:
        groups = f"groups of up to {self.images} images" if self.fuse else "users one by one"
        return f"{self.lanes} {'lane' if self.lanes == 1 else 'lanes'}, {groups}"


@dataclass(frozen=True)
class Plan:
    """First the users of ``wide`` are trained, one after another on all cores; then the lanes work.

    A lane begins with its lightest task, so that it does not wait long until the first images are read.
    """

    wide: list[Task]
    lanes: list[list[Task]]


def grouped(members: Sequence[Member], max_images: int, fuse: bool, max_users: int = MAX_USERS) -> list[Task]:
    """A cohort's tasks. Neither workers nor lanes change them, so neither changes any rounding."""
    tasks = [Task((m,), False) for m in members if not (fuse and m.num_steps == 1)]
    group: list[Member] = []
    images = 0
    for member in (m for m in members if fuse and m.num_steps == 1):
        images += member.num_passes
        if group and (len(group) == max_users or images > max_images):
            tasks.append(Task(tuple(group), True))
            group, images = [], member.num_passes
        group.append(member)
    return [*tasks, Task(tuple(group), True)] if group else tasks


def dealt(tasks: Sequence[Task], parts: int) -> list[list[Task]]:
    """Divide tasks among ``parts`` workers or lanes; each gets its tasks heaviest first."""
    shares = longest_first(np.array([task.work for task in tasks]), parts)
    return [[tasks[position] for position in share] for share in shares]


def plan(tasks: Sequence[Task], num_lanes: int, widen: bool = True) -> Plan:
    """The plan of least predicted time. ``widen``: whether a user may be trained on all cores."""
    tasks = sorted(tasks, key=lambda task: -task.work)
    best, least = Plan([], []), float("inf")
    wide, rest = 0.0, sum(task.work for task in tasks)
    for count in range(len(tasks) + 1):
        if count:
            if tasks[count - 1].together or not widen:
                break
            wide, rest = wide + tasks[count - 1].work, rest - tasks[count - 1].work
        on_all_cores = wide / (num_lanes * WIDE)
        if (on_all_cores + rest / num_lanes) * (1 - ROUNDING) >= least:
            break  # since WIDE is below 1, this bound only grows with the count
        if count < len(tasks) and (on_all_cores + tasks[count].work) * (1 - ROUNDING) >= least:
            continue  # the heaviest of the others alone takes too long
        lanes = dealt(tasks[count:], num_lanes)
        time = on_all_cores + max(sum(task.work for task in lane) for lane in lanes)
        if time < least:
            best, least = Plan(tasks[:count], [lane[::-1] for lane in lanes]), time
    return best
