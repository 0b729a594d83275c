from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import pfl.model.pytorch  # noqa: F401  (makes torch the framework of pfl)
import pytest
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.common_types import Population
from pfl.context import CentralContext, UserContext
from pfl.data.dataset import Dataset
from pfl.metrics import Metrics
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from pfl.stats import MappedVectorStatistics
from torch import Tensor

from pfl_ext.privacy.accounting import Calibration, PrivacyConfig
from pfl_ext.privacy.central import (
    METRICS,
    TALLY,
    AdaptivePrivateMean,
    PrivateMean,
    metric_name,
    private_mean,
)
from pfl_ext.privacy.epsilon import System
from tests.closeness import assert_close_as_vector


def calibration(
    multiplier: float = 1.0,
    cohort: int = 10,
    noise_cohort: int | None = None,
    rounds: int = 1000,
    **config: Any,
) -> Calibration:
    """As if calibrated, with the multiplier given; adaptive, unless the config says otherwise."""
    size = noise_cohort or cohort
    config.setdefault("indicator_std_fraction", max(0.05, multiplier / size))  # at least twice the minimum
    facts: dict[str, Any] = {"epsilon": 2.0, "mechanism": "adaptive", "clipping_bound": 0.1, "quantile": 0.1}

    def system(users: int) -> System:
        return System(100_000, users, multiplier * (users / size), 1e-6, "poisson", "pld")

    return Calibration(PrivacyConfig(**facts | config), rounds, system(size), system(cohort))


def context(round_number: int, seed: int = 5) -> CentralContext[Any, Any]:
    return CentralContext(round_number, False, 10, Population.TRAIN, None, None, seed=seed)


def contribution(mechanism: PrivateMean, update: Tensor, points: int = 1) -> MappedVectorStatistics:
    half = len(update) // 2
    stats = MappedVectorStatistics({"a.w": update[:half].clone(), "b.w": update[half:].clone()})
    return mechanism.postprocess_one_user(stats=stats, user_context=UserContext(points, seed=0))[0]


def released(
    mechanism: PrivateMean, total: MappedVectorStatistics, r: int, seed: int = 5
) -> tuple[Tensor, Metrics]:
    stats, metrics = mechanism.postprocess_server(
        stats=total, central_context=context(r, seed), aggregate_metrics=Metrics()
    )
    assert TALLY not in stats
    stats.average()  # what pfl's algorithms do
    return torch.cat(list(stats.values())), metrics


def summed(mechanism: PrivateMean, updates: Sequence[Tensor]) -> MappedVectorStatistics:
    """What the users of these updates send, added up in pfl's order."""
    total = contribution(mechanism, updates[0])
    for update in updates[1:]:
        total = contribution(mechanism, update) + total
    return total


def release(
    mechanism: PrivateMean, updates: Sequence[Tensor], r: int = 0, seed: int = 5
) -> tuple[Tensor, Metrics]:
    """The noisy mean that a model is updated with, through pfl's steps in pfl's order."""
    return released(mechanism, summed(mechanism, updates), r, seed)


def value(metrics: Metrics, description: str) -> float:
    return float(metrics[metric_name(description)].overall_value)


@pytest.mark.parametrize("kind", ["gaussian", "adaptive"])
@pytest.mark.parametrize("cohort, noise_cohort", [(10, 10), (10, 250)])
def test_noise_on_the_mean_is_sigma_times_bound_over_the_noise_cohort(
    kind: Any, cohort: int, noise_cohort: int
) -> None:
    """The paper's simulation: the mean of 10 users carries the noise of a mean of 250. Within 1 %."""
    facts = calibration(
        4.0, cohort, noise_cohort, mechanism=kind, clipping_bound=0.3, indicator_std_fraction=0.25
    )
    noisy, metrics = release(private_mean(facts), [torch.zeros(200_000)])
    expected = facts.value_noise_multiplier * 0.3 / noise_cohort
    assert float(noisy.std()) == pytest.approx(expected, rel=0.01)
    assert float(noisy.mean()) == pytest.approx(0, abs=5 * expected / math.sqrt(200_000))
    assert value(metrics, "noise std. dev. on the mean") == pytest.approx(expected)
    assert (facts.value_noise_multiplier > 4.0) == (kind == "adaptive")


