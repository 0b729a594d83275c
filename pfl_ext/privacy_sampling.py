"""Who takes part in a private round. Letters: N population, C (expected) cohort size.

Each sampler is a pure function of (seed, round) and the one that its accounting in
`pfl_ext.privacy_epsilon` is for; both return sorted user numbers, each at most once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pfl_ext.privacy_epsilon import Sampler
from pfl_ext.randomness import stream

IntArray = npt.NDArray[np.int64]


def poisson_cohort(seed: int, round_number: int, population: int, expected_size: int) -> IntArray:
    """Each of N users independently with probability C / N. The cohort's size varies; it may be empty."""
    _check(population, expected_size)
    draws = stream(seed, "cohort", round_number).random(population)
    return np.flatnonzero(draws < expected_size / population).astype(np.int64)


def fixed_cohort(seed: int, round_number: int, population: int, size: int) -> IntArray:
    """Exactly C of N users, every such set equally likely."""
    _check(population, size)
    chosen = stream(seed, "cohort", round_number).choice(population, size, replace=False)
    return np.sort(chosen).astype(np.int64)


def cyclic_cohort(seed: int, round_number: int, population: int, size: int) -> IntArray:
    """The next C users of a circle in which all N stand in an order of ``seed``, everyone alike often.

    Between two participations of one user lie at least ``N // C`` rounds, and in T rounds it has at most
    ``ceil(T C / N)``: its places on the line that the circle unrolls to are N apart.
    """
    _check(population, size)
    places = (round_number * size + np.arange(size)) % population
    return np.sort(stream(seed, "circle of users").permutation(population)[places]).astype(np.int64)


def private_cohort(
    sampler: Sampler, seed: int, round_number: int, population: int, cohort_size: int
) -> IntArray:
    """The cohort of a round by the sampler's name."""
    draw = {"poisson": poisson_cohort, "fixed": fixed_cohort, "cyclic": cyclic_cohort}[sampler]
    return draw(seed, round_number, population, cohort_size)


def _check(population: int, cohort_size: int) -> None:
    if not 0 < cohort_size <= population:
        raise ValueError(f"cohort_size is {cohort_size}: it must lie between 1 and the {population} users")
