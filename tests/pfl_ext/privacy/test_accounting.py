from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations, combinations_with_replacement, pairwise, permutations
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as strict_dataclass

from pfl_ext.privacy.accounting import Calibration, PrivacyConfig
from pfl_ext.privacy.epsilon import (
    COMPUTE_NOISE_ORDERS,
    LEAST_DELTA,
    LEAST_MU,
    STEP,
    System,
    epsilon_spent,
    gaussian_delta,
    least_multiplier,
    without_replacement_delta,
)

pytestmark = pytest.mark.xdist_group("accounting")
"""One process runs them all: calibrations are remembered."""

FLAIR_USERS, ROUNDS = 41_131, 5_000
ADAPTIVE: dict[str, Any] = {"epsilon": 2.0, "mechanism": "adaptive"}
REMOVE = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = dp_accounting.NeighboringRelation.REPLACE_ONE


@cache
def paper(cohort: int, **options: Any) -> Calibration:
    config = PrivacyConfig(**ADAPTIVE | {"noise_cohort_size": cohort} | options)
    return config.calibrate(FLAIR_USERS, min(200, cohort), ROUNDS)


def test_the_papers_setting_needs_a_multiplier_of_17_33() -> None:
    """Predecessors 4: 0.545 in pfl's config, 53.49 in the paper's code."""
    calibration = paper(5000)
    assert calibration.simulated.delta == pytest.approx(8.4026e-6, rel=1e-5)
    assert calibration.simulated.noise_multiplier == pytest.approx(17.33, abs=0.01)
    assert 1.999 < calibration.epsilon <= 2
    assert calibration.epsilon_rdp == pytest.approx(2.171, abs=0.002)
    assert calibration.simulated.sampling_probability == 5000 / FLAIR_USERS


def test_a_simulated_cohort_buys_the_run_itself_no_privacy() -> None:
    """200 users with a 25th of the noise: what the paper's runs really have is 4.7, not 2."""
    calibration = paper(5000)
    assert calibration.is_simulation
    assert calibration.executed.noise_multiplier == pytest.approx(17.334 / 25)
    direct = PLDAccountant(REMOVE).compose(
        dp_accounting.PoissonSampledDpEvent(200 / FLAIR_USERS, dp_accounting.GaussianDpEvent(17.334 / 25)),
        ROUNDS,
    )
    assert calibration.epsilon_executed == pytest.approx(direct.get_epsilon(FLAIR_USERS**-1.1), rel=1e-3)
    assert calibration.epsilon_executed > 4.7


@pytest.mark.parametrize(
    "cohort, rdp, bug",
    [
        (200, 1.025, 10.72),
        (1000, 3.82, 23.93),
        (5000, 18.68, 53.49),
    ],
)
def test_multipliers_by_rdp_and_by_the_papers_bug(cohort: int, rdp: float, bug: float) -> None:
    """FLAIR's private setting."""
    assert paper(cohort, accountant="rdp").simulated.noise_multiplier == pytest.approx(rdp, rel=2e-3)
    assert paper(cohort, noise="rounds_as_epochs").simulated.noise_multiplier == pytest.approx(bug, rel=2e-4)


@pytest.mark.parametrize(
    "noise, order", [(0.109, 1.25), (0.161, 1.5), (0.257, 1.75), (0.35, 2.0), (0.449, 2.25), (0.57, 2.5)]
)
def test_little_noise_is_accounted_at_an_order_near_one(noise: float, order: float) -> None:
    """One Gaussian round at delta 0.01, whose best order on a grid of quarters is this one."""
    system = System(100, 100, noise, 0.01, "poisson", "rdp")
    quarters = tuple(np.arange(1.25, 4.75, 0.25))
    best = epsilon_spent(system, 1, orders=quarters)
    assert best == epsilon_spent(system, 1, orders=(order,))
    assert epsilon_spent(system, 1, orders=COMPUTE_NOISE_ORDERS) == best


