"""What a sweep found: a table of its trials, the best first, their means over seeds, and a picture."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import optuna
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.visualization.matplotlib import plot_parallel_coordinate

from benchmarks.reporting.plots import plain_log, save_both
from benchmarks.reporting.tables import csv_table, markdown_table
from benchmarks.sweep.space import Metric, Sweep
from dataset.files import write_bytes
from pfl_ext.tasks.multi_label_scores import shown
from pfl_ext.tasks.score_kinds import USUAL, ScoreKinds

MOST_TICKS = 100
"""Most values of a parameter drawn as categories; one of more whole numbers is drawn as a scale."""
MOST_LABELS = 12
"""Most tick labels of an axis of categories."""
SCALES = 8
"""Values whose greatest is so many times the least are drawn on a logarithmic axis."""
PAD = 0.06
"""What is left free at both ends of an axis, as a share of its height."""

DIVERGED = "diverged"
"""The status of a trial whose model diverged."""
Point = tuple[str, ...]
"""The values of a trial's parameters, but for the seed, in full."""


@dataclass(frozen=True)
class Row:
    """One trial: `score` is the best of the metric, reached at `step`; `test` the score on test, of the model
    of `test_step`."""

    number: int
    point: Mapping[str, Any]
    status: str
    score: float | None
    step: int | None
    test: float | None
    seconds: float | None
    """The trial's time; None where nothing says it, as in a public release."""
    run_dir: str
    test_step: int | None = None


def table(
    rows: Sequence[Row],
    varied: Sequence[str],
    metric: Metric,
    on_test: str,
    kinds: ScoreKinds = USUAL,
) -> list[list[str]]:
    """The header, then the trials, the best first and those without a score last.

    A column is for each of the ``varied`` parameters; ``on_test`` names the score of `Row.test`, and
    ``kinds`` says how it is read.
    """
    digits = _digits_on_test(rows, on_test, kinds)
    scores = f"best {metric.name}", "at round/epoch", f"test {shown(on_test)}", "test at round/epoch"
    out = [["rank", "trial", *varied, *scores, "status", "seconds", "run"]]
    ranked = sorted(rows, key=lambda r: (r.score is None, metric.sign * (r.score or 0.0), r.number))
    for rank, (row, cells) in enumerate(zip(ranked, _cells(ranked, varied)), 1):
        place, score, step = "", "", ""
        if row.score is not None:
            place, score, step = str(rank), f"{row.score:.4g}", str(row.step)
        test = "" if row.test is None else f"{row.test:.{digits}f}"
        tested = "" if row.test_step is None else str(row.test_step)
        seconds = "" if row.seconds is None else f"{row.seconds:.0f}"
        out.append([place, f"{row.number:03d}", *cells, score, step, test, tested, row.status,
                    seconds, row.run_dir])  # fmt: skip
    return out


def _cells(rows: Sequence[Row], names: Sequence[str]) -> list[list[str]]:
    """The values of each row; floats in six digits, but in full where two of a column would look the same."""
    columns = []
    for name in names:
        values = [row.point[name] for row in rows]
        words = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in values]
        alike = len(set(words)) < len(set(map(repr, values)))
        columns.append(list(map(str, values)) if alike else words)
    return list(map(list, zip(*columns))) if columns else [[] for _ in rows]


def _point(row: Row) -> Point:
    """What rows that differ only in their seed have in common."""
    return tuple(repr(value) for name, value in row.point.items() if name != "seed")


def _by_point(rows: Iterable[Row]) -> dict[Point, list[Row]]:
    """The trials of each point."""
    points: dict[Point, list[Row]] = {}
    for row in rows:
        points.setdefault(_point(row), []).append(row)
    return points


def _mean(rows: Sequence[Row]) -> float:
    """The mean score of trials that have one."""
    return statistics.fmean(row.score or 0.0 for row in rows)


def _digits_on_test(rows: Sequence[Row], on_test: str, kinds: ScoreKinds) -> int:
    return kinds.decimals(on_test, [row.test for row in rows if row.test is not None], 2)


