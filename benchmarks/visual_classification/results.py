"""What these runs leave besides what every run does: accuracy by class, the partition, the final rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
from pfl.metrics import Metrics

from benchmarks.core.clients import FEW_BARS, FEW_USERS, by_class
from benchmarks.core.config.trees import Tree
from benchmarks.visual_classification import paper
from benchmarks.visual_classification.config import Config
from dataset.partitions.statistics import distances, mean_emd
from dataset.store.views import SingleLabelView
from pfl_ext.evaluation import SCORES


def partition_text(task: SingleLabelView) -> str:
    """The partition, whose users it takes the images from, and what its alpha counts if it has one."""
    clause, users = task.convention, len(task.file.split("train").user_ids)
    instead = f" instead of the file's {users:,} users" if task.dealt is not None and users > 1 else ""
    return f"partition {task.partition or 'of the file'}{instead}{clause and f'; {clause}'}"


def followed_text(task: SingleLabelView, scored: str) -> str:
    """What is scored over the rounds."""
    if scored == "test":
        return "test is scored during training, but picks no model"
    origin = f"{task.val_share:.3g} of each user's training images" if task.val_share else "the file's"
    return f"val is {origin}"


def partition_facts(task: SingleLabelView) -> Tree:
    """How the training images lie with the users (Hsu, Qi, Brown, 6.1): sizes, classes, mean EMD."""
    train = task.split("train")
    sizes = np.diff(train.user_offsets)
    distance, classes = distances(train.classes, np.repeat(np.arange(len(sizes)), sizes), len(sizes))
    return {
        "name": task.partition,
        "convention": task.convention,
        "users": len(sizes),
        "images": int(sizes.sum()),
        "largest_user": int(sizes.max()),
        "mean_classes": float(classes.mean()),
        "mean_emd": mean_emd(distance, sizes),
        **({"sizes": sizes.tolist()} if len(sizes) <= FEW_USERS else {}),
    }


def class_scores(task: SingleLabelView, metrics: Mapping[str, Metrics]) -> Tree:
    """Scores of the reported model: accuracy of each class on test; and the partition it was trained on.

    With few classes also ``confusion``: for each true class, how many of its images were predicted as each
    class, in the order of the classes.
    """
    scores = metrics["test"][SCORES]
    matrix = {} if scores.confusion is None else dict(zip(task.label_names, scores.confusion.tolist()))
    return {
        "per_class_accuracy": by_class(task, scores.per_class),
        **({"confusion": matrix} if matrix else {}),
        "partition": partition_facts(task),
    }


def draw_confusion(results: Tree, title: str, folder: Path) -> None:
    """``confusion.png``, where its rows can be read."""
    from benchmarks.reporting import plots  # here, as matplotlib takes 0.3 s that most commands can spare

    if 0 < len(matrix := results.get("confusion", {})) <= FEW_BARS:
        plots.confusion(matrix, f"{title}, test", folder / "confusion.png")


def final_rows(results: Tree) -> dict[str, Mapping[str, float]]:
    """The rows of the final table."""
    rows: dict[str, Mapping[str, float]] = {"test, last model": results["last"]["test"]}
    if results["best_step"] != results["rounds"]:
        rows["test, best model"] = results["test"]
    return rows


def show(config: Config, results: Tree) -> None:
    """Accuracy, and the paper's of centralised training where the run can be compared with the paper."""
    if facts := results.get("partition"):  # a public release of a private run has none
        print(
            f"partition {facts['name'] or 'of the file'}: {facts['users']:,} users, {facts['images']:,} "
            f"images, mean EMD {facts['mean_emd']:.3f}"
            + (f"; {facts['convention']}" if facts.get("convention") else "")
        )
    for name, values in final_rows(results).items():
        print(f"{name}: " + ", ".join(f"{key} {value:.2f}" for key, value in values.items()))
    theirs, reasons = paper.centralised(results["setting"]), paper.reasons_against(asdict(config), results)
    if theirs is not None and not reasons:
        print(f"centralised, the paper's: {theirs} %")
    elif theirs is not None:
        print(f"not comparable with the paper's {results['setting']}: {'; '.join(reasons)}")
