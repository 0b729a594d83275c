"""What FLAIR's runs leave besides what every run does: each class, each user, the paper's rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from benchmarks import plots
from benchmarks.flair import paper
from benchmarks.flair.config import Config
from benchmarks.flair.users import write_users
from benchmarks.recorder import Recorder
from benchmarks.settings import Tree
from dataset.flair.task import FlairTask
from pfl_ext.distributed import is_main
from pfl_ext.evaluation import SCORES
from pfl_ext.metrics import average_precision
from pfl_ext.per_user import shot_table


def class_scores(
    config: Config, task: FlairTask, recorder: Recorder, model: PyTorchModel, metrics: Mapping[str, Metrics]
) -> Tree:
    """Of the best model: AP and prevalence of each class, few-shot classes apart; users if asked for."""
    scores = metrics["test"][SCORES]
    ap = 100 * average_precision(scores.scores(), scores.targets())
    positives = {name: int(n) for name, n in zip(task.label_names, scores.targets().sum(0))}
    per_class = {name: float(value) for name, value in zip(task.label_names, ap)}
    told: Tree = {}
    if is_main() and (config.evaluation.per_user or config.personal.num_epochs):
        told["per_user"] = write_users(
            recorder.directory, config, model.pytorch_model, task, scores.scores(), scores.targets()
        )
    counts = task.split("train").label_counts()
    return {
        "per_class_ap": per_class,
        "shots": shot_table(per_class, positives, counts, config.evaluation.few_shot_below),
        **told,
        "prevalence": {name: float(p) for name, p in zip(task.label_names, scores.targets().mean(0))},
    }


def draw(results: Tree, title: str, folder: Path) -> None:
    """AP of each class beside the paper's."""
    ap, prevalence = results["per_class_ap"], results["prevalence"]
    plots.per_class_bars(
        list(ap),
        list(ap.values()),
        list(prevalence.values()),
        paper.per_class(results["setting"]),
        title,
        folder / "per_class_ap.png",
    )


def final_rows(results: Tree, compared: bool = True) -> dict[str, Mapping[str, float]]:
    """The rows of the final table: val, test, test of the last model, and the paper's where it has one.

    ``compared``: whether the run is of the kind that the paper's row is; local privacy is not.
    """
    rows = {"val, best model": results["val"], "test, best model": results["test"]}
    rows["test, last model"] = results["last"]["test"]
    paper_row = paper.row(results["setting"]) if compared else None
    return rows | ({"test, FLAIR paper": paper_row} if paper_row else {})


def show(results: Tree, compared: bool = True) -> None:
    """The table of results beside the paper's row."""
    prevalence = list(results["prevalence"].values())
    print(paper.results_table(final_rows(results, compared)))
    print(
        f"mean label prevalence on test (the C-AP of guessing): {100 * sum(prevalence) / len(prevalence):.1f}"
    )
