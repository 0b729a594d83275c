"""The plan of a round: the search stops early, and finds the same plan as one that tries everything."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pfl_ext.data.federated_dataset import Member
from pfl_ext.engine import plan as module
from pfl_ext.engine.plan import WIDE, Plan, Task, dealt, grouped, plan

BATCH = 8


def exhaustive(tasks: Sequence[Task], num_lanes: int) -> Plan:
    """The best plan of all numbers of users on all cores."""
    tasks = sorted(tasks, key=lambda task: -task.work)
    best, least = Plan([], []), float("inf")
    for count in range(len(tasks) + 1):
        if count and tasks[count - 1].together:
            break
        lanes = dealt(tasks[count:], num_lanes)
        time = sum(task.work for task in tasks[:count]) / (num_lanes * WIDE)
        time += max(sum(task.work for task in lane) for lane in lanes)
        if time < least:
            best, least = Plan(tasks[:count], [lane[::-1] for lane in lanes]), time
    return best


def tasks_of(images: Sequence[int], fuse: bool) -> list[Task]:
    members = [Member(user, 0, n, -(-n // BATCH), n) for user, n in enumerate(images)]
    return grouped(members, 64, fuse)


sizes = st.one_of(st.integers(1, 12), st.integers(1, 300), st.sampled_from([40, 1000]))


@given(st.lists(sizes, max_size=50), st.integers(1, 17), st.booleans())
def test_the_plan_is_that_of_the_exhaustive_search(images: list[int], lanes: int, fuse: bool) -> None:
    tasks = tasks_of(images, fuse)
    assert plan(tasks, lanes) == exhaustive(tasks, lanes)


@pytest.mark.parametrize("kind", ["equal", "heavy tail", "two sizes"])
def test_a_large_cohort_is_dealt_a_few_times(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every count of users on all cores was tried before, 2,001 deals of 2,000 users."""
    rng, users = np.random.default_rng(0), 2000
    images = {
        "equal": np.full(users, 50),
        "heavy tail": 1 + 20 * rng.pareto(1.2, users).astype(int),
        "two sizes": np.where(rng.random(users) < 0.02, 1000, 20),
    }[kind]
    deals = []

    def counted(tasks: Sequence[Task], parts: int) -> list[list[Task]]:
        deals.append(len(tasks))
        return dealt(tasks, parts)

    monkeypatch.setattr(module, "dealt", counted)
    plan(tasks_of(images.tolist(), True), 16)
    assert 1 <= len(deals) <= 32
