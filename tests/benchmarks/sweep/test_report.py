"""The table and the picture of a sweep."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks.sweep.report import (
    MOST_LABELS,
    PAD,
    Row,
    best_row,
    draw_trials,
    other_models,
    over_seeds,
    parallel_coordinates,
    table,
    write_tables,
)
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


@pytest.mark.parametrize(
    ("test_step", "best_by", "said"),
    [
        (3, ("loss", "C-AP"), ""),
        (None, ("loss", "C-AP"), ""),
        (60, ("loss", "C-AP"), "; --evaluation.best_by C-AP makes them one."),
        (60, ("loss",), "; a metric that --evaluation.best_by takes makes them one."),
    ],
)
def test_the_table_says_which_model_a_test_score_is_of(
    test_step: int | None, best_by: tuple[str, ...], said: str
) -> None:
    rows = [dataclasses.replace(some_rows()[0], test=1.0, test_step=test_step)]
    metric = Metric("val/C-AP", "maximize")
    line = dict(zip(*table(rows, ["b"], metric, "C-AP")))
    assert (line["at round/epoch"], line["test at round/epoch"]) == (
        "3",
        "" if test_step is None else str(test_step),
    )
    note = other_models(rows, metric, best_by)
    assert note.endswith(said)
    assert bool(note) == bool(said)


def test_points_are_ranked_by_their_mean_over_seeds(tmp_path: Path) -> None:
    """The lucky seed of "lucky" has the best trial; "steady" has the better mean."""
    scores: dict[str, list[float | None]] = {
        "lucky": [90.0, 10.0, None],
        "steady": [60.0, 61.0, 62.0],
        "failed": [None],
    }
    rows = [
        Row(seed, {"a": name, "seed": seed}, "finished", score, 3, score, 1.0, "x")
        for name, values in scores.items()
        for seed, score in enumerate(values)
    ]
    rows[0] = dataclasses.replace(rows[0], test=None)
    means = over_seeds(rows, ["a", "seed"], Metric("val/C-AP", "maximize"), "C-AP")
    assert means == [
        ["rank", "a", "n", "mean best val/C-AP", "std", "mean test C-AP exact", "std"],
        ["1", "steady", "3", "61", "1", "61.00", "1.00"],
        ["2", "lucky", "2", "50", "56.57", "", ""],
    ]
    assert over_seeds(rows, ["a", "seed"], Metric("val/loss"), "C-AP")[1][1] == "lucky"
    fell = [*rows, Row(3, {"a": "steady", "seed": 3}, "diverged", None, None, None, 1.0, "x")]
    ranked = over_seeds(fell, ["a", "seed"], Metric("val/C-AP", "maximize"), "C-AP")
    assert [line[1] for line in ranked[1:]] == ["lucky", "steady"], "one of its seeds diverged"
    assert over_seeds(rows, ["a"], Metric("val/loss"), "C-AP") == []
    best = best_row(fell, Metric("val/C-AP", "maximize"))
    assert best is not None
    assert best.point["a"] == "lucky"
    best = best_row(rows, Metric("val/C-AP", "maximize"))
    assert best is not None
    assert best.point["a"] == "steady"
    assert best_row(rows[-1:], Metric("val/loss")) is None
    text = write_tables([["rank"], ["1"]], means, "A note.", tmp_path)
    assert text == (tmp_path / "table.md").read_text().rstrip("\n")
    assert "A note.\n\nOver seeds" in text
    assert (tmp_path / "over_seeds.csv").read_text().splitlines()[1] == "1,steady,3,61,1,61.00,1.00"


def test_points_that_agree_in_six_digits_are_not_seeds_of_one() -> None:
    """Their mean was ranked as that of one point with two seeds."""
    rates = (0.012345671, 0.012345672, 0.5)
    rows = [
        Row(i, {"a": rate, "seed": 0}, "finished", 10.0 * i, 3, None, 1.0, "x")
        for i, rate in enumerate(rates)
    ]
    metric = Metric("val/C-AP", "maximize")
    (_, *means) = over_seeds(rows, ["a", "seed"], metric, "C-AP")
    assert [line[1:4] for line in means] == [["0.5", "1", "20"], [str(rates[1]), "1", "10"],
                                             [str(rates[0]), "1", "0"]]  # fmt: skip
    assert [line[2] for line in table(rows, ["a"], metric, "C-AP")[1:]] == [
        "0.5",
        "0.012345672",
        "0.012345671",
    ]
    assert table(rows[1:], ["a"], metric, "C-AP")[2][2] == "0.0123457"
    best = best_row(rows[:2], metric)
    assert best is not None
    assert best.point["a"] == rates[1]


def test_the_best_point_of_a_grid_has_all_its_seeds() -> None:
    """One seed of three was as good as three where the others were not made yet, or were stopped."""
    metric = Metric("val/C-AP", "maximize")
    scores = {"whole": (50.0, 52.0), "begun": (60.0, None)}
    rows = [
        Row(seed, {"a": name, "seed": seed}, "finished" if score else "stopped", score, 3, None, 1.0, "x")
        for name, values in scores.items()
        for seed, score in enumerate(values)
    ]
    for whole, name in ((True, "whole"), (False, "begun")):
        best = best_row(rows, metric, whole)
        assert best is not None
        assert best.point["a"] == name


def test_no_line_of_the_picture_runs_along_its_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All axes are padded by one share of their height, and an axis of many values has few labels."""
    space = {
        "local.max_images": {"values": list(range(1, 61))},
        "server.learning_rate": {"distribution": "log_uniform_values", "min": 0.001, "max": 0.1},
    }
    sweep, _, _ = read_sweep(written(tmp_path, space, method="random", run_cap=40))
    points = [{"local.max_images": i + 1, "server.learning_rate": 0.001 + i * 0.099 / 39} for i in range(40)]
    rows = [Row(i, point, "finished", 10.0 + i, 3, None, 1.0, "x") for i, point in enumerate(points)]
    figures: list[Figure] = []
    monkeypatch.setattr("benchmarks.sweep.report.save_both", lambda figure, stem: figures.append(figure))
    parallel_coordinates(rows, sweep, "t", tmp_path / "p")
    score, _, images, rate = figures[0].axes
    for axes, low, high in ((score, 10, 49), (rate, np.log10(0.001), np.log10(0.1))):
        limits = axes.yaxis.get_transform().transform(np.array(axes.get_ylim()))
        places = (np.array([low, high]) - limits[0]) / np.ptp(limits)
        np.testing.assert_allclose(places, np.array([PAD, 1 + PAD]) / (1 + 2 * PAD))
    assert len(images.get_yticklabels()) <= MOST_LABELS


