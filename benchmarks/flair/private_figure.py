"""Clipping, noise and learning of private runs in one picture, and what they reached as a Markdown table.

python -m benchmarks.flair.private_figure OUT.png RUN_DIR...

Runs with the same budget have one colour; runs without privacy are grey and only in the last panel. Local
privacy, in which each device noises its update, is a budget apart, named as such.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.flair.config import FLAIR
from benchmarks.reporting.plots import COLOURS, GREY, PRIVATE_PANELS, plain_log, save
from benchmarks.reporting.runs import RunRecord, check_seeds, not_whole, read_run
from benchmarks.reporting.tables import markdown_table, spread
from dataset.cli import run as run_command

BOUND, CLIPPED, RATIO = (name for name, _ in PRIVATE_PANELS)


@dataclass(frozen=True, order=True)
class Budget:
    """What distinguishes runs: central privacy first, by epsilon, then local, by that of one update."""

    local: bool
    epsilon: float  # of the system accounted for, or of one update; infinite without privacy

    @property
    def private(self) -> bool:
        """Whether there is noise at all."""
        return math.isfinite(self.epsilon)

    def text(self, none: str, prefix: str = "") -> str:
        """In words; ``none`` without privacy."""
        local = "local, " if self.local else ""
        return (
            f"{local}{prefix}{self.epsilon:g}{' an update' if self.local else ''}" if self.private else none
        )


def budget_of(run: RunRecord) -> Budget:
    """The budget that a run's config asks for."""
    local = run.config.local_privacy
    privacy = local or run.config.privacy
    return Budget(local is not None, math.inf if privacy is None else float(privacy.epsilon))


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


def of_budget(runs: Sequence[RunRecord], budget: Budget) -> list[RunRecord]:
    """Those with one budget."""
    return [run for run in runs if budget_of(run) == budget]


def table(runs: Sequence[RunRecord]) -> str:
    """Finished runs by budget: scores of the best model in percent; over a run's rounds, the median
    signal-to-noise ratio, the mean fraction clipped, and the last clipping bound. Means of seeds.
    """
    heads = ("epsilon", "seeds", "val C-AP exact", "test C-AP exact", "test O-AP exact", "signal to noise",
             "clipped", "last bound")  # fmt: skip
    rows = []
    for budget in sorted(set(map(budget_of, runs)), key=lambda b: (b.local, -b.epsilon)):
        done = [run for run in of_budget(runs, budget) if run.finished]
        if not done:
            continue
        scores = [
            spread([run.outcome[split][column] for run in done])
            for split, column in (("val", "C-AP"), ("test", "C-AP"), ("test", "O-AP"))
        ]
        private = ["-"] * 3
        if budget.private:
            panels = {name: [run.series("privacy", name)[1] for run in done] for name, _ in PRIVATE_PANELS}
            private = [
                spread([float(np.median(values)) for values in panels[RATIO]], 2),
                spread([float(np.mean(values)) for values in panels[CLIPPED]], 2),
                spread([float(values[-1]) for values in panels[BOUND]], 2),
            ]
        seeds = ", ".join(str(run.seed) for run in done)
        rows.append([budget.text("none"), seeds, *scores, *private])
    return markdown_table(heads, rows)


def picture(runs: Sequence[RunRecord]) -> Figure:
    """Four panels over the rounds: clipping bound, fraction clipped, signal-to-noise ratio, C-AP on val."""
    budgets = sorted(set(map(budget_of, runs)))
    private = [budget for budget in budgets if budget.private]
    colours = dict.fromkeys(budgets, GREY)
    colours |= {budget: COLOURS[i % len(COLOURS)] for i, budget in enumerate(reversed(private))}
    figure = Figure(figsize=(7.2, 5.6), layout="constrained")
    grid: list[Axes] = list(figure.subplots(2, 2, sharex=True).flat)
    for run in runs:
        colour = colours[budget_of(run)]
        for axes, (name, _) in zip(grid, PRIVATE_PANELS):
            axes.plot(*run.series("privacy", name), color=colour, lw=0.8, alpha=0.8)
        grid[3].plot(*run.series("val", "C-AP"), color=colour, lw=1.2)
    for axes, (_, label) in zip(grid, PRIVATE_PANELS):
        axes.set_ylabel(label)
    plain_log(grid[0])
    grid[1].set_ylim(0, 1.02)
    plain_log(grid[2])
    grid[3].set(ylabel="C-AP exact on val (%)")
    grid[3].set_ylim(bottom=0)
    for axes in grid:
        axes.grid(alpha=0.3)
    for axes in grid[2:]:
        axes.set_xlabel("round of training")
    handles = [Line2D([], [], color=colours[b], label=b.text("no privacy", "epsilon ")) for b in budgets]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(budgets), frameon=False)
    return figure


def main(argv: Sequence[str]) -> None:
    """Draw the runs named on the command line, and print the table of the finished ones."""
    if len(argv) < 2:
        raise ValueError("say where to draw and from what: private_figure OUT.png RUN_DIR...")
    runs = [read_private(Path(word)) for word in argv[1:]]
    for budget in set(map(budget_of, runs)):  # they have one colour and one row
        check_seeds(of_budget(runs, budget))
    save(picture(runs), Path(argv[0]))
    print(table(runs))


if __name__ == "__main__":
    sys.exit(run_command(main))