def test_the_orders_are_those_of_compute_noise() -> None:
    """In quarters to 2.5, in halves to 5, whole to 63, then three more."""
    steps = (*np.arange(1.25, 2.5, 0.25), *np.arange(2.5, 5, 0.5), *range(5, 64), 2**7, 2**8, 2**9)
    assert steps == COMPUTE_NOISE_ORDERS


def test_the_multiplier_of_a_fifth_of_the_cohort_by_pld() -> None:
    assert paper(1000).simulated.noise_multiplier == pytest.approx(3.553, abs=0.002)


def test_the_papers_bug_is_worth_another_epsilon_and_says_so() -> None:
    calibration = paper(5000, noise="rounds_as_epochs", accountant="rdp")
    assert calibration.epsilon == pytest.approx(0.634, abs=0.001)
    assert calibration.to_json()["config"]["noise"] == "rounds_as_epochs"


GRID = [
    (100, 10, 1, 8.0),
    (100, 100, 20, 0.5),
    (100, 100, 20, 8.0),
    (3000, 60, 300, 2.0),
]


@pytest.mark.parametrize("population, cohort, rounds, epsilon", GRID)
def test_calibrated_noise_keeps_the_budget_and_no_more_of_it_is_wasted(
    population: int, cohort: int, rounds: int, epsilon: float
) -> None:
    """Against dp-accounting itself, on a finer grid; PLD is never above RDP."""
    calibration = PrivacyConfig(epsilon=epsilon, mechanism="gaussian").calibrate(population, cohort, rounds)
    delta, multiplier = population**-1.1, calibration.simulated.noise_multiplier

    def direct(noise: float, accountant: Any) -> float:
        event = dp_accounting.PoissonSampledDpEvent(cohort / population, dp_accounting.GaussianDpEvent(noise))
        return float(accountant.compose(event, rounds).get_epsilon(delta))

    fine = 3e-3 / math.sqrt(max(rounds, 50)) * max(1.0, multiplier**-2)
    tight = direct(multiplier, PLDAccountant(REMOVE, value_discretization_interval=fine))
    assert tight - 1e-5 <= calibration.epsilon <= epsilon  # both bounds from above, their grids not nested
    assert calibration.epsilon - tight < 2e-3
    assert direct(multiplier - 3 * STEP, PLDAccountant(REMOVE, value_discretization_interval=fine)) > epsilon
    assert tight <= direct(multiplier, RdpAccountant()) == calibration.epsilon_rdp


def test_sampling_without_replacement_is_accounted_as_replacing_a_user() -> None:
    """RDP: the library's answer at half the multiplier, as two users' updates lie twice the bound apart."""
    config = PrivacyConfig(epsilon=2.0, sampler="fixed", accountant="rdp", mechanism="gaussian")
    calibration = config.calibrate(3000, 60, 300)

    def direct(noise: float) -> float:
        event = dp_accounting.GaussianDpEvent(noise / 2)
        sampled = dp_accounting.SampledWithoutReplacementDpEvent(3000, 60, event)
        ledger = RdpAccountant(neighboring_relation=REPLACE).compose(sampled, 300)
        return float(ledger.get_epsilon(3000**-1.1))

    assert direct(calibration.simulated.noise_multiplier) == calibration.epsilon <= 2
    assert direct(calibration.simulated.noise_multiplier - STEP) > 2
    assert calibration.to_json()["neighbouring_relation"] == "replace_one"


def test_the_papers_setting_without_replacement_needs_35_30_by_pld() -> None:
    """Less than half of what RDP asks for (75.1); the natural one-sided pair would need 34.67."""
    fixed = paper(5000, sampler="fixed", mechanism="gaussian")
    assert fixed.simulated.noise_multiplier == pytest.approx(35.298, abs=0.02)
    assert 1.999 < fixed.epsilon <= 2 < fixed.epsilon_rdp


def density(data: tuple[float, ...], cohort: int, noise: float, at: Any) -> Any:
    """Density of the noisy sum over a cohort drawn without replacement: the mean over all its subsets."""
    sums = np.array([sum(chosen) for chosen in combinations(data, cohort)])
    return np.exp(-((at - sums[:, None]) ** 2) / (2 * noise**2)).mean(0) / (noise * math.sqrt(2 * math.pi))


