"""Epsilon of repeated Gaussian rounds, for each sampler of cohorts.

Letters: N population, C users in a round, T rounds, q = C / N, z noise multiplier, k participations of one
user, b band. The unit of privacy is one user with all of their images. The library dp-accounting computes
every epsilon.

The samplers, their neighbouring relations and accountants; a combination without sound accounting is refused:

* ``sampler="poisson"``: each user joins a round independently with probability q. Neighbours differ by one
  user added or removed. PLD (tight) or RDP.
* ``sampler="fixed"``: exactly C users without replacement. Neighbours differ by one user replaced by
  another (N and C are public), which moves the clipped sum by up to *twice* the bound. PLD: the dominating
  pair of `without_replacement`, which this file builds, because dp-accounting has no PLD for this sampler.
  RDP: the library's (Wang et al. 2019, arXiv 1808.00087, Theorem 27), asked about z / 2 because it is
  written for sensitivity one. At the paper's setting PLD needs 35.30, RDP 75.12, Poisson sampling 17.33.
  35.30 is not tight: its pair dominates both directions at once. The natural one-sided pair would need 34.67,
  but we know no proof that it may be composed.
* ``sampler="cyclic"``: users are in a circle and each round takes the next C. Nothing is random, so privacy
  is not amplified. A user takes part at most k = ceil(T C / N) times; k Gaussian rounds of z are one Gaussian
  mechanism of z / sqrt(k). Neighbours differ by one user whose updates are replaced by nothing (the circle
  stays the same). PLD or RDP. Only this sampler allows noise with a band; `pfl_ext.privacy.banded` shows that
  the same k holds there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import dp_accounting
import numpy as np
import numpy.typing as npt
from dp_accounting.pld import PLDAccountant, pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq
from scipy.special import log_ndtr

from dataset.arrays import FloatArray

Accountant = Literal["pld", "rdp"]
Sampler = Literal["poisson", "fixed", "cyclic"]

STEP = 1e-3  # noise multipliers are whole multiples of this, rounded up
NO_GUARANTEE_BELOW = 0.1  # noise multiplier under which epsilon (then over 100) is given as infinite
COMPUTE_NOISE_ORDERS = (1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5, *range(5, 64), 128, 256, 512)
"""RDP orders of tensorflow_privacy's compute_noise, with which the paper's code calibrates."""
GRID = 7e-3  # PLD's grid is this over sqrt(T): it then overstates epsilon by about T grid^2 = 5e-5, or less
RELATIONS = {
    "poisson": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "fixed": dp_accounting.NeighboringRelation.REPLACE_ONE,
    "cyclic": dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
}


def participations(population: int, cohort_size: int, rounds: int) -> int:
    """The most times that one user of a circle takes part: its places are N apart among T C places."""
    return -(-rounds * cohort_size // population)


def min_separation(population: int, cohort_size: int) -> int:
    """The least number of rounds between two participations of one user of a circle."""
    return population // cohort_size


@dataclass(frozen=True)
class System:
    """Private training as an accountant sees it: population, cohort and noise."""

    population: int
    cohort_size: int  # expected, for Poisson sampling
    noise_multiplier: float  # the noise's standard deviation on the sum over the bound of one user's norm
    delta: float
    sampler: Sampler
    accountant: Accountant
    releases: tuple[float, ...] = ()
    """Noise multipliers of Gaussian mechanisms before the first round in which every user takes part."""

    def __post_init__(self) -> None:
        assert 0 < self.cohort_size <= self.population
        assert not self.releases or self.sampler == "poisson", "argued for users added or removed"

    @property
    def sampling_probability(self) -> float:
        """Probability that one user is drawn in one round; in a circle, the share of the rounds."""
        return self.cohort_size / self.population

    def epsilon_after(self, rounds: int, accountant: Accountant | None = None) -> float:
        """Epsilon of ``rounds`` rounds, by this system's accountant or another; infinite when hopeless."""
        return epsilon_spent(replace(self, accountant=accountant or self.accountant), rounds)

    def epsilon_of_runs(self, runs: int, rounds: int) -> float:
        """Epsilon of ``runs`` runs of ``rounds`` rounds together, each run with a secret of its own.

        With the cyclic sampler every run has its own circle, so a user takes part in each as often as in one.
        """
        if self.sampler != "cyclic":
            return replace(self, releases=self.releases * runs).epsilon_after(runs * rounds)
        noisier = replace(self, noise_multiplier=self.noise_multiplier / math.sqrt(runs))
        return noisier.epsilon_after(rounds)

    def participations(self, rounds: int) -> int:
        """The most times that one user takes part; with a circle, fewer than ``rounds``."""
        if self.sampler != "cyclic":
            return rounds
        return participations(self.population, self.cohort_size, rounds)

    def profile(self, rounds: int) -> PrivacyProfile:
        """Delta at some epsilons and mu-GDP after ``rounds`` rounds."""
        return privacy_profile(self, rounds)


