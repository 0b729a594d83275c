"""Clients by Dirichlet and by classes: NIID-Bench's partitions of CIFAR-10, and what holds for any images."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.arrays import IntArray
from dataset.partitions.by_class import LEAST_IMAGES
from dataset.partitions.drawn import drawers, parse_kinds, read_name
from dataset.partitions.statistics import distances, mean_emd
from dataset.store.index import PartitionIndex, meaning

REAL = Path(__file__).parents[4] / "shared" / "data" / "cifar10" / "train-00000-of-00001.parquet"
MADE = np.random.default_rng(0).permutation(np.repeat(np.arange(5), (90, 60, 120, 100, 30)))


@pytest.fixture(scope="module")
def cifar10() -> IntArray:
    """The classes of CIFAR-10's training images in the official order."""
    if not REAL.is_file():
        pytest.skip(f"{REAL} is absent: the published sizes are those of CIFAR-10's labels")
    return np.asarray(pq.read_table(REAL, columns=["label"])["label"].to_numpy(), np.int64)


def drawn(name: str, classes: IntArray) -> PartitionIndex:
    recipe = read_name(name)
    assert recipe is not None, name
    return recipe.draw(classes)


def emd(dealt: PartitionIndex, classes: IntArray) -> float:
    sizes = np.diff(dealt.offsets)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    return mean_emd(distances(classes[dealt.rows], owner, len(sizes))[0], sizes)


def held(dealt: PartitionIndex, classes: IntArray) -> list[list[int]]:
    return [np.unique(classes[rows]).tolist() for rows in np.split(dealt.rows, dealt.offsets[1:-1])]


@pytest.mark.parametrize(
    "name, sizes, distance",
    [
        ("lda-legacy-0.5-clients-10-seed-0", "5307 3688 4435 5047 5189 3803 5202 4325 8078 4926", 0.975),
        ("lda-legacy-0.5-clients-10-seed-1", "5936 4204 5805 5297 4988 5343 7495 5158 1980 3794", 0.874),
        ("lda-legacy-0.5-clients-10-seed-2", "5167 4475 2161 5507 6539 6366 6427 5530 4604 3224", 1.008),
        ("lda-0.5-clients-10-seed-42", "1785 5453 5426 5263 7013 5062 5051 6092 5142 3713", 1.115),
    ],
)
def test_the_sizes_are_those_of_niid_bench_and_of_flowers_baseline(
    name: str, sizes: str, distance: float, cifar10: IntArray
) -> None:
    dealt = drawn(name, cifar10)
    assert np.diff(dealt.offsets).tolist() == [int(size) for size in sizes.split()]
    assert abs(emd(dealt, cifar10) - distance) <= 0.0005
    assert np.array_equal(np.sort(dealt.rows), np.arange(50_000)), "every image has one client"


@pytest.mark.parametrize(
    "name, others",
    [
        ("classes-legacy-2-clients-10-seed-0", "6 6 0 4 8 7 4 5 9 3"),
        ("classes-legacy-2-clients-10-seed-1", "2 9 1 4 1 7 7 6 3 1"),
        ("classes-legacy-2-clients-10-seed-2", "1 5 4 4 9 3 9 0 9 2"),
        ("classes-2-clients-10-seed-42", "7 6 4 4 8 0 2 0 5 7"),
        ("classes-3-clients-10-seed-42", "76 48 06 20 59 71 84 53 19 76"),
        ("classes-legacy-3-clients-10-seed-0", "64 87 64 75 93 82 42 19 49 24"),
    ],
)
def test_the_classes_are_those_of_niid_bench_and_of_flowers_baseline(
    name: str, others: str, cifar10: IntArray
) -> None:
    """Client i has class i, and these besides."""
    dealt = drawn(name, cifar10)
    expected = [sorted({i, *map(int, digits)}) for i, digits in enumerate(others.split())]
    assert held(dealt, cifar10) == expected
    assert abs(emd(dealt, cifar10) - (1.6 if "-2-" in name else 1.4)) <= 0.0005
    assert np.array_equal(np.sort(dealt.rows), np.arange(50_000))


@settings(max_examples=40)
@given(
    kind=st.sampled_from(["lda", "lda-legacy"]),
    beta=st.sampled_from([0.3, 1.0, 100.0]),
    seed=st.integers(0, 2**32 - 1),
    clients=st.integers(1, 12),
)
def test_every_image_is_dealt_once_and_every_client_has_enough(
    kind: str, beta: float, seed: int, clients: int
) -> None:
    name = f"{kind}-{repr(beta).removesuffix('.0')}-clients-{clients}-seed-{seed}"
    dealt, again = drawn(name, MADE), drawn(name, MADE)
    assert np.array_equal(np.sort(dealt.rows), np.arange(len(MADE)))
    assert np.diff(dealt.offsets).min() >= LEAST_IMAGES
    assert np.array_equal(dealt.rows, again.rows)
    assert np.array_equal(dealt.offsets, again.offsets)


def test_who_has_its_share_gets_nothing_of_the_classes_that_follow() -> None:
    """Ten classes of 100 images: before a client's last class it had fewer than a tenth of all. The last
    client is left out: it gets the image that is left where the others' shares were rounded down."""
    classes = np.repeat(np.arange(10), 100)
    for seed in range(20):
        dealt = drawn(f"lda-0.5-clients-10-seed-{seed}", classes)
        for rows in np.split(classes[dealt.rows], dealt.offsets[1:-1])[:-1]:
            assert np.count_nonzero(rows < rows.max()) < len(classes) / 10


