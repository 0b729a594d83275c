"""Runs of federated visual classification beside the paper's tables.

    python -m benchmarks.visual_classification.report RUN_DIR... [--output_dir D] [--rounds 1000,2500,5000]
                                                      [--batches 10000,25000,50000]

Folders are searched for runs. Written into D (default: report): report.md, report.csv and the learning
curves as PNG and SVG. Accuracy is in percent, mean and standard deviation over seeds; relative accuracy is to
the centralised run on the same data, where one is among the runs.
"""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks.core.commands import command_parser
from benchmarks.core.config.digests import experiment
from benchmarks.core.config.trees import Tree
from benchmarks.reporting import single_users
from benchmarks.reporting.folders import finished_runs
from benchmarks.reporting.runs import RunRecord, by_experiment, origins, split_duplicates
from benchmarks.reporting.tables import csv_table, markdown_table, section, spread, write_texts
from benchmarks.visual_classification import figures, paper
from benchmarks.visual_classification.config import VISION, Config
from benchmarks.visual_classification.curves import Row, place, read_finished
from dataset.cli import run as run_command
from dataset.store.index import meaning

NAMED = "federated.algorithm "
"""How a difference begins that a row's name says already."""


def cells(row: Row, rounds: Sequence[int], batches: Sequence[int]) -> dict[str, str]:
    """A row of the table, by the head of the column."""
    best = [curve.best for curve in row.curves]
    return {
        "setting": row.label,
        "partition": row.partition,
        "seeds": ", ".join(str(run.seed) for run in row.runs),
        "rounds": str(row.runs[0].outcome["rounds"]),
        **{f"acc@{n:,} rounds": spread([curve.at_round(n) for curve in row.curves]) for n in rounds},
        **{f"acc@{n:,} batches": spread([curve.at_batch(n) for curve in row.curves]) for n in batches},
        "test, last": spread([last_accuracy(run) for run in row.runs]),
        "best": spread(best),
        "relative, best": spread([100 * b / row.centralised if row.centralised else None for b in best]),
        **{f"rounds to {share} %": _rounds_to(row, share) for share in paper.RELATIVE},
    }


def _rounds_to(row: Row, share: int) -> str:
    """The mean of the rounds that the seeds took to a share of centralised accuracy, if all got there."""
    if row.centralised is None:
        return "-"
    found = [curve.rounds_to(row.centralised * share / 100) for curve in row.curves]
    known = [rounds for rounds in found if rounds is not None]
    return f"{np.mean(known):.0f}" if len(known) == len(found) else "-"


def last_accuracy(run: RunRecord) -> float:
    """Test accuracy of a run's last model in percent."""
    return float(run.outcome["last"]["test"]["accuracy"])


def repetition(run: RunRecord, kept: RunRecord) -> str:
    """A run with the config, seed and data of one that is counted, in a line."""
    theirs, ours = last_accuracy(run), last_accuracy(kept)
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
            accuracy[data] = float(np.mean([last_accuracy(run) for run in experiments[0]]))
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
        name = VISION.name_of(seeds[0].config) or place(seeds[0])[0]
        shipped = seeds[0].config.setting.lower() in VISION.settings  # so that its name has the algorithm
        told_apart = [each for each in differences(tree, rivals) if not (shipped and each.startswith(NAMED))]
        label = ", ".join([name, *told_apart])
        reasons = paper.reasons_against(tree, seeds[0].outcome)
        rows.append(Row(label, seeds, centralised.get(seeds[0].data_key), reasons))
    return sorted(rows, key=lambda row: (row.name, row.partition, row.label))


def differences(config: Tree, rivals: Sequence[Tree]) -> list[str]:
    """``key value`` of each field in which experiments of one setting and partition differ."""
    leaves, others = experiment(config, Config), [experiment(rival, Config) for rival in rivals]
    return [
        f"{key} {value}" for key, value in leaves.items() if any(other.get(key) != value for other in others)
    ]


def paper_cells(name: str, rounds: Sequence[int], batches: Sequence[int]) -> dict[str, str]:
    """The paper's numbers by the head of the column; none where it lacks the row."""
    found = paper.rows().get(name)
    if not found or not found["table"]:
        return {}
    after_rounds, after_batches = found.get("accuracy_at_round", {}), found.get("accuracy_at_batch", {})
    relative = found.get("rounds_at_relative", {})
    numbers = {
        **{f"acc@{n:,} rounds": after_rounds.get(str(n)) for n in rounds},
        **{f"acc@{n:,} batches": after_batches.get(str(n)) for n in batches},
        "test, last": found.get("accuracy"),
        **{f"rounds to {share} %": relative.get(str(share)) for share in paper.RELATIVE},
    }
    empty = dict.fromkeys(("partition", "seeds", "rounds"), "")
    known = {head: str(number) for head, number in numbers.items() if number is not None}
    return {"setting": f"{name}, the paper's", **empty, **known}


def users_of(rows: Sequence[Row]) -> list[list[str]]:
    """How the accuracy of the model of each row differs over users."""
    return [
        line
        for row in rows
        for line in single_users.rows(f"{row.label}, {row.partition}", row.runs, "accuracy")
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
    heads = list(table[0])
    lines = [[line.get(head, "-") for head in heads] for line in table]
    clauses = {
        row.partition: meaning(row.partition, len(row.runs[0].outcome.get("per_class_accuracy", ())))
        for row in rows
    }
    alphas = [f"{partition}: {clause}" for partition, clause in clauses.items() if clause]
    apart = [f"{row.label}, {row.partition}: {'; '.join(row.reasons)}" for row in rows if row.reasons]
    text = [
        "# Federated visual classification",
        "",
        markdown_table(heads, lines),
        "",
        *single_users.section(users_of(rows)),
        *section("Dirichlet's alpha:", alphas),
        *section("Not comparable with the paper:", apart),
        origins([run for row in rows for run in row.runs]),
        "",
        "Accuracy in percent over the rounds is that of the split `data.scored`; `best` is the greatest of "
        "them: on test it says what a run reached, and is no result of a model that was chosen.",
        "",
        *section("Left out:", left_out),
    ]
    return "\n".join(text).rstrip() + "\n"


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ArgumentTypeError(f"{text!r}: give whole numbers with commas between them")
    return tuple(map(int, parts))


def main(argv: Sequence[str]) -> None:
    """Read, write, show."""
    parser = command_parser("visual_classification.report", __doc__)
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--output_dir", type=Path, default=Path("report"))
    parser.add_argument("--rounds", type=_numbers, default=paper.ROUNDS, help="columns after so many rounds")
    parser.add_argument("--batches", type=_numbers, default=paper.BATCHES, help="and after so many batches")
    options = parser.parse_args(argv or ["--help"])
    runs, left_out = finished_runs(options.run_dirs, read_finished, "of visual classification")
    runs, repeated = split_duplicates(runs)
    centralised, several = centralised_accuracy(runs)
    left_out += [*(repetition(run, kept) for run, kept in repeated), *several]
    rows = make_rows(runs, centralised)
    text = markdown(rows, left_out, options.rounds, options.batches)
    table = [cells(row, options.rounds, options.batches) for row in rows]
    as_csv = csv_table(list(table[0]), [list(line.values()) for line in table])
    texts = {"report.md": text, "report.csv": as_csv, "users.csv": single_users.csv(users_of(rows))}
    written = write_texts(options.output_dir, texts)
    written += figures.draw_all(rows, options.output_dir)
    print(text)
    print(f"written: {', '.join(map(str, written))}")


if __name__ == "__main__":
    sys.exit(run_command(main))
