from __future__ import annotations

import json
import math
from itertools import combinations, pairwise, product
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from pfl.privacy.ftrl_mechanism import BandedMatrixFactorizationMechanism, FTRLMatrixFactorizer

from dataset.arrays import FloatArray
from pfl_ext.privacy.accounting import Calibration, PrivacyConfig
from pfl_ext.privacy.banded import BandedFactor, CorrelatedNoise
from pfl_ext.privacy.central import PrivateMean, private_mean
from pfl_ext.privacy.epsilon import STEP, min_separation, participations
from pfl_ext.privacy.mechanisms import gaussian_noise
from pfl_ext.privacy.sampling import private_cohort
from pfl_ext.randomness import derive
from tests.closeness import assert_close_as_vector
from tests.pfl_ext.privacy.test_central import release, value

SPECIAL = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
POPULATION, COHORT, ROUNDS = 100, 10, 25


def cyclic(**options: Any) -> Calibration:
    facts: dict[str, Any] = {"epsilon": 2.0, "sampler": "cyclic", "band": 4, "delta": 1e-3} | options
    return PrivacyConfig(**facts).calibrate(POPULATION, COHORT, ROUNDS)


def patterns(rounds: int, separation: int, most: int) -> list[tuple[int, ...]]:
    """All sets of rounds in which one user could take part."""
    every = (s for size in range(1, most + 1) for s in combinations(range(rounds), size))
    return [s for s in every if all(b - a >= separation for a, b in pairwise(s))]


def sensitivity(factor: FloatArray, min_separation: int, max_participations: int) -> float:
    """Largest L2 change of ``C X`` by one user, for C ``[T, T]`` with at most ``min_separation`` diagonals.

    It is taken over all sets of at most ``max_participations`` rounds that are ``min_separation`` or more
    apart, by dynamic programming. So it is a reference for more rounds than `brute_force` can compute.
    """
    assert not np.triu(factor, 1).any()
    assert not np.tril(factor, -min_separation).any(), "columns of one user could overlap"
    squares = (factor**2).sum(axis=0)
    best = np.zeros(len(squares) + min_separation)  # best[t]: from round t on, with the participations so far
    for _ in range(max_participations):
        more = np.zeros_like(best)
        for t in reversed(range(len(squares))):
            more[t] = max(more[t + 1], squares[t] + best[t + min_separation])
        best = more
    return float(best[0] ** 0.5)


def brute_force(factor: FloatArray, separation: int, most: int) -> float:
    """Over all patterns and all updates of length 1 along one axis with either sign, or all orthogonal."""
    worst = 0.0
    for pattern in patterns(len(factor), separation, most):
        columns = factor[:, pattern]
        worst = max(worst, float(np.linalg.norm(columns)))
        for signs in product((-1.0, 1.0), repeat=len(pattern)):
            worst = max(worst, float(np.linalg.norm(columns @ np.array(signs))))
    return worst


def running_error(factor: BandedFactor) -> float:
    """Root mean square over rounds of the noise on the running sum, over z: of A C^-1 by rows."""
    rounds = factor.num_rounds
    rows = np.tril(np.ones((rounds, rounds))) @ np.linalg.inv(factor.matrix())
    return float(np.linalg.norm(rows) / rounds**0.5)


# the factor and its sensitivity


@pytest.mark.parametrize("rounds, band, most", [(7, 1, 3), (8, 2, 4), (9, 3, 2), (9, 3, 9), (6, 6, 3)])
def test_the_reference_is_the_worst_over_all_participations(rounds: int, band: int, most: int) -> None:
    """Holds for any band matrix, here with columns of many lengths and signs."""
    rng = np.random.default_rng(rounds * band)
    near = np.subtract.outer(range(rounds), range(rounds)) < band
    factor = np.tril(rng.normal(size=(rounds, rounds))) * near
    assert sensitivity(factor, band, most) == pytest.approx(brute_force(factor, band, most), rel=1e-12)


def test_users_nearer_than_the_band_would_move_more() -> None:
    """Why `PrivacyConfig.calibrate` refuses a band above their distance."""
    factor = BandedFactor(8, 3).matrix()
    assert brute_force(factor, 2, 4) > brute_force(factor, 3, 4) * 1.1


