"""Weights of convolutions and linear layers in a shorter type, kept beside the float32 ones for a GPU.

Autocast converts each layer's weights in every step, and its gradient back. Here all are converted together,
and the step reads gradients as they come. The layers compute what they compute under autocast.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pfl_ext.engine.layout import Layout, trained
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.probing import before_each

ALIGNED = 8
"""Elements at whose multiples a variable begins: 16 bytes, as fast kernels ask for."""


def padded(size: int) -> int:
    """Elements that a variable of ``size`` takes up in a vector of short weights."""
    return -(-size // ALIGNED) * ALIGNED


class ShortWeights:
    """A network that reads its trained parameters from a vector ``[P]`` of float32.

    Args:
        module: the network; its parameters become views.
        weights: the vector.
        dtype: type of the vector ``short``, from which it reads some variables; None: there is none.
        are_short: by variable, whether it is one of these. They follow each other there, each `padded`.
    """

    def __init__(
        self,
        module: ImageClassifier,
        layout: Layout,
        weights: Tensor,
        dtype: torch.dtype | None,
        are_short: Sequence[bool],
    ) -> None:
        self.module, self.weights, self.dtype, self.are_short = module, weights, dtype, are_short
        sizes = [padded(size) for size, is_short in zip(layout.sizes, are_short) if is_short]
        self.short = torch.zeros(sum(sizes), dtype=dtype, device=layout.device) if sizes else None
        room = iter([] if self.short is None else torch.split(self.short, sizes))
        self._copied: list[tuple[Tensor, Tensor]] = []
        forms = zip(trained(module), layout.views(weights), layout.shapes, layout.strides, are_short)
        for parameter, wide, shape, strides, is_short in forms:
            parameter.data = wide
            if is_short:
                part = next(room)
                parameter.data = part.as_strided(shape, strides, part.storage_offset())
                self._copied.append((parameter.data, wide))

    @staticmethod
    def of(
        model: ImageClassifier, layout: Layout, weights: Tensor, dtype: torch.dtype | None
    ) -> ShortWeights:
        """``model`` itself, or a copy that shares with it what is not trained."""
        are_short = [False] * len(layout.names) if dtype is None else converted_once(model, dtype)
        if any(are_short):
            in_training = {id(parameter) for parameter in trained(model)}
            shared = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in in_training]
            model = copy.deepcopy(model, {id(t): t for t in shared})
        return ShortWeights(model, layout, weights, dtype, are_short)

    def like(self, module: ImageClassifier, layout: Layout, weights: Tensor) -> ShortWeights:
        """The same for another vector and another copy of the network."""
        return ShortWeights(module, layout, weights, self.dtype, self.are_short)

    @torch.no_grad()
    def refresh(self) -> None:
        """Make ``short`` what the float32 weights are."""
        for short, wide in self._copied:
            short.copy_(wide)


@torch.no_grad()
def converted_once(model: ImageClassifier, dtype: torch.dtype) -> list[bool]:
    """Which trained parameters autocast to this type converts just once in a step, by a pass of zeros.

    They are those of convolutions and linear layers that are used once, and not where autocast is off.
    """
    device, uses = model.mean.device, Counter[int]()

    def used(_: str, layer: nn.Module, inputs: Any) -> None:
        uses[id(layer)] += 1 if torch.is_autocast_enabled(device.type) else 2

    layers = {name: layer for name, layer in model.named_modules() if type(layer) in (nn.Conv2d, nn.Linear)}
    with before_each(layers.items(), used), torch.autocast(device.type, dtype, cache_enabled=False):
        model.backbone(torch.zeros(1, *model.input_shape, device=device))
    owners = Counter(id(p) for layer in model.modules() for p in layer.parameters(recurse=False))
    once = [layer for layer in layers.values() if uses[id(layer)] == 1]
    known = {id(p) for layer in once for p in layer.parameters(recurse=False) if owners[id(p)] == 1}
    return [id(parameter) in known for parameter in trained(model)]
