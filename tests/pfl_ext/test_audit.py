"""An audit from outside: canaries, a membership attack, and what it proves about epsilon.

Each canary is a user whose update points along its own axis, far above the bound. It is in the population or
not by a fair coin. The attacker sees the noisy means and scores each canary by what they hold along its axis;
noise is independent between axes, so canaries are independent trials. From the attack's error rates
Clopper and Pearson's intervals give a lower bound on epsilon that holds with 99 % confidence.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.stats import beta

from pfl_ext.privacy import private_mean
from pfl_ext.privacy_accounting import Calibration, PrivacyConfig
from pfl_ext.privacy_banded import BandedFactor
from pfl_ext.privacy_sampling import private_cohort
from pfl_ext.randomness import stream
from tests.pfl_ext.test_privacy import contribution, released

Scores = npt.NDArray[np.float64]
DELTA = 1e-4


def lower_bound(members: Scores, others: Scores, confidence: float = 0.99) -> float:
    """Epsilon that any mechanism with these scores must at least have.

    ``P(score > t | in) <= exp(eps) P(score > t | out) + delta``. The threshold is chosen on one half, the
    rates are bounded on the other, each with half of the error allowed.
    """

    def bound(hits_in: int, n_in: int, hits_out: int, n_out: int) -> float:
        slack = (1 - confidence) / 2
        low = beta.ppf(slack, hits_in, n_in - hits_in + 1) if hits_in else 0.0
        high = beta.ppf(1 - slack, hits_out + 1, n_out - hits_out) if hits_out < n_out else 1.0
        return math.log((low - DELTA) / high) if low > DELTA else 0.0

    def at(threshold: float, x: Scores, y: Scores) -> float:
        return bound(int((x > threshold).sum()), len(x), int((y > threshold).sum()), len(y))

    candidates = np.quantile(np.concatenate([members, others]), np.linspace(0.01, 0.999, 90))
    best = max(candidates, key=lambda t: at(t, members[::2], others[::2]))
    return max(0.0, at(best, members[1::2], others[1::2]))


def attack(calibration: Calibration, repeats: int) -> tuple[Scores, Scores]:
    """Scores of canaries in and out, over repeated training runs of ``calibration.num_rounds`` rounds."""
    population, expected = calibration.executed.population, calibration.executed.cohort_size
    sampler, members, others = calibration.config.sampler, [], []
    for repeat in range(repeats):
        joined = stream(repeat, "canary coins").random(population) < 0.5
        mechanism, means = private_mean(calibration, noise_seed=repeat), []
        invited = np.zeros((calibration.num_rounds, population))
        for r in range(calibration.num_rounds):
            total = contribution(mechanism, torch.zeros(population), points=0)
            for user in private_cohort(sampler, repeat, r, population, expected):
                invited[r, user] = 1
                if joined[user]:
                    update = torch.zeros(population)
                    update[user] = 50.0
                    total = contribution(mechanism, update) + total
            means.append(released(mechanism, total, r)[0].double().numpy())
        seen = scores_of(calibration, np.stack(means), invited)
        members.append(seen[joined])
        others.append(seen[~joined])
    return np.concatenate(members), np.concatenate(others)


def scores_of(calibration: Calibration, means: Scores, invited: Scores) -> Scores:
    """``[U]`` from the means ``[T, U]``: how much each canary's axis holds of what it would have added.

    Of a circle the attacker knows who was in which round, and takes the correlation of the noise back.
    """
    if calibration.config.sampler == "poisson":
        return np.asarray(means.sum(axis=0))
    factor = BandedFactor(calibration.num_rounds, calibration.config.band).matrix()
    pattern = factor @ invited
    return np.asarray((pattern * (factor @ means)).sum(axis=0) / np.linalg.norm(pattern, axis=0))


def audited(**options: Any) -> PrivacyConfig:
    return PrivacyConfig(epsilon=1.0, delta=DELTA, mechanism="gaussian", clipping_bound=1.0, **options)


CLAIMS = {
    "all users, 1 round": (audited(), 200, 1),
    "half of them, 4 rounds": (audited(), 100, 4),
    "a circle with a band, 8 rounds": (audited(sampler="cyclic", band=4), 50, 8),
}


@pytest.fixture(scope="module", params=list(CLAIMS))
def claimed(request: pytest.FixtureRequest) -> Calibration:
    config, cohort, rounds = CLAIMS[request.param]
    return config.calibrate(200, cohort, rounds)


def test_the_attack_proves_no_more_than_the_epsilon_claimed(claimed: Calibration) -> None:
    found = lower_bound(*attack(claimed, repeats=50))
    assert 0 <= found <= claimed.epsilon <= 1


def test_the_attack_convicts_a_mechanism_with_a_quarter_of_its_noise(claimed: Calibration) -> None:
    """The audit can fail: the same claim, the noise cut by 4."""
    weak = dataclasses.replace(claimed.simulated, noise_multiplier=claimed.simulated.noise_multiplier / 4)
    found = lower_bound(*attack(dataclasses.replace(claimed, simulated=weak, executed=weak), repeats=50))
    assert found > claimed.epsilon
    assert found <= weak.epsilon_after(claimed.num_rounds)  # and it accuses of nothing that is not so


def test_the_lower_bound_is_right_for_randomised_response() -> None:
    """Known epsilon: log(p / (1 - p)). Below it at 99 % confidence, and near it with many trials."""
    rng, p = np.random.default_rng(0), 0.88
    truth = math.log(p / (1 - p))
    members, others = ((rng.random(40_000) < q).astype(float) for q in (p, 1 - p))
    found = lower_bound(members, others)
    assert truth - 0.15 < found < truth
