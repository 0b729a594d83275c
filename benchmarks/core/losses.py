"""Whether a task trains each image by itself, as the engine and private training need it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dataset.partitions.drawn import global_state
from pfl_ext.data.augmented_views import augmented
from pfl_ext.data.federated_dataset import ImageStore
from pfl_ext.data.sampling import LocalSampling
from pfl_ext.data.transforms import draw_keys
from pfl_ext.models.checks import APART
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.probing import agree
from pfl_ext.randomness import stream
from pfl_ext.tasks.task import WeightedTask

IMAGES = 8
"""How many images of a batch are compared with each of them alone."""


@torch.no_grad()
def check_losses(
    module: ImageClassifier, store: ImageStore, sampling: LocalSampling, private: bool, engine: bool
) -> None:
    """Refuse a task of one's own by which an image's training depends on the other images beside it.

    In the engine, images of several users go through the network together. In private training, what is
    clipped is each image's own loss. So a task must not mix images. The engine computes a batch's loss as the
    sum of ``image_losses`` times the shares of ``settled``, whatever ``loss`` says. What a task draws from a
    global generator would be other numbers in a run that goes on.

    Args:
        module: the network and the task.
        store: has images and annotations of the kind that the task reads.
        sampling: of users' batches.
        private: whether the run is.
        engine: whether the engine trains the users.

    Raises:
        ValueError: one line that names the task.
    """
    task, rows = module.task, np.arange(min(IMAGES, int(store.user_offsets[-1])))
    if len(rows) < 2:
        return
    name, rng = type(task).__name__, stream(0, "check of losses")
    states = torch.get_rng_state(), global_state()
    remedy = "privacy and local_privacy to none" if private else "runtime.engine to stock"
    images, annotations = store.read(rows)
    chosen, drawn = augmented(images, rng, sampling.input_size, sampling)
    drawn = draw_keys(rng, drawn) if sampling.keys else drawn
    annotations = task.alike(annotations) if isinstance(task, WeightedTask) else annotations
    x, crops, collated = (
        part.to(module.mean.device)
        for part in (torch.from_numpy(chosen), torch.from_numpy(drawn), task.collate(annotations))
    )
    targets = task.settled(collated)[0]
    each = [module.prepare(*(part[[place]] for part in (x, targets, crops))) for place in range(len(rows))]
    if not all(map(_agree, map(torch.cat, zip(*each)), module.prepare(x, targets, crops))):
        raise ValueError(
            f"{name}.augment gives an image other pixels or targets if there are other images in its batch, "
            f"and a batch may hold images of several users: change each image by itself, or set {remedy}"
        )
    x, collated = x[:2], collated[:2]
    targets, shares = task.settled(collated)
    outputs, targets = module.outputs(x, targets)
    both, single = task.image_losses(outputs, targets), task.image_losses(outputs[:1], targets[:1])
    if both.shape != (2,) or not _agree(single, both[:1]):
        raise ValueError(
            f"{name}.image_losses gives an image another loss if there are other images in its batch, so one "
            "user would change the updates of others: compute each loss from its own image, or set "
            f"{remedy}"
        )
    if engine and not _agree(task.loss(outputs, module.prepare(x, collated)[1]), (both * shares).sum()):
        raise ValueError(
            f"{name}.loss is not the sum of image_losses times the shares of settled, by which the engine "
            "trains: say in image_losses what an image's loss is, or set runtime.engine to stock"
        )
    if not states[0].equal(torch.get_rng_state()) or states[1] != global_state():
        raise ValueError(
            f"{name} draws random numbers from a global generator, so a resumed run would differ: let them "
            "follow from the crops, which are drawn for each image and step"
        )


def _agree(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and agree(found.double(), expected.double(), APART)
