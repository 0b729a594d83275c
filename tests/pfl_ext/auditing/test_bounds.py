"""The audit's lower bounds: below the truth as often as they promise, near it, and valid under dependence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, norm

from pfl_ext.auditing.bounds import EPSILONS, Claim, Profile, Trials, find, rates, refuted_in_one_run
from pfl_ext.privacy.epsilon import System, gaussian_delta
from pfl_ext.randomness import stream

MU = 0.5


def gaussian_claim(noise_multiplier: float = 1 / MU) -> Claim:
    """Everybody in the one round of a circle: a single Gaussian mechanism."""
    return Claim(System(100, 100, noise_multiplier, 1e-5, "cyclic", "pld"), 1)


def gaussian_trials(mu: float, canaries: int, seed: int) -> Trials:
    draw = stream(seed, "gaussian trials")
    joined = draw.random(canaries) < 0.5
    return Trials(joined, {"score": draw.standard_normal(canaries) + mu * joined})


@given(st.floats(1e-6, 1 - 1e-6), st.floats(0.05, 4))
@settings(max_examples=60)
def test_a_profile_allows_what_its_gaussian_trade_off_allows(probability: float, mu: float) -> None:
    """Between the true trade-off function and the little that a grid of epsilons gives away."""
    profile = Profile(gaussian_delta(EPSILONS, mu))
    most = float(profile.most(probability))
    exact = float(norm.cdf(norm.ppf(probability) + mu))
    assert exact - 1e-12 <= most <= exact + 0.02
    least = float(norm.cdf(norm.ppf(probability) - mu))
    assert least - 0.02 <= profile.least(probability) <= least + 1e-12


def test_rates_are_clopper_and_pearsons() -> None:
    low, high = rates([0, 7, 40], 40, [0, 7, 50], 50, 0.9)
    for x, y, a, b in zip((0, 7, 40), (0, 7, 50), low, high):
        assert a == pytest.approx(binomtest(x, 40).proportion_ci(0.9).low)
        assert b == pytest.approx(binomtest(y, 50).proportion_ci(0.9).high)


def test_what_is_found_is_below_the_truth_and_near_it() -> None:
    finding = find(gaussian_claim(), gaussian_trials(MU, 100_000, 1), in_one_run=True)
    assert not finding.convicted
    assert 0.85 * MU < finding.mu < MU
    assert 0.8 * finding.claimed < finding.epsilon < finding.claimed
    assert finding.epsilon_in_one_run is not None
    assert 0 < finding.epsilon_in_one_run < finding.epsilon


def test_half_the_noise_is_convicted_even_without_independence() -> None:
    finding = find(gaussian_claim(), gaussian_trials(2 * MU, 100_000, 1), in_one_run=True)
    assert finding.convicted
    assert finding.epsilon_in_one_run is not None
    assert finding.claimed < finding.epsilon_in_one_run < finding.epsilon < gaussian_claim(0.5 / MU).epsilon()


def test_an_honest_mechanism_is_convicted_no_more_often_than_the_confidence_allows() -> None:
    """At 80 % and 300 times; more than this would come once in a thousand if 20 % were convicted."""
    claim, runs = gaussian_claim(), 300
    convicted = sum(
        find(claim, gaussian_trials(MU, 400, seed), confidence=0.8).convicted for seed in range(runs)
    )
    assert convicted <= binom.ppf(0.999, runs, 0.2)


@pytest.mark.parametrize("correct", [30, 60, 90, 100])
def test_in_one_run_independent_guesses_refute_nothing_that_they_obey(correct: int) -> None:
    """100 canaries of a Gaussian mechanism, each guessed at best: their tail is a binomial's."""
    profile = Profile(gaussian_delta(EPSILONS, MU))
    tail = float(binom.sf(correct - 1, 100, norm.cdf(MU / 2)))
    assert not refuted_in_one_run(profile, 100, 100, correct, tail * (1 - 1e-9))


@pytest.mark.parametrize("mistakes", [0, 5])
def test_in_one_run_a_mechanism_that_rarely_tells_all_refutes_nothing(mistakes: int) -> None:
    """With probability 1 % everything is published: (0, 0.01)-DP. Independent trials would convict it."""
    profile = Profile(np.full(len(EPSILONS), 0.01))
    assert not refuted_in_one_run(profile, 200, 200, 200 - mistakes, 0.0099)
    assert refuted_in_one_run(profile, 200, 200, 200 - mistakes, 0.05)


def test_in_one_run_any_number_of_wrong_guesses_is_allowed() -> None:
    profile = Profile(gaussian_delta(EPSILONS, 0.01))
    assert not refuted_in_one_run(profile, 1000, 500, 200, 0.001)
    assert refuted_in_one_run(profile, 1000, 500, 450, 0.001)
