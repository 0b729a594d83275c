"""The README's picture: groups of finished runs side by side, over training and at the end.

python -m benchmarks.flair.overview OUT.png "federated=runs/a,runs/b" "centralised=runs/c" [...]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from benchmarks.core.commands import command_parser
from benchmarks.flair.config import FLAIR
from benchmarks.reporting.plots import COLOURS, GREY, save
from benchmarks.reporting.runs import RunRecord, check_seeds, finished_run
from dataset.cli import run as run_command


def curve(run: RunRecord) -> list[tuple[float, float]]:
    """``(share of the training done, val C-AP)``.

    Raises:
        ValueError: when no line of the run has val.
    """
    steps, values = run.series("val", "C-AP")
    return [(step / run.config.num_steps, float(value)) for step, value in zip(steps, values)]


def overview(groups: Mapping[str, Sequence[Path]], path: Path) -> None:
    """Left: val C-AP over training, mean and range of the runs. Right: test C-AP of each, and the mean.

    Raises:
        ValueError: when the runs of a group are not different seeds of one experiment.
    """
    figure = Figure(figsize=(8.6, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 0.7 * max(len(groups), 3)))
    place = np.linspace(0, 1, 51)
    for number, (name, directories) in enumerate(groups.items()):
        runs = [finished_run(directory, FLAIR, {"test": ["C-AP"]}) for directory in directories]
        check_seeds(runs)
        colour = COLOURS[number % len(COLOURS)]
        curves = np.array([np.interp(place, *np.array(curve(run)).T) for run in runs])
        left.plot(100 * place, curves.mean(0), color=colour, label=f"{name} (n = {len(runs)})")
        left.fill_between(100 * place, curves.min(0), curves.max(0), color=colour, alpha=0.2, linewidth=0)
        tests = [run.outcome["test"]["C-AP"] for run in runs]
        right.plot([number] * len(tests), tests, "o", color=colour, alpha=0.6)
        right.plot([number - 0.25, number + 0.25], [np.mean(tests)] * 2, color=colour, linewidth=3)
        right.text(number, max(tests) + 2, f"{np.mean(tests):.1f}", ha="center", fontsize=9)
        guess = 100 * float(np.mean(list(runs[0].outcome["prevalence"].values())))
    right.axhline(guess, color=GREY, linestyle=":", label="guessing")
    left.set(
        xlabel="share of the training done (%)", ylabel="C-AP exact on val (%)", xlim=(0, 100), ylim=(0, None)
    )
    right.set(ylabel="C-AP exact on test (%)", xlim=(-0.5, len(groups) - 0.5))
    right.set_ylim(0, 1.15 * right.dataLim.y1)
    right.set_xticks(range(len(groups)), [name.replace(", ", ",\n") for name in groups])
    for axes in (left, right):
        axes.legend(frameon=False, loc="lower right", fontsize=9)
        axes.grid(alpha=0.3)
    save(figure, path)


def main(argv: Sequence[str]) -> None:
    """Parse and draw."""
    parser = command_parser("flair.overview", __doc__)
    parser.add_argument("picture", type=Path, metavar="OUT.png")
    parser.add_argument("groups", nargs="+", metavar="NAME=RUN_DIR,RUN_DIR")
    options = parser.parse_args(argv)
    if not all("=" in word for word in options.groups):
        parser.error("write a group of runs as NAME=RUN_DIR,RUN_DIR")
    named = dict(word.split("=", 1) for word in options.groups)
    overview({name: [Path(d) for d in text.split(",")] for name, text in named.items()}, options.picture)


if __name__ == "__main__":
    sys.exit(run_command(main))