NEIGHBOURS = [
    ((*rest, one), (*rest, other))
    for rest in combinations_with_replacement((-1.0, 0.0, 1.0), 4)
    for one, other in permutations((-1.0, 0.0, 1.0), 2)
]


@pytest.mark.parametrize("noise", [0.7, 2.0, 6.0])
def test_no_neighbours_are_told_apart_better_than_the_profile_of_the_fixed_size_sampler(noise: float) -> None:
    """Five users with values in {-1, 0, 1} and cohorts of two, integrated; no smaller profile would do."""
    step, closest = noise / 100, 1.0
    error = 1e-5  # of the sum over the grid: step^2 / 8 times the jump of the slope at each of some kinks
    at = np.arange(-3 - 9 * noise, 3 + 9 * noise, step)
    of = {data: density(data, 2, noise, at) for pair in NEIGHBOURS for data in pair}
    for epsilon in (-1.0, -0.1, 0.0, 0.05, 0.3, 1.0):
        allowed = float(without_replacement_delta(epsilon, noise, 2 / 5))
        for one, other in NEIGHBOURS:
            found = float(np.maximum(of[one] - math.exp(epsilon) * of[other], 0).sum() * step)
            assert found <= allowed + error
            closest = min(closest, allowed - found)
    assert closest < error


def test_two_rounds_of_the_fixed_size_sampler_spend_no_more_than_is_accounted() -> None:
    """Both rounds' outputs together, integrated over the plane, for every pair of neighbours."""
    noise, step = 3.0, 0.15
    at = np.arange(-3 - 8 * noise, 3 + 8 * noise, step)
    profile = System(5, 2, noise, 0.01, "fixed", "pld").profile(2)
    for epsilon in (0.25, 0.5, 1.0):
        for one, other in NEIGHBOURS:
            p, q = (density(data, 2, noise, at) for data in (one, other))
            found = np.maximum(np.outer(p, p) - math.exp(epsilon) * np.outer(q, q), 0).sum() * step**2
            assert found <= profile.delta_at_epsilon[epsilon] + 1e-7


@pytest.mark.parametrize("sampler", ["poisson", "fixed", "cyclic"])
def test_the_gaussian_of_the_profiles_mu_gives_no_less_away_than_the_run(sampler: Any) -> None:
    """And not much more: at the run's own delta it has nearly the run's epsilon."""
    system = System(2000, 50, 2.0, 1e-4, sampler, "pld")
    profile = system.profile(40)
    for delta in (1e-4, 1e-3, 1e-2):
        spent = replace(system, delta=delta).epsilon_after(40)
        assert gaussian_delta(spent, profile.mu) >= delta * (1 - 1e-6)
    for epsilon, delta in profile.delta_at_epsilon.items():
        assert delta == LEAST_DELTA or replace(system, delta=delta).epsilon_after(40) <= epsilon + 1e-3
    if sampler == "cyclic":  # one Gaussian mechanism: mu is its sensitivity over its noise
        assert profile.mu == pytest.approx(1 / 2.0, rel=0.02)


def test_a_profile_of_next_to_nothing_has_the_smallest_mu() -> None:
    system = System(10**12, 30, 0.35, 1e-3, "poisson", "pld")
    assert system.profile(2).mu == LEAST_MU


def test_the_full_batch_without_replacement_is_the_plain_gaussian_mechanism() -> None:
    """With everyone in each round no sampling helps: sensitivity 2C, so the noise of z / 2."""
    spent = System(50, 50, 6.0, 1e-3, "fixed", "rdp").epsilon_after(3)
    plain = RdpAccountant().compose(dp_accounting.GaussianDpEvent(3.0), 3)
    assert spent == pytest.approx(plain.get_epsilon(1e-3))


@cache
def small(**options: Any) -> Calibration:
    return PrivacyConfig(**ADAPTIVE | options).calibrate(2000, 50, 40)


