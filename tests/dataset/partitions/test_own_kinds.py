"""Kinds of partition of one's own that draw something else at each call, or deal images in a wrong way."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from dataset.arrays import IntArray
from dataset.partitions import drawn as partitions
from dataset.partitions.drawn import Drawing, Recipe, drawers, drawn, of_parts
from dataset.store.index import PartitionIndex

N, CLIENTS = 12, 3
RECIPE = Recipe("own", 0.0, CLIENTS, None, 5)


@pytest.fixture(autouse=True)
def _kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    drawers()  # all of the folder
    for name in ("_DRAWERS", "_WITHOUT_NUMBER"):
        monkeypatch.setattr(partitions, name, getattr(partitions, name).copy())
    states = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002


def dealt(order: IntArray) -> PartitionIndex:
    return of_parts(np.array_split(order, CLIENTS))


def by_numpy(_: Drawing, __: float) -> PartitionIndex:
    return dealt(np.random.permutation(N))  # noqa: NPY002


def by_python(_: Drawing, __: float) -> PartitionIndex:
    return dealt(np.array(random.sample(range(N), N)))


def seeded(drawing: Drawing, _: float) -> PartitionIndex:
    np.random.seed(drawing.seed)  # noqa: NPY002
    return by_numpy(drawing, 0)


def twice(_: Drawing, __: float) -> PartitionIndex:
    return dealt(np.arange(N) // 2)


def beyond(_: Drawing, __: float) -> PartitionIndex:
    return dealt(np.arange(N) + 1)


def empty(_: Drawing, __: float) -> PartitionIndex:
    return of_parts([np.arange(N), np.arange(0), np.arange(0)])


@pytest.mark.parametrize(
    "kind, message",
    [
        (by_numpy, "the partition own draws from a global generator"),
        (by_python, "the partition own draws from a global generator"),
        (twice, "is none: it gives an image to two clients"),
        (beyond, r"is none: a row is out of range \(0..11\)"),
        (empty, "is none: its offsets do not rise"),
    ],
)
def test_a_kind_that_is_no_function_or_no_partition_is_refused(
    kind: Callable[[Drawing, float], PartitionIndex], message: str
) -> None:
    drawn("own", numbered=False)(kind)
    with pytest.raises(ValueError, match=message):
        RECIPE.draw(np.zeros(N, np.int64))


def test_a_kind_may_set_the_seed_of_the_global_generator() -> None:
    """As NIID-Bench's code does."""
    drawn("own", numbered=False)(seeded)
    first, second = (RECIPE.draw(np.zeros(N, np.int64)) for _ in range(2))
    assert np.array_equal(first.rows, second.rows)
