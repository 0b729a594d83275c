"""Our sampler against the paper's rules, its edge cases, and Google's published splits."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.arrays import IntArray
from dataset.partitions import dirichlet
from dataset.partitions.dirichlet import (
    _draw_q,
    _rounded,
    dirichlet_partition,
)
from dataset.partitions.drawn import parse_kinds, partition_name
from dataset.partitions.statistics import distances
from dataset.store.index import known_as, meaning

CIFAR10 = np.repeat(np.arange(10), 5000)
CIFAR100 = np.repeat(np.arange(100), 500)
SEEDS = 24


def golden(classes: IntArray, alpha: float, seed: int) -> tuple[float, float]:
    """Mean EMD and mean number of classes of 100 clients of 500 images."""
    dealt = dirichlet_partition(classes, alpha, seed)
    distance, held = distances(classes[dealt.rows], np.repeat(np.arange(100), 500), 100)
    return float(distance.mean()), float(held.mean())


@pytest.mark.parametrize(
    "classes, alpha, emd, held",
    [
        (CIFAR10, 0, 1.800, 1),
        (CIFAR10, 0.05, 1.752, 1.32),
        (CIFAR10, 0.1, 1.743, 1.54),
        (CIFAR10, 0.2, 1.688, 2.19),
        (CIFAR10, 0.5, 1.562, 3.57),
        (CIFAR10, 1, 1.439, 4.78),
        (CIFAR10, 10, 0.763, 9.28),
        (CIFAR10, 100, 0.255, 9.9),
        (CIFAR100, 0, 1.980, 1),
        (CIFAR100, 1000, 0.264, 98.8),
    ],
)
def test_google_published_a_draw_of_this_sampler(
    classes: IntArray, alpha: float, emd: float, held: float
) -> None:
    """Within three standard deviations of one draw, and half a unit of the table's last digit."""
    drawn = np.array([golden(classes, alpha, seed) for seed in range(SEEDS if classes is CIFAR10 else 6)])
    mean, deviation = drawn.mean(0), drawn.std(0, ddof=1)
    assert abs(mean[0] - emd) <= 3 * deviation[0] + 0.0005
    assert abs(mean[1] - held) <= 3 * deviation[1] + 0.005


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=2, max_size=8).filter(lambda sizes: sum(sizes) >= 30),
    alpha=st.sampled_from([0.0, 1e-300, 0.01, 1.0, 1e6]),
    seed=st.integers(0, 2**32),
    images=st.integers(1, 10),
)
def test_every_client_gets_its_images_and_no_image_is_dealt_twice(
    sizes: list[int], alpha: float, seed: int, images: int
) -> None:
    """However many classes run out, and up to the very last image."""
    classes = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    clients = len(classes) // images
    dealt = dirichlet_partition(classes, alpha, seed, clients, images)
    assert len(np.unique(dealt.rows)) == len(dealt.rows) == clients * images
    assert np.diff(dealt.offsets).tolist() == [images] * clients
    again = dirichlet_partition(classes, alpha, seed, clients, images)
    np.testing.assert_array_equal(again.rows, dealt.rows)


