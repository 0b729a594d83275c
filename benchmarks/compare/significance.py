"""Whether two groups of seeds differ by more than chance: Welch's t-test (Welch 1947), and the paired t-test
of groups with the same seeds."""

from __future__ import annotations

import itertools
import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """The difference of the means of two groups, and what its chance is if the groups do not differ.

    ``low`` and ``high`` bound the difference with `CONFIDENCE`. They, ``t``, ``df`` and ``p`` are NaN where
    no seed of either group differs from another, so that nothing is known of chance.
    """

    first: str
    second: str
    n: tuple[int, int]
    difference: float
    """Mean of the first minus mean of the second."""
    low: float
    high: float
    t: float
    df: float
    """Degrees of freedom by Welch and Satterthwaite."""
    p: float
    """Two-sided, of this comparison by itself."""
    p_holm: float = math.nan
    """Two-sided p where all comparisons of the table are taken together (Holm 1979)."""
    p_paired: float = math.nan
    """Two-sided p of the differences between runs of one seed; NaN where the groups have other seeds, or
    where all these differences are equal."""


def welch(first: str, ours: Sequence[float], second: str, theirs: Sequence[float]) -> Difference:
    """Welch's test of two samples, each of at least two values."""
    assert min(len(ours), len(theirs)) >= 2
    sizes, difference = (len(ours), len(theirs)), statistics.fmean(ours) - statistics.fmean(theirs)
    if len(set(ours)) == len(set(theirs)) == 1:
        return Difference(first, second, sizes, difference, *[math.nan] * 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # where the seeds of one group are all equal
        found = stats.ttest_ind(ours, theirs, equal_var=False)
    interval = found.confidence_interval(CONFIDENCE)
    numbers = (interval.low, interval.high, found.statistic, found.df, found.pvalue)
    return Difference(first, second, sizes, difference, *map(float, numbers))


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    """The p of the paired t-test of values by seed, or NaN: see `Difference.p_paired`."""
    if ours.keys() != theirs.keys():
        return math.nan
    differences = [round(ours[seed] - theirs[seed], 9) for seed in ours]  # equal ones but for rounding
    if len(set(differences)) < 2:
        return math.nan
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def pairs(groups: Mapping[str, Mapping[int, float]]) -> list[Difference]:
    """Every two groups with at least two values each, in order; a group has a value for each seed."""
    enough = {name: values for name, values in groups.items() if len(values) >= 2}
    tests = [
        replace(
            welch(first, list(enough[first].values()), second, list(enough[second].values())),
            p_paired=paired(enough[first], enough[second]),
        )
        for first, second in itertools.combinations(enough, 2)
    ]
    return adjusted(tests)


def adjusted(tests: Sequence[Difference]) -> list[Difference]:
    """The tests with Holm's p: the i-th smallest of m (from 0) times m - i, and none below the one before."""
    known = sorted((test for test in tests if not math.isnan(test.p)), key=lambda test: test.p)
    found: dict[int, float] = {}
    least = 0.0
    for place, test in enumerate(known):
        least = max(least, min(1.0, (len(known) - place) * test.p))
        found[id(test)] = least
    return [replace(test, p_holm=found.get(id(test), math.nan)) for test in tests]
