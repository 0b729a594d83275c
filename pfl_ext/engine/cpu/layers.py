"""Replaces a network's layers by modules that compute with `kernels`, where `choice` says so.

Shape letters: N images, C channels in, K channels out, H and W positions.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from pfl_ext.engine.cpu.build import Unavailable
from pfl_ext.engine.cpu.check import checked
from pfl_ext.engine.cpu.choice import FLOAT32, Row, chosen, kind_of
from pfl_ext.engine.cpu.convolutions import (
    LARGEST_SIDE,
    Convolution,
    FewChannels,
    PooledConvolution,
    entering,
    regular,
    taken,
)
from pfl_ext.engine.cpu.dense import Dropout, Linear
from pfl_ext.engine.cpu.depthwise import Depthwise, depthwise
from pfl_ext.engine.cpu.joining import joined
from pfl_ext.engine.cpu.kernels import CHANNELS, CpuKernels
from pfl_ext.engine.norms import JoiningNorm
from pfl_ext.models.classifier import FrozenStatisticsBatchNorm2d, ImageClassifier
from pfl_ext.models.dropout import KeyedDropout

FEW = 16
"""A convolution with fewer channels, in or out, is `FewChannels`."""


class GroupNorm(JoiningNorm):
    """`JoiningNorm` on a CPU. It computes in float32, also for bfloat16 images."""

    def __init__(self, layer: nn.GroupNorm, kernels: CpuKernels, multiplied: torch.dtype) -> None:
        super().__init__(layer)
        self.kernels, self.multiplied = kernels, multiplied

    def takes(self, x: Tensor, added: Tensor | None = None) -> bool:
        """Whether this layer computes ``x`` ``[N, C, H, W]`` and ``added`` itself; else torch does."""
        if not taken(x) or x.ndim != 4:
            return False
        return added is None or (taken(added) and added.shape == x.shape)

    def normalise(self, ctx: Any, x: Tensor, relu: bool, added: Tensor | None) -> Tensor:
        """The output. What `gradients` needs is saved on an autograd function's ``ctx``."""
        x, added = entering(x), None if added is None else entering(added)
        out, mean, rstd = self.kernels.group_norm(
            x, self.weight, self.bias, self.num_groups, self.eps, relu, added
        )
        ctx.save_for_backward(x, mean, rstd, *([] if added is None else [out]))
        ctx.relu = relu
        return out

    def gradients(self, ctx: Any, e: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The gradients, by `CpuKernels.group_norm_backward`."""
        x, mean, rstd, *out = ctx.saved_tensors
        return self.kernels.group_norm_backward(x, e, self.weight, self.bias, mean, rstd, ctx.relu, *out)


def kernels_for(model: ImageClassifier) -> CpuKernels | None:
    """The compiled functions. None on a GPU, for a network that gains nothing by them, and, with a line on
    the screen, where they cannot be compiled."""
    if model.mean.device.type != "cpu" or not gains(model.trained_part):
        return None
    try:
        return checked()
    except Unavailable as reason:
        print(f"convolutions are torch's own, which are slower: {reason}", file=sys.stderr)
        return None


class CpuLayers(NamedTuple):
    """The compiled functions, and the row of the table that says which layers they compute."""

    kernels: CpuKernels
    row: Row

    @property
    def autocast(self) -> torch.dtype | None:
        """The type of torch's autocast around the network; None: there is none."""
        return self.row.autocast

    def replaced(self, network: nn.Module, side: int = 0) -> nn.Module:
        """The network in channels-last memory, with compiled modules for the layers that the row names.

        It shares parameters and all other layers with ``network``, which must not be used any more. ``side``
        is the side of its images in pixels.
        """
        network.to(memory_format=torch.channels_last)
        normed = any(isinstance(m, nn.GroupNorm | FrozenStatisticsBatchNorm2d) for m in network.modules())
        for name, layer in list(network.named_modules()):
            # a norm would convert the images to channels-last memory again
            compiled = self._compiled(layer, narrow=not normed and side <= LARGEST_SIDE)
            if compiled is None:
                continue
            if layer is network:
                return compiled
            network.set_submodule(name, compiled)
        return joined(network, GroupNorm, FewChannels, Linear, self._pooled)

    def _compiled(self, layer: nn.Module, narrow: bool) -> nn.Module | None:
        """The module for a layer; None: it stays. ``narrow``: whether `FewChannels` may be taken."""
        if type(layer) is KeyedDropout:
            return Dropout(layer, self.kernels)
        kind = kind_of(layer)
        if kind is None or self.row.way(kind).by != "compiled":
            return None
        if type(layer) is nn.Linear:
            return Linear(layer, self.kernels)
        if not compilable(layer):
            return None
        multiplied = self.row.way(kind).format
        if isinstance(layer, nn.GroupNorm):
            return GroupNorm(layer, self.kernels, multiplied)
        if depthwise(layer):
            return Depthwise(layer, self.kernels)
        if few(layer):  # by torch in bfloat16
            return FewChannels(layer, self.kernels) if narrow else None
        assert isinstance(layer, nn.Conv2d)
        return Convolution(layer, self.kernels, multiplied)

    def _pooled(self, layer: nn.Module) -> nn.Module | None:
        """The replacement of a convolution whose outputs are pooled; None if it stays as it is."""
        if not poolable(layer) or self.row.way("other convolutions") != FLOAT32.convolution:
            return None
        return PooledConvolution(layer, self.kernels, compilable(layer) or isinstance(layer, Convolution))


def gains(network: nn.Module) -> bool:
    """Whether `CpuLayers.replaced` makes a network faster: by a compiled layer, or by channels-last memory.

    In channels-last memory torch's convolutions and pooling are faster (by a tenth of a step of `cifar_cnn`),
    but its GroupNorm is slower. So if only convolutions of few channels are compiled, the norms decide.
    """
    layers = list(network.modules())
    norms = any(isinstance(layer, nn.GroupNorm) for layer in layers)
    convolutions = any(isinstance(layer, nn.Conv2d) for layer in layers)
    return any(compilable(layer) and not few(layer) for layer in layers) or (convolutions and not norms)


def layers_for(kernels: CpuKernels | None, precision: torch.dtype | None) -> CpuLayers | None:
    """The compiled layers for training in this type (None is float32); None without compiled functions."""
    return None if kernels is None else CpuLayers(kernels, chosen(precision, kernels.feature))


def compilable(layer: nn.Module) -> bool:
    """Whether a compiled module can replace this layer."""
    if type(layer) is nn.GroupNorm:
        return layer.affine and layer.num_channels % CHANNELS == 0
    if few(layer) or depthwise(layer):
        return True
    if not _plain(layer):
        return False
    small = max(layer.kernel_size) <= 3  # torch is faster with larger ones
    return small and layer.in_channels % CHANNELS == 0 and layer.out_channels % CHANNELS == 0


def few(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether a convolution has so few channels that vectors should hold images instead."""
    if not _plain(layer) or layer.stride != (1, 1) or layer.kernel_size == (1, 1):
        return False
    return min(layer.in_channels, layer.out_channels) < FEW


def poolable(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether a convolution that is not `few` can be a `PooledConvolution`."""
    if not (isinstance(layer, Convolution) or _plain(layer)):
        return False
    return layer.stride == (1, 1) and layer.out_channels >= FEW


def _plain(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    return regular(layer) and layer.groups == 1