def test_epsilon_grows_with_the_rounds_to_its_budget_and_no_further() -> None:
    calibration = small()
    spent = [calibration.epsilon_after(rounds) for rounds in (0, 1, 10, 20, 40)]
    assert spent[0] == 0
    assert all(a < b for a, b in pairwise(spent))
    assert spent[-1] == calibration.epsilon <= 2
    with pytest.raises(ValueError, match=r"beyond the 40 rounds .* num_rounds"):
        calibration.epsilon_after(41)


def test_the_indicators_share_is_taken_out_of_the_total() -> None:
    """The vote alone (sensitivity 1/2) and the update alone compose back to the multiplier accounted for."""
    calibration = small(indicator_std_fraction=0.05)
    z, values, votes = (
        calibration.simulated.noise_multiplier,
        calibration.value_noise_multiplier,
        calibration.indicator_std / 0.5,
    )
    assert calibration.indicator_std == 0.05 * 50
    assert values > z
    assert (values**-2 + votes**-2) ** -0.5 == pytest.approx(z, rel=1e-12)
    assert small(mechanism="gaussian").value_noise_multiplier == z
    both = dp_accounting.ComposedDpEvent(
        [dp_accounting.GaussianDpEvent(values), dp_accounting.GaussianDpEvent(votes)]
    )
    total = RdpAccountant().compose(dp_accounting.PoissonSampledDpEvent(50 / 2000, both), 40)
    assert total.get_epsilon(2000**-1.1) == pytest.approx(calibration.epsilon_rdp, rel=1e-6)


def test_an_indicator_noise_below_its_minimum_is_refused_with_the_minimum() -> None:
    calibration = small()
    least = calibration.minimal_indicator_std_fraction
    assert small(indicator_std_fraction=1.01 * least).value_noise_multiplier > 1
    with pytest.raises(ValueError, match=f"indicator_std_fraction .* must exceed {least:.6g}"):
        small(indicator_std_fraction=0.99 * least)
    small(indicator_std_fraction=0.99 * least, mechanism="gaussian")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"epsilon": 0.0}, "epsilon\n.*greater than 0"),
        ({"epsilon": math.inf}, "epsilon\n.*finite"),
        ({"delta": 1.0}, "delta\n.*less than 1"),
        ({"delta": 0.01}, "not below one in 2000"),
        ({"quantile": 1.0}, "quantile\n.*less than 1"),
        ({"clipping_bound": -1.0}, "clipping_bound\n.*greater than or equal to 0.000000001"),
        ({"clipping_bound": 1e-12}, "clipping_bound\n.*greater than or equal to 0.000000001"),
        ({"clipping_bound": 1e10}, "clipping_bound\n.*less than or equal to 1000000000"),
        ({"clip_step": 0.0}, "clip_step\n.*greater than 0"),
        ({"indicator_std_fraction": -1.0}, "indicator_std_fraction\n.*greater than 0"),
        ({"noise_cohort_size": 10}, "must be at least the cohort_size, 50"),
        ({"noise_cohort_size": 2001}, "at most 2000"),
        ({"epsilon": 1e-9, "mechanism": "gaussian", "delta": 1e-12}, "privacy.epsilon .* raise it"),
    ],
)
def test_senseless_settings_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**options)


def test_a_simulated_population_is_labelled_and_the_run_keeps_its_own() -> None:
    alone = PrivacyConfig(2.0, noise_cohort_size=5000).calibrate(FLAIR_USERS, 20, 150)
    few = PrivacyConfig(2.0, noise_cohort_size=5000, noise_population=FLAIR_USERS).calibrate(275, 20, 150)
    assert few.simulated == alone.simulated
    assert few.simulated.delta == pytest.approx(FLAIR_USERS**-1.1)
    assert (few.executed.population, few.executed.cohort_size) == (275, 20)
    assert few.epsilon <= 2.0 < few.epsilon_executed
    report = few.to_json()
    assert report["is_simulation"] is True
    assert "5000 users a round of 41131" in report["claim"]
    assert "20 of 275" in report["claim"]


