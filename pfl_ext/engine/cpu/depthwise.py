"""Convolutions that filter each channel by itself, always in float32.

`kernels` computes the weights' gradients of 5 x 5 kernels. torch computes everything else, where it is
faster. torch takes 62 ms for the gradients of the 5 x 5 kernels in a step of EfficientNet-Lite0 (16 images of
128 pixels), and `kernels` 6 (AMD EPYC Zen 4, one thread, torch 2.15, the least of five). In bfloat16 torch
takes three times as long for these, and with stride 2 twenty times as long for images' gradients: 77 ms in
one layer.

Shape letters: N images, C channels, H and W positions.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfl_ext.engine.cpu.convolutions import Compiled, by_torch, regular, taken
from pfl_ext.engine.cpu.kernels import DEPTHWISE_CHANNELS, DEPTHWISE_SIDE


class Depthwise(Compiled):
    """A convolution that filters each channel by itself."""

    def forward(self, x: Tensor) -> Tensor:
        """``[N, C, H, W]`` -> ``[N, C, H', W']``; in bfloat16 where torch's autocast is on."""
        if not self.takes(x):
            return super().forward(x)
        halved = torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", enabled=False):
            out: Tensor = _Filter.apply(x.float(), self.weight, self)
            out = out if self.bias is None else out + self.bias[:, None, None]
        return out.to(torch.bfloat16) if halved else out

    def takes(self, x: Tensor) -> bool:
        """Whether ``x`` ``[N, C, H, W]`` goes this way."""
        return taken(x) and x.ndim == 4 and x.numel() > 0

    def gradients(
        self, x: Tensor, e: Tensor, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of ``x`` and weights, if wanted, from the output's gradient ``e`` ``[N, C, H', W']``."""
        compiled = wanted[1] and self.kernel_size == (DEPTHWISE_SIDE, DEPTHWISE_SIDE)
        images, dtype = x.float(), x.dtype
        e = e.float()
        dx, dw = by_torch(self, images, e, (wanted[0], wanted[1] and not compiled))
        if compiled:
            dw = self.kernels.depthwise_weights(images, e, self.form)
        return None if dx is None else dx.to(dtype), dw


class _Filter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Depthwise) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return F.conv2d(x, weight, None, layer.stride, layer.padding, groups=layer.groups)

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return (*ctx.layer.gradients(x, e, ctx.needs_input_grad[:2]), None)


def depthwise(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether this layer filters each channel by itself, with a kernel of 3 x 3 or 5 x 5."""
    if not regular(layer):
        return False
    single = layer.groups == layer.in_channels == layer.out_channels > 1
    square = layer.kernel_size in ((3, 3), (DEPTHWISE_SIDE, DEPTHWISE_SIDE))
    return single and square and layer.in_channels % DEPTHWISE_CHANNELS == 0