def test_two_workers_add_the_same_noise_once() -> None:
    """pfl sums over workers and then runs the server's step on each with the same central seed."""
    updates = list(torch.randn(6, 100_000, generator=torch.Generator().manual_seed(1)))
    alone, _ = release(private_mean(calibration(2.0)), updates)
    workers = [private_mean(calibration(2.0), threads=1 + rank) for rank in range(2)]
    shares: list[MappedVectorStatistics] = []
    for rank, worker in enumerate(workers):
        share = contribution(worker, updates[rank])
        for update in updates[rank + 2 :: 2]:
            share = contribution(worker, update) + share
        shares.append(share)
    means = []
    for worker in workers:
        mean, _ = released(worker, shares[0] + shares[1], 0)
        means.append(mean)
    assert torch.equal(means[0], means[1])
    assert_close_as_vector(means[0], alone, 2 * len(updates))
    clean = sum(u * 0.1 / u.norm() for u in updates) / 10
    assert isinstance(clean, Tensor)
    assert float((means[0] - clean).std()) == pytest.approx(
        calibration(2.0).value_noise_multiplier * 0.1 / 10, rel=0.01
    )
    assert workers[0].state() == workers[1].state()


@pytest.mark.parametrize("present", [3, 10, 17])
def test_the_mean_is_divided_by_the_expected_cohort(present: int) -> None:
    """Not by who came: that count depends on the data under Poisson sampling."""
    facts = calibration(1e-6, cohort=10, mechanism="gaussian", clipping_bound=2.0)
    noisy, metrics = release(private_mean(facts), [torch.ones(4)] * present)
    assert torch.allclose(noisy, torch.ones(4) * present / 10, rtol=1e-3)
    assert value(metrics, "users") == present


def test_each_round_has_its_own_noise_and_repeating_a_round_repeats_it() -> None:
    zeros = [torch.zeros(10_000)]
    mechanism, again = private_mean(calibration()), private_mean(calibration())
    rounds = [release(mechanism, zeros, r, seed=0)[0] for r in range(3)]
    torch.manual_seed(9)
    assert torch.equal(rounds[0], release(again, zeros, 0, seed=0)[0])
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert abs(float(torch.corrcoef(torch.stack([rounds[a], rounds[b]]))[0, 1])) < 0.05
    secret = private_mean(calibration(), noise_seed=2**127 + 1)
    other = private_mean(calibration(), noise_seed=1)
    means = [release(m, zeros, 0, seed=0)[0] for m in (secret, other)]
    assert not torch.equal(means[0], means[1])
    assert not torch.equal(means[0], rounds[0])


def test_a_resumed_run_goes_on_with_its_bound_and_releases_no_round_twice() -> None:
    """Predecessors 10 and 11."""
    updates = [torch.ones(6) * scale for scale in (0.01, 1.0, 5.0)]
    straight = private_mean(calibration(cohort=3))
    means = [release(straight, updates, r)[0] for r in range(6)]
    first = private_mean(calibration(cohort=3))
    for r in range(3):
        release(first, updates, r)
    saved = json.loads(json.dumps(first.state()))
    resumed = private_mean(calibration(cohort=3))
    with pytest.raises(ValueError, match=r"round 3 .* round 0 was due"):
        release(resumed, updates, 3)
    resumed.load_state(saved)
    for r in range(3, 6):
        assert torch.equal(release(resumed, updates, r)[0], means[r])
    assert resumed.state() == straight.state()
    assert resumed.rounds_done == 6
    with pytest.raises(ValueError, match=r"round 5 .* round 6 was due"):
        release(resumed, updates, 5)
    with pytest.raises(ValueError, match="not the state"):
        resumed.load_state({"clipping_bound": 0.1})


