"""Closed forms that add up many users in one product send what those do that ask one user after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from pfl_ext.algorithms import by_rows
from pfl_ext.algorithms.by_rows import ByRows
from pfl_ext.algorithms.closed_form import NOISE, ClosedForm, Sums, UserByUser
from pfl_ext.algorithms.fed3r import Fed3R
from pfl_ext.algorithms.fedncm import FedNCM
from pfl_ext.tasks.multi_label import MultiLabel
from pfl_ext.tasks.single_label import SingleLabel
from tests.pfl_ext.algorithms.test_closed_form import (
    ALL,
    BOUND,
    IMAGES,
    LABELS,
    WIDTH,
    Features,
    algorithm,
)
from tests.pfl_ext.engine.setting import private

KINDS = (Fed3R, FedNCM)
SIZES = {
    "one image each": [1] * IMAGES,
    "some, of whom one has more than features": [2, 0, 25, 1, 1, 0, 31],
    "one": [IMAGES],
    "blocks of few": [3, 3, 3, 3] * 5,
}
FLOAT = 2.0**-22
"""Clipping one by one rounds matrices, norms and scales to float32, once each."""


@pytest.fixture(autouse=True, params=[7, 1024], ids=lambda size: f"blocks of {size}")
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also blocks of which some users have more rows."""
    monkeypatch.setattr(by_rows, "BLOCK", request.param)


@pytest.fixture
def alone() -> Iterator[mock.Mock]:
    """What asks one user for its sums."""
    with mock.patch.object(ByRows, "of_user", autospec=True, side_effect=ClosedForm.of_user) as spy:
        yield spy


def sums_of(
    kind: type[ClosedForm], store: Features, *, clipped: bool, together: bool, several: bool = False
) -> tuple[Sums, dict[str, Any]]:
    """After a round of all users without noise, and the line about it."""
    users, mechanism = len(store.user_ids), None
    if clipped:
        mechanism = private(users, noisy=False)
    task = MultiLabel() if several else SingleLabel()
    made = algorithm(kind, store, kind.options(), users, task, mechanism=mechanism)
    if not together:
        made.asking = lambda: UserByUser(made)  # type: ignore[method-assign]
    state, line = made.round(made.init(0), 0)
    return {name: t for name, t in state.items() if name != NOISE}, line


def distance(ours: Sums, theirs: Sums) -> float:
    def norm(tensors: list[Tensor]) -> float:
        return float(torch.cat([t.flatten() for t in tensors]).norm())

    return norm([ours[name] - theirs[name] for name in theirs]) / norm(list(theirs.values()))


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_sum_is_that_of_users_who_are_asked_one_by_one(
    sizes: list[int], kind: type[ClosedForm], clipped: bool, several: bool, alone: mock.Mock
) -> None:
    store = Features(sizes, ALL, several)
    ours, line = sums_of(kind, store, clipped=clipped, together=True, several=several)
    assert alone.call_count == 0
    theirs, expected = sums_of(kind, store, clipped=clipped, together=False, several=several)
    assert alone.call_count == len(sizes)
    assert distance(ours, theirs) <= (FLOAT if clipped else 1e-14 * IMAGES)
    assert line.keys() == expected.keys()
    assert (line["users"], line["images"]) == (expected["users"], expected["images"])
    for name, value in expected.get("privacy", {}).items():
        assert line["privacy"][name] == pytest.approx(value, rel=1e-6), name


@pytest.mark.parametrize("kind", KINDS)
def test_users_of_one_row_of_features_are_read_together(kind: type[ClosedForm]) -> None:
    store, reads = Features([1] * IMAGES, ALL), 0
    read = store.read

    def counted(rows: Any) -> Any:
        nonlocal reads
        reads += len(rows) > 0
        return read(rows)

    store.read = counted  # type: ignore[method-assign]
    sums_of(kind, store, clipped=True, together=True)
    assert reads == -(-IMAGES // by_rows.BLOCK)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_each_user_adds_no_more_than_the_bound_and_one_within_it_adds_all(
    sizes: list[int], kind: type[ClosedForm]
) -> None:
    """By the user's own sum: of the others there is nothing in the round."""
    firsts = np.cumsum([0, *sizes]).tolist()
    for turn, number in enumerate(range(0, len(sizes), max(1, len(sizes) // 7))):
        first, size = firsts[number], sizes[number]
        store = Features(sizes, ALL)
        others = np.delete(ALL, slice(first, first + size))
        store.features[others] = np.nan
        scale = 1.0 if turn % 2 else 0.01
        store.features *= np.float32(scale)
        own, _ = sums_of(kind, store, clipped=True, together=True)
        norm = float(torch.cat([t.flatten() for t in own.values()]).norm())
        whole = sum_of(kind, store, slice(first, first + size))
        length = float(torch.cat([t.flatten() for t in whole.values()]).norm())
        limit = BOUND * (1 - 2**-14)
        assert norm <= BOUND
        assert norm == pytest.approx(min(length, limit), rel=FLOAT)


def sum_of(kind: type[ClosedForm], store: Features, rows: slice) -> Sums:
    """What one user with these images would send."""
    x = torch.from_numpy(store.features[rows].astype(np.float64))
    y = torch.from_numpy(store.labels[rows].astype(np.float64))
    if kind is FedNCM:
        return {"sums": y.T @ x}
    z = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
    return {"gram": z.T @ z, "cross": z.T @ y}


@pytest.mark.parametrize("images", [1, 3, WIDTH, WIDTH + 1, 40])
def test_the_norm_of_a_users_matrices_follows_from_its_rows(images: int) -> None:
    made = algorithm(Fed3R, Features([IMAGES], ALL), Fed3R.options(), 1, SingleLabel())
    assert isinstance(made, Fed3R)
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(images, WIDTH, dtype=torch.float64, generator=draw)
    y = (torch.rand(images, LABELS, generator=draw) < 0.4).double()
    expected = sum(float(t.square().sum()) for t in made.of_batch(z, y).values())
    assert float(made.squared_norm(z, y)) == pytest.approx(expected, rel=1e-13)
