"""Clipping, noise and learning of private runs in one picture.

python -m benchmarks.flair.private_figure OUT.png RUN_DIR...

Runs with the same budget have one colour; runs without privacy are grey and only in the last panel.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.flair.config import Tree
from benchmarks.flair.plots import BLUE, GREY, ORANGE, _save, plain_log
from dataset.command_line import run as run_command

COLOURS = (BLUE, ORANGE, "#009E73", "#CC79A7")
PANELS = (
    ("clipping bound", "clipping bound (L2)"),
    ("fraction clipped", "fraction of updates clipped"),
    ("signal-to-noise ratio", "signal-to-noise ratio\nof the mean update"),
)


@dataclass(frozen=True)
class PrivateRun:
    """What the picture needs of a run directory."""

    epsilon: float  # of the system accounted for; infinite without privacy
    history: list[Tree]


def read_run(directory: Path) -> PrivateRun:
    """A run directory, finished or not.

    :raises ValueError: when it is none.
    """
    lines, config = directory / "metrics.jsonl", directory / "config.yaml"
    if not lines.is_file() or not config.is_file():
        raise ValueError(f"{directory} is not a run directory: it lacks metrics.jsonl or config.yaml")
    privacy = yaml.safe_load(config.read_text()).get("privacy")
    history = [json.loads(line) for line in lines.read_text().splitlines()]
    return PrivateRun(math.inf if privacy is None else float(privacy["epsilon"]), history)


def picture(runs: Sequence[PrivateRun]) -> Figure:
    """Four panels over the rounds: clipping bound, fraction clipped, signal-to-noise ratio, C-AP on val."""
    budgets = sorted({run.epsilon for run in runs})
    private = [budget for budget in budgets if math.isfinite(budget)]
    colours = {budget: COLOURS[i % len(COLOURS)] for i, budget in enumerate(reversed(private))}
    colours[math.inf] = GREY
    figure = Figure(figsize=(7.2, 5.6), layout="constrained")
    grid: list[Axes] = list(figure.subplots(2, 2, sharex=True).flat)
    for run in runs:
        told = [line for line in run.history if "privacy" in line]
        for axes, (name, _) in zip(grid, PANELS):
            values = [line["privacy"][name] for line in told]
            axes.plot([line["round"] for line in told], values, color=colours[run.epsilon], lw=0.8, alpha=0.8)
        scored = [line for line in run.history if "val" in line]
        grid[3].plot(
            [line["round"] for line in scored],
            [line["val"]["C-AP"] for line in scored],
            color=colours[run.epsilon],
            lw=1.2,
        )
    for axes, (_, label) in zip(grid, PANELS):
        axes.set_ylabel(label)
    plain_log(grid[0])
    grid[1].set_ylim(0, 1.02)
    plain_log(grid[2])
    grid[3].set(ylabel="C-AP on val (%)")
    grid[3].set_ylim(bottom=0)
    for axes in grid:
        axes.grid(alpha=0.3)
    for axes in grid[2:]:
        axes.set_xlabel("round of training")
    names = {b: f"epsilon {b:g}" if b in private else "no privacy" for b in budgets}
    handles = [Line2D([], [], color=colours[budget], label=names[budget]) for budget in budgets]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(budgets), frameon=False)
    return figure


def main(argv: Sequence[str]) -> None:
    """Draw the runs named on the command line."""
    if len(argv) < 2:
        raise ValueError("say where to draw and from what: private_figure OUT.png RUN_DIR...")
    _save(picture([read_run(Path(word)) for word in argv[1:]]), Path(argv[0]))


if __name__ == "__main__":
    sys.exit(run_command(main))
