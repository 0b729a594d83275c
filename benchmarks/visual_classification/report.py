"""Runs of federated visual classification beside the paper's tables.

    python -m benchmarks.visual_classification.report RUN_DIR... [--output_dir D] [--rounds 1000,2500,5000]
                                                      [--batches 10000,25000,50000]

Folders are searched for runs. Written into D (default: report): report.md, report.csv and the learning
curves as PNG and SVG. Accuracy is in percent, mean and standard deviation over seeds; relative accuracy is to
the centralised run on the same data, where one is among the runs.
"""

from __future__ import annotations

import csv
import io
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.runs import find_runs
from benchmarks.settings import Tree, arguments, dotted
from benchmarks.visual_classification import figures, paper
from benchmarks.visual_classification.curves import FinishedRun, read_run
from dataset.command_line import run as run_command
from pfl_ext.checkpoint import write_bytes


@dataclass(frozen=True)
class Row:
    """The seeds of one experiment."""

    name: str
    label: str
    """The name, and what tells it from other rows of the same setting and partition."""
    partition: str
    runs: tuple[FinishedRun, ...]
    centralised: float | None

    def mean_std(self, values: Sequence[float | None]) -> str:
        """``mean ± std`` over the seeds that have a value; a dash if not all have."""
        known = [v for v in values if v is not None]
        if not known or len(known) < len(values):
            return "-"
        spread = f" ± {np.std(known, ddof=1):.1f}" if len(known) > 1 else ""
        return f"{np.mean(known):.1f}{spread}"

    def cells(self, rounds: Sequence[int], batches: Sequence[int]) -> list[str]:
        """The row of the table."""
        curves = [run.curve for run in self.runs]
        best = [curve.best for curve in curves]
        last = [float(run.results["last"]["test"]["accuracy"]) for run in self.runs]
        relative = [100 * b / self.centralised if self.centralised else None for b in best]
        reached = []
        for share in paper.RELATIVE:
            goal = None if self.centralised is None else self.centralised * share / 100
            found = [None if goal is None else curve.rounds_to(goal) for curve in curves]
            known = [f for f in found if f is not None]
            reached.append(f"{np.mean(known):.0f}" if known and len(known) == len(found) else "-")
        seeds = ", ".join(str(run.results["seed"]) for run in self.runs)
        return [
            self.label,
            self.partition,
            seeds,
            str(self.runs[0].results["rounds"]),
            *(self.mean_std([c.at_round(n) for c in curves]) for n in rounds),
            *(self.mean_std([c.at_batch(n) for c in curves]) for n in batches),
            self.mean_std(last),
            self.mean_std(best),
            self.mean_std(relative),
            *reached,
        ]


def header(rounds: Sequence[int], batches: Sequence[int]) -> list[str]:
    """The names of `Row.cells`."""
    return [
        "setting",
        "partition",
        "seeds",
        "rounds",
        *(f"acc@{n:,} rounds" for n in rounds),
        *(f"acc@{n:,} batches" for n in batches),
        "test, last",
        "best",
        "relative, best",
        *(f"rounds to {share} %" for share in paper.RELATIVE),
    ]


def make_rows(runs: Sequence[FinishedRun]) -> list[Row]:
    """Runs by what they share but the seed; of runs with the same seed too, the first."""
    groups: dict[str, dict[int, FinishedRun]] = defaultdict(dict)
    for run in runs:
        groups[run.variant].setdefault(int(run.results["seed"]), run)
    central: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        if run.config["mode"] == "centralised":
            central[str(run.results["data_sha256"])].append(float(run.results["last"]["test"]["accuracy"]))
    firsts = [next(iter(group.values())) for group in groups.values()]
    rows = []
    for group, first in zip(groups.values(), firsts):
        seeds = tuple(group[seed] for seed in sorted(group))
        rivals = [other.config for other in firsts if other.place == first.place]
        own = central.get(str(first.results["data_sha256"]))
        name, partition = first.place
        label = ", ".join([name, *differences(first.config, rivals)])
        rows.append(Row(name, label, partition, seeds, float(np.mean(own)) if own else None))
    return sorted(rows, key=lambda row: (row.name, row.partition, row.label))


