"""The clients of pfl's CIFAR-10 benchmark: the very ones that pfl's own function gives."""

from __future__ import annotations

import numpy as np
import pytest
from pfl.data.partition import partition_by_dirichlet_class_distribution

from dataset.arrays import IntArray
from tests.dataset.partitions.test_by_class import MADE, drawn, emd, held


def by_pfl(classes: IntArray, alpha: float, each: int, seed: int) -> list[IntArray]:
    """Rows of each client, by pfl's benchmark after ``numpy.random.seed(seed)``."""
    before = np.random.get_state()  # noqa: NPY002 - pfl's function draws from it
    try:
        np.random.seed(seed)  # noqa: NPY002
        order = np.random.permutation(len(classes))  # noqa: NPY002
        users = partition_by_dirichlet_class_distribution(classes[order], alpha, lambda: each)
    finally:
        np.random.set_state(before)  # noqa: NPY002
    return [np.sort(order[rows]) for rows in users]


@pytest.mark.parametrize("alpha", [0.02, 0.1, 5])
@pytest.mark.parametrize("clients", [16, 80])
def test_the_partition_is_pfls(alpha: float, clients: int) -> None:
    """Where every image is dealt, the last clients' classes run out, and their p is spread several times."""
    for seed in range(3):
        dealt = drawn(f"pfl-dirichlet-{alpha}-clients-{clients}-seed-{seed}", MADE)
        ours = np.split(dealt.rows, dealt.offsets[1:-1])
        theirs = by_pfl(MADE, alpha, len(MADE) // clients, seed)
        assert len(ours) == len(theirs)
        assert all(np.array_equal(one, other) for one, other in zip(ours, theirs))


def test_distances_of_the_benchmarks_clients() -> None:
    """1,000 users of 50 images: a mean EMD of 1.43 and 3.65 classes a user were measured over three seeds."""
    classes = np.repeat(np.arange(10), 5000)
    dealt = drawn("pfl-dirichlet-0.1-clients-1000-seed-0", classes)
    assert emd(dealt, classes) == pytest.approx(1.43, abs=0.03)
    assert np.mean([len(mine) for mine in held(dealt, classes)]) == pytest.approx(3.65, abs=0.15)


@pytest.mark.parametrize(
    "name, message",
    [
        ("pfl-dirichlet-0-clients-4-seed-0", "is 0; give a number above 0"),
        ("pfl-dirichlet-1e-320-clients-4-seed-0", "is too small for float64: give a larger number"),
        ("pfl-dirichlet-1-clients-900-seed-0", "400 images are not enough for 900 clients with 0 images"),
        (f"pfl-dirichlet-1-clients-4-seed-{2**32}", "partitions that end in -legacy need a seed below"),
    ],
)
def test_what_cannot_be_drawn_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drawn(name, MADE)
