"""One palette and style for all pictures, and the pictures that several benchmarks draw."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from dataset.arrays import FloatArray
from dataset.drawing import write_figure
from dataset.files import write_bytes
from pfl_ext.tasks.multi_label_scores import shown
from pfl_ext.tasks.score_kinds import PERCENT, USUAL, ScoreKinds, labelled

BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#777777"
GREEN, VERMILION, PINK, SKY, BLACK = "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000"
"""Okabe and Ito's palette, whose colours colour-blind readers can tell apart."""
COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PINK, SKY, BLACK)
MARKERS = "osD^vPX"
DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), (0, (6, 3)))
"""Colours, markers and line styles of a picture's curves, in cycles; grey is for what is no curve."""
LETTERS_AN_INCH = 13
LINE_IN = 0.17
"""Width and height of a legend's letters, about."""
FEW_USERS = 30
"""Below so many users, each is drawn as a point: a density of them would be made up."""
MOST_CLASSES = 40
"""So many bars can be read."""
FEW_CELLS = 20
"""With so many classes or fewer, the cells of a confusion matrix have numbers."""
PRIVATE_PANELS = (
    ("clipping bound", "clipping bound (L2)"),
    ("fraction clipped", "fraction of updates clipped"),
    ("signal-to-noise ratio", "signal-to-noise ratio\nof the mean update"),
)
"""What private runs write of each round, and how it is labelled."""


def style(place: int) -> dict[str, Any]:
    """Colour, marker and line of the curve at this place of a legend; the colours begin again, dashed."""
    lap = place // len(COLOURS)
    return {
        "color": COLOURS[place % len(COLOURS)],
        "marker": MARKERS[place % len(MARKERS)],
        "linestyle": DASHES[lap % len(DASHES)],
    }


