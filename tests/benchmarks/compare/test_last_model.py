"""Scores of the last model: of every seed, or of none."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.compare.reading import compare
from tests.benchmarks.made_runs import make_run

SECTION, SCORE = "test, last model", "C-AP exact"


def seed_of(directory: Path, seed: int, last: float | None, best_step: int = 4) -> float:
    """A run, and the C-AP on test of its best model. None: results.json has no scores of the last one."""
    path = make_run(directory / str(seed), seed=seed, shift=float(seed), best_step=best_step) / "results.json"
    results = json.loads(path.read_text())
    if last is not None:
        results["last"] = {"test": results["test"] | {"C-AP": last}}
    path.write_text(json.dumps(results))
    return float(results["test"]["C-AP"])


def test_a_seed_whose_last_model_is_its_best_counts(tmp_path: Path) -> None:
    best = seed_of(tmp_path, 0, last=None)
    seed_of(tmp_path, 1, last=best + 1)  # this seed's best model, too
    seed_of(tmp_path, 2, last=3.0, best_step=2)
    comparison = compare([tmp_path])
    (group,) = comparison.groups
    assert comparison.values(group, SECTION, SCORE) == [best, best + 1, 3.0]


def test_a_best_model_before_the_last_says_nothing_of_the_last(tmp_path: Path) -> None:
    seed_of(tmp_path, 0, last=None, best_step=2)
    seed_of(tmp_path, 1, last=3.0, best_step=2)
    comparison = compare([tmp_path])
    assert comparison.values(comparison.groups[0], SECTION, SCORE) == [3.0]


def test_the_table_is_left_out_where_every_last_model_is_the_best(tmp_path: Path) -> None:
    best = seed_of(tmp_path, 0, last=None)
    seed_of(tmp_path, 1, last=best + 1)
    comparison = compare([tmp_path])
    assert not any(one.section == SECTION for found in comparison.measures.values() for one in found)
