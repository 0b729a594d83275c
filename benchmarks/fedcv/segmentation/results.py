"""What these runs leave besides what every run does: scores by class, users' scores, pictures of masks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from pfl.internal.ops.pytorch_ops import get_default_device
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from benchmarks.core.clients import by_class
from benchmarks.core.config.trees import Tree
from benchmarks.fedcv.experiment import partition_facts, shown
from dataset.store.annotated_view import AnnotatedView
from pfl_ext.data.federated_dataset import ImageStore
from pfl_ext.evaluation import SCORES, autocast_of
from pfl_ext.workers.distributed import is_main


def class_scores(view: AnnotatedView, metrics: Mapping[str, Metrics]) -> Tree:
    """Scores of each class of the reported model on test, in percent, None where a class is absent; and how
    the training images are distributed over the users."""
    found = metrics["test"][SCORES]
    return {
        "per_class_iou": by_class(view, found.per_class),
        "per_class_dice": by_class(view, found.dice),
        "per_class_sensitivity": by_class(view, found.recall),
        "per_class_specificity": by_class(view, found.specificity),
        "partition": partition_facts(view),
    }


@torch.no_grad()
def user_columns(store: ImageStore, model: PyTorchModel) -> list[dict[str, float]]:
    """The scores of each user of a split: those of one confusion matrix of all pixels of that user."""
    module, device = model.pytorch_model, get_default_device()
    task, columns = module.task, []
    for first, end in itertools.pairwise(store.user_offsets.tolist()):
        total = task.statistics(0, np.arange(0), [], [])
        for start in range(first, end, task.scored_together):
            rows = np.arange(start, min(start + task.scored_together, end))
            images, masks = store.read(rows)
            batch = torch.from_numpy(images).to(device), task.collate(masks).to(device)
            with autocast_of(model):
                outputs, truth = module.outputs(*batch)
            kept = task.scored(outputs.float().cpu(), truth.cpu())[1]
            total = total + task.statistics(len(rows), rows, [kept], [masks])
        columns.append(task.user_summary(total))
    return columns


def draw_masks(view: AnnotatedView, model: PyTorchModel, title: str, directory: Path) -> None:
    """Predicted masks beside the truth, for the first images of the first test users: ``plots/masks.png``."""
    from benchmarks.reporting import pictures  # here, as matplotlib takes 0.3 s that most commands can spare

    if not is_main():
        return
    pixels, truth, outputs, users = shown(view, model)
    found, path = outputs.argmax(1).cpu().numpy(), directory / "plots" / "masks.png"
    pictures.masks(pixels, truth.cpu().numpy(), found, view.label_names, title, path, users)