@pytest.mark.parametrize("values", [[0.01, 0.1, 1.0], ["none", "horizontal", None]])
def test_one_swept_key_is_drawn_as_scores_over_its_values(
    values: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line goes through the means over seeds; a value one of whose seeds diverged has none."""
    sweep, _, _ = read_sweep(
        written(tmp_path, {"server.learning_rate": {"values": [0.01, 0.1, 1.0]}, "seed": {"values": [0, 1]}})
    )
    scores = [20.0, 40.0, 50.0, 60.0, 10.0, None]
    rows = [
        Row(i, {"server.learning_rate": values[i // 2], "seed": i % 2}, "finished" if score else "diverged",
            score, 3, None, 1.0, "x")
        for i, score in enumerate(scores)
    ]  # fmt: skip
    figures: list[Figure] = []
    monkeypatch.setattr("benchmarks.sweep.report.save_both", lambda figure, stem: figures.append(figure))
    assert draw_trials(rows, sweep, "t", tmp_path / "plots")
    (axes,) = figures[0].axes
    line, crosses = axes.lines
    places = values if values[0] == 0.01 else [0, 1, 2]
    assert np.array_equal(line.get_xydata(), [(places[0], 30), (places[1], 55)])
    assert np.array_equal(crosses.get_xdata(), places[2:])
    points = axes.collections[0].get_offsets()
    assert np.array_equal(points, [(places[i // 2], score) for i, score in enumerate(scores) if score])
    assert axes.get_xscale() == ("log" if values[0] == 0.01 else "linear")
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        str(value).removesuffix(".0") for value in values
    ]


def test_one_scored_trial_makes_no_plot(tmp_path: Path) -> None:
    sweep, _, _ = read_sweep("learning-rates")
    only = [row for row in some_rows() if row.number == 1]
    assert not draw_trials(only, sweep, "t", tmp_path / "p")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("error")
def test_a_parameter_of_one_value_is_drawn_without_a_word(tmp_path: Path) -> None:
    sweep, _, _ = read_sweep("learning-rates")
    points = [{"local.learning_rate": 0.1, "server.learning_rate": rate} for rate in (0.02, 0.05)]
    rows = [Row(i, point, "finished", 1.0 + i, 3, None, 1.0, "x") for i, point in enumerate(points)]
    assert draw_trials(rows, sweep, "t", tmp_path / "p")


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
    parallel_coordinates(rows, sweep, "t", tmp_path / "p")
    picture = (tmp_path / "p.svg").read_text()
    assert all(f"<!-- {name} -->" in picture for name in space)
