"""Rules of aggregation against what their papers say, computed by brute force in float64; and attacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks.core.config.trees import build
from dataset.arrays import FloatArray, IntArray
from pfl_ext.aggregation.krum import squared_distances
from pfl_ext.aggregation.rule import RULES, AggregationRule, SpooledOptions
from pfl_ext.aggregation.spool import Spool
from pfl_ext.attacks.alie import largest_z
from pfl_ext.attacks.attack import ATTACKS, Attack, attackers
from pfl_ext.attacks.label_flip import FlippedLabels
from pfl_ext.randomness import stream
from tests.pfl_ext.stores import NumberedStore

N, P = 11, 57


@pytest.fixture(autouse=True)
def small_blocks() -> Any:
    """Several blocks of coordinates, the last of which is not whole."""
    with mock.patch("pfl_ext.aggregation.spool.BLOCK_BYTES", 8 * N * 10):
        yield


def rule(kind: str, **options: Any) -> AggregationRule:
    chosen = RULES[kind]
    return chosen(build(chosen.options, options, "test"))


def spooled(updates: Any, weights: Any = None) -> tuple[Spool, IntArray]:
    spool = Spool(len(updates), len(updates[0]))
    for row, update in enumerate(updates):
        spool.write(row, update, 1.0 if weights is None else float(weights[row]))
    return spool, spool.finite_rows()


def updates(seed: int = 0, n: int = N) -> Any:
    return np.random.default_rng(seed).standard_normal((n, P)).astype(np.float32)


WEIGHTS = np.random.default_rng(9).integers(1, 20, N).astype(float)


def brute(kind: str, x: FloatArray, weights: FloatArray, f: int) -> Any:
    """By the definition, number by number."""
    n, p = len(x), weights / weights.sum()
    if kind == "mean":
        return np.array([sum(q * v for q, v in zip(p, column)) for column in x.T])
    if kind == "norm_bound":
        return sum(q * v * min(1.0, 5.0 / np.sqrt(sum(v * v))) for q, v in zip(p, x))
    if kind == "median":
        return np.array([(sorted(c)[(n - 1) // 2] + sorted(c)[n // 2]) / 2 for c in x.T])
    if kind == "trimmed_mean":
        return np.array([np.mean(sorted(c)[f : n - f]) for c in x.T])
    if kind in ("krum", "multi_krum"):
        scores = []
        for i in range(n):
            distances = sorted(sum((x[i] - x[j]) ** 2) for j in range(n) if j != i)
            scores.append(sum(distances[: n - f - 2]))
        best = sorted(range(n), key=lambda i: scores[i])[: 1 if kind == "krum" else n - f]
        return np.mean([x[i] for i in best], axis=0)
    z = brute("median", x, weights, f)
    for _ in range(4):
        b = [q / max(1e-5, np.sqrt(sum((z - v) ** 2))) for q, v in zip(p, x)]
        z = sum(c * v for c, v in zip(b, x)) / sum(b)
    return z


KINDS = tuple(RULES.names())


@pytest.mark.parametrize("n", [N, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_is_its_definition(kind: str, n: int) -> None:
    assert set(KINDS) == {
        *("geometric_median", "krum", "mean", "median", "multi_krum", "norm_bound", "trimmed_mean")
    }
    options = {"bound": 5.0} if kind == "norm_bound" else {}
    x = updates(n=n)
    found = rule(kind, **options).aggregate(*spooled(x, WEIGHTS[:n]))
    expected = brute(kind, x.astype(float), WEIGHTS[:n], int(0.2 * n))
    tolerance = 2**-12 if kind == "norm_bound" else 1e-12  # whose bound is undercut by 2^-14
    assert np.linalg.norm(found - expected) < tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_of_equal_updates_every_rule_gives_that_update(kind: str) -> None:
    x = np.repeat(updates()[:1], N, axis=0)
    options = {"bound": 1000.0} if kind == "norm_bound" else {}
    found = rule(kind, **options).aggregate(*spooled(x, WEIGHTS))
    np.testing.assert_allclose(found, x[0], rtol=1e-12)


ROBUST = [kind for kind in KINDS if issubclass(RULES[kind].options, SpooledOptions)]


@pytest.mark.parametrize("size", [1e4, 1e10, 1e38])
@pytest.mark.parametrize("kind", ROBUST)
def test_two_huge_updates_of_eleven_change_little(kind: str, size: float) -> None:
    """A sum from which outliers are subtracted, as in one library, would be rounding noise."""
    x = updates()
    honest = rule(kind).aggregate(*spooled(x[2:], WEIGHTS[2:]))
    x[:2] = size
    found = rule(kind).aggregate(*spooled(x, WEIGHTS))
    assert np.linalg.norm(found - honest) < 3 * np.sqrt(P)
    assert np.abs(found).max() < np.abs(x[2:]).max()


def test_distances_of_nearly_equal_updates_are_not_lost() -> None:
    """In float32 and from the norms of whole models, a squared distance of 2e-4 came out as 0.13."""
    draws = np.random.default_rng(1)
    base = draws.standard_normal(20_000)
    x = (base + 1e-4 * draws.standard_normal((4, 20_000))).astype(np.float32)
    with mock.patch("pfl_ext.aggregation.spool.BLOCK_BYTES", 2**16):
        found = squared_distances(*spooled(x))
    wide = x.astype(float)
    exact = [[((a - b) ** 2).sum() for b in wide] for a in wide]
    np.testing.assert_allclose(found, exact, rtol=1e-6)
    assert (np.diag(found) == 0).all()


def test_krum_adds_squared_distances_and_leaves_itself_out() -> None:
    """With distances that are not squared, or with one's own among the nearest, another is often the best."""
    others = {"not squared": 0, "itself": 0}
    for seed in range(60):
        x = np.zeros((7, P), np.float32)
        x[:, 0] = np.random.default_rng(seed).standard_normal(7) ** 3
        expected = brute("krum", x.astype(float), np.ones(7), 1)
        np.testing.assert_array_equal(rule("krum", tolerated=0.2).aggregate(*spooled(x)), expected)
        distances = np.sort(np.abs(x[:, :1] - x[:, 0].astype(float)), axis=1)
        others["not squared"] += x[distances[:, 1:5].sum(1).argmin(), 0] != expected[0]
        others["itself"] += x[(distances[:, :4] ** 2).sum(1).argmin(), 0] != expected[0]
    assert min(others.values()) > 5


