"""Figures of a data set's partitions, after Figures 2, 3 and 4 (top) of Hsu, Qi and Brown.

classes.png: images of each class, for each split (2a, 3), by name, or by rank where there are many.
clients.png: classes and images of each client, by rank, for each partition (2b, 2c, 3). emd.png: how far each
client's classes are from the population's, for each partition (4, top). mixes.png: the classes of clients of
each partition, from the largest to the smallest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from dataset.arrays import IntArray
from dataset.drawing import write_figure
from dataset.files import replacing
from dataset.partitions.of_file import is_lowest
from dataset.store.hdf5 import DataFile
from dataset.store.views import SingleLabelView

if TYPE_CHECKING:
    from dataset.partitions.statistics import Dealt

BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"  # of Okabe and Ito's palette
BROKEN = ((6, 2), (3, 1, 1, 1), (1, 1), (5, 1, 1, 1))  # lengths of ink and gap
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", *((0, lengths) for lengths in BROKEN))
COLOURS = tuple(colormaps["tab20"].colors)  # type: ignore[attr-defined]
MOST_BARS = 40
"""Most classes that are drawn as bars, each with its name."""
GIANT = 10
"""From so many times the median client on, the largest would hide the others: shares are drawn instead."""
COLUMNS = 6
"""Names of classes in a line of a legend."""
LINE = 110
"""Letters of a legend's line."""
PLAIN = FuncFormatter(lambda value, _: f"{value:,g}")


def draw(file: DataFile, dealt: Sequence[Dealt], taxonomy: str, folder: Path) -> list[Path]:
    """Write the figures into a folder; returns their paths."""
    trained = [part for part in dealt if part.split == "train"] or list(dealt)
    trained.sort(key=lambda part: part.emd)
    figures = {"classes": classes(file, taxonomy), "clients": clients(trained), "emd": emd(trained)}
    figures["mixes"] = mixes(trained, SingleLabelView(file, taxonomy=taxonomy, lowest=True).label_names)
    paths = {folder / f"{name}.png": figure for name, figure in figures.items()}
    for path, figure in paths.items():
        with replacing(path) as temporary:
            write_figure(figure, temporary, path.name, format="png", dpi=200)
    return list(paths)


def classes(file: DataFile, taxonomy: str) -> Figure:
    """Images of each class, the commonest first: a bar for each split under its name, or lines over ranks."""
    task = SingleLabelView(file, taxonomy=taxonomy, lowest=True)
    counts = {name: task.split(name).label_counts() for name in file.splits}
    number, bars = len(task.label_names), len(task.label_names) <= MOST_BARS
    figure = Figure(figsize=(max(4.6, 1.4 + 0.32 * number) if bars else 4.6, 3.6), layout="constrained")
    axes = figure.subplots()
    order = np.argsort(-counts[file.splits[0]], kind="stable")
    for place, (name, colour, dash) in enumerate(zip(counts, (BLUE, GREEN, ORANGE), DASHES)):
        images, label = counts[name], f"{name}: {counts[name].sum():,} images"
        if bars:
            width = 0.8 / len(counts)
            left = np.arange(number) - 0.4 + place * width
            axes.bar(
                left,
                100 * images[order] / max(images.sum(), 1),
                width,
                align="edge",
                color=colour,
                label=label,
            )
        else:
            _ranked(axes, images[images > 0], color=colour, linestyle=dash, label=label)
    if bars:
        axes.set_xticks(np.arange(number), [task.label_names[k] for k in order], rotation=50, ha="right")
        counted = ",\nby their lowest class" if is_lowest(file, taxonomy) else ""
        axes.set_ylabel(f"% of the split's images{counted}")
        axes.grid(axis="y", alpha=0.25)
    else:
        axes.set(xlabel="class, the commonest first", ylabel="images", xscale="log", yscale="log")
        _plain(axes)
    figure.legend(frameon=False, ncols=3, loc="outside lower center", fontsize=8, columnspacing=1.2)
    return figure


