"""What these runs leave besides what every run does: AP by class, users' scores, pictures of boxes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from benchmarks.core.clients import by_class
from benchmarks.core.config.trees import Tree
from benchmarks.fedcv.experiment import partition_facts, shown
from dataset.store.annotated_view import AnnotatedView
from pfl_ext.data.federated_dataset import ImageStore
from pfl_ext.evaluation import SCORES
from pfl_ext.tasks.detection import MOST
from pfl_ext.tasks.detection_scores import HALF, Detections
from pfl_ext.tasks.task import Task
from pfl_ext.workers.distributed import is_main


def class_scores(view: AnnotatedView, metrics: Mapping[str, Metrics]) -> Tree:
    """Scores of the reported model: AP of each class on test, in percent, None where test has no object of
    the class; and how the training images are distributed over the users."""
    scores: Detections = metrics["test"][SCORES]
    return {
        "per_class_ap": by_class(view, scores.per_class),
        "per_class_ap50": by_class(view, scores.precisions[HALF]),
        "partition": partition_facts(view),
    }


def user_columns(store: ImageStore, task: Task, scores: Detections) -> list[dict[str, float]]:
    """The scores of each user of a split, in percent, NaN for one without objects.

    A class that a user lacks does not count there, so that users' scores are often higher than the whole's.
    """
    each = [scores.only(np.arange(a, b)) for a, b in itertools.pairwise(store.user_offsets.tolist())]
    columns = [task.summarise(own) for own in each]
    return [c if own.has_objects else dict.fromkeys(c, float("nan")) for c, own in zip(columns, each)]


def draw_boxes(view: AnnotatedView, model: PyTorchModel, title: str, directory: Path) -> None:
    """Predicted boxes beside the truth, for the first images of the first test users: ``plots/boxes.png``."""
    from benchmarks.reporting import pictures  # here, as matplotlib takes 0.3 s that most commands can spare

    if not is_main():
        return
    pixels, truth, outputs, users = shown(view, model)
    found = model.pytorch_model.task.scored(outputs.float(), truth)[1].cpu().numpy()[:, :MOST]
    path = directory / "plots" / "boxes.png"
    pictures.boxes(pixels, truth.cpu().numpy(), found, view.label_names, title, path, users)