def test_krum_needs_more_than_twice_f_and_two() -> None:
    for n in range(1, 30):
        for tolerated in (0.0, 0.2, 0.4):
            f = int(tolerated * n + 1e-9)
            assert rule("krum", tolerated=tolerated).works_with(n) == (n > 2 * f + 2)


def test_multi_krum_keeps_as_many_as_asked_for() -> None:
    x = updates()
    one = rule("multi_krum", kept=1).aggregate(*spooled(x))
    np.testing.assert_array_equal(one, rule("krum").aggregate(*spooled(x)))


def test_a_geometric_median_comes_near_the_least_sum_of_distances() -> None:
    x = updates().astype(float)
    found = rule("geometric_median", iterations=200).aggregate(*spooled(x, WEIGHTS))

    def total(z: Any) -> float:
        return float((WEIGHTS * np.linalg.norm(x.astype(np.float32) - z, axis=1)).sum())

    draws = np.random.default_rng(0)
    assert all(total(found) < total(found + 1e-3 * draws.standard_normal(P)) for _ in range(50))


def test_buckets_are_means_of_their_users() -> None:
    x = updates()
    spool, _ = spooled(x, WEIGHTS)
    groups = [np.array([0, 3]), np.array([7]), np.array([1, 2, 5])]
    found = spool.bucketed(groups, None)
    for row, group in enumerate(groups):
        weights = WEIGHTS[group] / WEIGHTS[group].sum()
        np.testing.assert_allclose(found.read(row), weights @ x[group].astype(float), rtol=1e-6)
        assert found.weights[row] == WEIGHTS[group].sum()


def test_a_spool_knows_what_was_written_and_what_is_finite(tmp_path: Path) -> None:
    spool = Spool(4, P, tmp_path)
    x = updates()
    for row, value in ((0, 1.0), (2, np.nan), (3, -np.inf)):
        spool.write(row, np.concatenate([x[row, :-1], [value]]), 2.0)
    assert spool.written_rows().tolist() == [0, 2, 3]
    assert spool.finite_rows().tolist() == [0]
    assert list(tmp_path.iterdir()) == [], "the file has no name"


