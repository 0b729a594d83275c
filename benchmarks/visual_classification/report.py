"""Runs of federated visual classification beside the paper's tables.

    python -m benchmarks.visual_classification.report RUN_DIR... [--output_dir D] [--rounds 1000,2500,5000]
                                                      [--batches 10000,25000,50000]

Folders are searched for runs. Written into D (default: report): report.md, report.csv and the learning
curves as PNG and SVG. Accuracy is in percent, mean and standard deviation over seeds; relative accuracy is to
the centralised run on the same data, where one is among the runs.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks.core.config.command_line import arguments
from benchmarks.core.config.digests import experiment
from benchmarks.core.config.trees import Tree
from benchmarks.reporting.runs import RunRecord, by_experiment, find_runs, split_duplicates
from benchmarks.reporting.tables import csv_table, markdown_table, spread
from benchmarks.visual_classification import figures, paper
from benchmarks.visual_classification.config import Config
from benchmarks.visual_classification.curves import Row, place, read_finished
from dataset.cli import run as run_command
from dataset.files import write_bytes
from dataset.partitions.dirichlet import meaning


def cells(row: Row, rounds: Sequence[int], batches: Sequence[int]) -> list[str]:
    """A row of the table."""
    best = [curve.best for curve in row.curves]
    last = [float(run.outcome["last"]["test"]["accuracy"]) for run in row.runs]
    relative = [100 * b / row.centralised if row.centralised else None for b in best]
    reached = []
    for share in paper.RELATIVE:
        goal = None if row.centralised is None else row.centralised * share / 100
        found = [None if goal is None else curve.rounds_to(goal) for curve in row.curves]
        known = [f for f in found if f is not None]
        reached.append(f"{np.mean(known):.0f}" if known and len(known) == len(found) else "-")
    return [
        row.label,
        row.partition,
        ", ".join(str(run.seed) for run in row.runs),
        str(row.runs[0].outcome["rounds"]),
        *(spread([curve.at_round(n) for curve in row.curves]) for n in rounds),
        *(spread([curve.at_batch(n) for curve in row.curves]) for n in batches),
        spread(last),
        spread(best),
        spread(relative),
        *reached,
    ]


def header(rounds: Sequence[int], batches: Sequence[int]) -> list[str]:
    """The names of `cells`."""
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


def repetition(run: RunRecord, kept: RunRecord) -> str:
    """A run with the config, seed and data of one that is counted, in a line."""
    theirs, ours = (float(r.outcome["last"]["test"]["accuracy"]) for r in (run, kept))
    same = f"{run.directory} repeats {kept.directory}: the same config, seed and data; test accuracy "
    return same + (f"{ours:.2f}, too" if theirs == ours else f"{theirs:.2f}, where {ours:.2f} IS COUNTED")


def centralised_accuracy(runs: Sequence[RunRecord]) -> tuple[dict[str, float], list[str]]:
    """Test accuracy in percent of centralised training, by the content of the data, mean over seeds.

    Where the runs hold several centralised experiments on the same data, none of them is the reference, and
    a line says so.
    """
    found: dict[str, list[tuple[RunRecord, ...]]] = defaultdict(list)
    for seeds in by_experiment(run for run in runs if run.config.mode == "centralised"):
        found[seeds[0].data_key].append(seeds)
    accuracy, notes = {}, []
    for data, experiments in found.items():
        if len(experiments) > 1:
            names = ", ".join(str(seeds[0].directory) for seeds in experiments)
            notes.append(
                f"no accuracy is relative to centralised training, as there are several experiments of it "
                f"({names}): give the runs of only one"
            )
        else:
            accuracy[data] = float(
                np.mean([run.outcome["last"]["test"]["accuracy"] for run in experiments[0]])
            )
    return accuracy, notes


def make_rows(runs: Sequence[RunRecord], centralised: Mapping[str, float]) -> list[Row]:
    """The seeds of each experiment as a row, by setting, partition and label.

    Args:
        runs: no two of them of one experiment and seed.
        centralised: as `centralised_accuracy` gives it.
    """
    groups = by_experiment(runs)
    trees = [asdict(seeds[0].config) for seeds in groups]
    rows = []
    for seeds, tree in zip(groups, trees):
        rivals = [other for group, other in zip(groups, trees) if place(group[0]) == place(seeds[0])]
        label = ", ".join([place(seeds[0])[0], *differences(tree, rivals)])
        reasons = paper.reasons_against(tree, seeds[0].outcome)
        rows.append(Row(label, seeds, centralised.get(seeds[0].data_key), reasons))
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
    table = []
    for row in rows:
        table.append(cells(row, rounds, batches))
        theirs = paper_cells(row.name, rounds, batches)
        table += [theirs] if theirs and not row.reasons else []
    lines = ["# Federated visual classification", "", markdown_table(header(rounds, batches), table)]
    clauses = {
        row.partition: meaning(row.partition, len(row.runs[0].outcome.get("per_class_accuracy", ())))
        for row in rows
    }
    if any(clauses.values()):
        lines += ["", "Dirichlet's alpha:", ""]
        lines += [f"* {partition}: {clause}" for partition, clause in clauses.items() if clause]
    apart = [f"* {row.label}, {row.partition}: {'; '.join(row.reasons)}" for row in rows if row.reasons]
    if apart:
        lines += ["", "Not comparable with the paper:", "", *apart]
    machines = {str(run.outcome["hardware"]) for row in rows for run in row.runs}
    commits = sorted({str(run.outcome["commit"])[:7] for row in rows for run in row.runs})
    lines += ["", f"Hardware: {'; '.join(sorted(machines))}. Commits: {', '.join(commits)}."]
    lines += [
        "",
        "Accuracy in percent over the rounds is that of the split `data.scored`; `best` is the greatest of "
        "them: on test it says what a run reached, and is no result of a model that was chosen.",
    ]
    if left_out:
        lines += ["", "Left out:", "", *(f"* {line}" for line in left_out)]
    return "\n".join(lines) + "\n"


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
    options = arguments(argv[cut:])
    unknown = options.keys() - {"output_dir", "rounds", "batches"}
    if unknown:
        raise ValueError(f"--{min(unknown)}: the options are --output_dir, --rounds and --batches")
    rounds = _numbers(options.get("rounds", ",".join(map(str, paper.ROUNDS))), "rounds")
    batches = _numbers(options.get("batches", ",".join(map(str, paper.BATCHES))), "batches")
    runs, left_out = [], []
    for directory in find_runs(map(Path, argv[:cut])):
        try:
            runs.append(read_finished(directory))
        except ValueError as fault:
            left_out.append(str(fault))
    if not runs:
        raise ValueError(
            f"no finished run in {', '.join(argv[:cut])}: {'; '.join(left_out) or 'no run at all'}"
        )
    runs, repeated = split_duplicates(runs)
    centralised, several = centralised_accuracy(runs)
    left_out += [*(repetition(run, kept) for run, kept in repeated), *several]
    rows = make_rows(runs, centralised)
    out = Path(options.get("output_dir", "report"))
    text = markdown(rows, left_out, rounds, batches)
    write_bytes(out / "report.md", text.encode())
    write_bytes(
        out / "report.csv",
        csv_table(header(rounds, batches), [cells(row, rounds, batches) for row in rows]).encode(),
    )
    drawn = figures.draw_all(rows, out)
    print(text)
    print(f"written: {', '.join(str(p) for p in [out / 'report.md', out / 'report.csv', *drawn])}")


if __name__ == "__main__":
    sys.exit(run_command(main))
