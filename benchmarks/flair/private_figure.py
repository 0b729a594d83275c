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
from statistics import mean, median, stdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.core.config.trees import Tree, read_yaml
from benchmarks.flair.config import Config
from benchmarks.reporting.plots import BLUE, GREY, ORANGE, plain_log, save
from benchmarks.reporting.runs import check_numbers, check_seeds, read_history, read_results, reading
from dataset.cli import run as run_command

COLOURS = (BLUE, ORANGE, "#009E73", "#CC79A7")
PANELS = (
    ("clipping bound", "clipping bound (L2)"),
    ("fraction clipped", "fraction of updates clipped"),
    ("signal-to-noise ratio", "signal-to-noise ratio\nof the mean update"),
)


@dataclass(frozen=True, order=True)
class Budget:
    """By what runs are told apart: central privacy first, by epsilon, then local, by that of one update."""

    local: bool
    epsilon: float  # of the system accounted for, or of one update; infinite without privacy

    @property
    def private(self) -> bool:
        """Whether there is noise at all."""
        return math.isfinite(self.epsilon)

    def told(self, none: str, prefix: str = "") -> str:
        """In words; ``none`` without privacy."""
        local = "local, " if self.local else ""
        return (
            f"{local}{prefix}{self.epsilon:g}{' an update' if self.local else ''}" if self.private else none
        )


@dataclass(frozen=True)
class PrivateRun:
    """What the picture needs of a run directory."""

    directory: Path
    budget: Budget
    config: Tree
    history: list[Tree]
    results: Tree | None  # None: not finished


def read_run(directory: Path) -> PrivateRun:
    """A run directory, finished or not.

    Raises:
        ValueError: when a file is missing or damaged.
    """
    with reading(directory):
        tree, history = read_yaml(directory / "config.yaml"), read_history(directory)
        local = tree.get("local_privacy") is not None
        privacy = tree["local_privacy"] if local else tree.get("privacy")
        if not local and privacy is not None and privacy.get("release") == "public":
            raise ValueError("it was run with privacy.release public, and holds no norms to draw")
        budget = Budget(local, math.inf if privacy is None else float(privacy["epsilon"]))
        results = read_results(directory) if (directory / "results.json").is_file() else None
        for line in history:
            shown = [("privacy", name) for name, _ in PANELS] if "privacy" in line else []
            check_numbers(line, ("round",), *shown, *([("val", "C-AP")] if "val" in line else []))
        if results is not None:
            check_numbers(results, ("seed",), ("val", "C-AP"), ("test", "C-AP"), ("test", "O-AP"))
    return PrivateRun(directory, budget, tree, history, results)


def check(runs: Sequence[PrivateRun]) -> None:
    """Runs of one budget must be different seeds of one experiment: they have one colour and one row.

    Raises:
        ValueError: when their configs differ in more than the seed, or two have the same seed.
    """
    for budget in {run.budget for run in runs}:
        check_seeds({run.directory: run.config for run in runs if run.budget == budget}, Config)


def _spread(values: Sequence[float], digits: int = 1) -> str:
    """Mean and sample standard deviation; the value alone where there is but one."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def table(runs: Sequence[PrivateRun]) -> str:
    """Finished runs by budget: scores of the best model in percent; over a run's rounds, the median
    signal-to-noise ratio, the mean fraction clipped, and the last clipping bound. Means of seeds.
    """
    lines = [
        "| epsilon | seeds | val C-AP exact | test C-AP exact | test O-AP exact | signal to noise | clipped "
        "| last bound |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for budget in sorted({run.budget for run in runs}, key=lambda b: (b.local, -b.epsilon)):
        done = [(run, run.results) for run in runs if run.budget == budget and run.results is not None]
        if not done:
            continue
        scores = [
            _spread([results[split][column] for _, results in done])
            for split, column in (("val", "C-AP"), ("test", "C-AP"), ("test", "O-AP"))
        ]
        told = [[line["privacy"] for line in run.history if "privacy" in line] for run, _ in done]
        private = ["-"] * 3
        if budget.private:
            private = [
                _spread([median(r["signal-to-noise ratio"] for r in rounds) for rounds in told], 2),
                _spread([mean(r["fraction clipped"] for r in rounds) for rounds in told], 2),
                _spread([rounds[-1]["clipping bound"] for rounds in told], 2),
            ]
        seeds = ", ".join(str(results["seed"]) for _, results in done)
        lines.append(f"| {' | '.join([budget.told('none'), seeds, *scores, *private])} |")
    return "\n".join(lines)


def picture(runs: Sequence[PrivateRun]) -> Figure:
    """Four panels over the rounds: clipping bound, fraction clipped, signal-to-noise ratio, C-AP on val."""
    budgets = sorted({run.budget for run in runs})
    private = [budget for budget in budgets if budget.private]
    colours = dict.fromkeys(budgets, GREY)
    colours |= {budget: COLOURS[i % len(COLOURS)] for i, budget in enumerate(reversed(private))}
    figure = Figure(figsize=(7.2, 5.6), layout="constrained")
    grid: list[Axes] = list(figure.subplots(2, 2, sharex=True).flat)
    for run in runs:
        told = [line for line in run.history if "privacy" in line]
        for axes, (name, _) in zip(grid, PANELS):
            values = [line["privacy"][name] for line in told]
            axes.plot([line["round"] for line in told], values, color=colours[run.budget], lw=0.8, alpha=0.8)
        scored = [line for line in run.history if "val" in line]
        grid[3].plot(
            [line["round"] for line in scored],
            [line["val"]["C-AP"] for line in scored],
            color=colours[run.budget],
            lw=1.2,
        )
    for axes, (_, label) in zip(grid, PANELS):
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
    handles = [Line2D([], [], color=colours[b], label=b.told("no privacy", "epsilon ")) for b in budgets]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(budgets), frameon=False)
    return figure


def main(argv: Sequence[str]) -> None:
    """Draw the runs named on the command line, and print the table of the finished ones."""
    if len(argv) < 2:
        raise ValueError("say where to draw and from what: private_figure OUT.png RUN_DIR...")
    runs = [read_run(Path(word)) for word in argv[1:]]
    check(runs)
    save(picture(runs), Path(argv[0]))
    print(table(runs))


if __name__ == "__main__":
    sys.exit(run_command(main))
