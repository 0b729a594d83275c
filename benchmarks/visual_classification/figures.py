"""Pictures of federated visual classification, after Figures 4 and 6 of the paper.

Learning curves over rounds and over batches of the largest users, a panel for each partition; and accuracy
relative to centralised training against the partition's distance from identical users (its mean EMD).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.reporting.plots import GREY, legend_below, save_both, style
from benchmarks.visual_classification.curves import Row
from dataset.arrays import FloatArray

Values = FloatArray


def draw_all(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Every figure that the rows have the data for; the files written."""
    federated = [row for row in rows if row.runs[0].config.mode == "federated"]
    drawn: list[Path] = []
    if federated:
        for over in ("rounds", "batches"):
            drawn += save_both(learning_curves(federated, over), folder / f"learning-curves-{over}")
    measured = [row for row in federated if row.centralised and _emd(row) is not None]
    if len({row.partition for row in measured}) > 1:
        drawn += save_both(accuracy_against_emd(measured), folder / "relative-accuracy-emd")
    return drawn


def _styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The style of each name, in alphabetical order."""
    return {name: style(place) for place, name in enumerate(sorted(set(names)))}


def learning_curves(rows: Sequence[Row], over: str) -> Figure:
    """Accuracy over ``rounds`` or ``batches``: the mean over seeds, and the range of them shaded."""
    panels: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        panels[row.partition].append(row)
    styles = _styles([row.label for row in rows])
    columns = min(len(panels), 4)
    lines = -(-len(panels) // columns)
    width = max(4.2 * columns, 7)
    figure = Figure(figsize=(width, 3.4 * lines + 1), layout="constrained")
    grid = figure.subplots(lines, columns, sharey=True, squeeze=False)
    for axes, (partition, members) in zip(grid.flat, panels.items()):
        for row in members:
            _curve(axes, row, over, styles[row.label])
        level = members[0].centralised
        if level:
            axes.axhline(level, color=GREY, linestyle="--", linewidth=1, label="centralised")
        unit = "communication rounds" if over == "rounds" else "local batches of the largest users"
        axes.set(title=partition, xlabel=unit)
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes in grid[:, 0]:
        axes.set_ylabel("accuracy (%)")
    grid[0, 0].set_ylim(bottom=0)  # of all panels, once they have all their curves
    legend_below(figure, max(1, int(width / 2.6)))
    return figure


def _curve(axes: Axes, row: Row, over: str, style: Mapping[str, Any]) -> None:
    """Seeds are averaged at the places that the first one was scored at."""
    places = getattr(row.curves[0], over).astype(np.float64)
    values = np.array(
        [np.interp(places, getattr(curve, over), curve.accuracy) for curve in row.curves], np.float64
    )
    every = max(1, len(places) // 8)
    axes.plot(places, values.mean(0), **style, markersize=4, markevery=every, label=row.label)
    if len(values) > 1:
        axes.fill_between(places, values.min(0), values.max(0), color=style["color"], alpha=0.12, linewidth=0)


def _emd(row: Row) -> float | None:
    found = row.runs[0].outcome.get("partition", {}).get("mean_emd")
    return None if found is None else float(found)


def accuracy_against_emd(rows: Sequence[Row]) -> Figure:
    """The best accuracy over the rounds, relative to centralised training; seeds as points, means joined.

    If runs of one method differ in their constants, the best is drawn, as in the paper's Figure 4.
    """
    styles = _styles([row.name for row in rows])
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    methods: dict[str, list[tuple[float, Values]]] = defaultdict(list)
    places: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        places[row.name, row.partition].append(row)
    for (name, _), rivals in places.items():
        row = max(rivals, key=lambda rival: float(np.mean([curve.best for curve in rival.curves])))
        assert row.centralised is not None
        best = np.array([curve.best for curve in row.curves], np.float64)
        methods[name].append((_emd(row) or 0.0, 100 * best / row.centralised))
    for name, points in methods.items():
        points.sort(key=lambda point: point[0])
        axes.plot(
            [emd for emd, _ in points],
            [values.mean() for _, values in points],
            **styles[name],
            label=name,
        )
        for emd, values in points:
            if len(values) > 1:
                points_style = {**styles[name], "linestyle": ""}
                axes.plot([emd] * len(values), values, **points_style, alpha=0.4, markersize=3)
    axes.axhline(100, color=GREY, linestyle="--", linewidth=1)
    axes.text(0.02, 99, "centralised", color=GREY, va="top", transform=axes.get_yaxis_transform())
    axes.set(
        xlabel="mean EMD of users' classes to the population's (0: identical, 2: disjoint)",
        ylabel="relative accuracy, best of the run (%)",
        xlim=(-0.05, 2.05),
        ylim=(0, 108),
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower left")
    return figure
