"""What a sweep found: a table of its trials, the best first, and a parallel-coordinates plot."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import optuna
from matplotlib import rc_context
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.visualization.matplotlib import plot_parallel_coordinate

from benchmarks.reporting.plots import save
from benchmarks.reporting.tables import csv_table, markdown_table
from benchmarks.sweep.space import Metric, Sweep
from dataset.files import write_bytes
from pfl_ext.tasks.multi_label_scores import shown

MOST_TICKS = 100
"""Most values of a parameter drawn as categories; one of more whole numbers is drawn as a scale."""


@dataclass(frozen=True)
class Row:
    """One trial: `score` is the best of the metric, reached at `step`; `test` the headline score on test."""

    number: int
    point: Mapping[str, Any]
    status: str
    score: float | None
    step: int | None
    test: float | None
    seconds: float | None
    """The trial's time; None where nothing says it, as in a public release."""
    run_dir: str


def table(rows: Sequence[Row], varied: Sequence[str], metric: Metric, headline: str) -> list[list[str]]:
    """The header, then the trials, the best first and those without a score last.

    A column is for each of the ``varied`` parameters; ``headline`` names the score of `Row.test`.
    """
    sign = -1 if metric.goal == "maximize" else 1
    out = [["rank", "trial", *varied, f"best {metric.name}", "at", f"test {shown(headline)}", "status",
            "seconds", "run"]]  # fmt: skip
    for rank, row in enumerate(
        sorted(rows, key=lambda r: (r.score is None, sign * (r.score or 0.0), r.number)), 1
    ):
        values = [row.point[name] for name in varied]
        cells = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in values]
        place, score, step = "", "", ""
        if row.score is not None:
            place, score, step = str(rank), f"{row.score:.4g}", str(row.step)
        test = "" if row.test is None else f"{row.test:.2f}"
        seconds = "" if row.seconds is None else f"{row.seconds:.0f}"
        out.append([place, f"{row.number:03d}", *cells, score, step, test, row.status, seconds,
                    row.run_dir])  # fmt: skip
    return out


def write_tables(cells: Sequence[Sequence[str]], directory: Path) -> None:
    """``table.md`` and ``table.csv``."""
    write_bytes(directory / "table.md", f"{markdown_table(cells[0], cells[1:])}\n".encode())
    write_bytes(directory / "table.csv", csv_table(cells[0], cells[1:]).encode())


def parallel_coordinates(rows: Sequence[Row], sweep: Sweep, title: str, stem: Path) -> bool:
    """optuna's plot of the parameters and scores, as PNG and SVG; False with fewer than two scored trials.

    It is drawn from a copy of the trials, as optuna leaves out those that were stopped early, and knows what
    was drawn instead of the values of the config keys.
    """
    scored = [row for row in rows if row.score is not None]
    if len(scored) < 2:
        return False
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
        for suffix in (".png", ".svg"):
            save(axes.figure, stem.with_suffix(suffix))
        plt.close(axes.figure)
    return True
