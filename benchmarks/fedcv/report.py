"""Runs of FedCV's tasks in one table, beside the paper's numbers.

    python -m benchmarks.fedcv.report RUN_DIR... [--output_dir D]

Folders are searched for runs. Written into D (default: report): report.md, report.csv and, where users were
scored one by one, users.csv. Scores are of test,
in percent, mean and standard deviation over seeds. Runs are put into one row only where nothing but the seed
differs. The paper's number stands beside a run of its setting where no key was changed; of any other row, the
keys in which it differs from the setting of its name. Megabytes are those of one client in one round.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.core.commands import command_parser
from benchmarks.core.config.digests import experiment
from benchmarks.core.config.trees import differences
from benchmarks.core.experiment import Experiment
from benchmarks.fedcv.classification.train import FederatedClassification
from benchmarks.fedcv.detection.train import FederatedDetection
from benchmarks.fedcv.paper import ACCURACY, DATA
from benchmarks.fedcv.segmentation.train import FederatedSegmentation
from benchmarks.reporting import single_users
from benchmarks.reporting.folders import finished_runs
from benchmarks.reporting.runs import (
    RunOfAnother,
    RunRecord,
    by_experiment,
    finished_run,
    origins,
    split_duplicates,
)
from benchmarks.reporting.tables import csv_table, markdown_table, section, spread, write_texts
from benchmarks.visual_classification.config import VISION
from dataset.cli import run as run_command

TASKS: Sequence[type[Experiment[Any]]] = (FederatedClassification, FederatedSegmentation, FederatedDetection)
HEADS = (
    "setting",
    "seeds",
    "score",
    "test",
    "mean of test users",
    "of the paper",
    "MB down",
    "MB up",
    "minutes",
)


def task_of(directory: Path) -> tuple[type[Experiment[Any]], RunRecord]:
    """A finished run and its task; its setting is one of the task's, or the user's own.

    Raises:
        ValueError: what is wrong with it, in a line.
    """
    faults: list[ValueError] = []
    for task in TASKS:
        try:
            run = finished_run(directory, task.benchmark, {"test": task.headline})
        except ValueError as fault:
            faults.append(fault)
            continue
        setting = run.config.setting
        if setting in task.benchmark.settings or setting not in VISION.settings:  # whose config looks alike
            return task, run
        faults.append(ValueError(f"{directory} is a run of {setting}, which is no setting of FedCV's tasks"))
    raise next((fault for fault in faults if not isinstance(fault, RunOfAnother)), faults[-1])


def changes(task: type[Experiment[Any]], run: RunRecord) -> list[str]:
    """The keys in which a run differs from the setting of its name, ``key: setting's -> run's``; of a setting
    that is not shipped, a remark."""
    if run.config.setting not in task.benchmark.settings:
        return ["a setting of its own (its config.yaml has all values)"]
    setting = task.benchmark.parse(["--config", run.config.setting]).config
    trees = [experiment(asdict(config), type(config)) for config in (setting, run.config)]
    return differences(*trees)


def of_the_paper(run: RunRecord) -> str:
    """The paper's score of a run's setting, if the run had the paper's data; else a dash."""
    setting = str(run.config.setting)
    classes = len(run.outcome.get("per_class_accuracy", ()))
    data = classes, run.data.get("images", {}).get("train")
    return str(ACCURACY.get(setting, "-")) if DATA.get(setting.partition("-")[0]) == data else "-"


def cells(task: type[Experiment[Any]], runs: Sequence[RunRecord]) -> tuple[str, ...]:
    """A row of the table, as `HEADS`."""
    setting, score = str(runs[0].config.setting), task.headline[0]
    users = [_mean_of_users(run, score) for run in runs]
    return (
        setting,
        ", ".join(str(run.seed) for run in runs),
        score,
        spread([run.outcome["test"][score] for run in runs]),
        spread(users),
        "-" if changes(task, runs[0]) else of_the_paper(runs[0]),
        *(_megabytes(runs[0], way) for way in ("down", "up")),
        _minutes(runs),
    )


def _minutes(runs: Sequence[RunRecord]) -> str:
    """A run with a public release says nothing of its time, which depends on its cohorts."""
    seconds = [run.outcome["wall_clock_s"] for run in runs if "wall_clock_s" in run.outcome]
    return spread([each / 60 for each in seconds]) if seconds else "not released"


def _mean_of_users(run: RunRecord, score: str) -> float | None:
    found = run.outcome.get("per_user", {}).get("quantiles", {}).get(score, {})
    return float(found["mean"]) if "mean" in found else None


def _megabytes(run: RunRecord, way: str) -> str:
    traffic = run.outcome.get("traffic")
    return "-" if traffic is None else f"{traffic[way] / 1e6:.3g}"


def main(argv: Sequence[str]) -> None:
    """Read, write, show."""
    parser = command_parser("fedcv.report", __doc__)
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--output_dir", type=Path, default=Path("report"))
    options = parser.parse_args(argv or ["--help"])
    tasks: dict[Path, type[Experiment[Any]]] = {}

    def read(directory: Path) -> RunRecord:
        tasks[directory], run = task_of(directory)
        return run

    found, left_out = finished_runs(options.run_dirs, read, "of FedCV's tasks")
    runs, repeated = split_duplicates(found)
    left_out += [f"{run.directory} repeats {kept.directory}" for run, kept in repeated]
    groups = sorted(by_experiment(runs), key=lambda group: str(group[0].config.setting))
    rows = [cells(tasks[group[0].directory], group) for group in groups]
    apart = [
        f"{row[0]}, row {number}: {'; '.join(changed)}"
        for number, (group, row) in enumerate(zip(groups, rows), 1)
        if (changed := changes(tasks[group[0].directory], group[0]))
    ]
    of_users = [
        line
        for group, row in zip(groups, rows)
        for line in single_users.rows(row[0], group, tasks[group[0].directory].headline[0])
    ]
    text = "\n".join(
        [
            "# FedCV's tasks",
            "",
            markdown_table(HEADS, rows),
            "",
            *single_users.section(of_users),
            *section("Not the setting as it is shipped:", apart),
            origins(runs),
            "",
            *section("Left out:", left_out),
        ]
    )
    texts = {"report.md": f"{text.rstrip()}\n", "report.csv": csv_table(HEADS, rows)}
    written = write_texts(options.output_dir, {**texts, "users.csv": single_users.csv(of_users)})
    print(text)
    print(f"written: {', '.join(map(str, written))}")


if __name__ == "__main__":
    sys.exit(run_command(main))