def differences(config: Tree, rivals: Sequence[Tree]) -> list[str]:
    """``key value`` of each field in which configs of the same setting and partition differ; but the seed."""
    leaves, others = dotted(config), [dotted(rival) for rival in rivals]
    return [
        f"{key} {value}"
        for key, value in leaves.items()
        if key != "seed" and any(other.get(key) != value for other in others)
    ]


def paper_cells(name: str, rounds: Sequence[int], batches: Sequence[int]) -> list[str] | None:
    """The paper's numbers in the same columns, if it has the row."""
    found = paper.rows().get(name)
    if not found or not found["table"]:
        return None

    def cell(kind: str, key: int) -> str:
        value = found.get(kind, {}).get(str(key))
        return "-" if value is None else str(value)

    return [
        f"{name}, the paper's",
        "",
        "",
        "",
        *(cell("accuracy_at_round", n) for n in rounds),
        *(cell("accuracy_at_batch", n) for n in batches),
        str(found.get("accuracy", "-")),
        "-",
        "-",
        *(cell("rounds_at_relative", share) for share in paper.RELATIVE),
    ]


def markdown(
    rows: Sequence[Row], left_out: Sequence[str], rounds: Sequence[int], batches: Sequence[int]
) -> str:
    """The table, and what was left out and why."""
    names = header(rounds, batches)
    lines = ["# Federated visual classification", "", _line(names), "|---" * len(names) + "|"]
    for row in rows:
        lines.append(_line(row.cells(rounds, batches)))
        theirs = paper_cells(row.name, rounds, batches)
        lines += [_line(theirs)] if theirs else []
    told = {str(run.results["hardware"]) for row in rows for run in row.runs}
    commits = sorted({str(run.results["commit"])[:7] for row in rows for run in row.runs})
    lines += ["", f"Hardware: {'; '.join(sorted(told))}. Commits: {', '.join(commits)}."]
    lines += [
        "",
        "Accuracy in percent over the rounds is that of the split `data.scored`; `best` is chosen on it.",
    ]
    if left_out:
        lines += ["", "Left out:", "", *(f"* {line}" for line in left_out)]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table_csv(rows: Sequence[Row], rounds: Sequence[int], batches: Sequence[int]) -> str:
    """The same table as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header(rounds, batches))
    writer.writerows(row.cells(rounds, batches) for row in rows)
    return text.getvalue()


def _numbers(text: str, key: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise ValueError(f"--{key} is {text!r}: give whole numbers with commas between them") from None


def main(argv: Sequence[str]) -> None:
    """Read, write, show."""
    if not argv or {"--help", "-h"} & set(argv):
        print(__doc__)
        return
    cut = next((i for i, word in enumerate(argv) if word.startswith("--")), len(argv))
    given = arguments(argv[cut:])
    unknown = given.keys() - {"output_dir", "rounds", "batches"}
    if unknown:
        raise ValueError(f"--{min(unknown)}: the options are --output_dir, --rounds and --batches")
    rounds = _numbers(given.get("rounds", ",".join(map(str, paper.ROUNDS))), "rounds")
    batches = _numbers(given.get("batches", ",".join(map(str, paper.BATCHES))), "batches")
    runs, left_out = [], []
    for directory in find_runs(map(Path, argv[:cut])):
        try:
            runs.append(read_run(directory))
        except ValueError as fault:
            left_out.append(str(fault))
    if not runs:
        raise ValueError(
            f"no finished run in {', '.join(argv[:cut])}: {'; '.join(left_out) or 'no run at all'}"
        )
    rows = make_rows(runs)
    out = Path(given.get("output_dir", "report"))
    text = markdown(rows, left_out, rounds, batches)
    write_bytes(out / "report.md", text.encode())
    write_bytes(out / "report.csv", table_csv(rows, rounds, batches).encode())
    drawn = figures.draw_all(rows, out)
    print(text)
    print(f"written: {', '.join(str(p) for p in [out / 'report.md', out / 'report.csv', *drawn])}")


if __name__ == "__main__":
    sys.exit(run_command(main))
