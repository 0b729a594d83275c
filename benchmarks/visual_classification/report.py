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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.core.config.command_line import arguments
from benchmarks.core.config.digests import experiment
from benchmarks.core.config.trees import Tree
from benchmarks.reporting.runs import find_runs
from benchmarks.visual_classification import figures, paper
from benchmarks.visual_classification.config import Config
from benchmarks.visual_classification.curves import FinishedRun, read_run
from dataset.cli import run as run_command
from dataset.files import write_bytes
from dataset.partitions.dirichlet import meaning


@dataclass(frozen=True)
class Row:
    """The seeds of one experiment."""

    name: str
    label: str
    """The name, and what tells it from other rows of the same setting and partition."""
    partition: str
    runs: tuple[FinishedRun, ...]
    centralised: float | None
    reasons: tuple[str, ...] = ()
    """Why it is not comparable with the paper; empty where it is."""

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


def split_duplicates(runs: Sequence[FinishedRun]) -> tuple[list[FinishedRun], list[str]]:
    """The first run of each experiment and seed; and a line on each other one."""
    first: dict[tuple[object, int], FinishedRun] = {}
    told = []
    for run in runs:
        kept = first.setdefault((run.experiment, run.seed), run)
        if kept is not run:
            theirs, ours = (float(r.results["last"]["test"]["accuracy"]) for r in (run, kept))
            told.append(
                f"{run.directory} repeats {kept.directory}: the same config, seed and data; test accuracy "
                + (f"{ours:.2f}, too" if theirs == ours else f"{theirs:.2f}, where {ours:.2f} IS COUNTED")
            )
    return list(first.values()), told


def centralised_accuracy(runs: Sequence[FinishedRun]) -> tuple[dict[str, float], list[str]]:
    """Test accuracy in percent of centralised training, by the content of the data, mean over seeds.

    Where the runs hold several centralised experiments on the same data, none of them is the reference, and
    a line says so.
    """
    found: dict[str, dict[object, list[FinishedRun]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.config["mode"] == "centralised":
            found[run.experiment[1]][run.experiment].append(run)
    out, told = {}, []
    for data, experiments in found.items():
        (seeds, *others) = experiments.values()
        if others:
            names = ", ".join(str(group[0].directory) for group in experiments.values())
            told.append(
                f"no accuracy is relative to centralised training, as there are several experiments of it "
                f"({names}): give the runs of only one"
            )
        else:
            out[data] = float(np.mean([run.results["last"]["test"]["accuracy"] for run in seeds]))
    return out, told


def make_rows(runs: Sequence[FinishedRun], centralised: Mapping[str, float]) -> list[Row]:
    """The seeds of each experiment as a row, by setting, partition and label.

    Args:
        runs: no two of them of one experiment and seed.
        centralised: as `centralised_accuracy` gives it.
    """
    groups: dict[object, list[FinishedRun]] = defaultdict(list)
    for run in runs:
        groups[run.experiment].append(run)
    firsts = [group[0] for group in groups.values()]
    rows = []
    for first, group in zip(firsts, groups.values()):
        rivals = [other.config for other in firsts if other.place == first.place]
        name, partition = first.place
        label = ", ".join([name, *differences(first.config, rivals)])
        seeds = tuple(sorted(group, key=lambda run: run.seed))
        reference = centralised.get(first.experiment[1])
        reasons = paper.reasons_against(first.config, first.results)
        rows.append(Row(name, label, partition, seeds, reference, reasons))
    return sorted(rows, key=lambda row: (row.name, row.partition, row.label))


def differences(config: Tree, rivals: Sequence[Tree]) -> list[str]:
    """``key value`` of each field in which experiments of the same setting and partition differ."""
    leaves, others = experiment(config, Config), [experiment(rival, Config) for rival in rivals]
    return [
        f"{key} {value}" for key, value in leaves.items() if any(other.get(key) != value for other in others)
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
        lines += [_line(theirs)] if theirs and not row.reasons else []
    clauses = {
        row.partition: meaning(row.partition, len(row.runs[0].results.get("per_class_accuracy", ())))
        for row in rows
    }
    if any(clauses.values()):
        lines += ["", "Dirichlet's alpha:", ""]
        lines += [f"* {partition}: {clause}" for partition, clause in clauses.items() if clause]
    apart = [f"* {row.label}, {row.partition}: {'; '.join(row.reasons)}" for row in rows if row.reasons]
    if apart:
        lines += ["", "Not comparable with the paper:", "", *apart]
    told = {str(run.results["hardware"]) for row in rows for run in row.runs}
    commits = sorted({str(run.results["commit"])[:7] for row in rows for run in row.runs})
    lines += ["", f"Hardware: {'; '.join(sorted(told))}. Commits: {', '.join(commits)}."]
    lines += [
        "",
        "Accuracy in percent over the rounds is that of the split `data.scored`; `best` is the greatest of "
        "them: on test it says what a run reached, and is no result of a model that was chosen.",
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
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"--{key} is {text!r}: give whole numbers with commas between them")
    return tuple(map(int, parts))


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
    runs, repeated = split_duplicates(runs)
    centralised, several = centralised_accuracy(runs)
    left_out += [*repeated, *several]
    rows = make_rows(runs, centralised)
    out = Path(given.get("output_dir", "report"))
    text = markdown(rows, left_out, rounds, batches)
    write_bytes(out / "report.md", text.encode())
    write_bytes(out / "report.csv", table_csv(rows, rounds, batches).encode())
    drawn = figures.draw_all(rows, out)
    print(text)
    print(f"written: {', '.join(str(p) for p in [out / 'report.md', out / 'report.csv', *drawn])}")


if __name__ == "__main__":
    sys.exit(run_command(main))
