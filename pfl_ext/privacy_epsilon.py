"""Epsilon of repeated Gaussian rounds, for each way of choosing who takes part.

Letters: N population, C users in a round, T rounds, q = C / N, z noise multiplier, k participations of one
user, b band. The unit of privacy is one user with all of their images. Every epsilon comes from the library
dp-accounting; nothing here derives one by itself.

What goes with what, and what is refused because no sound accounting is known to us:

* ``sampler="poisson"``: each user joins a round independently with probability q. Neighbours differ by one
  user added or removed. PLD (tight) or RDP.
* ``sampler="fixed"``: exactly C users without replacement. Neighbours differ by one user replaced by
  another (N and C are public), which moves the clipped sum by up to *twice* the bound, so the library, whose
  bound for this event is written for sensitivity one, is asked about z / 2. RDP only (Wang et al. 2019,
  arXiv 1808.00087, Theorem 27): dp-accounting has no PLD for it. At the paper's setting it
  needs 4 times the noise of Poisson sampling (75.1 for 18.7 by RDP); the paper's code takes it for Poisson.
* ``sampler="cyclic"``: users stand in a circle and each round takes the next C. Nothing is random, so
  nothing is amplified: a user takes part at most k = ceil(T C / N) times, and with one Gaussian round of z
  each that is one Gaussian mechanism of z / sqrt(k). Neighbours differ by one user whose updates are
  replaced by nothing (the circle stays). PLD or RDP. The only one for noise with a band, see
  `pfl_ext.privacy_banded`, which shows that the same k holds there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import dp_accounting
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

Accountant = Literal["pld", "rdp"]
Sampler = Literal["poisson", "fixed", "cyclic"]

STEP = 1e-3  # noise multipliers are whole multiples of this, rounded up
NO_GUARANTEE_BELOW = 0.1  # noise multiplier under which epsilon (then over 100) is given as infinite
PAPER_ORDERS = (1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5, *range(5, 64), 128, 256, 512)
"""RDP orders of tensorflow_privacy's compute_noise, with which the paper's code calibrates."""
GRID = 7e-3  # PLD's grid is this over sqrt(T): it then overstates epsilon by about T grid^2 = 5e-5, or less
RELATIONS = {
    "poisson": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "fixed": dp_accounting.NeighboringRelation.REPLACE_ONE,
    "cyclic": dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
}


def participations(population: int, cohort_size: int, rounds: int) -> int:
    """The most often that one user of a circle takes part: its places come N apart among T C places."""
    return -(-rounds * cohort_size // population)


def min_separation(population: int, cohort_size: int) -> int:
    """The least number of rounds between two participations of one user of a circle."""
    return population // cohort_size


@lru_cache(maxsize=512)
def epsilon_spent(
    noise_multiplier: float,
    *,
    population: int,
    cohort_size: int,
    rounds: int,
    delta: float,
    sampler: Sampler = "poisson",
    accountant: Accountant = "pld",
    coarse: bool = False,
    orders: tuple[float, ...] | None = None,
) -> float:
    """Epsilon of ``rounds`` Gaussian rounds at ``delta``; an upper bound, infinite if hopeless. Remembered.

    ``noise_multiplier`` is the noise's standard deviation on the sum over the bound of one user's norm.
    ``coarse``: PLD on a five times wider grid, RDP at few orders; faster, and a little above. ``orders``:
    RDP's, or the library's.
    """
    refuse_unsound(sampler, accountant)
    assert 0 < cohort_size <= population
    assert rounds >= 0
    if rounds == 0:
        return 0.0
    times = rounds
    if sampler == "cyclic":
        noise_multiplier /= math.sqrt(participations(population, cohort_size, rounds))
        times = 1
    if noise_multiplier < NO_GUARANTEE_BELOW:
        return math.inf
    if sampler == "cyclic":
        event = dp_accounting.GaussianDpEvent(noise_multiplier)
    elif sampler == "poisson":
        event = dp_accounting.PoissonSampledDpEvent(
            cohort_size / population, dp_accounting.GaussianDpEvent(noise_multiplier)
        )
    else:
        event = dp_accounting.SampledWithoutReplacementDpEvent(
            population, cohort_size, dp_accounting.GaussianDpEvent(noise_multiplier / 2)
        )
    if accountant == "rdp":
        ledger = RdpAccountant(range(2, 64, 4) if coarse else orders, neighboring_relation=RELATIONS[sampler])
    else:
        interval = max(1e-4, GRID / math.sqrt(max(times, 50))) * (5 if coarse else 1)
        interval *= max(1.0, noise_multiplier**-2)
        ledger = PLDAccountant(RELATIONS[sampler], value_discretization_interval=interval)
    return float(ledger.compose(event, times).get_epsilon(delta))


def refuse_unsound(sampler: Sampler, accountant: Accountant, band: int = 1) -> None:
    """Raise ValueError for what no sound accounting is known for."""
    if sampler == "fixed" and accountant != "rdp":
        raise ValueError(
            "privacy.sampler fixed has no sound accounting with privacy.accountant pld: "
            "set accountant to rdp, or sampler to poisson"
        )
    if band > 1 and sampler != "cyclic":
        raise ValueError(
            f"privacy.band is {band}, which needs users to take part at fixed distances: "
            "set privacy.sampler to cyclic, or band to 1"
        )


def least_multiplier(epsilon_of: Callable[[float], float], epsilon: float, start: float) -> float:
    """The smallest whole multiple of ``STEP`` with ``epsilon_of(it) <= epsilon``, searched from ``start``.

    ``epsilon_of`` must fall as the multiplier grows.
    """
    high = max(1, math.ceil(start / STEP))
    low = 0  # no noise: never private
    while epsilon_of(high * STEP) > epsilon:
        low, high = high, 2 * high
        if high * STEP > 1e6:
            raise ValueError(f"privacy.epsilon = {epsilon:g} needs a noise multiplier above 1e6: raise it")
    stride = max(1, high // 512)
    while high - stride > low:
        if epsilon_of((high - stride) * STEP) > epsilon:
            low = high - stride
            break
        high, stride = high - stride, 2 * stride
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if epsilon_of(middle * STEP) <= epsilon else (middle, high)
    return round(high * STEP, 6)
