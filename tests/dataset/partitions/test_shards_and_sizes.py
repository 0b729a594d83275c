"""Clients of shards, and clients of different sizes whose images are all drawn alike."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.partitions.by_class import LEAST_IMAGES
from dataset.partitions.drawn import MAX_NUMBER, drawers, parse_kinds, read_name
from dataset.store.index import PartitionIndex
from tests.dataset.partitions.test_by_class import MADE, drawn, emd, held

MANY = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 5000))


def sizes(dealt: PartitionIndex) -> list[int]:
    return [int(size) for size in np.diff(dealt.offsets)]


def test_mnists_shards_are_mcmahans() -> None:
    """60,000 images of ten equal classes: 100 clients of two shards of 300 images, a class in each shard."""
    classes = np.random.default_rng(2).permutation(np.repeat(np.arange(10), 6000))
    dealt = drawn("shards-2-clients-100-seed-0", classes)
    assert sizes(dealt) == [600] * 100
    assert np.array_equal(np.sort(dealt.rows), np.arange(60_000))
    own = held(dealt, classes)
    assert {len(mine) for mine in own} == {1, 2}
    assert sum(len(mine) == 1 for mine in own) <= 25, (
        "two shards of a class: 19 of 199, so 9.5 of 100 clients"
    )


@settings(max_examples=40)
@given(number=st.integers(1, 6), clients=st.integers(1, 12), seed=st.integers(0, 2**32 - 1))
def test_a_client_has_so_many_runs_of_the_sorted_images(number: int, clients: int, seed: int) -> None:
    name = f"shards-{number}-clients-{clients}-seed-{seed}"
    dealt, again = drawn(name, MADE), drawn(name, MADE)
    assert np.array_equal(dealt.rows, again.rows)
    length = len(MADE) // (number * clients)
    assert sizes(dealt) == [number * length] * clients
    assert len(np.unique(dealt.rows)) == len(dealt.rows)
    edges = np.cumsum(np.bincount(MADE)[:-1])
    most = number + sum(bool(edge % length) for edge in edges)  # a shard across an edge has both its classes
    assert max(len(mine) for mine in held(dealt, MADE)) <= most


def test_shards_of_one_class_are_dealt_in_a_random_order() -> None:
    one, other = (drawn(f"shards-1-clients-4-seed-{seed}", np.zeros(40, np.int64)) for seed in (0, 1))
    assert not np.array_equal(one.rows, other.rows)
    assert not np.array_equal(one.rows, np.arange(40))


@pytest.mark.parametrize("kind", ["quantity-dirichlet-0.5", "quantity-linear", "quantity-exponential-0.3"])
def test_sizes_differ_and_classes_do_not(kind: str) -> None:
    """Every client's classes are near the population's: as near as a random part of its size would be."""
    dealt = drawn(f"{kind}-clients-10-seed-3", MANY)
    assert np.array_equal(np.sort(dealt.rows), np.arange(len(MANY)))
    assert max(sizes(dealt)) > 3 * min(sizes(dealt))
    # a class of a random part of n images is off by sqrt(n p (1 - p)) at most, on average
    at_random = sum(10 * (n * 0.1 * 0.9) ** 0.5 for n in sizes(dealt)) / len(MANY)
    assert emd(dealt, MANY) <= at_random
    assert not np.array_equal(dealt.rows, drawn(f"{kind}-clients-10-seed-4", MANY).rows)


def test_sizes_follow_their_rule() -> None:
    assert sizes(drawn("quantity-linear-clients-4-seed-0", MANY[:1000])) == [100, 200, 300, 400]
    growing = sizes(drawn("quantity-exponential-1-clients-5-seed-0", MANY))
    np.testing.assert_allclose(np.diff(np.log(growing)), 1.0, atol=0.01)
    assert set(sizes(drawn("quantity-exponential-0-clients-5-seed-0", MANY))) == {10_000}
    for seed in range(5):
        assert min(sizes(drawn(f"quantity-dirichlet-0.5-clients-10-seed-{seed}", MADE))) >= LEAST_IMAGES


@pytest.mark.parametrize(
    "seed, expected",
    [
        (0, "3901 25 174 3079 2770 9374 6256 5140 1741 17540"),
        (1, "1556 2110 8034 63 337 3308 16520 38 9660 8374"),
        (2, "19855 969 1160 4418 3673 2156 11218 332 102 6117"),
    ],
)
def test_legacy_sizes_are_those_of_niid_benchs_protocol(seed: int, expected: str) -> None:
    """Computed by hand from its description: after numpy.random.seed, a permutation, then the shares."""
    dealt = drawn(f"quantity-dirichlet-legacy-0.5-clients-10-seed-{seed}", MANY)
    assert sizes(dealt) == [int(size) for size in expected.split()]


def test_a_smaller_parameter_has_sizes_differ_more() -> None:
    spread = [
        np.mean(
            [np.std(sizes(drawn(f"quantity-dirichlet-{beta}-clients-10-seed-{s}", MANY))) for s in range(5)]
        )
        for beta in ("0.3", "3", "300")
    ]
    assert spread[0] > 2 * spread[1] > 4 * spread[2]


@pytest.mark.parametrize(
    "name, message",
    [
        ("shards-2-clients-201-seed-0", "400 images are not enough for 402 shards: use fewer clients or"),
        ("shards-1.5-clients-2-seed-0", "shards is 1.5: give a whole number of at least 1"),
        ("quantity-dirichlet-0-clients-2-seed-0", "the parameter of a Dirichlet distribution is 0"),
        ("quantity-dirichlet-1-clients-41-seed-0", "400 images are not enough for 41 clients with at least"),
        (
            "quantity-dirichlet-0.0001-clients-30-seed-0",
            "in 1000 tries, Dir(0.0001) never gave each of 30 clients",
        ),
        ("quantity-linear-clients-40-seed-0", "client 0 of 40 would get none of the 400 images: use fewer"),
        ("quantity-exponential-1-clients-10-seed-0", "client 0 of 10 would get none of the 400 images: use"),
        ("quantity-exponential-1e+100-clients-3-seed-0", "client 0 of 3 would get none of the 400 images"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_one_line(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        drawn(name, MADE)


def test_the_command_line_offers_them() -> None:
    assert {"shards", "quantity-dirichlet", "quantity-linear", "quantity-exponential"} <= set(drawers())


def test_the_largest_number_is_read_and_a_larger_one_is_not() -> None:
    largest = f"{MAX_NUMBER:g}"
    assert list(parse_kinds("partition", f"shards={largest}")) == [("shards", MAX_NUMBER)]
    recipe = read_name(f"lda-{largest}-clients-2-seed-0")
    assert recipe is not None
    assert recipe.number == MAX_NUMBER
    with pytest.raises(ValueError, match=r"give numbers of at most 1e\+100"):
        list(parse_kinds("partition", "shards=1.1e100"))