def test_classes_that_a_client_does_not_have_cost_no_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 clients of 3 images among 500 classes: at most 30 classes have images."""
    lengths, sort = [], np.sort

    def counted(images: IntArray) -> IntArray:
        lengths.append(len(images))
        return sort(images)

    monkeypatch.setattr(np, "sort", counted)
    dirichlet_partition(np.arange(5000) % 500, 1.0, 0, 10, 3)
    assert sum(lengths) == 30
    assert all(lengths)


def test_seeds_give_other_images_and_other_classes() -> None:
    first, second = (dirichlet_partition(CIFAR10, 1.0, seed) for seed in (0, 1))
    assert not np.array_equal(CIFAR10[first.rows], CIFAR10[second.rows])
    calm = [dirichlet_partition(CIFAR10, 1e12, seed) for seed in (0, 1)]
    assert np.bincount(CIFAR10[calm[0].rows[:500]]).tolist() == [50] * 10  # alpha -> infinity is the prior
    assert len(np.intersect1d(calm[0].rows[:500], calm[1].rows[:500])) < 30


def test_without_mass_on_what_is_left_a_client_draws_anew_among_it() -> None:
    """alpha = 0 on classes of 30, 20 and 10 images: six clients of ten, one class each."""
    classes = np.repeat(np.arange(3), (30, 20, 10))
    for seed in range(20):
        dealt = dirichlet_partition(classes, 0.0, seed, 6, 10)
        held = [set(classes[dealt.rows[start : start + 10]].tolist()) for start in range(0, 60, 10)]
        assert [len(one) for one in held] == [1] * 6
    firsts = [int(classes[dirichlet_partition(classes, 0.0, seed, 1, 10).rows[0]]) for seed in range(1000)]
    assert np.abs(np.bincount(firsts) / 1000 - [1 / 2, 1 / 3, 1 / 6]).max() < 0.06  # class y with chance p(y)


def test_alpha_is_the_sum_of_the_parameters_and_the_prior_is_the_datas() -> None:
    """Dir(alpha p): mean p, variance p (1 - p) / (alpha + 1)."""
    prior = np.array([0.6, 0.3, 0.1, 0.0])
    rng = np.random.default_rng(0)
    drawn = np.array([_draw_q(rng, prior * 7, 4.0) for _ in range(4000)])
    np.testing.assert_allclose(drawn.mean(0), prior, atol=0.015)
    np.testing.assert_allclose(drawn.var(0), prior * (1 - prior) / 5, atol=0.004)
    np.testing.assert_allclose(drawn.sum(1), 1)


def test_the_same_prior_by_either_convention_deals_the_same_images() -> None:
    """Ten classes of one size: a total of 3 is 0.3 per class, as long as no class has run out."""
    total = dirichlet_partition(CIFAR10, 3.0, 5, 40, 50)
    each = dirichlet_partition(CIFAR10, 0.3, 5, 40, 50, "per-class")
    np.testing.assert_array_equal(total.rows, each.rows)
    other = dirichlet_partition(CIFAR10, 0.3, 5, 40, 50)
    assert not np.array_equal(other.rows, each.rows)


def test_per_class_every_class_has_the_same_parameter_whatever_its_size() -> None:
    """Two classes in 9 : 1: q ~ Dir(1, 1), uniform, so that the mean share of each is a half."""
    classes = np.repeat([0, 1], [90_000, 10_000])
    dealt = dirichlet_partition(classes, 1.0, 0, 400, 20, "per-class")
    shares = classes[dealt.rows].reshape(400, 20).mean(1)
    assert abs(shares.mean() - 1 / 2) < 5 / np.sqrt(12 * 400)  # a uniform variable's variance is 1/12
    assert abs((shares < 1 / 4).mean() - 1 / 4) < 5 * np.sqrt(3 / 16 / 400) + 1 / 20
    total = dirichlet_partition(classes, 2.0, 0, 400, 20)
    assert classes[total.rows].mean() < 0.2


@pytest.mark.parametrize(
    "name, classes, said",
    [
        ("alpha-0.30", 10, r"^alpha 0\.3 is the total over the 10 classes .*; per class .* it is 0\.03$"),
        (
            "dirichlet-0.3-seed-7",
            10,
            r"^alpha 0\.3 is the total over the 10 classes .*; per class .* it is 0\.03$",
        ),
        (
            "dirichlet-total-1e-05-seed-0",
            100,
            r"^alpha 1e-05 is the total over the 100 classes .*; per class .* is 1e-07$",
        ),
        (
            "dirichlet-per-class-0.03-seed-0",
            10,
            r"^alpha 0\.03 is per class .* over the 10 .* is 0\.3$",
        ),
        ("user-120k", 10, "^$"),
        ("alpha-beta", 10, "^$"),
        ("dirichlet-per-class-..-seed-0", 10, "^$"),
        (None, 10, "^$"),
    ],
)
def test_a_partitions_name_says_what_its_alpha_counts(name: str | None, classes: int, said: str) -> None:
    assert re.search(said, meaning(name, classes))


def test_the_old_name_and_the_new_one_find_each_other() -> None:
    old, new = "dirichlet-0.3-seed-7", partition_name("dirichlet-total", 0.3, 7)
    assert (known_as(old, [new]), known_as(new, [old])) == (new, old)
    assert (known_as(old, [old, new]), known_as(new, [old, new])) == (old, new)
    each = partition_name("dirichlet-per-class", 0.3, 7)
    assert (known_as(each, [old]), known_as(old, [each]), known_as("users", [old])) == (each, old, "users")
    assert partition_name("dirichlet-total", 10, 0) == "dirichlet-total-10-seed-0"


def test_rounding_keeps_the_sum_and_favours_the_largest_remainders() -> None:
    assert _rounded(np.array([1.2, 2.7, 0.4, 0.7])).tolist() == [1, 3, 0, 1]
    assert _rounded(np.array([2.5, 2.5])).tolist() == [3, 2]
    assert _rounded(np.array([3.0, 0.0])).tolist() == [3, 0]


@pytest.mark.parametrize(
    "alpha, clients, images, said",
    [
        (-0.1, 10, 10, "alpha is -0.1; give a number from 0 to 1e.100"),
        (float("nan"), 10, 10, "alpha is nan"),
        (float("inf"), 10, 10, "alpha is inf"),
        (1.0, 101, 500, "50,000 images are not enough for 101 clients with 500 images each"),
        (1.0, 0, 500, "images are not enough for 0 clients with 500"),
    ],
)
def test_what_cannot_be_dealt_is_said(alpha: float, clients: int, images: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dirichlet_partition(CIFAR10, alpha, 0, clients, images)


def counts_of_client(rng: np.random.Generator, alpha: float, left: IntArray, images: int) -> list[int]:
    """What one client gets of the prior `THIRDS`."""
    return dirichlet._counts(lambda prior: dirichlet._draw_q(rng, prior, alpha), THIRDS, left, images)


class Prescribed:
    """In the place of `_draw_q`: these q one after another, and the priors that they were asked for with."""

    def __init__(self, *draws: list[float]) -> None:
        self.draws = [np.array(q) for q in draws]
        self.priors: list[list[float]] = []

    def __call__(self, rng: np.random.Generator, prior: Any, alpha: float) -> Any:
        self.priors.append(prior.tolist())
        return self.draws.pop(0)


THIRDS = np.array([0.5, 0.3, 0.2])


@pytest.mark.parametrize(
    "left, q, images, taken",
    [
        # Nothing runs out: the shares of q.
        ([100, 100, 100], [0.5, 0.3, 0.2], 20, [10, 6, 4]),
        # Class 0 has 2 of 10: the lacking 8 go to the others as q has them, 4.8 and 3.2.
        ([2, 100, 100], [0.5, 0.3, 0.2], 20, [2, 6 + 5, 4 + 3]),
        # Class 0 is exhausted from the start: equation 5 for all 20, 12 and 8.
        ([0, 100, 100], [0.5, 0.3, 0.2], 20, [0, 12, 8]),
        # Two run out one after the other: 2 of 10, then 7 of 11, and class 2 has the rest.
        ([2, 7, 100], [0.5, 0.3, 0.2], 20, [2, 7, 11]),
        # A class with no mass in q is not touched while another has images.
        ([5, 100, 100], [0.5, 0.5, 0.0], 20, [5, 15, 0]),
        # The very last image of each class.
        ([3, 4, 5], [0.98, 0.01, 0.01], 12, [3, 4, 5]),
    ],
)
def test_what_an_exhausted_class_lacks_comes_from_the_others_as_q_has_them(
    left: list[int], q: list[float], images: int, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = Prescribed(q)
    monkeypatch.setattr(dirichlet, "_draw_q", draws)
    stock = np.array(left)
    assert counts_of_client(np.random.default_rng(0), 1.0, stock, images) == taken
    assert stock.tolist() == left, "the caller's account is the caller's"
    assert draws.priors == [THIRDS.tolist()], "q is drawn once"


def test_where_all_of_q_is_exhausted_it_is_drawn_from_the_prior_of_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draws = Prescribed([1.0, 0.0, 0.0], [0.0, 0.25, 0.75])
    monkeypatch.setattr(dirichlet, "_draw_q", draws)
    rng = np.random.default_rng(0)
    assert counts_of_client(rng, 1.0, np.array([4, 100, 100]), 20) == [4, 4, 12]
    assert draws.priors == [THIRDS.tolist(), [0.0, 0.3, 0.2]]


def test_what_is_drawn_after_a_class_is_exhausted_follows_the_prior() -> None:
    """With alpha = 0, a client whose class runs out takes the rest from one other, y with chance p(y)."""
    left = np.array([4, 100, 100])
    rng, counts = np.random.default_rng(1), np.zeros(3)
    for _ in range(2000):
        taken = counts_of_client(rng, 0.0, left, 20)
        assert sorted(taken) in ([0, 0, 20], [0, 4, 16])
        if taken[0]:
            counts += np.array(taken) == 16
    share = counts[1] / counts.sum()
    assert abs(share - 0.6) < 5 * (0.6 * 0.4 / counts.sum()) ** 0.5
    assert abs(counts.sum() / 2000 - 0.5) < 5 * (0.25 / 2000) ** 0.5


def test_zero_has_one_name() -> None:
    kinds = parse_kinds("dirichlet_total", "0,-0,0.0", "dirichlet-total")
    assert {partition_name(*kind, 3) for kind in kinds} == {"dirichlet-total-0-seed-3"}
