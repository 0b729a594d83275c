"""The order of events of asynchronous training, by plain loops and by known numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from pfl_ext.devices.arrivals import Job, ServerStep, server_steps
from pfl_ext.randomness import stream

SECONDS = np.array([1.0, 2.5, 7.0, 1.5, 4.0, 0.5])
PLAIN = {"concurrency": 3, "buffer_size": 2, "max_staleness": None, "drop_out": 0.0, "num_steps": 40}


def steps(seconds: Any = SECONDS, seed: int = 3, **more: Any) -> list[ServerStep]:
    chosen: dict[str, Any] = {**PLAIN, **more}
    return server_steps(seconds, **chosen, seed=seed)


class Flight(NamedTuple):
    end: float
    number: int
    user: int
    version: int


def by_plain_loops(seconds: Any, seed: int, **more: Any) -> list[ServerStep]:
    """The same by a list of who trains, which is looked through for the first to finish."""
    chosen: dict[str, Any] = {**PLAIN, **more}
    flying: list[Flight] = []
    buffer: list[Job] = []
    found: list[ServerStep] = []
    begun, version, stale, lost, now = 0, 0, 0, 0, 0.0
    while len(found) < chosen["num_steps"]:
        while len(flying) < chosen["concurrency"]:
            free = [user for user in range(len(seconds)) if user not in {f.user for f in flying}]
            place = stream(seed, "cohort", begun).choice(len(free), 1, replace=False)[0]
            flying.append(Flight(now + seconds[free[place]], begun, free[place], version))
            begun += 1
        first = min(flying)
        flying.remove(first)
        now, age = first.end, version - first.version
        coin = stream(seed, "drop-out of a job", first.number).random() if chosen["drop_out"] else 1
        if coin < chosen["drop_out"]:
            lost += 1
        elif chosen["max_staleness"] is not None and age > chosen["max_staleness"]:
            stale += 1
        else:
            buffer.append(Job(first.user, first.version))
        if len(buffer) == chosen["buffer_size"]:
            found.append(ServerStep(tuple(buffer), stale, lost, now))
            version, buffer, stale, lost = version + 1, [], 0, 0
    return found


CASES: list[dict[str, Any]] = [
    {},
    {"concurrency": 1, "buffer_size": 1},
    {"concurrency": 6, "buffer_size": 1},
    {"concurrency": 2, "buffer_size": 5},
    {"concurrency": 5, "buffer_size": 1, "max_staleness": 2, "drop_out": 0.3},
    {"max_staleness": 0},
]


@pytest.mark.parametrize("more", CASES)
def test_events_are_those_of_plain_loops(more: dict[str, Any]) -> None:
    found = steps(**more)
    assert found == by_plain_loops(SECONDS, 3, **more)
    assert all(len(step.jobs) == {**PLAIN, **more}["buffer_size"] for step in found)
    assert [step.end for step in found] == sorted(step.end for step in found)
    ages = [number - job.version for number, step in enumerate(found) for job in step.jobs]
    assert min(ages) >= 0
    if "max_staleness" in more:
        assert max(ages) == more["max_staleness"]
        assert sum(step.stale for step in found) > 0
    assert (sum(step.lost for step in found) > 0) == ("drop_out" in more)


def test_one_at_a_time_is_cohorts_of_one() -> None:
    found = steps(concurrency=1, buffer_size=1)
    cohorts = [int(stream(3, "cohort", number).choice(6, 1, replace=False)[0]) for number in range(40)]
    assert [step.jobs for step in found] == [((user, number),) for number, user in enumerate(cohorts)]
    assert found[-1].end == pytest.approx(SECONDS[cohorts].sum())


def test_users_of_a_step_are_grouped_by_version_and_keep_their_order() -> None:
    for step in steps(concurrency=4, buffer_size=4):
        groups = step.by_version()
        assert list(groups) == sorted(groups)
        for version, users in groups.items():
            assert users.tolist() == [job.user for job in step.jobs if job.version == version]
        assert sum(map(len, groups.values())) == 4


def test_mean_staleness_is_concurrency_over_buffer_size() -> None:
    """In a long run, while one of M users trains, M - 1 others and its successor fill M / K buffers."""
    seconds = np.abs(stream(0, "half-normal").standard_normal(500)) + 0.01
    found = steps(seconds, concurrency=80, buffer_size=10, num_steps=600)
    ages = [number - job.version for number, step in enumerate(found) for job in step.jobs]
    assert np.mean(ages[1000:]) == pytest.approx(80 / 10, abs=0.5)


def test_another_seed_is_another_order() -> None:
    assert steps() == steps()
    assert steps() != steps(seed=4)