def gaussian_delta(epsilon: npt.ArrayLike, mu: float) -> FloatArray:
    """Delta of a Gaussian mechanism whose sensitivity is ``mu`` standard deviations of its noise.

    ``Phi(mu / 2 - epsilon / mu) - exp(epsilon) Phi(-mu / 2 - epsilon / mu)`` (Balle and Wang 2018,
    arXiv 1805.06530, Theorem 8).

    Args:
        epsilon: any shape, 0 or more.
        mu: above 0.

    Returns:
        An array of the same shape, between 0 and 1.
    """
    at = np.asarray(epsilon, np.float64)
    kept = np.exp(log_ndtr(mu / 2 - at / mu))
    delta: FloatArray = np.clip(kept - np.exp(at + log_ndtr(-mu / 2 - at / mu)), 0.0, 1.0)
    return delta


def without_replacement_delta(epsilon: npt.ArrayLike, noise_multiplier: float, share: float) -> FloatArray:
    """The hockey-stick profile of one Gaussian round of a cohort drawn without replacement; an upper bound.

    Neighbours differ by one user replaced by another. For epsilon of 0 or more this is Balle, Barthe and
    Gaboardi 2018 (arXiv 1807.01647, by their Theorem 2, advanced joint convexity):
    ``q delta(log(1 + (exp(epsilon) - 1) / q))`` with delta that
    of the Gaussian mechanism at sensitivity 2. The relation is symmetric, so the other half follows from
    ``H_a(P, Q) = 1 - a + a H_{1/a}(Q, P)``. The whole is convex in ``a = exp(epsilon)``: its slopes at 1 are
    ``q t - (1 + t) / 2`` on the left and ``-(1 - t) / 2`` on the right, with t the total variation at
    sensitivity 2. Some pair of distributions therefore has it (Zhu, Dong and Wang 2022, arXiv 2106.08567, on
    which functions are profiles), dominates the round in both directions, and may be composed (their
    Theorem 10).

    Args:
        epsilon: any shape, of either sign.
        noise_multiplier: standard deviation of the noise on the sum over the bound of one user's norm.
        share: q, the cohort over the population, above 0 and at most 1.

    Returns:
        An array of the same shape, between 0 and 1.
    """
    at = np.asarray(epsilon, np.float64)
    inner = np.log1p(np.expm1(np.abs(at)) / share)
    delta = share * gaussian_delta(inner, 2 / noise_multiplier)
    return np.where(at < 0, -np.expm1(np.minimum(at, 0)) + np.exp(at) * delta, delta)


@dataclass(frozen=True)
class _WithoutReplacement:
    """Rounds of `without_replacement_delta`, composed by dp-accounting."""

    loss: PrivacyLossDistribution

    @classmethod
    def rounds(
        cls, noise_multiplier: float, share: float, times: int, interval: float
    ) -> _WithoutReplacement:
        """Privacy loss on a grid of this interval, rounded so that every delta is at least the true one."""
        mu = 2 / noise_multiplier
        end = math.log1p(math.expm1(mu * mu / 2 + 9.5 * mu) * share)  # delta is below 1e-20 from here on
        last = max(1, math.ceil(end / interval))
        profile = without_replacement_delta(interval * np.arange(-last, last + 1), noise_multiplier, share)
        one = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -last, last, profile)
        return cls(PrivacyLossDistribution(one).self_compose(times))

    def get_epsilon(self, target_delta: float) -> float:
        return float(self.loss.get_epsilon_for_delta(target_delta))

    def get_delta(self, target_epsilon: float) -> float:
        return float(self.loss.get_delta_for_epsilon(target_epsilon))