def test_a_block_of_many_coordinates_is_small() -> None:
    with mock.patch("pfl_ext.aggregation.spool.BLOCK_BYTES", 2**20):
        spool = Spool(200, 30_000)
        for row in range(200):
            spool.write(row, np.zeros(30_000), 1.0)
        sizes = [block.nbytes for _, block in spool.coordinates(spool.written_rows())]
    assert max(sizes) <= 2**20
    assert sum(sizes) == 200 * 30_000 * 8


def attack(kind: str, **options: Any) -> Attack:
    chosen = ATTACKS[kind]
    return chosen(build(chosen.options, options, "test"))


def test_attackers_are_a_function_of_seed_and_user() -> None:
    found = attackers(3, 100, 0.2)
    assert found.sum() == 20
    assert (found == attackers(3, 100, 0.2)).all()
    assert (found != attackers(4, 100, 0.2)).any()
    more = attackers(3, 100, 0.3)
    assert more[found].all(), "a greater share adds attackers"


def test_updates_of_attackers() -> None:
    own = [torch.randn(3, 200, generator=torch.Generator().manual_seed(0)), torch.ones(2000)]
    rng = stream(0, "test")
    for kind, options, factor in (
        ("honest", {}, 1.0),
        ("label_flip", {}, 1.0),
        ("sign_flip", {}, -1.0),
        ("sign_flip", {"scale": 2.0}, -2.0),
        ("boost", {}, 8.0),
        ("boost", {"scale": 3.0}, 3.0),
    ):
        for before, after in zip(own, attack(kind, **options).update(own, rng, 8)):
            assert (after == factor * before).all(), kind
    deviation = torch.cat([t.reshape(-1) for t in own]).std()
    for options, factor in (({}, 1.0), ({"scale": 3.0}, 3.0)):
        noise = torch.cat([t.reshape(-1) for t in attack("gaussian", **options).update(own, rng, 8)])
        assert float(noise.std()) == pytest.approx(factor * float(deviation), rel=0.05)
        assert abs(float(noise.mean())) < 0.2 * float(noise.std())


def test_alie_takes_the_quantile_and_not_the_distribution_function() -> None:
    assert largest_z(100, 20) == pytest.approx(0.286, abs=5e-4)  # the slip gives 0.730
    assert largest_z(20, 4) == pytest.approx(0.157, abs=5e-4)  # 9 / 16
    assert largest_z(10, 0) == 0


def test_alie_sends_the_mean_less_deviations_of_the_honest() -> None:
    x = updates()
    bad, honest = np.array([1, 4]), np.array([0, 2, 3, 5, 6, 7, 8, 9, 10])
    spool, _ = spooled(x)
    attack("alie").collude(spool, honest, bad)
    wide = x[honest].astype(float)
    z = largest_z(N, 2)
    expected = wide.mean(0) - z * np.sqrt(((wide - wide.mean(0)) ** 2).mean(0))
    for row in bad:
        np.testing.assert_allclose(spool.read(row), expected, rtol=1e-5, atol=1e-6)
    for row in honest:
        np.testing.assert_array_equal(spool.read(row), x[row])


def test_labels_are_flipped_of_attackers_alone() -> None:
    store = NumberedStore((3, 4))
    owned = np.array([False] * 3 + [True] * 4)
    flipped = attack("label_flip").images(store, owned)
    rows = np.array([6, 0, 3])
    assert isinstance(flipped, FlippedLabels)
    before, after = store.read(rows)[1], flipped.read(rows)[1]
    np.testing.assert_array_equal(after[0], before[0][::-1])
    np.testing.assert_array_equal(after[1], before[1])
    np.testing.assert_array_equal(after, flipped.targets(rows))
    assert flipped.user_ids == store.user_ids
    for of_image in ((4, 5), (1,)):  # boxes, and a single label, which flipping would not change
        other = mock.Mock(targets=lambda rows, shape=of_image: np.zeros((len(rows), *shape)))
        with pytest.raises(
            ValueError, match=r"attack.kind is label_flip, which needs images with two labels"
        ):
            attack("label_flip").images(other, owned)
