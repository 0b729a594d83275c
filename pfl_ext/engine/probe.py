"""Finds out by trial whether a network can be trained in groups of users, and how large these may be."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfl_ext.engine.gradients import Gradient, Users, squared_norm
from pfl_ext.engine.tape import TapedNetwork
from pfl_ext.engine.training import LocalTraining
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.features import FeatureClassifier

CPU_BYTES = 1 << 30  # for the activations of one group; about as much keeps its layers in the caches
MOST_IMAGES = {"cpu": 32, "cuda": 256}
"""Most images of a group, whatever the memory. On a CPU twice as many took 0.88 of the time, but divide a
small cohort less evenly among lanes (README)."""
MOST_FEATURES = 256
"""Most images of a group for training on features, where a pass is only through the last layers."""
GPU_SHARE = 0.5  # share of the free memory for the groups of all lanes together
COPIES = 3.0  # a group's memory over that of its activations, with their gradients and a layer's scratch
TOLERANCE = 1e-3  # relative error of each variable's gradient
ROUNDING = 2.0**-18
"""Error of a variable's gradient that rounding may make, relative to the gradient of all variables. Where
positions or images cancel, as in a bias before a norm, a gradient is little more than that."""


def _image_losses(outputs: Tensor) -> Tensor:
    """Losses of images whose gradients depend on every output, whatever the outputs mean."""
    flat = outputs.flatten(1).float()
    targets = (torch.arange(flat.shape[1], device=flat.device) % 3 == 0).float().expand_as(flat)
    return F.binary_cross_entropy_with_logits(flat, targets, reduction="none").mean(1)


@contextlib.contextmanager
def _other_weights(network: nn.Module) -> Iterator[None]:
    """In this context trained parameters have weights that follow from their shapes alone.

    With the weights of a round, rounding could decide a verdict, and a run that is taken up in that round
    would train in another way than from its beginning on. Weights of 0 would hide what is before them.
    """
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    before = [p.detach().clone() for p in trained.values()]
    draw = torch.Generator().manual_seed(0)
    try:
        for name, p in trained.items():
            noise, scale = torch.randn(p.shape, generator=draw), 0.1
            if p.ndim > 1:
                scale = math.sqrt(2 / p[0].numel())
            p.data.copy_(noise * scale + float(p.ndim < 2 and name.endswith("weight")))
        yield
    finally:
        for p, weights in zip(trained.values(), before):
            p.data.copy_(weights)


def fusable(model: ImageClassifier) -> bool:
    """Whether the tape of two synthetic images holds every variable's gradient exactly once, and correctly.

    It does not if parameters are outside convolutions, linear layers and the norms of `tape.KINDS`, or if a
    layer is used twice or mixes images. Then users are trained one by one. What one image has on the tape is
    compared with its gradient in a pass without the other: the bound of private training is for that. The
    verdict does not depend on the weights.
    """
    trained = {name: p for name, p in model.backbone.named_parameters() if p.requires_grad}
    names, parameters = list(trained), list(trained.values())
    device = model.mean.device
    shape = (2, *model.input_shape)
    steps = torch.arange(math.prod(shape), device=device, dtype=torch.float32)
    x = torch.sin(steps * 0.37).view(shape)
    x = x.contiguous(memory_format=model.memory_format)
    taped: list[tuple[str, Gradient]] = []
    users = Users((0, 1, 2), device)
    weights = torch.tensor([0.25, 0.75], device=device)
    net = TapedNetwork(model.backbone)
    with _other_weights(model.backbone), contextlib.suppress(RuntimeError):
        net.run(x, _image_losses, users, weights, lambda *pair: taped.append(pair), contextlib.nullcontext())
        if sorted(name for name, _ in taped) != sorted(names):
            return False
        found = dict(taped)
        errors, sizes = torch.zeros(2, len(names), dtype=torch.float64)
        for user, only in enumerate(torch.eye(2, dtype=torch.float64, device=device)):
            with torch.enable_grad():
                losses = _image_losses(model.backbone(x[user : user + 1]))
                alone = torch.autograd.grad(losses.sum() * weights[user], parameters)
            with torch.no_grad():
                for place, (name, gradient) in enumerate(zip(names, alone)):
                    total = torch.zeros_like(gradient)
                    found[name].add_to(total, only)
                    errors[place] += float(squared_norm(total - gradient))
                    sizes[place] += float(squared_norm(gradient))
        return bool((errors <= TOLERANCE**2 * sizes + ROUNDING**2 * sizes.sum()).all())
    return False  # a saved tensor was changed in place, or a layer's input does not belong to images


def activation_bytes(model: ImageClassifier, local: LocalTraining) -> int:
    """Bytes that forward saves for backward for one image, without the weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def count(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in weights and t.ndim > 1 and t.shape[0] == 2:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    device = model.mean.device
    x = torch.zeros(2, *model.input_shape, device=device)
    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(count, lambda t: t),
        local.autocast(device),
    ):
        model.backbone(x)
    return max(1, sum(kept.values()) // 2)


def most_images(model: ImageClassifier) -> int:
    """Most images of a group, whatever the memory. It is the same on every worker."""
    return MOST_FEATURES if isinstance(model, FeatureClassifier) else MOST_IMAGES[model.mean.device.type]


def group_size(model: ImageClassifier, local: LocalTraining, lanes: int, most: int) -> int:
    """Number of images of one group: as many as memory allows, and at most ``most``."""
    device = model.mean.device
    if device.type == "cuda":
        budget = torch.cuda.mem_get_info(device)[0] * GPU_SHARE / lanes
    else:
        budget = float(CPU_BYTES)
    return int(min(max(budget / (COPIES * activation_bytes(model, local)), 1), most))