def test_no_round_runs_past_the_budget() -> None:
    mechanism = private_mean(calibration(rounds=2))
    for r in range(2):
        release(mechanism, [torch.zeros(4)], r)
    with pytest.raises(ValueError, match="beyond the 2 rounds"):
        release(mechanism, [torch.zeros(4)], 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_updates_that_are_not_finite_count_as_zero_and_are_reported(bad: float) -> None:
    facts = calibration(1e-6, cohort=4, mechanism="gaussian", clipping_bound=2.0)
    poisoned = torch.ones(4)
    poisoned[1] = bad
    noisy, metrics = release(private_mean(facts), [torch.ones(4) * 0.5, poisoned, torch.ones(4) * 9])
    assert torch.allclose(noisy, torch.full((4,), (0.5 + 1.0) / 4), rtol=1e-3)
    assert value(metrics, "refused updates") == 1
    assert value(metrics, "users") == 3
    assert value(metrics, "fraction clipped") == pytest.approx(2 / 3)
    assert value(metrics, "norm before clipping") == pytest.approx((1 + 18) / 2)


def test_the_rounds_metrics_are_all_there() -> None:
    facts = calibration(2.0, cohort=4, clipping_bound=0.5)
    _, metrics = release(private_mean(facts), [torch.ones(400)] * 4)
    assert {str(name) for name, _ in metrics} == {f"Central DP | {name}" for name in METRICS}
    assert value(metrics, "clipping bound") == 0.5  # the one used, not the next
    noise = facts.value_noise_multiplier * 0.5 / 4 * math.sqrt(400)
    assert value(metrics, "signal-to-noise ratio") == pytest.approx(0.5 / noise, rel=1e-3)


def norms(kind: str, n: int, rng: np.random.Generator) -> list[float]:
    """One from each of n parts of equal probability: few users are then as even as many."""
    shares = [float(share) for share in (np.arange(n) + rng.random(n)) / n]
    return [2 * p if kind == "uniform" else math.exp(NormalDist(-3, 1).inv_cdf(p)) for p in shares]


@pytest.mark.parametrize(
    "kind, quantile, expected",
    [("uniform", 0.1, 0.2), ("lognormal", 0.5, math.exp(-3))],
)
def test_the_adaptive_bound_settles_at_the_asked_quantile(
    kind: str, quantile: float, expected: float
) -> None:
    rng = np.random.default_rng(4)
    facts = calibration(1.0, cohort=25, clipping_bound=3 * expected, quantile=quantile, clip_step=1.0)
    mechanism, bounds = private_mean(facts), []
    for r in range(100):
        bounds.append(mechanism.clipping_bound)
        release(mechanism, [torch.tensor([norm, 0.0]) for norm in norms(kind, 25, rng)], r)
    assert np.exp(np.log(bounds[40:]).mean()) == pytest.approx(expected, rel=0.12)


def test_one_adaptive_step_is_andrew_et_als() -> None:
    """``C exp(-step (b - quantile))``; the noise on b has the standard deviation asked for."""
    fractions, facts = [], calibration(1.0, cohort=40, noise_cohort=400, clipping_bound=1.0)
    updates = [torch.tensor([0.5, 0.0])] * 3 + [torch.tensor([3.0, 0.0])] * 5
    total = summed(private_mean(facts), updates)
    for seed in range(600):
        mechanism = private_mean(facts)
        _, metrics = released(mechanism, copy.deepcopy(total), 0, seed)
        b = value(metrics, "noisy fraction unclipped")
        assert mechanism.clipping_bound == pytest.approx(math.exp(-0.2 * (b - 0.1)), rel=1e-9)
        fractions.append(b)
    assert np.mean(fractions) == pytest.approx(0.5 + (3 - 5) / 2 / 40, abs=4 * 0.05 / math.sqrt(600))
    assert np.std(fractions) == pytest.approx(0.05, rel=0.12)


@pytest.mark.parametrize("lost", [0.0, 0.5, 0.8])
def test_users_who_are_lost_do_not_move_the_fraction(lost: float) -> None:
    """Of 40 expected users ``lost`` do not report; a quarter of the others is not clipped."""
    fractions, reporting = [], round(40 * (1 - lost))
    updates = [torch.tensor([0.5, 0.0])] * (reporting // 4) + [torch.tensor([3.0, 0.0])] * (
        3 * reporting // 4
    )
    facts = calibration(1.0, cohort=40, clipping_bound=1.0)
    total = summed(private_mean(facts, reporting=1 - lost), updates)
    for seed in range(200):
        _, metrics = released(private_mean(facts, reporting=1 - lost), copy.deepcopy(total), 0, seed)
        fractions.append(value(metrics, "noisy fraction unclipped"))
    deviation = 0.05 / (1 - lost)
    assert np.mean(fractions) == pytest.approx(0.25, abs=4 * deviation / math.sqrt(200))
    assert np.std(fractions) == pytest.approx(deviation, rel=0.2)


def test_one_user_moves_the_noisy_fraction_by_half_a_vote() -> None:
    """The indicator's sensitivity that is accounted for, for one user added, on 40 expected."""
    moved = []
    for extra in (
        [],
        [torch.tensor([0.5, 0.0])],
        [torch.tensor([3.0, 0.0])],
        [torch.tensor([math.nan, 0.0])],
    ):
        mechanism = private_mean(calibration(1.0, cohort=40, clipping_bound=1.0))
        _, metrics = release(mechanism, [torch.tensor([0.5, 0.0]), *extra])
        moved.append(value(metrics, "noisy fraction unclipped"))
    assert [m - moved[0] for m in moved[1:]] == pytest.approx([0.5 / 40, -0.5 / 40, -0.5 / 40])


def test_the_bound_never_leaves_the_range_of_float32() -> None:
    mechanism = private_mean(calibration(1.0, cohort=1, clipping_bound=1e-9, clip_step=50.0))
    release(mechanism, [torch.zeros(2)])
    assert mechanism.clipping_bound == 1e-9


def test_weighted_updates_are_refused() -> None:
    stats = MappedVectorStatistics({"w": torch.ones(3)}, weight=7.0)
    with pytest.raises(ValueError, match=r"federated\.weighting"):
        private_mean(calibration()).postprocess_one_user(stats=stats, user_context=UserContext(7, seed=0))


def test_the_config_names_the_mechanism() -> None:
    assert type(private_mean(calibration(mechanism="gaussian"))) is PrivateMean
    assert type(private_mean(calibration(mechanism="adaptive"))) is AdaptivePrivateMean
    assert isinstance(private_mean(calibration()), CentrallyAppliedPrivacyMechanism)


class Cohorts:
    """A pfl federated dataset whose rounds have the given users; nobody stands in for an empty round."""

    def __init__(self, users: list[list[float]]) -> None:
        self.rounds = iter(users)

    def get_cohort(self, cohort_size: int) -> Iterator[tuple[Dataset, int]]:
        users = next(self.rounds)
        for number in users or [0.0]:
            yield Dataset((np.array([number] if users else [], np.float32),)), 3


class Trainer:
    """Each user's update is its number, four times."""

    def simulate_one_user(
        self, model: Any, user: Dataset, context: Any
    ) -> tuple[MappedVectorStatistics, Metrics]:
        return MappedVectorStatistics({"w": torch.full((4,), float(sum(user.raw_data[0])))}), Metrics()


def test_pfls_backend_releases_noise_in_an_empty_round_as_in_any() -> None:
    mechanism = private_mean(calibration(2.0, cohort=2, clipping_bound=1.0))
    cohorts = Cohorts([[0.1, 0.2], [], [0.3]])
    backend = SimulatedBackend(cohorts, cohorts, [WeightByUser(), mechanism])
    users = []
    for r in range(3):
        stats, metrics = backend.gather_results(None, Trainer(), central_context=context(r))
        assert list(stats.keys()) == ["w"]
        assert stats.weight == 2
        assert stats["w"].abs().min() > 0
        users.append(value(metrics, "users"))
    assert users == [2, 0, 1]
    assert mechanism.rounds_done == 3


def test_the_executed_run_has_less_noise_than_the_system_it_simulates() -> None:
    """On the sum of the real cohort: C_sm / C_lg of it, which `as_executed` accounts for."""
    facts = calibration(5.0, cohort=10, noise_cohort=100, mechanism="gaussian", clipping_bound=1.0)
    noisy, _ = release(private_mean(facts), [torch.zeros(200_000)])
    assert float(noisy.std()) * 10 == pytest.approx(facts.executed.noise_multiplier, rel=0.01)
    assert dataclasses.replace(facts, executed=facts.simulated).executed.noise_multiplier == 5.0
