"""The figures of the FLAIR paper, from a data file and from runs, as PNG and SVG.

    python -m benchmarks.flair.figures [RUN_DIR...] [--data_path F] --output_dir D

From a file: user_sizes (the paper's Figure 2, left), emd (Figure 2, right), labels (Figure 3). From runs,
their seeds together: per_class (Figure 4), per_user (Figure 5; of runs with a per_user.json, which
``python -m benchmarks.flair.per_user`` makes), private (Figure 6: private runs by noise cohort).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, PercentFormatter
from scipy.stats import binned_statistic

from benchmarks.core.commands import command_parser
from benchmarks.core.config.trees import Tree
from benchmarks.flair.config import parse
from benchmarks.flair.report import collect
from benchmarks.flair.skew import EmdCurves, emd_of_users, label_counts, size_curve
from benchmarks.flair.table import Row
from benchmarks.flair.train import Flair
from benchmarks.reporting.plots import (
    BLUE,
    COLOURS,
    DASHES,
    GREEN,
    GREY,
    MARKERS,
    PINK,
    SKY,
    VERMILION,
    legend_below,
    plain_log,
    save_both,
    violin_legend,
    violins,
)
from benchmarks.reporting.runs import RunRecord, not_whole, statements_of
from dataset.arrays import FloatArray, IntArray
from dataset.cli import run as run_command
from dataset.store.annotations import LabelMatrix
from dataset.store.hdf5 import DataFile
from pfl_ext.tasks.multi_label_scores import shown

Named = tuple[str, Figure]
SHORT = {
    "data.partition=iid": "IID", "privacy=none": "no noise", "local_privacy.epsilon=": "local epsilon ",
    "privacy.epsilon=": "epsilon ", "privacy.noise_cohort_size=": "noise cohort ",
    "federated.num_rounds=": "rounds: ", "server.learning_rate=": "server's rate ",
}  # fmt: skip
"""How differences are said in a legend; a longer key before one that ends it."""
THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")


def user_sizes(sizes: Mapping[str, IntArray], name: str) -> Figure:
    """Share of the images held by the largest users, for each split."""
    figure = Figure(figsize=(5.2, 4.2), layout="constrained")
    axes = figure.subplots()
    for (split, values), colour, dash in zip(sizes.items(), COLOURS, DASHES):
        users, images = size_curve(values)
        half = 100 * users[np.searchsorted(images, 0.5)]
        axes.plot(
            100 * users, 100 * images, color=colour, linestyle=dash, linewidth=1.8,
            label=f"{split}: {len(values):,} users, half of the images with {half:.2g} % of them",
        )  # fmt: skip
    axes.plot([0, 100], [0, 100], color=GREY, linewidth=1, label="as many images for every user")
    axes.set(
        xlabel="users, the largest first (%)", ylabel="images that they hold (%)", title=name,
        xlim=(0, 100), ylim=(0, 101),
    )  # fmt: skip
    axes.grid(alpha=0.3)
    legend_below(figure, 1)
    return figure


def emd(curves: EmdCurves, name: str) -> Figure:
    """Distribution over users of the distance of their pixels to everybody's."""
    figure = Figure(figsize=(5.2, 4.2), layout="constrained")
    axes = figure.subplots()
    shown = {
        "real users": (curves.real, PINK, "-"),
        "images dealt at random, the same sizes": (curves.size_matched, GREEN, ":"),
        "images dealt at random, equal sizes": (curves.equal, BLUE, "--"),
    }
    for label, (values, colour, dash) in shown.items():
        label = f"{label} (median {np.median(values):.1f})"
        axes.ecdf(values, color=colour, linestyle=dash, linewidth=1.8, label=label)
    last = float(np.quantile(np.concatenate([curves.real, curves.size_matched, curves.equal]), 0.995))
    axes.set(
        xlabel="earth mover's distance to all images' pixels (levels of 256)",
        ylabel="users at most so far away (%)",
        xlim=(0, 1.05 * last),
        ylim=(0, 1.01),
        title=f"{name}\n{curves.num_images:,} images with {curves.label}, of {len(curves.real):,} users",
    )
    axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    axes.grid(alpha=0.3)
    legend_below(figure, 1)
    return figure


