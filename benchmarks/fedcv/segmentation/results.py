"""What these runs leave besides what every run does: IoU by class and by user, the partition, pictures."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from pfl.internal.ops.pytorch_ops import get_default_device
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from benchmarks.core.config.trees import Tree
from dataset.files import write_json
from dataset.store.mask_view import MaskView
from pfl_ext.algorithms.per_user import quantiles
from pfl_ext.evaluation import SCORES
from pfl_ext.workers.distributed import is_main

USERS, EACH = 4, 2
"""Of how many test users masks are drawn, and of how many images of each."""
BARS = 60
"""Up to so many bars of a picture can be read."""
FEW_USERS = 100
"""Up to so many users, the results hold how many images each one has."""


def class_scores(view: MaskView, metrics: Mapping[str, Metrics]) -> Tree:
    """Of the model that is reported: IoU of each class on test, in percent, None where a class is absent from
    truth and prediction; and how the training images lie with the users."""
    values = metrics["test"][SCORES].per_class
    train = view.split("train")
    sizes = np.diff(train.user_offsets)
    return {
        "per_class_iou": {
            name: None if np.isnan(value) else 100 * float(value)
            for name, value in zip(view.label_names, values)
        },
        "partition": {
            "name": view.partition,
            "users": len(sizes),
            "images": int(sizes.sum()),
            **({"sizes": sizes.tolist()} if len(sizes) <= FEW_USERS else {}),
        },
    }


@torch.no_grad()
def user_scores(view: MaskView, model: PyTorchModel, directory: Path, title: str) -> Tree:
    """Write ``per_user.json`` and ``plots/per_user.png``; the summary for ``results.json``.

    Each test user's scores are those of one confusion matrix of all pixels of that user. Their mean weighs
    users alike and says another thing than the scores of the split.
    """
    from benchmarks.reporting import plots  # here, as matplotlib takes 0.3 s that most commands can spare

    store, module, device = view.split("test"), model.pytorch_model, get_default_device()
    task, columns = module.task, []
    for first, end in itertools.pairwise(store.user_offsets.tolist()):
        total = torch.zeros(1, dtype=torch.int64)
        for start in range(first, end, task.scored_together):
            images, masks = store.read(np.arange(start, min(start + task.scored_together, end)))
            outputs, truth = module.outputs(
                torch.from_numpy(images).to(device), task.collate(masks).to(device)
            )
            total = total + task.scored(outputs.cpu(), truth.cpu())[1].sum(0, keepdim=True)
        columns.append(task.user_columns(total, None))
    values = {name: np.array([column[name] for column in columns]) for name in columns[0]}
    summary: Tree = {
        "users": len(columns),
        "quantiles": {name: quantiles(found) for name, found in values.items()},
    }
    if is_main():
        whole = {
            **summary,
            "user_ids": list(store.user_ids),
            "images": np.diff(store.user_offsets).tolist(),
            **{
                name: [None if np.isnan(v) else round(float(v), 4) for v in found]
                for name, found in values.items()
            },
        }
        write_json(directory / "per_user.json", whole)
        shown = {name: v for name, v in zip(store.user_ids, values["mIoU"].tolist()) if not np.isnan(v)}
        if 0 < len(shown) <= BARS:
            plots.bars(shown, "mean IoU of a test user (%)", title, directory / "plots" / "per_user.png")
    return summary


@torch.no_grad()
def draw_masks(view: MaskView, model: PyTorchModel, title: str, directory: Path) -> None:
    """Predicted masks beside the truth, for the first images of the first test users: ``plots/masks.png``."""
    from benchmarks.reporting import plots  # here, as matplotlib takes 0.3 s that most commands can spare

    if not is_main():
        return
    store, module, device = view.split("test"), model.pytorch_model, get_default_device()
    starts, ends = store.user_offsets[:-1][:USERS], store.user_offsets[1:][:USERS]
    rows = np.concatenate([np.arange(a, min(a + EACH, b)) for a, b in zip(starts, ends)])
    images, masks = (torch.from_numpy(part).to(device) for part in store.read(rows))
    outputs, truth = module.outputs(images, masks)
    pixels = module.task.pixels(images, None, module.framing).permute(0, 2, 3, 1)
    plots.masks(
        pixels.cpu().numpy(),
        truth.cpu().numpy(),
        outputs.argmax(1).cpu().numpy(),
        view.label_names,
        title,
        directory / "plots" / "masks.png",
    )


def draw_classes(results: Tree, title: str, folder: Path) -> None:
    """IoU of each class, where a bar for each can be read."""
    from benchmarks.reporting import plots

    found = {name: value for name, value in results["per_class_iou"].items() if value is not None}
    if 0 < len(found) <= BARS:
        plots.bars(found, "intersection over union on test (%)", title, folder / "per_class_iou.png")
