"""Which layers of a network get LoRA's adapters: ``model.lora_targets``.

A layer is a linear layer, a convolution without groups, or a projection of `nn.MultiheadAttention`, whose
names are those of the attention with ``.query``, ``.key``, ``.value`` and ``.out``. The network calls it, or
reads its weights, as torchvision's Swin reads those of its attention.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pfl_ext.models.config import ALL_TARGETS, CALLED, ModelConfig
from pfl_ext.models.lora_layers import PARTS, shape_of
from pfl_ext.models.probing import before_each

MOST_NAMES = 12
"""Most names of layers that an error lists."""


class Place(NamedTuple):
    """Where a network can have an adapter."""

    name: str
    layer: nn.Linear | nn.Conv2d | nn.MultiheadAttention
    part: str | None = None
    """The projection of attention; None for another layer."""

    @property
    def full_rank(self) -> int:
        """The largest rank of an update of these weights."""
        if isinstance(self.layer, nn.MultiheadAttention):
            return min(shape_of(self.layer, self.part or "").weight.shape)
        return min(self.layer.weight.flatten(1).shape)


def selects(pattern: str, name: str) -> bool:
    """Whether a pattern is that of this name, or of a module in which it is; ``*`` stands for dots, too."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def targets(backbone: nn.Module, head: str, config: ModelConfig, images: Tensor) -> list[Place]:
    """The places that ``config.lora_targets`` selects, in the network's order.

    Args:
        backbone: the network, all of it frozen.
        head: name of the last layer, or of the module that holds it and the bottleneck.
        config: with the names of layers, or `ALL_TARGETS`, or `CALLED`.
        images: ``[B, 3, S, S]``, with which the network can be run.

    Raises:
        ValueError: one line, when a name selects nothing, or there is nothing to select.
    """
    places = _places(backbone, head, images, only_called=config.lora_targets == CALLED)
    if not places:
        raise ValueError(
            f"model.trained is lora, but {config.arch} has no linear layer, and no convolution without "
            "groups, before its last layer: set model.trained to all or head"
        )
    if config.lora_targets in (ALL_TARGETS, CALLED):
        return places
    patterns = config.lora_targets.split(",")
    for pattern in patterns:
        if not any(selects(pattern, place.name) for place in places):
            raise ValueError(
                f"model.lora_targets has {pattern}, but no layer of {config.arch} that can have an adapter "
                "has this name: set it to all, or to names (* stands for any characters) like "
                + _examples([place.name for place in places])
            )
    return [place for place in places if any(selects(pattern, place.name) for pattern in patterns)]


def _examples(names: Sequence[str]) -> str:
    """The first of all names that differ only in numbers."""
    first = [*{re.sub(r"\d+", "0", name): name for name in reversed(names)}.values()][::-1]
    more = f" and {len(first) - MOST_NAMES} more" if len(first) > MOST_NAMES else ""
    return ", ".join(first[:MOST_NAMES]) + more


def _places(backbone: nn.Module, head: str, images: Tensor, only_called: bool) -> list[Place]:
    layers = {
        name: layer
        for name, layer in backbone.named_modules()
        if (isinstance(layer, nn.Linear | nn.Conv2d) or type(layer) is nn.MultiheadAttention)
        and not f"{name}.".startswith(f"{head}.")
    }
    used = set[str]()
    with before_each(layers.items(), lambda name, *_: used.add(name)), torch.no_grad():
        backbone(images)
    attention = {name for name, layer in layers.items() if isinstance(layer, nn.MultiheadAttention)}
    if only_called:
        used -= attention
    else:
        of_attention = {f"{name}.out_proj" for name in attention}
        used |= _read(backbone, images, {n: m for n, m in layers.items() if n not in used | of_attention})
    found: list[Place] = []
    for name, layer in layers.items():
        if name not in used or getattr(layer, "groups", 1) > 1:
            continue
        if isinstance(layer, nn.MultiheadAttention):
            found += [Place(f"{name}.{part}", layer, part) for part in PARTS]
        else:
            assert isinstance(layer, nn.Linear | nn.Conv2d)
            found.append(Place(name, layer))
    return found


def _read(backbone: nn.Module, images: Tensor, layers: dict[str, nn.Module]) -> set[str]:
    """The linear layers among these, which the network does not call, whose weights its outputs depend on."""
    weights = {name: layer.weight for name, layer in layers.items() if isinstance(layer, nn.Linear)}
    if not weights:
        return set()
    try:
        with torch.enable_grad():
            for weight in weights.values():
                weight.requires_grad_(True)
            outputs = [t for t in tree_leaves(backbone(images)) if isinstance(t, Tensor) and t.requires_grad]
            if not outputs:
                return set()
            total = torch.stack([t.float().sum() for t in outputs]).sum()
            gradients = torch.autograd.grad(total, list(weights.values()), allow_unused=True)
    finally:
        for weight in weights.values():
            weight.requires_grad_(False)
    return {name for name, gradient in zip(weights, gradients) if gradient is not None}