def labels(
    coarse: tuple[Sequence[str], LabelMatrix],
    fine: LabelMatrix,
    owner: npt.NDArray[np.int32],
    users: int,
    name: str,
) -> Figure:
    """Images with each label (bars, log) and users who have it (line), coarse and fine."""
    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, width_ratios=(1.25, 1))
    for axes, matrix, title in zip(panels, (coarse[1], fine), ("coarse labels", "fine labels")):
        images, owners = label_counts(matrix, owner)
        order = np.argsort(-images, kind="stable")
        x, share = np.arange(len(order)), 100 * owners[order] / users
        named = matrix is coarse[1]
        width = 0.75 if named else 1.0
        axes.bar(x, images[order], width, color=SKY, label="images with the label (left)")
        axes.set(yscale="log", ylabel="images", title=f"{len(order):,} {title}")
        axes.set_ylim(0.7, 2 * images.max())
        axes.yaxis.set_major_formatter(THOUSANDS)
        right = axes.twinx()
        right.plot(
            x, share, color=VERMILION, marker="o" if named else None, markersize=4, linewidth=1.4,
            label="users with the label (right)",
        )  # fmt: skip
        right.set(ylabel="users (%)", ylim=(0, None))
        if named:
            axes.set_xticks(x, [coarse[0][k] for k in order], rotation=50, ha="right", rotation_mode="anchor")
        else:
            axes.set_xlabel("label, the commonest first")
            axes.set_xlim(-0.5, len(order) - 0.5)
    legend_below(figure, 2)
    figure.suptitle(name)
    return figure


def data_figures(path: Path, split: str, image_size: int | None, threads: int) -> Iterator[Named]:
    """The figures of a data file.

    Raises:
        ValueError: when the file is not grouped by user, or an image's size must be said.
    """
    with DataFile(path) as file:
        if not file.grouped:
            raise ValueError(f"{path} is not grouped by user: preprocess without --not_group_data_by_user")
        size = image_size or file.image_size or 256
        index, name = file.split(split), path.stem
        yield "user_sizes", user_sizes({s: np.diff(file.split(s).user_offsets) for s in file.splits}, name)
        coarse, fine = index.labels["labels"], index.labels["fine_grained_labels"]
        names = list(file.label_mapping("labels"))
        title = f"{name}, {split}: {index.num_images:,} images of {index.num_users:,} users"
        yield "labels", labels((names, coarse), fine, index.user_index, index.num_users, title)
        yield "emd", emd(emd_of_users(file, split, image_size=size, threads=threads), f"{name}, {split}")


def _label(row: Row, rows: Sequence[Row]) -> str:
    """A row's label, short: seeds, and the scale only where there are several."""
    scales = {other.variant.scale for other in rows}
    scale = f" ({row.variant.scale or 'full'})" if len(scales) > 1 else ""
    return _shortened(f"{row.label}{scale}")


def _shortened(label: str) -> str:
    for long, short in SHORT.items():
        label = label.replace(long, short)
    return label.removesuffix(".0").replace(".0,", ",").replace(".0 (", " (")


