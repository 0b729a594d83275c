"""Samplers of private cohorts. Letters: N population, C (expected) cohort size.

Each sampler is a pure function of (seed, round), and `pfl_ext.privacy.epsilon` accounts for exactly this
sampler. Each returns user numbers ``[C]``, every user at most once. They are only called by `private_cohort`,
by which `pfl_ext.data.federated_dataset` draws every cohort of these three kinds, private or not.
"""

from __future__ import annotations

import numpy as np

from dataset.arrays import IntArray
from pfl_ext.privacy.epsilon import Sampler
from pfl_ext.randomness import stream


def _poisson(seed: int, round_number: int, population: int, expected_size: int) -> IntArray:
    """Each of N users independently with probability C / N. The cohort's size varies; it may be empty."""
    draws = stream(seed, "cohort", round_number).random(population)
    return np.flatnonzero(draws < expected_size / population).astype(np.int64)


def _fixed(seed: int, round_number: int, population: int, size: int) -> IntArray:
    """Exactly C of N users, every such set equally likely."""
    return stream(seed, "cohort", round_number).choice(population, size, replace=False).astype(np.int64)


def _cyclic(seed: int, round_number: int, population: int, size: int) -> IntArray:
    """The next C users of a circle of all N users, in an order drawn from ``seed``.

    Two participations of one user are at least ``N // C`` rounds apart, and in T rounds it has at most
    ``ceil(T C / N)``: on the unrolled circle its places are N apart.
    """
    places = (round_number * size + np.arange(size)) % population
    return np.sort(stream(seed, "circle of users").permutation(population)[places]).astype(np.int64)


def private_cohort(
    sampler: Sampler, seed: int, round_number: int, population: int, cohort_size: int
) -> IntArray:
    """The cohort of a round by the sampler's name.

    Raises:
        ValueError: when the cohort is larger than the population, or below 1.
    """
    if not 0 < cohort_size <= population:
        raise ValueError(
            f"cohort_size is {cohort_size} but there are only {population} training users: "
            f"give 1 to {population}, for example --federated.cohort_size {population}"
        )
    draw = {"poisson": _poisson, "fixed": _fixed, "cyclic": _cyclic}[sampler]
    return draw(seed, round_number, population, cohort_size)