def legend_below(figure: Figure, columns: int = 3) -> None:
    """One legend under all panels, with each label once; long labels take several lines, for which
    the figure grows."""
    entries = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels())
    }
    width = max(30, int(LETTERS_AN_INCH * figure.get_figwidth() / columns) - 6)
    labels = [textwrap.fill(label, width) for label in entries]
    rows = max(1, -(-len(labels) // columns))
    folds = [sum(text.count("\n") for text in labels[i : i + rows]) for i in range(0, len(labels), rows)]
    figure.set_figheight(figure.get_figheight() + LINE_IN * max(folds, default=0))
    figure.legend(entries.values(), labels, frameon=False, ncols=columns, loc="outside lower center")


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path's suffix: ``.png``, ``.svg`` or ``.pdf``, without a date."""
    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": path.name}):  # the same ids in the same figure
        kind = path.suffix.removeprefix(".")
        dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
        name = path.name if kind == "png" else ""  # else a warning for each format
        write_figure(figure, buffer, name, format=kind, dpi=150, metadata=dates.get(kind))
    write_bytes(path, buffer.getvalue())


def save_both(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as PNG and as SVG; their paths."""
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("png", "svg")]
    for path in paths:
        save(figure, path)
    return paths


def plain_log(axes: Axes) -> None:
    """A logarithmic y axis with plain numbers at 1, 2 and 5."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def whole_steps(axes: Axes) -> None:
    """Ticks of rounds or epochs along x: there is no half of one."""
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def violins(axes: Axes, groups: Mapping[str, FloatArray], colours: Sequence[str]) -> None:
    """A violin for each group, with its quartiles as a box, its median as a dot and its mean as a tick.

    The shape ends at the least and the greatest value. A group of fewer than `FEW_USERS` has no shape and no
    box, but a point for each value, beside each other. Groups without a number keep their place, empty.
    """
    for place, (values, colour) in enumerate(zip(groups.values(), colours)):
        known = values[~np.isnan(values)]
        if not len(known):
            continue
        low, median, high = np.quantile(known, [0.25, 0.5, 0.75])
        if len(known) < FEW_USERS:
            # steps of the golden ratio spread evenly, in any order of the values
            beside = place + 0.5 * (np.arange(1, len(known) + 1) * 0.618034 % 1 - 0.5)
            axes.plot(beside, known, "o", color=colour, alpha=0.6, markeredgewidth=0)
        else:
            if np.ptp(known) > 0:
                body = axes.violinplot([known], [place], widths=0.8, showextrema=False)["bodies"]
                for part in body:  # type: ignore[attr-defined]
                    part.set(facecolor=colour, edgecolor=colour, alpha=0.35)
            axes.vlines(place, low, high, color=colour, linewidth=5)
        axes.plot(place, median, "o", color="white", markeredgecolor=BLACK, markersize=6, zorder=3)
        axes.plot(place, known.mean(), "_", color=BLACK, markersize=16, zorder=3)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.grid(axis="y", alpha=0.3)


def violin_legend(groups: Mapping[str, FloatArray]) -> list[Line2D]:
    """Handles that say what the marks of `violins` of these groups are."""
    sizes = [np.count_nonzero(~np.isnan(values)) for values in groups.values()]
    point = Line2D([], [], color=GREY, marker="o", linestyle="", alpha=0.6, label="one user")
    box = Line2D([], [], color=GREY, linewidth=5, label="middle half of the users")
    return [
        *([point] if any(0 < size < FEW_USERS for size in sizes) else []),
        *([box] if any(size >= FEW_USERS for size in sizes) else []),
        Line2D([], [], color="white", markeredgecolor=BLACK, marker="o", linestyle="", label="median"),
        Line2D([], [], color=BLACK, marker="_", markersize=12, linestyle="", label="mean"),
    ]


def per_user_violins(groups: Mapping[str, FloatArray], ylabel: str, title: str, path: Path) -> None:
    """One run's users, as they are and before and after fine-tuning."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    violins(axes, groups, (BLUE, ORANGE, GREEN))
    axes.set(ylabel=ylabel, ylim=(0, 102), title=title)
    figure.legend(handles=violin_legend(groups), frameon=False, ncols=4, loc="outside lower center")
    save(figure, path)


def training_curve(
    history: Sequence[Mapping[str, Any]],
    unit: str,
    columns: Sequence[str],
    title: str,
    path: Path,
    kinds: ScoreKinds = USUAL,
) -> None:
    """Draw these columns and the loss over the rounds (or epochs) of ``metrics.jsonl``.

    They are those of val, or of test where the lines have ``tracked`` in its place. Where ``kinds`` says that
    some are no percentages, the legend has the unit of each.
    """
    followed, split = ("tracked", "test") if any("tracked" in line for line in history) else ("val", "val")
    scored = [line for line in history if followed in line]
    steps = [line[unit] for line in scored]
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    left = figure.subplots()
    percent = all(kinds.unit(column) == PERCENT for column in columns)
    units = PERCENT if percent else ""
    for column, line_style, marker in zip(columns, ("-", "--", "-."), ("o", "", "")):
        values = [line[followed][column] for line in scored]
        label = shown(column) if percent else labelled(shown(column), kinds.unit(column))
        left.plot(steps, values, line_style, color=BLUE, marker=marker, markersize=3, label=label)
    whole_steps(left)
    left.set(xlabel=f"{unit}s of training", ylabel=labelled(f"score on {split}", units), title=title)
    if percent:
        left.set_ylim(0, 100)
    right = left.twinx()
    right.plot(
        steps, [line[followed]["loss"] for line in scored], color=ORANGE, linestyle=":", label="loss (right)"
    )
    right.set_ylabel(f"loss on {split}")
    right.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    left.grid(alpha=0.3)
    save(figure, path)


def per_class_bars(
    names: Sequence[str],
    ap: Sequence[float],
    prevalence: Sequence[float],
    paper: Mapping[str, float],
    title: str,
    path: Path,
) -> None:
    """AP of the classes on test, the commonest first, beside the paper's where it gives them.

    Red ticks are each label's share of the images: the AP of guessing. At most `MOST_CLASSES` are drawn. A
    class without an image in test has no AP, and "none" in its place.
    """
    order = np.argsort(-np.asarray(prevalence), kind="stable")[:MOST_CLASSES]
    x = np.arange(len(order))
    figure = Figure(figsize=(max(6.4, 0.36 * len(order)), 4.2), layout="constrained")
    axes = figure.subplots()
    shift = 0.2 if paper else 0.0
    present = [ap[k] if prevalence[k] else np.nan for k in order]
    axes.bar(x - shift, present, 0.4 if paper else 0.7, color=BLUE, label="this run")
    if paper:
        bars = [paper.get(names[k], np.nan) for k in order]
        axes.bar(x + shift, bars, 0.4, color=ORANGE, label="paper (FLAIR)")
    shares = [100 * prevalence[k] if prevalence[k] else np.nan for k in order]
    edge = [withStroke(linewidth=4.5, foreground="white")]
    looks: dict[str, Any] = {"markersize": 14, "markeredgewidth": 2.2, "path_effects": edge}
    axes.plot(x, shares, "_", color=VERMILION, label="label prevalence", **looks)
    for place in np.flatnonzero(np.isnan(shares)).tolist():
        axes.text(place, 1, "none", rotation=90, ha="center", va="bottom", fontsize="small")
    axes.set_xticks(x, [names[k] for k in order], rotation=50, ha="right")
    axes.set_xlim(-0.7, len(order) - 0.3)
    shown = "" if len(order) == len(names) else f" (commonest {len(order)} of {len(names)})"
    axes.set(ylabel="average precision on test (%)", ylim=(0, 100), title=title + shown)
    figure.legend(frameon=False, ncols=3, loc="outside lower center")
    axes.grid(axis="y", alpha=0.3)
    save(figure, path)


def private_panel(axes: Axes, name: str, label: str) -> None:
    """Label and scale of one of `PRIVATE_PANELS`."""
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    if name == "fraction clipped":
        axes.set_ylim(0, 1.02)
    else:
        plain_log(axes)


def privacy_curves(history: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Clipping bound, fraction of updates clipped and signal-to-noise ratio over a private run's rounds.

    What the run did not write, as with ``privacy.release: public``, has no panel; nor has what is the same in
    all rounds, as a fixed clipping bound, beside what changes.
    """
    lines = [(line["round"], line["privacy"]) for line in history if "privacy" in line]
    rounds = [number for number, _ in lines]
    found = {
        panel: {values[panel[0]] for _, values in lines if panel[0] in values} for panel in PRIVATE_PANELS
    }
    panels = [panel for panel, values in found.items() if len(values) > 1]
    panels = panels or [panel for panel, values in found.items() if values]
    figure = Figure(figsize=(6.4, 1 + 1.8 * len(panels)), layout="constrained")
    rows = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axes, (name, label) in zip(rows, panels):
        axes.plot(rounds, [values.get(name, math.nan) for _, values in lines], color=BLUE)
        private_panel(axes, name, label)
    axes.set_xlabel("round of training")
    whole_steps(axes)
    figure.suptitle(title)
    save(figure, path)


def bench_bars(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Seconds of a round by case, stock and fast side by side, each bar divided by where its time goes."""
    parts = ("data", "training", "bookkeeping", "evaluation")
    shades = (ORANGE, BLUE, GREY, GREEN)
    figure = Figure(figsize=(7.2, 1.2 + 0.62 * len(results)), layout="constrained")
    axes = figure.subplots()
    for row, result in enumerate(results):
        for offset, name in ((-0.2, "stock"), (0.2, "fast")):
            left = 0.0
            for part, shade in zip(parts, shades):
                width = result[name]["share"][part] * result[name]["round_s"] / result["stock"]["round_s"]
                label = part if row == 0 and name == "stock" else None
                bar = axes.barh(row + offset, width, 0.36, left, color=shade, label=label)
                left += width
            times = f" ({result['ratio']:.2f}x)" if name == "fast" else ""
            axes.bar_label(bar, [f" {name}: {result[name]['round_s']:.2f} s{times}"])
    axes.set_yticks(range(len(results)), [result["case"]["name"] for result in results])
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.45), xlabel="time of a round, of stock pfl's")
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.08), ncols=4, frameon=False)
    save(figure, path)


def bars(values: Mapping[str, float], label: str, title: str, path: Path) -> None:
    """A horizontal bar for each name, the greatest on top."""
    ordered = sorted(values.items(), key=lambda item: item[1])
    figure = Figure(figsize=(6.4, 1 + 0.24 * len(ordered)), layout="constrained")
    axes = figure.subplots()
    axes.barh([name for name, _ in ordered], [value for _, value in ordered], color=BLUE)
    axes.set(xlabel=label, title=title, xlim=(0, 100))
    axes.grid(axis="x", alpha=0.3)
    save(figure, path)


def confusion(counts: Mapping[str, Sequence[int]], title: str, path: Path) -> None:
    """A matrix with true classes as rows and predicted ones as columns. The colour is the share of the row's
    images, and where there are few classes each cell has the number of images."""
    names, numbers = list(counts), np.array(list(counts.values()))
    shares = 100 * numbers / np.maximum(numbers.sum(1, keepdims=True), 1)
    side = 2.6 + max(0.16, 0.5 * (len(names) <= FEW_CELLS)) * len(names)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=100)
    if len(names) <= FEW_CELLS:
        for (row, column), number in np.ndenumerate(numbers):
            ink = "white" if shares[row, column] > 60 else BLACK
            axes.text(column, row, f"{number:,}", ha="center", va="center", color=ink, fontsize="small")
    size = "small" if len(names) <= FEW_CELLS else "xx-small"
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=size)
    axes.set_yticks(range(len(names)), names, fontsize=size)
    axes.set(xlabel="predicted class", ylabel="true class")
    figure.suptitle(title)
    figure.colorbar(image, ax=axes, label="% of the images of the true class", shrink=0.8)
    save(figure, path)