def clients(dealt: Sequence[Dealt]) -> Figure:
    """Classes and images of each client, the richest first."""
    labels = [f"{part.name} ({len(part.sizes):,} clients)" for part in dealt]
    columns = max(1, min(3, LINE // max(map(len, labels))))
    height = 3.7 + 0.2 * -(-len(dealt) // columns)
    figure = Figure(figsize=(8.4, height), layout="constrained")
    left, right = figure.subplots(1, 2)
    for part, label, style in zip(dealt, labels, _styles(len(dealt))):
        _ranked(left, part.classes_per_client, label=label, **style)
        _ranked(right, part.sizes, **style)
    left.set(xlabel="client, that with most classes first", ylabel="classes of the client")
    right.set(xlabel="client, the largest first", ylabel="images of the client")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log")
        _plain(axes)
    handles = left.get_legend_handles_labels()
    figure.legend(*handles, frameon=False, ncols=columns, fontsize=8, loc="outside lower center")
    return figure


def mixes(dealt: Sequence[Dealt], names: Sequence[str]) -> Figure:
    """Images of clients of each partition, the largest first, a colour for each of the commonest classes."""
    columns = min(len(dealt), 2)
    rows = -(-len(dealt) // columns)
    commonest = np.argsort(-sum(part.mixes.sum(0) for part in dealt), kind="stable")
    shown = np.sort(commonest[: len(COLOURS)])  # of all panels, so that a colour is one class in all
    lines = -(-(len(shown) + 1) // COLUMNS)
    figure = Figure(figsize=(8.4, 0.4 + 1.9 * rows + 0.18 * lines), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for part, axes in zip(dealt, panels):
        images, unit = part.mixes.astype(float), "images"
        sizes = images.sum(1)
        if sizes.max() > GIANT * np.median(sizes):
            images, unit = 100 * images / np.maximum(sizes, 1)[:, None], "% of its images"
        stacks = [(images[:, k], colour, names[k]) for k, colour in zip(shown, COLOURS)]
        if len(names) > len(shown):
            stacks.append((images.sum(1) - images[:, shown].sum(1), "lightgrey", "all other classes"))
        bottom = np.zeros(len(images))
        for height, colour, name in stacks:
            axes.bar(np.arange(len(height)), height, 1.0, bottom, color=colour, linewidth=0, label=name)
            bottom = bottom + height
        drawn = f"{len(images):,} of " if len(images) < len(part.sizes) else ""
        axes.set_title(f"{part.name} ({drawn}{len(part.sizes):,} clients, by size)", fontsize=8)
        axes.set(xlim=(-0.5, len(bottom) - 0.5), xlabel="client, the largest first", ylabel=unit)
        axes.tick_params(labelsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in panels[len(dealt) :]:
        axes.set_visible(False)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, ncols=COLUMNS, fontsize=7, loc="outside lower center")
    return figure


def emd(dealt: Sequence[Dealt]) -> Figure:
    """The clients' distances to the population: a row for each partition, its weighted mean marked."""
    figure = Figure(figsize=(6.0, 1.1 + 0.42 * len(dealt)), layout="constrained")
    axes = figure.subplots()
    edges = np.linspace(-0.0125, 2.0125, 82)  # so that round numbers lie in the middle of a bar
    for row, part in enumerate(dealt):
        share, _ = np.histogram(part.distances, edges)
        height = 0.85 * share / share.max()
        axes.stairs(row + height, edges, baseline=row, fill=True, color=BLUE, alpha=0.45, linewidth=0)
        axes.plot([part.emd, part.emd], [row, row + 0.85], color=ORANGE, linewidth=2)
        axes.text(2.03, row + 0.3, f"{part.emd:.2f}", va="center", color=ORANGE)
    axes.set_yticks(
        np.arange(len(dealt)) + 0.3, [f"{part.name}\n{len(part.sizes):,} clients" for part in dealt]
    )
    axes.set(xlim=(0, 2), ylim=(-0.05, len(dealt)), xlabel="EMD of a client, ‖q − p‖₁")
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.set_title("clients (blue) and their mean, weighted by images (orange)", fontsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return figure


def _styles(count: int) -> list[dict[str, Any]]:
    """Colours of one order, light to dark, with dashes that differ from neighbour to neighbour."""
    shades = colormaps["viridis"](np.linspace(0.88, 0.0, count) if count > 1 else [0.2])
    dashes = itertools.cycle(DASHES)
    return [{"color": tuple(c), "linestyle": dash, "linewidth": 1.8} for c, dash in zip(shades, dashes)]


def _ranked(axes: Axes, values: IntArray, **style: Any) -> None:
    axes.plot(np.arange(1, len(values) + 1), np.sort(values)[::-1], drawstyle="steps-mid", **style)


def _plain(axes: Axes) -> None:
    """Plain numbers at the ticks of logarithmic axes, which begin at 1."""
    axes.grid(alpha=0.25, which="major")
    axes.set_ylim(0.85, 1.3 * axes.dataLim.ymax)
    for axis, scale in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
        if scale == "log":
            low, high = axis.get_view_interval()
            subs = (1.0, 2.0, 5.0) if high / max(low, 1e-9) < 300 else (1.0,)
            axis.set_major_locator(LogLocator(subs=subs))
            axis.set_major_formatter(PLAIN)
            axis.set_minor_formatter(NullFormatter())
