"""Scores by other classes, on the same images, are other scores."""

from __future__ import annotations

from pathlib import Path

from benchmarks.compare.latex import latex
from benchmarks.compare.reading import compare
from benchmarks.compare.tables import significance
from tests.benchmarks.made_runs import make_run

FINE = {"oak": 1.0, "elm": 2.0}


def test_scores_by_other_classes_are_not_tested_against_each_other(tmp_path: Path) -> None:
    """Runs with 17 and with 1,628 labels of one file were tested, and the better one was bold."""
    for seed in (0, 1):
        make_run(tmp_path / f"coarse{seed}", "fl-r-17", seed=seed, shift=seed)
        make_run(tmp_path / f"fine{seed}", "fl-r-1628", seed=seed, shift=seed, per_class_ap=FINE)
    comparison = compare([tmp_path])
    assert len({group.finished[0].data_key for group in comparison.groups}) == 1
    assert "first − second" not in significance(comparison)
    assert r"\textbf" not in latex(comparison, "command")


def test_runs_that_name_their_classes_are_tested_with_older_ones(tmp_path: Path) -> None:
    for seed in (0, 1):
        make_run(tmp_path / f"old{seed}", seed=seed, shift=seed)
        classes = ["animal", "fire", "food"]
        words = ("fl-r-17", "--local.learning_rate=0.3")
        make_run(tmp_path / f"new{seed}", *words, seed=seed, shift=5.0 + seed, classes=classes)
    assert "first − second" in significance(compare([tmp_path]))
