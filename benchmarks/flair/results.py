"""What FLAIR's runs leave besides what every run does: each class, each user, the paper's rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from benchmarks.core.config.trees import Tree
from benchmarks.flair import paper
from benchmarks.flair.config import Config
from benchmarks.flair.table import classes_without_positives, reasons_against
from benchmarks.flair.users import write_users
from benchmarks.reporting.tables import text_table
from dataset.store.label_sets import LabelSetView
from pfl_ext.algorithms.per_user import shot_table
from pfl_ext.evaluation import SCORES
from pfl_ext.tasks.multi_label_scores import average_precision, for_people, shown


def class_scores(
    config: Config, task: LabelSetView, directory: Path, model: PyTorchModel, metrics: Mapping[str, Metrics]
) -> Tree:
    """Of the best model: AP and prevalence of each class, few-shot classes apart; users if asked for."""
    scores = metrics["test"][SCORES]
    ap = 100 * average_precision(scores.scores(), scores.targets())
    positives = {name: int(n) for name, n in zip(task.label_names, scores.targets().sum(0))}
    per_class = {name: float(value) for name, value in zip(task.label_names, ap)}
    users: Tree = {}
    if config.evaluation.per_user or config.personal.num_epochs:
        users["per_user"] = write_users(directory, config, model.pytorch_model, task, scores)
    counts = task.split("train").label_counts()
    return {
        "per_class_ap": per_class,
        "shots": shot_table(per_class, positives, counts, config.evaluation.few_shot_below),
        **users,
        "prevalence": {name: float(p) for name, p in zip(task.label_names, scores.targets().mean(0))},
    }


def draw(config: Config, results: Tree, title: str, folder: Path) -> None:
    """AP of each class, beside the paper's where the run can be compared with it."""
    from benchmarks.reporting import plots  # here, as matplotlib takes 0.3 s that most commands can spare

    ap, prevalence = results["per_class_ap"], results["prevalence"]
    comparable = not reasons_against(config, results, results.get("data", {}))
    plots.per_class_bars(
        list(ap),
        list(ap.values()),
        list(prevalence.values()),
        paper.per_class(results["setting"]) if comparable else {},
        title,
        folder / "per_class_ap.png",
    )


def final_rows(config: Config, results: Tree) -> dict[str, Mapping[str, float]]:
    """The rows of the final table: val, test, test of the last model; and the paper's, where the run can be
    compared with it.
    """
    rows: dict[str, Mapping[str, float]] = {
        "val, best model": for_people(results["val"]),
        "test, best model": for_people(results["test"]),
        "test, last model": for_people(results["last"]["test"]),
    }
    theirs = paper.row(results["setting"])
    if theirs and not reasons_against(config, results, results.get("data", {})):
        rows["test, FLAIR paper"] = theirs
    return rows


def show(config: Config, results: Tree) -> None:
    """The table of results beside the paper's row, or why that row does not stand there."""
    prevalence = list(results["prevalence"].values())
    rows = final_rows(config, results)
    print(text_table(rows))
    print(f"{shown('C-AP')} of guessing (mean label prevalence on test): {100 * np.mean(prevalence):.1f}")
    if absent := classes_without_positives(results):
        print(absent)
    reasons = reasons_against(config, results, results.get("data", {}))
    if paper.row(results["setting"]) and reasons:
        print(f"not comparable with the paper's {results['setting']}: {'; '.join(reasons)}")