@given(rounds=st.integers(1, 60), band=st.integers(1, 20), most=st.integers(1, 6))
@settings(max_examples=60)
def test_one_participation_is_worth_one_and_k_the_root_of_k(rounds: int, band: int, most: int) -> None:
    fitting = min(most, -(-rounds // band))
    found = sensitivity(BandedFactor(rounds, band).matrix(), band, most)
    assert found == pytest.approx(math.sqrt(fitting), rel=1e-12)


def test_a_full_band_is_the_square_root_of_the_running_sum() -> None:
    factor = BandedFactor(12, 12)
    root = factor.matrix() * factor.column_norms
    assert np.allclose(root @ root, np.tril(np.ones((12, 12))), atol=1e-12)
    assert np.array_equal(BandedFactor(9, 1).matrix(), np.eye(9))


def test_the_scales_of_the_noise_are_the_rows_of_the_inverse() -> None:
    for rounds, band in ((1, 4), (5, 2), (30, 8)):
        factor = BandedFactor(rounds, band)
        inverse = np.linalg.inv(factor.matrix())
        assert np.allclose(factor.noise_scales, np.linalg.norm(inverse, axis=1))


def test_the_running_sum_is_less_noisy_the_wider_the_band() -> None:
    """At equal sensitivity, so equal epsilon. Known: sqrt((T + 1) / 2) for independent noise."""
    errors = [running_error(BandedFactor(150, band)) for band in (1, 2, 4, 8, 13)]
    assert errors[0] == pytest.approx(math.sqrt(151 / 2))
    assert errors == sorted(errors, reverse=True)
    assert errors[3] == pytest.approx(3.856, abs=0.001)


def test_pfls_factor_is_longer_by_columns_than_its_accountant_believes() -> None:
    """Why it is not used: if this fails, pfl has fixed it."""
    rounds, separation = 24, 8
    mask = BandedMatrixFactorizationMechanism._get_banded_matrix_mask(rounds, separation - 1)
    gram = np.asarray(FTRLMatrixFactorizer(np.tril(np.ones((rounds, rounds))), mask).optimize(60))
    factor = np.linalg.cholesky(gram).astype(np.float64)
    assert np.allclose((factor**2).sum(axis=1), 1, atol=1e-5)
    assert (factor**2).sum(axis=0).max() > 1.5**2
    assert sensitivity(np.tril(factor), separation, 3) > 1.15 * math.sqrt(3)


# the noise


def test_the_noise_has_the_covariance_of_the_factorisation() -> None:
    factor, size = BandedFactor(6, 3), 400_000
    noise = CorrelatedNoise(factor)
    rows = torch.stack([noise(7, t, size)[0] for t in range(6)]).double().numpy()
    inverse = np.linalg.inv(factor.matrix())
    expected = inverse @ inverse.T
    assert np.abs(expected[1, 0]) > 0.4
    assert np.abs(rows @ rows.T / size - expected).max() < 5 * expected.max() * math.sqrt(2 / size)


def test_what_is_private_carries_independent_noise() -> None:
    """``C (C^-1 Z) = Z``: the very numbers that were drawn, one draw a round."""
    factor, size = BandedFactor(9, 4), 1000
    noise = CorrelatedNoise(factor)
    rows = torch.stack([noise(2**100, t, size)[0] for t in range(9)]).double()
    drawn = torch.stack([gaussian_noise(derive(2**100, "dp noise", t), size) for t in range(9)]).double()
    product = torch.from_numpy(factor.matrix()) @ rows
    assert_close_as_vector(product, drawn.float(), 9 * 8)  # a recurrence of nine rounds


def test_a_rounds_noise_is_the_same_after_a_resume_and_on_any_number_of_threads() -> None:
    factor = BandedFactor(8, 3)
    straight = CorrelatedNoise(factor)
    rows = [straight(5, t, 300)[0] for t in range(8)]
    for start in (0, 1, 2, 5, 7):
        resumed = CorrelatedNoise(factor, threads=3)
        for t in range(start, 8):
            assert torch.equal(resumed(5, t, 300)[0], rows[t])
    assert torch.equal(straight(5, 3, 300)[0], rows[3])
    assert not torch.equal(straight(6, 3, 300)[0], rows[3])


# the circle


@given(population=st.integers(1, 60), share=st.floats(0.01, 1), rounds=st.integers(1, 40))
@settings(max_examples=80)
def test_users_of_the_circle_keep_their_distance(population: int, share: float, rounds: int) -> None:
    size = max(1, int(population * share))
    taken: list[list[int]] = [[] for _ in range(population)]
    for r in range(rounds):
        cohort = private_cohort("cyclic", 3, r, population, size)
        assert len(set(cohort.tolist())) == size
        for user in cohort:
            taken[user].append(r)
    separation, most = min_separation(population, size), participations(population, size, rounds)
    assert all(b - a >= separation for rounds_of in taken for a, b in pairwise(rounds_of))
    counts = [len(rounds_of) for rounds_of in taken]
    assert max(counts) == most
    assert min(counts) >= most - 1


def test_the_circle_is_in_an_order_of_the_seed() -> None:
    first = [private_cohort("cyclic", 1, r, 40, 8).tolist() for r in range(10)]
    assert first[:5] == first[5:]
    assert private_cohort("cyclic", 2, 0, 40, 8).tolist() != first[0]
    assert sorted(np.concatenate(first[:5]).tolist()) == list(range(40))


# accounting


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_epsilon_is_dp_accountings_of_k_gaussian_rounds(accountant: Any, epsilon: float) -> None:
    facts = cyclic(epsilon=epsilon, accountant=accountant)
    k = math.ceil(ROUNDS * COHORT / POPULATION)

    def direct(noise: float) -> float:
        event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(noise), k)
        ledger = (
            RdpAccountant(neighboring_relation=SPECIAL) if accountant == "rdp" else PLDAccountant(SPECIAL)
        )
        return float(ledger.compose(event).get_epsilon(1e-3))

    z = facts.simulated.noise_multiplier
    assert facts.epsilon == pytest.approx(direct(z), rel=1e-3)
    assert direct(z) <= facts.epsilon + 1e-4 <= epsilon + 1e-4
    assert direct(z - 3 * STEP) > epsilon
    assert facts.epsilon <= facts.epsilon_rdp
    assert [facts.epsilon_after(t) for t in (0, 1, 10)] == [0, facts.epsilon_after(1), facts.epsilon_after(1)]
    assert facts.epsilon_after(11) > facts.epsilon_after(10)


def test_the_claim_names_participations_separation_and_relation() -> None:
    statement = cyclic(noise_cohort_size=20).to_json()
    assert statement["neighbouring_relation"] == "replace_special"
    assert (statement["sampler"], statement["config"]["band"]) == ("cyclic", 4)
    system, executed = statement["simulated_system"], statement["as_executed"]
    assert (system["participations_at_most"], system["min_separation"]) == (5, 5)
    assert (executed["participations_at_most"], executed["min_separation"]) == (3, 10)
    json.dumps(statement, allow_nan=False)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"band": 0}, "band\n.*greater than 0"),
        ({"band": 11}, "privacy.band is 11 .* at most 10"),
        ({"band": 6, "noise_cohort_size": 20}, "privacy.band is 6 .* at most 5"),
        ({"sampler": "poisson"}, "set privacy.sampler to cyclic"),
        ({"sampler": "fixed", "accountant": "rdp"}, "set privacy.sampler to cyclic"),
        ({"noise": "rounds_as_epochs"}, "privacy.noise rounds_as_epochs needs rounds with random sampling"),
    ],
)
def test_a_band_that_nothing_accounts_for_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cyclic(**options)


