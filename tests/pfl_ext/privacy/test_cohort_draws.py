"""Cohorts are drawn as the accountant assumes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pfl_ext.privacy.sampling import private_cohort


def test_poisson_cohorts_include_each_user_independently_with_the_same_probability() -> None:
    population, expected, rounds = 400, 40, 2000
    joined = np.zeros((rounds, population), bool)
    for r in range(rounds):
        cohort = private_cohort("poisson", 7, r, population, expected)
        assert (np.diff(cohort) > 0).all()
        joined[r, cohort] = True
    sizes = joined.sum(1)
    assert sizes.mean() == pytest.approx(40, abs=4 * math.sqrt(36 / rounds))
    assert sizes.var() == pytest.approx(36, rel=0.15)  # N q (1 - q); a fixed size has none
    assert np.abs(joined.mean(0) - 0.1).max() < 5 * math.sqrt(0.09 / rounds)
    together = (joined[:, :200] & joined[:, 200:]).mean()
    assert together == pytest.approx(0.01, abs=0.001)


def test_fixed_cohorts_have_their_size_and_no_user_twice() -> None:
    """Predecessors 5: with replacement some user is drawn twice in 200 of 41,131 in 38 % of rounds."""
    counts = np.zeros(100)
    for r in range(500):
        cohort = private_cohort("fixed", 7, r, 100, 20)
        assert len(np.unique(cohort)) == 20
        counts[cohort] += 1
    assert np.abs(counts / 500 - 0.2).max() < 5 * math.sqrt(0.16 / 500)


@pytest.mark.parametrize("sampler", ["poisson", "fixed"])
def test_cohorts_are_functions_of_seed_and_round(sampler: Any) -> None:
    first = private_cohort(sampler, 3, 8, 1000, 100)
    assert np.array_equal(first, private_cohort(sampler, 3, 8, 1000, 100))
    assert not np.array_equal(first, private_cohort(sampler, 3, 9, 1000, 100))
    assert not np.array_equal(first, private_cohort(sampler, 4, 8, 1000, 100))
    assert len(private_cohort(sampler, 3, 8, 1000, 1000)) == 1000
    with pytest.raises(ValueError, match="cohort_size is 1001"):
        private_cohort(sampler, 3, 8, 1000, 1001)