def per_class(rows: Sequence[Row], name: str) -> Figure:
    """AP of each class on test against how common it is there; mean over seeds, bars from least to most."""
    prevalence: dict[str, float] = rows[0].runs[0].outcome["prevalence"]
    names = sorted((n for n in prevalence if prevalence[n] > 0), key=lambda n: -prevalence[n])
    few, absent = len(names) <= 30, [n for n in prevalence if not prevalence[n]]
    if absent:
        name += f"; not on test: {', '.join(absent) if len(absent) <= 3 else f'{len(absent):,} of them'}"
    figure = Figure(figsize=(max(6.4, 0.46 * len(names)) if few else 6.8, 4.6), layout="constrained")
    axes = figure.subplots()
    x = np.arange(len(names), dtype=float) if few else np.array([100 * prevalence[n] for n in names])
    for place, row in enumerate(rows):
        seeds = np.array([[run.outcome["per_class_ap"][n] for n in names] for run in row.runs])
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        mean, label = seeds.mean(0), f"{_label(row, rows)} (n = {len(seeds)})"
        if few:
            at = x + (place - (len(rows) - 1) / 2) * min(0.14, 0.7 / len(rows))
            axes.vlines(at, seeds.min(0), seeds.max(0), color=colour, linewidth=1.2, alpha=0.7)
            axes.plot(at, mean, marker, color=colour, markersize=4.5, label=label)
        else:
            axes.plot(x, mean, marker, color=colour, markersize=2.5, alpha=0.35)
            edges = np.geomspace(x.min(), x.max() * 1.001, 11)
            at, height = binned_statistic(x, [np.log(x), mean], "mean", edges).statistic
            filled = ~np.isnan(at)
            axes.plot(np.exp(at[filled]), height[filled], color=colour, marker=marker, label=label)
    share = [100 * prevalence[n] for n in names]
    if few:
        axes.plot(x, share, "_", color=GREY, markersize=16, label="guessing (share of the images)")
        ticks = [f"{n} ({s:.2g} %)" for n, s in zip(names, share)]
        axes.set_xticks(x, ticks, rotation=50, ha="right", rotation_mode="anchor")
        axes.set_xlim(-0.6, len(names) - 0.4)
    else:
        line = np.geomspace(min(share), max(share), 50)
        axes.plot(line, line, color=GREY, linestyle=":", label="guessing")
        axes.set(xscale="log", xlabel="share of the test images with the class (%)")
        axes.xaxis.set_major_locator(LogLocator(numticks=6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set(ylabel="average precision on test (%)", ylim=(-1, 101), title=name)
    axes.grid(axis="y", alpha=0.3)
    legend_below(figure, 2 if len(rows) < 6 else 3)
    return figure


def per_user(rows: Sequence[Row], name: str) -> Figure | None:
    """Distribution over test users of their own C-AP and O-AP, seeds together; None without their files."""
    groups: dict[str, dict[str, FloatArray]] = {"C-AP": {}, "O-AP": {}}
    users = 0
    for row in rows:
        whole = [tree for run in row.runs if (tree := run.single_users)]
        if not whole:
            continue
        title = "\n".join((*_label(row, rows).split(", "), f"n = {len(whole)}"))
        large = np.array(whole[0]["images"]) >= 2
        users = int(large.sum())
        for column, into in groups.items():
            into[title] = np.concatenate([np.array(tree[column], np.float64)[large] for tree in whole])
    if not groups["C-AP"]:
        return None
    figure = Figure(figsize=(max(5.2, 1.1 * len(groups["C-AP"])), 6.4), layout="constrained")
    titles = {name: f"{shown(name)} of one user (%)" for name in groups}
    titles["C-AP"] += "\nclasses it lacks count 0"
    for axes, (column, of_rows) in zip(figure.subplots(2, sharex=True), groups.items()):
        violins(axes, of_rows, [COLOURS[k % len(COLOURS)] for k in range(len(of_rows))])
        highest = max(float(np.nanmax(values, initial=0.0)) for values in of_rows.values())
        axes.set(ylabel=titles[column], ylim=(0, min(102, 1.1 * highest + 1)))
    figure.suptitle(f"{name}\n{users:,} test users with 2 images or more, n seeds together")
    marks = violin_legend(groups["O-AP"])
    figure.legend(handles=marks, frameon=False, ncols=len(marks), loc="outside lower center")
    return figure


def private(rows: Sequence[Row], name: str) -> Figure | None:
    """Private runs: C-AP on val over the rounds; at the end, C-AP and signal-to-noise ratio by noise cohort.

    Bars reach from the least to the most of the seeds. A private setting without noise is a grey line. None
    where no run is private. Runs with local privacy are not of these: they have no noise cohort; nor are runs
    with ``privacy.release: public``, which hold no signal-to-noise ratio.
    """
    found = [row for row in rows if row.central and all(_has_noise(run) for run in row.runs)]
    if not found:
        return None
    found.sort(key=_noise_cohort)
    cohorts = sorted({_noise_cohort(row) for row in found})
    shades = colormaps["viridis"](np.linspace(0.05, 0.85, len(cohorts)))
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    curves, ends, ratios = figure.subplots(1, 3, width_ratios=(1.3, 1, 1))
    for place, row in enumerate(found):
        cohort, (steps, scores) = _noise_cohort(row), _val_curves(row)
        colour = shades[cohorts.index(cohort)] if len(cohorts) > 1 else COLOURS[place % len(COLOURS)]
        style = {"color": colour, "marker": MARKERS[place % len(MARKERS)], "markersize": 4}
        dash = DASHES[place % len(DASHES)]
        curves.plot(steps, scores.mean(0), **style, linestyle=dash, label=_private_label(row))
        sisters = [other for other in found if _noise_cohort(other) == cohort]
        at = cohort * 1.06 ** (sisters.index(row) - (len(sisters) - 1) / 2)
        last = scores[:, -1]
        signal = np.array([*map(_signal_to_noise, statements_of(row.runs))])
        for axes, values in ((ends, last), (ratios, signal)):
            spread = [[values.mean() - values.min()], [values.max() - values.mean()]]
            axes.errorbar([at], [values.mean()], yerr=spread if len(values) > 1 else None, capsize=3, **style)
    for row in rows:
        if row.variant.setting.startswith("PFL") and not row.central:
            steps, scores = _val_curves(row)
            label = f"{row.variant.setting} without noise, n = {len(scores)}"
            curves.plot(steps, scores.mean(0), color=GREY, label=label)
            ends.axhline(scores[:, -1].mean(), color=GREY)
    curves.set(xlabel="rounds", ylabel="C-AP exact on val (%)", title="over the rounds, mean of seeds")
    ends.set(ylabel="C-AP exact on val (%)", title="after the last round")
    ratios.set(ylabel="norm of the mean update / of its noise", title="signal to noise, median")
    for axes in (ends, ratios):
        axes.set(xlabel="noise cohort (users)", xscale="log", xlim=(cohorts[0] / 1.6, cohorts[-1] * 1.6))
        axes.set_xticks(cohorts, [f"{cohort:,}" for cohort in cohorts])
        axes.minorticks_off()
    ratios.set_ylim(ratios.dataLim.y0 / 1.4, ratios.dataLim.y1 * 1.4)
    plain_log(ratios)
    for axes in (curves, ends, ratios):
        axes.grid(alpha=0.3)
    for axes in (curves, ends):
        axes.set_ylim(0, 1.06 * max(axes.dataLim.y1, 1.0))
    figure.suptitle(name)
    legend_below(figure, 2)
    return figure


def _noise_cohort(row: Row) -> int:
    config = row.runs[0].config
    return int(config.privacy.noise_cohort_size or config.federated.cohort_size)


def _private_label(row: Row) -> str:
    budget = ("privacy.epsilon", "privacy.noise_cohort")
    other = [text for text in row.variant.differences if not text.startswith(budget)]
    epsilon = row.runs[0].config.privacy.epsilon
    counts = f"noise cohort {_noise_cohort(row):,}, epsilon {epsilon:g}, n = {len(row.runs)}"
    return ", ".join((_shortened(", ".join((row.variant.setting, *other))), counts))


def _val_curves(row: Row) -> tuple[list[int], FloatArray]:
    """The steps that were scored, and C-AP on val, a line for each seed."""
    curves = [run.series("val", "C-AP") for run in row.runs]
    for run, (steps, _) in zip(row.runs, curves):
        if not steps:
            raise not_whole(run.directory, "no line of metrics.jsonl has val")
    return curves[0][0], np.array([values for _, values in curves])


def _has_noise(run: RunRecord) -> bool:
    return run.privacy is not None and "signal-to-noise ratio" in run.privacy["by_round"]


def _signal_to_noise(privacy: Tree) -> float:
    ratios = [value for value in privacy["by_round"]["signal-to-noise ratio"] if value is not None]
    return float(np.median(ratios))


def run_figures(paths: Sequence[Path]) -> Iterator[Named]:
    """The figures of runs: one set for each data set and taxonomy, which end their names where they differ.

    Raises:
        ValueError: when there is no finished run at these paths.
    """
    rows = collect(paths).rows
    if not rows:
        raise ValueError(f"no finished run in {', '.join(map(str, paths))}: nothing to draw")
    groups: dict[tuple[str, tuple[str, ...]], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.data, tuple(row.runs[0].outcome["per_class_ap"])), []).append(row)
    several = [len(set(keys)) > 1 for keys in zip(*groups)]
    makers: Mapping[str, Callable[[Sequence[Row], str], Figure | None]] = {
        "per_class": per_class,
        "per_user": per_user,
        "private": private,
    }
    for (_, classes), members in groups.items():
        stem = Path(members[0].runs[0].outcome["dataset"]).stem
        ends = [text for text, differs in zip((stem, str(len(classes))), several) if differs]
        for kind, make in makers.items():
            figure = make(members, f"{stem}, {len(classes)} classes")
            if figure is not None:
                yield "_".join((kind, *ends)), figure


def main(argv: Sequence[str]) -> None:
    """Draw the paper's figures; see the module's text."""
    parser = command_parser("flair.figures", __doc__)
    parser.add_argument("run_dirs", nargs="*", type=Path, metavar="RUN_DIR")
    parser.add_argument("--data_path", type=Path, help="a data file, or the word mini")
    parser.add_argument("--split", default="train", help="split for the figures of labels and emd")
    parser.add_argument("--image_size", type=int, help="pixels at which emd reads images; default: as stored")
    parser.add_argument("--threads", type=int, default=2, help="threads that read images")
    parser.add_argument("--output_dir", type=Path, required=True)
    options = parser.parse_args(argv)
    for name in ("image_size", "threads"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ValueError(f"--{name} is {getattr(options, name)}: give a whole number of at least 1")
    if not options.run_dirs and options.data_path is None:
        raise ValueError("nothing to draw: give run directories, or a file with --data_path, or both")
    found: list[Named] = []
    if options.data_path is not None:
        words, path = Flair.resolve_data([f"--data_path={options.data_path}"])
        Flair.ready_data(parse(words), path)
        found += data_figures(path, options.split, options.image_size, options.threads)
    if options.run_dirs:
        found += run_figures(options.run_dirs)
    for name, figure in found:  # all of them, or none
        save_both(figure, options.output_dir / name)
        print(f"wrote {options.output_dir / name}.png and .svg")


if __name__ == "__main__":
    sys.exit(run_command(main))