# the mechanism


def noisy_rounds(mechanism: PrivateMean, size: int, first: int = 0, last: int = ROUNDS) -> torch.Tensor:
    means = [release(mechanism, [torch.zeros(size)], r)[0] for r in range(first, last)]
    return torch.stack(means).double()


def test_at_equal_epsilon_the_model_carries_less_noise_than_with_independent_rounds() -> None:
    """What the server has added up, over all rounds, through the mechanism itself."""
    errors = []
    for band in (1, 4, 10):
        facts = cyclic(band=band, clipping_bound=0.5)
        sums = noisy_rounds(private_mean(facts, noise_seed=9), 20_000).cumsum(0)
        errors.append(float(sums.square().mean().sqrt()))
        unit = facts.simulated.noise_multiplier * 0.5 / COHORT
        assert errors[-1] == pytest.approx(unit * running_error(BandedFactor(ROUNDS, band)), rel=0.02)
    assert errors[2] < errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize("kind", ["gaussian", "adaptive"])
def test_each_rounds_metric_is_the_noise_that_was_added(kind: Any) -> None:
    mechanism = private_mean(cyclic(mechanism=kind, indicator_std_fraction=0.5), noise_seed=1)
    stds = []
    for r in range(6):
        noisy, metrics = release(mechanism, [torch.zeros(100_000)], r)
        stds.append(value(metrics, "noise std. dev. on the mean") / value(metrics, "clipping bound"))
        expected = stds[-1] * value(metrics, "clipping bound")
        assert float(noisy.std()) == pytest.approx(expected, rel=0.015)
    assert stds == sorted(stds)


def test_a_resumed_run_goes_on_with_the_noise_that_was_due() -> None:
    facts = cyclic()
    straight = private_mean(facts, noise_seed=4)
    rows = noisy_rounds(straight, 500)
    first = private_mean(facts, noise_seed=4)
    noisy_rounds(first, 500, 0, 7)
    resumed = private_mean(facts, noise_seed=4)
    resumed.load_state(json.loads(json.dumps(first.state())))
    assert torch.equal(noisy_rounds(resumed, 500, 7), rows[7:])
