"""The table and the picture of a sweep."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.sweep.report import Row, parallel_coordinates, table
from benchmarks.sweep.space import Metric, read_sweep
from tests.benchmarks.sweep.test_space import written


def some_rows() -> list[Row]:
    points = [{"a.rate": 0.1, "b": "x"}, {"a.rate": 0.001, "b": "y"}, {"a.rate": 0.01, "b": "x"}]
    scores: list[float | None] = [12.0, 30.0, None]
    return [
        Row(i, point, "finished" if score else "failed", score, 3, None, 1.0, f"trials/{i}")
        for i, (point, score) in enumerate(zip(points, scores))
    ]


def test_the_table_has_the_best_first_and_the_unscored_last() -> None:
    best = Metric("val/C-AP", "maximize")
    cells = table(some_rows(), ["a.rate", "b"], best, "C-AP")
    assert [line[1] for line in cells] == ["trial", "001", "000", "002"]
    assert [line[0] for line in cells] == ["rank", "1", "2", ""]
    unknown = table([dataclasses.replace(some_rows()[0], seconds=None)], ["a.rate"], best, "C-AP")
    assert dict(zip(*unknown))["seconds"] == ""
    smallest = table(some_rows(), ["a.rate"], Metric("val/loss"), "C-AP")
    assert [line[1] for line in smallest[1:]] == ["000", "001", "002"]


def test_one_scored_trial_makes_no_plot(tmp_path: Path) -> None:
    sweep, _, _ = read_sweep("learning-rates")
    only = [row for row in some_rows() if row.number == 1]
    assert not parallel_coordinates(only, sweep, "t", tmp_path / "p")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("error")
def test_a_parameter_of_one_value_is_drawn_without_a_word(tmp_path: Path) -> None:
    sweep, _, _ = read_sweep("learning-rates")
    points = [{"local.learning_rate": 0.1, "server.learning_rate": rate} for rate in (0.02, 0.05)]
    rows = [Row(i, point, "finished", 1.0 + i, 3, None, 1.0, "x") for i, point in enumerate(points)]
    assert parallel_coordinates(rows, sweep, "t", tmp_path / "p")


def test_every_kind_of_parameter_is_drawn(tmp_path: Path) -> None:
    """Words, None, whole numbers, and what optuna draws in other units than the config's."""
    space = {
        "augment.flip": {"values": ["none", "horizontal"]},
        "local.max_images": {"values": [None, 64]},
        "local.num_epochs": {"min": 1, "max": 3},
        "seed": {"min": 0, "max": 2**31 - 1},
        "server.learning_rate": {"distribution": "log_normal", "mu": -3, "sigma": 1},
        "federated.cohort_size": {"distribution": "q_log_uniform_values", "min": 8, "max": 64, "q": 8},
    }
    sweep, _, _ = read_sweep(written(tmp_path, space, method="random", run_cap=9))
    points = [next(sweep.candidates(0, number, []))[1] for number in range(9)]
    rows = [Row(i, point, "finished", 1.0 + i, 3, None, 1.0, "x") for i, point in enumerate(points)]
    assert parallel_coordinates(rows, sweep, "t", tmp_path / "p")
    picture = (tmp_path / "p.svg").read_text()
    assert all(f"<!-- {name} -->" in picture for name in space)
