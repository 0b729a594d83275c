"""Ranking by torch is ranking by NumPy, ties, empty classes and blocks included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.arrays import BoolArray
from pfl_ext.tasks import multi_label_scores, ranking
from pfl_ext.tasks.ranking import Array, Ranking, rank, rank_on

CPU = torch.device("cpu")


def drawn(seed: int, n: int, k: int, levels: int, share: float) -> tuple[Array, BoolArray]:
    """Scores of so many different values, and targets."""
    rng = np.random.default_rng(seed)
    scores = (rng.integers(0, levels, (n, k)) / max(levels - 1, 1)).astype(np.float32)
    return scores, rng.random((n, k)) < share


def assert_same(ours: Ranking, numpys: Ranking) -> None:
    np.testing.assert_allclose(ours.ap, numpys.ap, rtol=1e-12, atol=0)
    assert ours.overall_ap == pytest.approx(numpys.overall_ap, rel=1e-12)
    for name in ("tp", "predicted", "positives"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(numpys, name))
        assert getattr(ours, name).dtype == np.int64


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    n=st.integers(1, 40),
    k=st.integers(1, 6),
    levels=st.sampled_from([1, 2, 5, 200, 100_000]),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    overall=st.booleans(),
)
def test_both_rank_alike(seed: int, n: int, k: int, levels: int, share: float, overall: bool) -> None:
    scores, targets = drawn(seed, n, k, levels, share)
    assert_same(rank_on(CPU, scores, targets, overall=overall), rank(scores, targets, overall=overall))


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, targets = drawn(0, 30, 7, 11, 0.3)
    monkeypatch.setattr(ranking, "DEVICE_BLOCK", 60)
    assert_same(rank_on(CPU, scores, targets, overall=True), rank(scores, targets, overall=True))


def test_a_gpu_ranks_where_pfl_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, targets = drawn(1, 50, 3, 100, 0.2)
    expected = multi_label_scores.summarise(scores, targets)
    asked: list[torch.device] = []

    def watched(device: torch.device, *arrays: Array, overall: bool) -> Ranking:
        asked.append(device)
        return rank_on(CPU, *arrays, overall=overall)

    monkeypatch.setattr(multi_label_scores, "get_default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(multi_label_scores, "rank_on", watched)
    assert multi_label_scores.summarise(scores, targets) == pytest.approx(expected, rel=1e-12)
    assert asked == [torch.device("cuda")]
