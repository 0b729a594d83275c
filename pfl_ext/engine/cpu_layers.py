"""A network's convolutions and norms done by `cpu_kernels`, where these are faster than torch's.

Shape letters: N images, C channels in, K channels out, H and W positions.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from pfl_ext.engine.cpu_kernels import CHANNELS, CpuKernels, Form, Unavailable
from pfl_ext.models import ImageClassifier


class Convolution(nn.Conv2d):
    """A convolution by `CpuKernels`."""

    kernels: CpuKernels

    @property
    def form(self) -> Form:
        """What `CpuKernels` must know."""
        assert not isinstance(self.padding, str)
        (high, wide), (top, left) = self.kernel_size, self.padding
        return Form(high, wide, self.stride[0], top, left)

    def takes(self, x: Tensor) -> bool:
        """Whether ``x`` ``[N, C, H, W]`` goes this way."""
        return _plain(x)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, C, H, W]`` -> ``[N, K, H', W']``."""
        if not self.takes(x):
            return super().forward(x)
        out: Tensor = _Convolve.apply(x, self.weight, self)
        return out if self.bias is None else out + self.bias[:, None, None]

    def gradients(
        self, x: Tensor, e: Tensor, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """From ``e`` ``[N, K, H', W']``, the output's gradient: those of ``x`` and the weights, if wanted."""
        return self.kernels.convolution_backward(x, e, self.weight, self.form, wanted)


class GroupNorm(nn.GroupNorm):
    """GroupNorm in channels-last memory."""

    kernels: CpuKernels

    def takes(self, x: Tensor) -> bool:
        """Whether ``x`` ``[N, C, H, W]`` goes this way."""
        return _plain(x) and x.ndim == 4

    def forward(self, x: Tensor) -> Tensor:
        """``[N, C, H, W]``, in and out."""
        if not self.takes(x):
            return super().forward(x)
        out: Tensor = _Normalise.apply(x, self.weight, self.bias, self)
        return out


def _plain(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Convolution) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.form = layer, layer.form
        return layer.kernels.convolution(x, weight, ctx.form)

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        return (*ctx.layer.kernels.convolution_backward(x, e, weight, ctx.form, wanted), None)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: GroupNorm) -> Tensor:
        out, mean, rstd = layer.kernels.group_norm(x, weight, bias, layer.num_groups, layer.eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.kernels = layer.kernels
        return out

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        dx, scale, shift = ctx.kernels.group_norm_backward(x, e, weight, mean, rstd)
        return dx, scale.sum(0), shift.sum(0), None


def kernels_for(model: ImageClassifier) -> CpuKernels | None:
    """What does this network's convolutions faster; None on a GPU, where there are none that it can do, or,
    with a line on the screen, where it cannot be compiled."""
    if model.mean.device.type != "cpu" or Convolution not in map(_kind, model.backbone.modules()):
        return None
    try:
        return CpuKernels()
    except Unavailable as reason:
        print(f"convolutions are torch's own, which are slower: {reason}", file=sys.stderr)
        return None


def take_over(network: nn.Module, kernels: CpuKernels) -> None:
    """Make every layer of ``network`` that `CpuKernels` can do one of these, in channels-last memory."""
    network.to(memory_format=torch.channels_last)
    for layer in network.modules():
        kind = _kind(layer)
        if kind is not None:
            layer.__class__, layer.kernels = kind, kernels  # type: ignore[assignment]


def _kind(layer: nn.Module) -> type[Convolution | GroupNorm] | None:
    if type(layer) is nn.GroupNorm:
        return GroupNorm if layer.affine and layer.num_channels % CHANNELS == 0 else None
    if type(layer) is not nn.Conv2d or isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        return None
    plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.stride[0] == layer.stride[1]
    small = max(layer.kernel_size) <= 3  # with larger ones torch was the faster
    even = layer.in_channels % CHANNELS == 0 and layer.out_channels % CHANNELS == 0
    return Convolution if plain and small and even else None
