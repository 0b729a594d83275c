"""Clipping, noise and learning of private runs in one picture, and what they reached as a Markdown table.

python -m benchmarks.flair.private_figure [--against_epsilon] OUT.png RUN_DIR...

With --against_epsilon the picture is what finished runs reached over their budgets. Otherwise runs with
the same budget have one colour; runs without privacy are grey and only in the last panel. Local privacy, in
which each device noises its update, is a budget apart, named as such.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.core.commands import command_parser
from benchmarks.flair.config import FLAIR
from benchmarks.reporting.plots import COLOURS, GREY, PRIVATE_PANELS, private_panel, save
from benchmarks.reporting.runs import RunRecord, check_seeds, not_whole, read_run
from benchmarks.reporting.tables import markdown_table, spread
from dataset.cli import run as run_command

HEADS = ("epsilon", "seeds", "val C-AP exact", "test C-AP exact", "test O-AP exact", "signal to noise",
         "clipped", "last bound")  # fmt: skip
SCORES = (("val", "C-AP"), ("test", "C-AP"), ("test", "O-AP"))
OVER_ROUNDS: Mapping[str, Callable[[Any], Any]] = {
    "signal-to-noise ratio": np.median,
    "fraction clipped": np.mean,
    "clipping bound": lambda values: values[-1],
}
"""How the table sums up what a private run wrote of each round."""


Budget: TypeAlias = tuple[bool, float]
"""Whether privacy is local, and epsilon: of the system accounted for, or of one update; infinite for none."""


def budget_text(budget: Budget, none: str, prefix: str = "") -> str:
    """A budget in words; ``none`` without privacy."""
    local, epsilon = budget
    if math.isinf(epsilon):
        return none
    return f"local, {prefix}{epsilon:g} an update" if local else f"{prefix}{epsilon:g}"


def by_budget(runs: Sequence[RunRecord]) -> dict[Budget, list[RunRecord]]:
    """The runs of each budget that their configs ask for, in the order of the budgets."""
    groups: dict[Budget, list[RunRecord]] = defaultdict(list)
    for run in runs:
        local = run.config.local_privacy
        privacy = local or run.config.privacy
        epsilon = math.inf if privacy is None else float(privacy.epsilon)
        groups[local is not None, epsilon].append(run)
    return dict(sorted(groups.items()))


def read_private(directory: Path) -> RunRecord:
    """A run directory, finished or not.

    Raises:
        ValueError: when a file is missing or damaged, or a public release left no norms to draw.
    """
    run = read_run(directory, FLAIR, {"val": ["C-AP"], "test": ["C-AP", "O-AP"]})
    if run.fault is not None:
        raise not_whole(directory, run.fault)
    privacy = run.config.privacy
    if privacy is not None and privacy.release == "public":
        raise not_whole(directory, "it was run with privacy.release public, and has no norms to draw")
    for name, _ in PRIVATE_PANELS:
        run.series("privacy", name)
    run.series("val", "C-AP")
    return run


def table(runs: Sequence[RunRecord]) -> str:
    """Finished runs by budget: scores of the best model in percent; over a run's rounds, the median
    signal-to-noise ratio, the mean fraction clipped, and the last clipping bound. Means of seeds.
    """
    rows, groups = [], by_budget(runs)
    for local, epsilon in sorted(groups, key=lambda budget: (budget[0], -budget[1])):
        done = [run for run in groups[local, epsilon] if run.finished]
        if not done:
            continue
        seeds = ", ".join(str(run.seed) for run in done)
        scores = [spread([run.outcome[split][column] for run in done]) for split, column in SCORES]
        noise = ["-"] * len(OVER_ROUNDS)
        if math.isfinite(epsilon):
            noise = [
                spread([float(summed_up(run.series("privacy", name)[1])) for run in done], 2)
                for name, summed_up in OVER_ROUNDS.items()
            ]
        rows.append([budget_text((local, epsilon), "none"), seeds, *scores, *noise])
    return markdown_table(HEADS, rows)


def picture(runs: Sequence[RunRecord]) -> Figure:
    """Four panels over the rounds: clipping bound, fraction clipped, signal-to-noise ratio, C-AP on val."""
    groups = by_budget(runs)
    colours = dict.fromkeys(groups, GREY)
    private = [budget for budget in groups if math.isfinite(budget[1])]
    colours |= {budget: COLOURS[i % len(COLOURS)] for i, budget in enumerate(reversed(private))}
    figure = Figure(figsize=(7.2, 5.6), layout="constrained")
    grid: list[Axes] = list(figure.subplots(2, 2, sharex=True).flat)
    for run, colour in [(run, colours[budget]) for budget in groups for run in groups[budget]]:
        for axes, (name, _) in zip(grid, PRIVATE_PANELS):
            axes.plot(*run.series("privacy", name), color=colour, lw=0.8, alpha=0.8)
        grid[3].plot(*run.series("val", "C-AP"), color=colour, lw=1.2)
    for axes, (name, label) in zip(grid, PRIVATE_PANELS):
        private_panel(axes, name, label)
    grid[3].set(ylabel="C-AP exact on val (%)")
    grid[3].set_ylim(bottom=0)
    grid[3].grid(alpha=0.3)
    for axes in grid[2:]:
        axes.set_xlabel("round of training")
    labels = {budget: budget_text(budget, "no privacy", "epsilon ") for budget in groups}
    handles = [Line2D([], [], color=colours[budget], label=label) for budget, label in labels.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(groups), frameon=False)
    return figure


def against_epsilon(runs: Sequence[RunRecord]) -> Figure:
    """C-AP of finished runs on val and test over epsilon: each seed, and the mean.

    A line for central and one for local privacy; a dashed one is the mean of runs without privacy.

    Raises:
        ValueError: when no finished run is private.
    """
    groups = by_budget([run for run in runs if run.finished])
    if not any(math.isfinite(epsilon) for _, epsilon in groups):
        raise ValueError("none of these runs is private and finished: there is nothing to draw over epsilon")
    figure = Figure(figsize=(4.8, 3.6), layout="constrained")
    axes = figure.subplots()
    for split, colour in zip(("test", "val"), COLOURS):
        for local in (False, True):
            found = {
                epsilon: [float(run.outcome[split]["C-AP"]) for run in groups[kind, epsilon]]
                for kind, epsilon in sorted(groups)
                if kind == local and math.isfinite(epsilon)
            }
            for epsilon, scores in found.items():
                axes.plot([epsilon] * len(scores), scores, "o", color=colour, alpha=0.4, ms=4)
            if found:
                label, style = (f"{split}, local", ":") if local else (split, "-")
                means = [np.mean(scores) for scores in found.values()]
                axes.plot(list(found), means, style, color=colour, label=label)
        if public := groups.get((False, math.inf)):
            mean = float(np.mean([run.outcome[split]["C-AP"] for run in public]))
            axes.axhline(mean, color=colour, linestyle="--", lw=1, label=f"{split}, no privacy")
    axes.set_xscale("log")
    budgets = sorted({epsilon for _, epsilon in groups if math.isfinite(epsilon)})
    axes.set_xticks(budgets, [f"{epsilon:g}" for epsilon in budgets])
    axes.minorticks_off()
    axes.set(xlabel="epsilon", ylabel="C-AP exact (%)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    return figure


def main(argv: Sequence[str]) -> None:
    """Draw the runs named on the command line, and print the table of the finished ones."""
    parser = command_parser("flair.private_figure", __doc__)
    parser.add_argument("picture", type=Path, metavar="OUT.png")
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--against_epsilon", action="store_true", help="what runs reached over their budgets")
    options = parser.parse_args(argv)
    runs = [read_private(directory) for directory in options.run_dirs]
    for members in by_budget(runs).values():  # they have one colour and one row
        check_seeds(members)
    save((against_epsilon if options.against_epsilon else picture)(runs), options.picture)
    print(table(runs))


if __name__ == "__main__":
    sys.exit(run_command(main))
