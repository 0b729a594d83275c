"""The tests against their formulas, and Holm's adjustment against the values that R's p.adjust gives."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from scipy.special import betainc, stdtrit

from benchmarks.compare.significance import adjusted, paired, pairs, welch

OURS, THEIRS = [61.2, 60.4, 62.9], [58.0, 59.9, 58.1, 57.2]


def test_welch_is_its_formulas() -> None:
    found = welch("a", OURS, "b", THEIRS)
    means = [sum(x) / len(x) for x in (OURS, THEIRS)]
    squares = [sum((value - mean) ** 2 for value in x) for x, mean in zip((OURS, THEIRS), means)]
    parts = [squares[0] / 2 / 3, squares[1] / 3 / 4]
    error = math.sqrt(sum(parts))
    t = (means[0] - means[1]) / error
    df = sum(parts) ** 2 / (parts[0] ** 2 / 2 + parts[1] ** 2 / 3)
    half = stdtrit(df, 0.975) * error
    assert found.n == (3, 4)
    assert found.t == pytest.approx(t, rel=1e-12)
    assert found.df == pytest.approx(df, rel=1e-12)
    assert found.p == pytest.approx(betainc(df / 2, 0.5, df / (df + t * t)), rel=1e-9)
    assert (found.low, found.high) == pytest.approx(
        (found.difference - half, found.difference + half), rel=1e-9
    )


def test_holm_is_that_of_r() -> None:
    one = welch("a", OURS, "b", THEIRS)
    tests = [replace(one, p=p) for p in (0.01, 0.04, 0.03, 0.005, math.nan)]
    assert [test.p_holm for test in adjusted(tests)][:4] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert math.isnan(adjusted(tests)[4].p_holm)
    assert [test.p_holm for test in adjusted([replace(one, p=0.9), replace(one, p=0.8)])] == [1.0, 1.0]


def test_groups_of_one_seed_are_not_tested_and_equal_seeds_say_nothing_of_chance() -> None:
    values = {"a": [1.0, 1.0], "b": [2.0], "c": [3.0, 3.0], "d": [1.0, 2.0]}
    found = pairs({name: dict(enumerate(each)) for name, each in values.items()})
    assert [(test.first, test.second) for test in found] == [("a", "c"), ("a", "d"), ("c", "d")]
    assert found[0].difference == -2
    assert math.isnan(found[0].p)
    assert found[1].p_holm >= found[1].p


def test_runs_of_one_seed_are_compared_with_each_other() -> None:
    """Seeds that move both groups alike hide a difference from Welch's test, and not from this one."""
    ours, theirs = {0: 61.2, 1: 55.4, 2: 66.9}, {2: 66.0, 0: 60.1, 1: 54.7}
    differences = [61.2 - 60.1, 55.4 - 54.7, 66.9 - 66.0]
    mean = sum(differences) / 3
    t = mean / math.sqrt(sum((d - mean) ** 2 for d in differences) / 2 / 3)
    assert paired(ours, theirs) == pytest.approx(betainc(1, 0.5, 2 / (2 + t * t)), rel=1e-9)
    found = pairs({"ours": ours, "theirs": theirs})[0]
    assert found.p_paired < 0.05 < 0.5 < found.p
    assert math.isnan(paired(ours, {0: 1.0, 1: 2.0, 3: 3.0}))
    assert math.isnan(paired({0: 0.3, 1: 0.2}, {0: 0.2, 1: 0.1}))  # which differ in the last bit