@settings(max_examples=40)
@given(
    kind=st.sampled_from(["classes", "classes-legacy"]),
    number=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
    clients=st.integers(1, 12),
)
def test_every_client_has_its_classes_and_each_class_is_divided_evenly(
    kind: str, number: int, seed: int, clients: int
) -> None:
    dealt = drawn(f"{kind}-{number}-clients-{clients}-seed-{seed}", MADE)
    own = held(dealt, MADE)
    assert all(len(mine) == number and i % 5 in mine for i, mine in enumerate(own))
    parts = np.split(MADE[dealt.rows], dealt.offsets[1:-1])
    for k in range(5):
        counts = [np.count_nonzero(part == k) for part in parts if k in part]
        assert max(counts, default=0) - min(counts, default=0) <= 1
        assert sum(counts) in (0, np.count_nonzero(k == MADE)), "a class that nobody owns is left out"
    assert len(np.unique(dealt.rows)) == len(dealt.rows)


def test_the_same_number_gives_each_generator_its_own_partition() -> None:
    for kind in ("lda", "classes"):
        one, other = (drawn(f"{kind}{legacy}-2-clients-5-seed-3", MADE) for legacy in ("", "-legacy"))
        assert not np.array_equal(one.rows, other.rows)


@pytest.mark.parametrize(
    "name, message",
    [
        ("lda-0-clients-5-seed-0", "the parameter of a Dirichlet distribution is 0; give a number above 0"),
        ("lda-1-clients-41-seed-0", "400 images are not enough for 41 clients with at least 10 images each"),
        ("lda-1e-05-clients-30-seed-0", "in 1000 tries, Dir"),
        ("lda-legacy-1-clients-5-seed-4294967296", "need a seed below 4294967296"),
        ("classes-6-clients-5-seed-0", "clients cannot have 6 of 5 classes: use a number from 1 to 5"),
        ("classes-0-clients-5-seed-0", "classes is 0: give a whole number of at least 1"),
        ("classes-1.5-clients-5-seed-0", "classes is 1.5: give a whole number of at least 1"),
        ("classes-5-clients-31-seed-0", "class 4 has 30 images, but 31 clients have this class: use fewer"),
        ("iid-clients-401-seed-0", "400 images are not enough for 401 clients: use fewer clients"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_one_line(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        drawn(name, MADE)


def test_iid_clients_have_equal_parts_of_everything() -> None:
    dealt = drawn("iid-clients-7-seed-1", MADE)
    assert np.array_equal(np.sort(dealt.rows), np.arange(len(MADE)))
    assert np.ptp(np.diff(dealt.offsets)) == 1
    assert not np.array_equal(dealt.rows, drawn("iid-clients-7-seed-2", MADE).rows)
    many = np.repeat(np.arange(10), 5000)
    assert emd(drawn("iid-clients-10-seed-0", many), many) < 0.1


def test_a_whole_name_says_all_and_is_written_in_one_way() -> None:
    for name in (
        "lda-0.5-clients-10-seed-42",
        "iid-clients-3-seed-0",
        "dirichlet-total-1e-05-clients-5-seed-1",
    ):
        recipe = read_name(name)
        assert recipe is not None
        assert recipe.name == name
    sizes = np.diff(drawn("dirichlet-total-0.3-clients-8-seed-0", MADE).offsets)
    assert sizes.tolist() == [50] * 8, "as many as there are for each"
    for other in ("alpha-0.50", "lda-0.5-seed-0", "lda-clients-5-seed-0", "iid-2-clients-5-seed-0", "users"):
        assert read_name(other) is None
    for wrong in ("lda-0.50-clients-10-seed-42", "lda-0.5-clients-010-seed-42"):
        with pytest.raises(
            ValueError,
            match=r"write the partition lda-.* as lda-0\.5-clients-10-seed-42",
        ):
            read_name(wrong)
    for wrong in ("lda-0.5-clients-0-seed-42", f"lda-0.5-clients-1-seed-{2**63}"):
        with pytest.raises(ValueError, match="at least 1 client, and a seed below"):
            read_name(wrong)
    with pytest.raises(ValueError, match=r"its number is 1e300; give a number from 0 to 1e\+100"):
        read_name("lda-1e300-clients-10-seed-0")


def test_kinds_without_a_number_are_asked_for_by_their_name_alone() -> None:
    assert list(parse_kinds("partition", "iid, classes=2")) == [("iid", 0.0), ("classes", 2.0)]
    with pytest.raises(ValueError, match=r"give one or more of classes=NUMBER, .*iid, lda=NUMBER"):
        list(parse_kinds("partition", "iid=3"))
    assert {"iid", "lda", "lda-legacy", "classes", "classes-legacy"} <= set(drawers())


def test_what_the_number_counts_is_said() -> None:
    for name in ("lda-0.5-seed-0", "lda-legacy-0.5-clients-10-seed-0"):
        assert "a Dirichlet distribution with 0.5 for each client" in meaning(name, 10)
    assert "the total over the 10 classes" in meaning("dirichlet-total-1-clients-10-seed-0", 10)