def over_seeds(
    rows: Sequence[Row],
    varied: Sequence[str],
    metric: Metric,
    on_test: str,
    kinds: ScoreKinds = USUAL,
) -> list[list[str]]:
    """The header, then each point with its mean over seeds, the best first, but for those of which a seed
    diverged, which are last; empty where no seed varies.

    The standard deviation is the sample's (n - 1). The mean on test is there where all n trials have one.
    """
    names = [name for name in varied if name != "seed"]
    if len(names) == len(varied):
        return []
    points = _by_point(row for row in rows if row.score is not None)
    out = [["rank", *names, "n", f"mean best {metric.name}", "std", f"mean test {shown(on_test)}", "std"]]
    fell = _by_point(row for row in rows if row.status == DIVERGED)
    digits = _digits_on_test(rows, on_test, kinds)
    order = sorted(points, key=lambda each: (each in fell, metric.sign * _mean(points[each])))
    cells = _cells([points[point][0] for point in order], names)
    for rank, (point, words) in enumerate(zip(order, cells), 1):
        scores = [row.score for row in points[point]]
        tests = [row.test for row in points[point]]
        found = [*_mean_and_std(scores, ".4g"), *_mean_and_std(tests, f".{digits}f")]
        out.append([str(rank), *words, str(len(scores)), *found])
    return out


def best_row(rows: Sequence[Row], metric: Metric, whole: bool = False) -> Row | None:
    """A finished trial of the best point, by its mean over seeds where seeds vary; None: no trial finished.

    A point of which a seed diverged is the best only where one did of all.

    Args:
        rows: the trials.
        metric: that ranks them.
        whole: choose among the points with the most finished seeds, as all points of a grid have the same.
    """
    points = _by_point(row for row in rows if row.status == "finished" and row.score is not None)
    fell = _by_point(row for row in rows if row.status == DIVERGED)

    def place(point: Point) -> tuple[bool, int, float]:
        found = points[point]
        return point in fell, -len(found) if whole else 0, metric.sign * _mean(found)

    best = min(points, key=place, default=None)
    return None if best is None else points[best][0]


def _mean_and_std(values: Sequence[float | None], form: str) -> tuple[str, str]:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "", ""
    return f"{statistics.fmean(known):{form}}", f"{statistics.stdev(known):{form}}" if len(known) > 1 else ""


def other_models(rows: Sequence[Row], metric: Metric, best_by: Sequence[str]) -> str:
    """A line where some trial's test score is of another model than the one that it is ranked by; else empty.

    Args:
        rows: the trials.
        metric: that ranks them.
        best_by: what ``evaluation.best_by`` can be.
    """
    if all(row.test_step in (None, row.step) for row in rows):
        return ""
    score = metric.name.removeprefix("val/")
    remedy = (
        f"--evaluation.best_by {score}" if score in best_by else "a metric that --evaluation.best_by takes"
    )
    return (
        "The test score is of the model that evaluation.best_by chose, not always of the one with the best "
        f"{metric.name}; {remedy} makes them one."
    )


def write_tables(
    cells: Sequence[Sequence[str]], means: Sequence[Sequence[str]], note: str, directory: Path
) -> str:
    """Write ``table.md``, ``table.csv`` and, where seeds vary, ``over_seeds.csv``; the text of the first."""
    parts = [markdown_table(cells[0], cells[1:]), note]
    write_bytes(directory / "table.csv", csv_table(cells[0], cells[1:]).encode())
    if means:
        parts += [
            "Over seeds, ranked by the mean (n trials with a score):",
            markdown_table(means[0], means[1:]),
        ]
        write_bytes(directory / "over_seeds.csv", csv_table(means[0], means[1:]).encode())
    text = "\n\n".join(part for part in parts if part)
    write_bytes(directory / "table.md", f"{text}\n".encode())
    return text