@lru_cache(maxsize=16)
def _composed(system: System, rounds: int, coarse: bool, orders: tuple[float, ...] | None) -> Any:
    """The rounds of `epsilon_spent`, whose ``get_epsilon`` and ``get_delta`` are upper bounds.

    None if there is no meaningful guarantee.
    """
    noise_multiplier, sampler, times = system.noise_multiplier, system.sampler, rounds
    if sampler == "cyclic":
        noise_multiplier /= math.sqrt(system.participations(rounds))
        times = 1
    smallest = min((noise_multiplier, *system.releases))
    if smallest < NO_GUARANTEE_BELOW:
        return None
    interval = max(1e-4, GRID / math.sqrt(max(times, 50))) * (5 if coarse else 1)
    interval *= max(1.0, smallest**-2)
    share = system.sampling_probability
    if sampler == "fixed" and system.accountant == "pld":
        return _WithoutReplacement.rounds(noise_multiplier, share, times, interval)
    if sampler == "cyclic":
        event = dp_accounting.GaussianDpEvent(noise_multiplier)
    elif sampler == "poisson":
        event = dp_accounting.PoissonSampledDpEvent(share, dp_accounting.GaussianDpEvent(noise_multiplier))
    else:
        event = dp_accounting.SampledWithoutReplacementDpEvent(
            system.population, system.cohort_size, dp_accounting.GaussianDpEvent(noise_multiplier / 2)
        )
    if system.accountant == "rdp":
        ledger = RdpAccountant(range(2, 64, 4) if coarse else orders, neighboring_relation=RELATIONS[sampler])
    else:
        ledger = PLDAccountant(RELATIONS[sampler], value_discretization_interval=interval)
    for multiplier in system.releases:
        ledger.compose(dp_accounting.GaussianDpEvent(multiplier))
    return ledger.compose(event, times) if times else ledger


@lru_cache(maxsize=512)
def epsilon_spent(
    system: System, rounds: int, coarse: bool = False, orders: tuple[float, ...] | None = None
) -> float:
    """An upper bound of epsilon of ``rounds`` Gaussian rounds at the system's delta; infinite if hopeless.

    Results are cached. ``coarse`` takes PLD on a five times wider grid, or RDP at few orders: faster, and a
    little above. ``orders`` are RDP's orders; None: the library's.
    """
    assert rounds >= 0
    if rounds == 0 and not system.releases:
        return 0.0
    ledger = _composed(system, rounds, coarse, orders)
    return math.inf if ledger is None else float(ledger.get_epsilon(system.delta))


def deltas_spent(system: System, rounds: int, epsilons: npt.ArrayLike) -> FloatArray:
    """Coarse upper bounds of delta for the rounds of `epsilon_spent`, at each of these epsilons (0 or more).

    Returns:
        An array of the shape of ``epsilons``; 1 if there is no meaningful guarantee.
    """
    ledger = _composed(system, rounds, True, None)
    at = np.asarray(epsilons, np.float64)
    if ledger is None:
        return np.ones(at.shape)
    found = [float(ledger.get_delta(epsilon)) for epsilon in at.ravel().tolist()]
    return np.asarray(found).reshape(at.shape)


@dataclass(frozen=True)
class PrivacyProfile:
    """A run's guarantee in addition to the one pair (epsilon, delta)."""

    delta_at_epsilon: dict[float, float]
    """An upper bound of delta at each of `EPSILONS`, at least `LEAST_DELTA`."""
    mu: float
    """Mu: the Gaussian mechanism with this ratio of sensitivity to noise (mu-GDP: Dong, Roth and Su 2019) has
    at least the run's delta at every epsilon from 0 to the run's own. Infinite without a guarantee."""


EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
MU_POINTS = 256  # points of the grid of epsilons on which mu is found
LARGEST_MULTIPLIER = 1e6  # largest noise multiplier of the search
LEAST_DELTA = 1e-12  # PLDs are composed by FFT, whose rounding is about 1e-15


@lru_cache(maxsize=64)
def privacy_profile(system: System, rounds: int) -> PrivacyProfile:
    """The privacy profile of the rounds of `epsilon_spent`.

    Mu is an upper bound: between two points of a grid of epsilons, delta is taken from the left one, and the
    Gaussian's from the right one.
    """
    if rounds == 0 and not system.releases:
        return PrivacyProfile(dict.fromkeys(EPSILONS, 0.0), 0.0)
    ledger = _composed(system, rounds, False, None)
    if ledger is None:
        return PrivacyProfile(dict.fromkeys(EPSILONS, 1.0), math.inf)
    grid = np.linspace(0.0, ledger.get_epsilon(system.delta), MU_POINTS + 1)
    deltas = [float(ledger.get_delta(at)) for at in grid[:-1]]
    mu = max(_gaussian_mu(right, left) for right, left in zip(grid[1:].tolist(), deltas))
    return PrivacyProfile({at: max(float(ledger.get_delta(at)), LEAST_DELTA) for at in EPSILONS}, mu)


LEAST_MU = 1e-9
"""The smallest mu that counts; also how far the root may be off."""


def _gaussian_mu(epsilon: float, delta: float) -> float:
    """The mu at which a Gaussian mechanism has this delta at this epsilon."""
    if delta <= 0:
        return 0.0
    high = 1.0
    while gaussian_delta(epsilon, high) < delta:
        high *= 2
        if high > 1e4:
            return math.inf
    if gaussian_delta(epsilon, LEAST_MU) >= delta:
        return LEAST_MU
    root = brentq(lambda mu: float(gaussian_delta(epsilon, mu)) - delta, LEAST_MU, high, xtol=LEAST_MU)
    return float(root) + LEAST_MU


GUESSES = 12
"""Multipliers that are guessed from the slope before `least_multiplier` halves the range."""


def least_multiplier(epsilon_of: Callable[[float], float], epsilon: float, start: float) -> float:
    """The smallest whole multiple of ``STEP`` with ``epsilon_of(it) <= epsilon``, searched from ``start``.

    ``epsilon_of`` must fall as the multiplier grows. Its logarithm is nearly linear in the multiplier's,
    so that the line through the last two points leads next to the result, after a first guess of slope -1.
    """
    most = round(LARGEST_MULTIPLIER / STEP)
    low, high = 0, most + 1  # low: too little noise, as none is; high: enough
    tried, guess = list[tuple[int, float]](), min(max(1, math.ceil(start / STEP)), most)
    while high - low > 1:
        found = epsilon_of(guess * STEP)
        low, high = (low, guess) if found <= epsilon else (guess, high)
        tried.append((guess, found))
        middle = 2 * low if high > most else (low + high) // 2
        guess = min(max(_guess(tried, epsilon) or middle, low + 1), high - 1)
    if high > most:
        raise ValueError(f"privacy.epsilon = {epsilon:g} needs a noise multiplier above 1e6: raise it")
    return round(high * STEP, 6)


def _guess(tried: Sequence[tuple[int, float]], epsilon: float) -> int | None:
    """Where the line through the last two points reaches epsilon; None if that is not known."""
    (before, more), (last, found) = tried[-2] if len(tried) > 1 else (0, 0.0), tried[-1]
    if len(tried) > GUESSES or not (epsilon > 0 and 0 < found < math.inf):
        return None
    slope = -1.0
    if 0 < more < math.inf and before != last:
        slope = min(math.log(found / more) / math.log(last / before), -0.1)
    factor = math.exp(min(max(math.log(epsilon / found) / slope, -2.0), 2.0))
    return math.ceil(last * factor)
