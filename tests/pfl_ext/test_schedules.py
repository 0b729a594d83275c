"""Learning rates over the rounds: by their formulas, and as torch's schedulers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LRScheduler, PolynomialLR

from pfl_ext.algorithms.optimizers import ServerConfig
from pfl_ext.engine.training import LocalSGDConfig
from pfl_ext.schedules import LEAST, READ_BY, ScheduleConfig

RATE, ROUNDS = 0.3, 40


def rates(**words: Any) -> list[float]:
    return [ScheduleConfig(**words).scheduled(RATE, r, ROUNDS) for r in range(ROUNDS + 2)]


@pytest.mark.parametrize(
    ("words", "scheduler"),
    [
        ({"schedule": "poly"}, lambda it: PolynomialLR(it, ROUNDS)),
        ({"schedule": "poly", "schedule_power": 0.9}, lambda it: PolynomialLR(it, ROUNDS, 0.9)),
        ({"schedule": "cosine"}, lambda it: CosineAnnealingLR(it, ROUNDS)),
        (
            {"schedule": "cosine", "final_learning_rate": 0.06},
            lambda it: CosineAnnealingLR(it, ROUNDS, eta_min=0.06),
        ),
        ({"schedule": "exponential", "schedule_factor": 0.97}, lambda it: ExponentialLR(it, 0.97)),
    ],
)
def test_rates_are_those_of_torchs_schedulers(
    words: dict[str, Any], scheduler: Callable[[torch.optim.Optimizer], LRScheduler]
) -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=RATE)
    theirs, schedule = [], scheduler(optimizer)
    for _ in range(ROUNDS):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    ours = rates(**words)
    # torch multiplies from step to step: a rounding or two of float64 in each, of values up to RATE
    assert ours[:ROUNDS] == pytest.approx(theirs, rel=0, abs=4 * ROUNDS * 2.0**-53 * RATE)
    assert ours[0] == RATE


def test_the_final_rate_is_reached_after_the_last_round_and_kept() -> None:
    for name in ("poly", "cosine", "warmup_linear"):
        found = rates(schedule=name, final_learning_rate=0.06, schedule_power=3.0)
        assert found[ROUNDS] == found[ROUNDS + 1] == 0.06
        assert all(a > b for a, b in itertools.pairwise(found[:-1]))
    assert set(rates(final_learning_rate=0.06, schedule_power=3.0, schedule_factor=0.5)) == {RATE}


def test_a_cycle_falls_to_the_final_rate_and_begins_again() -> None:
    words: dict[str, Any] = {"schedule": "cyclic", "schedule_cycle": 5, "schedule_from": 12}
    found = rates(**words, final_learning_rate=0.05)
    assert found[:12] == [RATE] * 12
    assert found[12:17] == pytest.approx([0.25, 0.2, 0.15, 0.1, 0.05])
    assert found[16] == 0.05, "exactly"
    assert found[17:] == (found[12:17] * 6)[: len(found) - 17]


def test_a_rise_to_the_final_rate_is_a_schedule_too() -> None:
    found = rates(schedule="poly", final_learning_rate=2.0)
    assert found[ROUNDS // 2] == pytest.approx((RATE + 2.0) / 2)


def test_server_and_users_share_one_function() -> None:
    words: dict[str, Any] = {"schedule": "cosine", "final_learning_rate": 0.01, "learning_rate": RATE}
    server, users = ServerConfig(**words), LocalSGDConfig(**words)
    assert [server.rate(r, 9) for r in range(9)] == [users.scheduled(RATE, r, 9) for r in range(9)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"schedule": "exponential"}, "local.schedule is exponential, and local.schedule_factor is none"),
        (
            {"schedule": "exponential", "schedule_factor": 0.001},
            "local.schedule is exponential, by which the last of 40 learning rates is 3e-118, too small",
        ),
        (
            {"schedule": "cosine", "final_learning_rate": 1e300},
            "more than float32 holds: lower local.final_learning_rate",
        ),
        ({"schedule": "poly", "schedule_power": 1e300}, "last of 40 learning rates is 0, too small"),
        (
            {"schedule": "cyclic"},
            "local.schedule is cyclic, and local.schedule_cycle is none: give the rounds",
        ),
        (
            {"schedule": "cyclic", "schedule_cycle": 5},
            "by which the last of a cycle's learning rates is 0, too small for a step: raise local.final",
        ),
        (
            {"schedule": "cyclic", "schedule_cycle": 5, "schedule_from": 40, "final_learning_rate": 0.1},
            "local.schedule_from is 40, but must be below 40, or no cycle would begin: lower it",
        ),
    ],
)
def test_what_is_no_sequence_of_rates_is_one_line(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ScheduleConfig(**words).check_schedule("local", RATE, ROUNDS)
    assert "\n" not in str(caught.value)


def test_the_least_rate_that_is_allowed_is_a_number_of_float32_and_so_is_its_inverse() -> None:
    least = torch.tensor(LEAST)
    assert torch.isfinite(1 / least)
    ScheduleConfig(schedule="poly", final_learning_rate=LEAST).check_schedule("local", LEAST, ROUNDS)
    ScheduleConfig().check_schedule("local", 1e-60, ROUNDS)  # as before there were schedules


@pytest.mark.parametrize(
    "words",
    [
        {"schedule_power": 0.0},
        {"schedule_power": float("inf")},
        {"schedule_factor": 0.0},
        {"schedule_cycle": 1},
        {"schedule_from": -1},
        {"schedule_factor": 1.01},
        {"schedule_factor": float("nan")},
        {"final_learning_rate": -1.0},
        {"schedule": "warmup_linear"},
    ],
)
def test_values_out_of_range_are_named(words: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(words))):
        LocalSGDConfig(**words)


def test_every_key_has_a_reader() -> None:
    assert set(READ_BY) | {"schedule"} >= set(ScheduleConfig.__dataclass_fields__)
