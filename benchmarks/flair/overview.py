"""The README's picture: groups of finished runs side by side, over training and at the end.

python -m benchmarks.flair.overview OUT.png "federated=runs/a,runs/b" "centralised=runs/c" [...]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.core.config.trees import read_yaml
from benchmarks.flair.config import Config
from benchmarks.reporting.plots import BLUE, GREY, ORANGE, save
from benchmarks.reporting.runs import check_numbers, check_seeds, read_history, read_results, reading
from dataset.cli import run as run_command

COLOURS = (BLUE, ORANGE, "#009E73", "#CC79A7")
"""Okabe and Ito's."""
Curve = list[tuple[float, float]]


def read_run(directory: Path) -> tuple[dict[str, Any], Curve]:
    """Results, and ``(share of the training done, val C-AP)`` of a run.

    Raises:
        ValueError: when the directory holds no finished run.
    """
    with reading(directory):
        results = read_results(directory)
        classes = [("prevalence", name) for name in results["prevalence"]]
        check_numbers(results, ("rounds",), ("test", "C-AP"), *classes)
        steps, unit = results["rounds"], results.get("unit", "round")
        scored = [line for line in read_history(directory) if "val" in line]
        if not scored:
            raise ValueError("no line of metrics.jsonl has val")
        return results, [(float(line[unit]) / steps, float(line["val"]["C-AP"])) for line in scored]


def overview(groups: Mapping[str, Sequence[Path]], path: Path) -> None:
    """Left: val C-AP over training, mean and range of the runs. Right: test C-AP of each, and the mean.

    Raises:
        ValueError: when the runs of a group are not different seeds of one experiment.
    """
    figure = Figure(figsize=(8.6, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    place = np.linspace(0, 1, 51)
    for number, (name, directories) in enumerate(groups.items()):
        read = [read_run(directory) for directory in directories]
        check_seeds({directory: read_yaml(directory / "config.yaml") for directory in directories}, Config)
        colour = COLOURS[number % len(COLOURS)]
        curves = np.array([np.interp(place, *np.array(curve).T) for _, curve in read])
        left.plot(100 * place, curves.mean(0), color=colour, label=f"{name} (n = {len(read)})")
        left.fill_between(100 * place, curves.min(0), curves.max(0), color=colour, alpha=0.2, linewidth=0)
        tests = [results["test"]["C-AP"] for results, _ in read]
        right.plot([number] * len(tests), tests, "o", color=colour, alpha=0.6)
        right.plot([number - 0.25, number + 0.25], [np.mean(tests)] * 2, color=colour, linewidth=3)
        right.text(number + 0.3, float(np.mean(tests)), f"{np.mean(tests):.1f}", va="center", fontsize=9)
        guess = 100 * float(np.mean(list(read[0][0]["prevalence"].values())))
    right.axhline(guess, color=GREY, linestyle=":", label="guessing")
    left.set(
        xlabel="share of the training done (%)", ylabel="C-AP exact on val (%)", xlim=(0, 100), ylim=(0, None)
    )
    right.set(ylabel="C-AP exact on test (%)", ylim=(0, None), xlim=(-0.6, len(groups) - 0.1))
    right.set_xticks(range(len(groups)), [name.replace(", ", ",\n") for name in groups])
    for axes in (left, right):
        axes.legend(frameon=False, loc="lower right", fontsize=9)
        axes.grid(alpha=0.3)
    save(figure, path)


def main(argv: Sequence[str]) -> None:
    """Parse and draw."""
    if len(argv) < 2 or not all("=" in word for word in argv[1:]):
        raise ValueError('write: python -m benchmarks.flair.overview OUT.png "NAME=RUN_DIR,RUN_DIR" ...')
    named = dict(word.split("=", 1) for word in argv[1:])
    overview({name: [Path(d) for d in text.split(",")] for name, text in named.items()}, Path(argv[0]))


if __name__ == "__main__":
    sys.exit(run_command(main))
