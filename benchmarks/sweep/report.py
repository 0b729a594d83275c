"""What a sweep found: a table of its trials, the best first, and a parallel-coordinates plot."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from benchmarks.sweep.space import Metric, Sweep
from dataset.files import write_bytes
from pfl_ext.tasks.metrics import shown


@dataclass(frozen=True)
class Row:
    """One trial as the table has it.

    `score` is the best of the metric, reached at `step`; `test` is the headline score on test.
    """

    number: int
    point: Mapping[str, Any]
    status: str
    score: float | None
    step: int | None
    test: float | None
    seconds: float
    run_dir: str


def ranked(rows: Sequence[Row], goal: str) -> list[Row]:
    """The best first, those without a score last."""
    sign = -1 if goal == "maximize" else 1
    return sorted(rows, key=lambda r: (r.score is None, sign * (r.score or 0.0), r.number))


def _cells(rows: Sequence[Row], varied: Sequence[str], metric: Metric, headline: str) -> list[list[str]]:
    header = ["rank", "trial", *varied, f"best {metric.name}", "at", f"test {shown(headline)}",
              "status", "seconds", "run"]  # fmt: skip
    out = [header]
    for rank, row in enumerate(ranked(rows, metric.goal), 1):
        score = "" if row.score is None else f"{row.score:.4g}"
        test = "" if row.test is None else f"{row.test:.2f}"
        step = "" if row.step is None else str(row.step)
        values = [str(row.point[name]) for name in varied]
        out.append([str(rank) if score else "", f"{row.number:03d}", *values, score, step, test,
                    row.status, f"{row.seconds:.0f}", row.run_dir])  # fmt: skip
    return out


def markdown(rows: Sequence[Row], varied: Sequence[str], metric: Metric, headline: str) -> str:
    """The table, for people; ``headline``: of which score `Row.test` is."""
    cells = _cells(rows, varied, metric, headline)
    lines = [f"| {' | '.join(line)} |" for line in cells]
    return "\n".join([lines[0], "|---" * len(cells[0]) + "|", *lines[1:]]) + "\n"


def write_tables(
    rows: Sequence[Row], varied: Sequence[str], metric: Metric, headline: str, directory: Path
) -> None:
    """``table.md`` and ``table.csv``."""
    write_bytes(directory / "table.md", markdown(rows, varied, metric, headline).encode())
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(_cells(rows, varied, metric, headline))
    write_bytes(directory / "table.csv", text.getvalue().encode())


@dataclass(frozen=True)
class Axis:
    """One upright axis: places in [0, 1] of the trials' values, and its ticks."""

    label: str
    places: Sequence[float]
    ticks: Sequence[tuple[float, str]]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def axis(label: str, values: Sequence[Any], options: Sequence[Any] | None, logarithmic: bool) -> Axis:
    """Numbers on a linear or logarithmic scale; words, evenly spaced. ``options``: all values, if finite."""
    known = list(options or ())
    everything = [*values, *known]
    if any(isinstance(value, (str, bool)) or value is None for value in everything):
        words = list(dict.fromkeys(map(str, known or sorted(map(str, everything)))))
        spread = {word: i / max(len(words) - 1, 1) for i, word in enumerate(words)}
        return Axis(label, [spread[str(value)] for value in values], [(spread[w], w) for w in words])
    low, high = min(everything), max(everything)
    if low == high:
        return Axis(label, [0.5] * len(values), [(0.5, _short(low))])

    def place(x: float) -> float:
        if logarithmic:
            return float(np.log(x / low) / np.log(high / low))
        return float((x - low) / (high - low))

    if 0 < len(known) <= 8:
        marks = sorted(set(known))
    else:
        locator = LogLocator(subs=(1.0, 3.0)) if logarithmic else MaxNLocator(5)
        marks = sorted({low, high} | {float(t) for t in locator.tick_values(low, high) if low <= t <= high})
        keep: list[float] = []
        for mark in marks:  # an end's label would lie over a round tick's beside it
            near = [m for m in (low, high) if m != mark and abs(place(mark) - place(m)) < 0.06]
            if not near:
                keep.append(mark)
        marks = keep
    return Axis(label, [place(value) for value in values], [(place(mark), _short(mark)) for mark in marks])


def parallel_coordinates(rows: Sequence[Row], sweep: Sweep, metric: Metric, title: str, stem: Path) -> bool:
    """A line a trial over its parameters to its score, as PNG and SVG; False with fewer than two scored."""
    scored = ranked([row for row in rows if row.score is not None], metric.goal)
    if len(scored) < 2:
        return False
    scores = [float(row.score or 0.0) for row in scored]
    axes_ = []
    for name in sweep.varied:
        parameter = sweep.parameters[name]
        values = [row.point[name] for row in scored]
        axes_.append(axis(name, values, parameter.options(), parameter.logarithmic))
    axes_.append(axis(f"best {metric.name}", scores, None, False))
    figure = Figure(figsize=(max(6.4, 1.9 * len(axes_) + 1.2), 4.4), layout="constrained")
    panel = figure.subplots()
    colours, norm = colormaps["cividis"], Normalize(min(scores), max(scores))
    x = np.arange(len(axes_))
    for rank in reversed(range(len(scored))):
        style = ":" if scored[rank].status == "stopped" else "-"
        y = [one.places[rank] for one in axes_]
        panel.plot(x, y, style, color=colours(norm(scores[rank])), linewidth=3.4 if rank == 0 else 1.6)
    box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8}
    for i, one in enumerate(axes_):
        panel.axvline(i, color="#444444", linewidth=1)
        for place, text in one.ticks:
            panel.plot([i - 0.015, i + 0.015], [place, place], color="#444444", linewidth=1)
            panel.text(i - 0.03, place, text, ha="right", va="center", fontsize=8, bbox=box)
    panel.set_xticks(x, [one.label.replace(".", ".\n", 1) for one in axes_])
    panel.set(xlim=(-0.45, len(axes_) - 0.9), ylim=(-0.04, 1.04), yticks=[])
    panel.spines[:].set_visible(False)
    panel.tick_params(length=0)
    dotted = "; dotted: stopped early" if any(row.status == "stopped" for row in scored) else ""
    panel.set_title(f"{title}: {len(scored)} trials, the best thick{dotted}", fontsize=10)
    figure.colorbar(ScalarMappable(norm, colours), ax=panel, label=metric.name, pad=0.02)
    for suffix in ("png", "svg"):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix, dpi=150)
        write_bytes(stem.with_suffix(f".{suffix}"), buffer.getvalue())
    return True