def _make_readable(axes: Axes) -> None:
    """Keep the lines off the frame, and the tick labels off each other and readable above the lines.

    All axes are padded by one share of their height, so that the lines still meet them at their values.
    """
    scale = axes.yaxis.get_transform()
    low, high = scale.transform(np.array(axes.get_ylim()))
    pad = PAD * (high - low)
    axes.set_ylim(*scale.inverted().transform(np.array([low - pad, high + pad])))
    if axes.get_yscale() == "log":
        plain_log(axes)
    elif isinstance(axes.yaxis.get_major_locator(), FixedLocator):
        labels = [label.get_text() for label in axes.get_yticklabels()]
        every = -(-len(labels) // MOST_LABELS)
        axes.set_yticks(axes.get_yticks()[::every], labels[::every])
    for label in axes.get_yticklabels():
        label.set_path_effects([withStroke(linewidth=3, foreground="white")])


def draw_trials(rows: Sequence[Row], sweep: Sweep, title: str, folder: Path) -> bool:
    """The picture of all trials: `scores_over` the one key that is swept besides seeds, or else
    `parallel_coordinates`; False with fewer than two scored trials."""
    if sum(row.score is not None for row in rows) < 2:
        return False
    keys = [name for name in sweep.space if name != "seed"]
    if len(keys) == 1:
        scores_over(keys[0], rows, sweep.ranking.name, title, folder / "scores")
    else:
        parallel_coordinates(rows, sweep, title, folder / "parallel_coordinates")
    return True


def scores_over(key: str, rows: Sequence[Row], metric: str, title: str, stem: Path) -> None:
    """A point for each trial and a line through the means over seeds, as PNG and SVG.

    Trials that diverged are crosses at the lower edge.
    """
    scored = [(row.point[key], row.score) for row in rows if row.score is not None]
    lost = [row.point[key] for row in rows if row.status == DIVERGED]
    values = list(dict.fromkeys([value for value, _ in scored] + lost))
    measured = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    values = sorted(values) if measured else values
    places = {value: value if measured else place for place, value in enumerate(values)}
    means = {
        value: statistics.fmean(s for v, s in scored if v == value) for value in values if value not in lost
    }
    plt.switch_backend("agg")
    figure, axes = plt.subplots(layout="constrained")
    axes.plot([places[value] for value in means], list(means.values()), color="C0", zorder=1)
    axes.scatter(
        [places[value] for value, _ in scored], [score for _, score in scored], color="C0", label="a trial"
    )
    if lost:
        at_edge = axes.get_xaxis_transform()
        axes.plot(
            [places[v] for v in lost],
            [0.03] * len(lost),
            "x",
            color="C3",
            transform=at_edge,
            label="diverged",
        )
        axes.legend(frameon=False)
    if measured and values[0] > 0 and values[-1] / values[0] >= SCALES:
        axes.set_xscale("log")
    axes.minorticks_off()
    shown_values = values[:: -(-len(values) // MOST_LABELS)]
    axes.set_xticks(
        [places[value] for value in shown_values],
        [f"{value:.3g}" if measured else str(value) for value in shown_values],
    )
    axes.set(xlabel=key, ylabel=metric, title=f"{title}: {len(scored)} trials")
    save_both(figure, stem)
    plt.close(figure)


def parallel_coordinates(rows: Sequence[Row], sweep: Sweep, title: str, stem: Path) -> None:
    """optuna's plot of the parameters and scores, as PNG and SVG.

    It is drawn from a copy of the trials, as optuna leaves out those that were stopped early, and knows what
    was drawn instead of the values of the config keys.
    """
    scored = [row for row in rows if row.score is not None]
    study = optuna.create_study(direction=sweep.ranking.goal)
    spaces: dict[str, BaseDistribution] = {}
    for name in sweep.space:
        values, parameter = [row.point[name] for row in scored], sweep.parameters[name]
        options = parameter.options()
        if options is not None and (parameter.values is not None or len(options) <= MOST_TICKS):
            spaces[name] = CategoricalDistribution(list(options))
        else:
            spaces[name] = FloatDistribution(min(values), max(values), log="log" in parameter.kind)
    for row in scored:
        point = {name: row.point[name] for name in spaces}
        study.add_trial(optuna.trial.create_trial(params=point, distributions=spaces, value=row.score))
    plt.switch_backend("agg")
    size = (max(6.4, 1.9 * len(spaces) + 3), 4.8)
    with warnings.catch_warnings(), rc_context({"figure.figsize": size, "savefig.bbox": "tight"}):
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # an axis of one value: optuna sets its limits to that value twice, and matplotlib widens them
        warnings.filterwarnings("ignore", "Attempting to set identical", UserWarning)
        axes = plot_parallel_coordinate(study, target_name=sweep.ranking.name)
        axes.collections[-1].set(cmap="cividis", linewidth=1.6)
        axes.set_xticklabels([sweep.ranking.name, *sorted(spaces)], ha="left")  # optuna cuts long names
        axes.set_title(f"{title}: {len(scored)} trials")
        for each in axes.figure.axes:
            if each is not axes.collections[-1].colorbar.ax:
                _make_readable(each)
        save_both(axes.figure, stem)
        plt.close(axes.figure)