@pytest.mark.parametrize(
    "population, cohort, options, words",
    [
        (275, 20, {"noise_population": 274}, "privacy.noise_population is 274, but must be at least"),
        (275, 300, {"noise_population": 9000}, "--federated.cohort_size 275"),
        (275, 20, {"noise_cohort_size": 400, "noise_population": 300}, "only 300 users"),
    ],
)
def test_a_population_that_does_not_fit_is_refused(
    population: int, cohort: int, options: dict[str, int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        PrivacyConfig(2.0, **options).calibrate(population, cohort, 10)  # type: ignore[arg-type]


def test_privacy_json_holds_both_systems_and_no_infinity() -> None:
    calibration = small(noise_cohort_size=2000, mechanism="adaptive")
    report = calibration.to_json(10)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    executed, simulated = report["as_executed"], report["simulated_system"]
    for noise in ("noise_multiplier", "value_noise_multiplier", "indicator_std"):
        assert executed[noise] == pytest.approx(simulated[noise] / 40, rel=1e-12)
    assert simulated["value_noise_multiplier"] == calibration.value_noise_multiplier
    assert simulated["indicator_std"] == calibration.indicator_std
    assert report["simulated_system"]["epsilon_spent"] < report["simulated_system"]["epsilon_at_end"] <= 2
    assert "SIMULATES 2000 users" in report["claim"]
    assert report["accountant_version"].startswith("dp-accounting 0.")
    hopeless = PrivacyConfig(epsilon=8, noise_cohort_size=2000).calibrate(2000, 1, 1).to_json()
    assert hopeless["as_executed"]["epsilon_at_end"] == hopeless["as_executed"]["mu_gdp"] == "infinite"


def test_without_simulation_the_run_is_the_system_accounted_for() -> None:
    calibration = small()
    assert calibration.simulated == calibration.executed
    report = calibration.to_json()
    assert report["is_simulation"] is False
    assert "simulated_system" not in report
    assert report["as_executed"]["epsilon_at_end"] == calibration.epsilon
    assert "nothing is simulated" in report["claim"]


def test_the_config_nests_in_a_strict_pydantic_config() -> None:
    @strict_dataclass(frozen=True)
    class Outer:
        privacy: PrivacyConfig

    outer = TypeAdapter(Outer).validate_python({"privacy": {"epsilon": 3, "sampler": "poisson"}})
    assert outer.privacy == PrivacyConfig(epsilon=3.0)
    with pytest.raises(ValidationError, match=r"epsilon\n.*required"):
        TypeAdapter(Outer).validate_python({"privacy": {}})
    with pytest.raises(ValidationError):
        TypeAdapter(Outer).validate_python({"privacy": {"accountant": "moments"}})


@pytest.mark.parametrize("start", [1, 12, 99, 100, 101, 400, 5000])
def test_the_least_multiplier_is_found_from_any_start_also_where_it_keeps_the_budget_exactly(
    start: int,
) -> None:
    def epsilon_of(multiplier: float) -> float:
        return -float(round(multiplier / STEP))

    assert least_multiplier(epsilon_of, -100.0, start * STEP) == 100 * STEP
    assert least_multiplier(epsilon_of, -100.5, start * STEP) == 101 * STEP


@pytest.mark.parametrize("start", [0.001, 0.7, 30.0])
@pytest.mark.parametrize(
    ("curve", "most"),
    [
        (lambda x: 2 / x, 9),
        (lambda x: 0.7 * x**-2 + 0.4 / x, 11),
        (lambda x: 5 * math.exp(-x) if x > 0.5 else math.inf, 22),
        (lambda x: math.inf if x < 3.2105 else 0.0, 40),
        (lambda x: max(1.0001 - x * 1e-4, 0.999), 60),
    ],
)
def test_the_least_multiplier_is_found_by_few_evaluations(
    curve: Callable[[float], float], most: int, start: float
) -> None:
    tried = list[float]()

    def epsilon_of(multiplier: float) -> float:
        tried.append(multiplier)
        return float(curve(multiplier))

    found = least_multiplier(epsilon_of, 1.0, start)
    assert curve(found) <= 1 < curve(found - STEP)
    assert len(tried) <= most, tried
