"""What these runs leave besides what every run does: AP by class, clients' own scores, pictures of boxes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from pfl.internal.ops.pytorch_ops import get_default_device
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from benchmarks.core.config.trees import Tree
from benchmarks.fedcv.experiment import by_class, partition_facts, shown_rows
from dataset.store.annotated_view import AnnotatedView
from pfl_ext.data.federated_dataset import ImageStore
from pfl_ext.evaluation import SCORES
from pfl_ext.tasks.detection_scores import Detections
from pfl_ext.workers.distributed import is_main


def class_scores(view: AnnotatedView, metrics: Mapping[str, Metrics]) -> Tree:
    """Of the model that is reported: AP of each class on test, in percent, None where test has no object of
    the class; the clients' own scores; and how the training images lie with the users.

    Clients' scores are of test, or of val where test belongs to one user.
    """
    scores: Detections = metrics["test"][SCORES]
    stores = {name: view.split(name) for name in ("test", "val") if name in metrics}
    several = [name for name, store in stores.items() if len(store.user_ids) > 1]
    return {
        "per_class_ap": by_class(view, scores.per_class),
        "per_class_ap50": by_class(view, scores.precisions[0]),
        "clients": {name: own_scores(stores[name], metrics[name][SCORES]) for name in several[:1]},
        "partition": partition_facts(view),
    }


def own_scores(store: ImageStore, scores: Detections) -> Tree:
    """The plain mean of each client's own mAP and mAP50, in percent, over those who have objects.

    It is no score of all images: a class that a client lacks does not count there.
    """
    bounds = zip(store.user_offsets[:-1], store.user_offsets[1:])
    each = [own for a, b in bounds if (own := scores.only(np.arange(a, b))).has_objects]
    values = {"mAP": [own.overall_value for own in each], "mAP50": [own.at_half for own in each]}
    means = {f"mean {name}": 100 * float(np.mean(found)) for name, found in values.items() if each}
    return {"scored": len(each), **means}


@torch.no_grad()
def draw_boxes(view: AnnotatedView, model: PyTorchModel, title: str, directory: Path) -> None:
    """Predicted boxes beside the truth, for the first images of the first test users: ``plots/boxes.png``."""
    from benchmarks.reporting import pictures  # here, as matplotlib takes 0.3 s that most commands can spare

    if not is_main():
        return
    store, module, device = view.split("test"), model.pytorch_model, get_default_device()
    images, boxes = (torch.from_numpy(part).to(device) for part in store.read(shown_rows(store)))
    outputs, truth = module.outputs(images, boxes)
    pixels = module.task.pixels(images, None, module.framing).permute(0, 2, 3, 1)
    pictures.boxes(
        pixels.cpu().numpy(),
        truth.cpu().numpy(),
        module.task.scored(outputs.float(), truth)[1].cpu().numpy(),
        view.label_names,
        title,
        directory / "plots" / "boxes.png",
    )
