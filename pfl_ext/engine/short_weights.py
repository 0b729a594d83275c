"""Weights of convolutions and linear layers in a shorter type, kept beside the float32 ones for a GPU.

Autocast converts each layer's weights in every step, and its gradient back. Here all are converted together,
and the step reads gradients as they come. The layers compute what they compute under autocast.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from pfl_ext.engine.layout import Layout, trained
from pfl_ext.models.classifier import ImageClassifier


class ShortWeights:
    """A network that reads its trained parameters from a vector ``[P]`` of float32.

    Args:
        module: the network; its parameters become views.
        weights: the vector.
        dtype: type of the vector ``short``, from which convolutions and linear layers read theirs; None: from
            ``weights``, too.
    """

    def __init__(
        self, module: ImageClassifier, layout: Layout, weights: Tensor, dtype: torch.dtype | None
    ) -> None:
        self.module, self.weights, self.dtype = module, weights, dtype
        self.short = None if dtype is None else layout.zeros(dtype)
        self.are_short = [False] * len(layout.names) if dtype is None else shortened(module)
        """By variable."""
        views = layout.views(weights)
        narrow = views if self.short is None else layout.views(self.short)
        for parameter, wide, other, is_short in zip(trained(module), views, narrow, self.are_short):
            parameter.data = other if is_short else wide

    @staticmethod
    def of(
        model: ImageClassifier, layout: Layout, weights: Tensor, dtype: torch.dtype | None
    ) -> ShortWeights:
        """``model`` itself, or a copy that shares with it what is not trained."""
        if dtype is not None:
            own = {id(parameter) for parameter in trained(model)}
            shared = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in own]
            model = copy.deepcopy(model, {id(t): t for t in shared})
        return ShortWeights(model, layout, weights, dtype)

    @torch.no_grad()
    def refresh(self) -> None:
        """Make ``short`` what the float32 weights are."""
        if self.short is not None:
            self.short.copy_(self.weights)


def shortened(model: ImageClassifier) -> list[bool]:
    """Which trained parameters autocast converts at each use, as far as is certain."""
    layers = (layer for layer in model.modules() if type(layer) in (nn.Conv2d, nn.Linear))
    known = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
    return [id(parameter) in known for parameter in trained(model)]
