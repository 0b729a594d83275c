"""Base of GroupNorms that compute the operations after them in the same pass, on a CPU or a GPU.

Shape letters: N images, C channels, H and W positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pfl_ext.engine.cpu.convolutions import followed


class JoiningNorm(nn.GroupNorm):
    """GroupNorm in channels-last memory, with what follows it: nothing, a ReLU, or a sum and a ReLU.

    It shares scale and shift with ``layer``.
    """

    def __init__(self, layer: nn.GroupNorm) -> None:
        super().__init__(layer.num_groups, layer.num_channels, layer.eps, device="meta")
        self.weight, self.bias = layer.weight, layer.bias

    def takes(self, x: Tensor, added: Tensor | None = None) -> bool:
        """Whether this layer computes ``x`` ``[N, C, H, W]`` and ``added`` itself; else torch does."""
        raise NotImplementedError

    def normalise(self, ctx: Any, x: Tensor, relu: bool, added: Tensor | None) -> Tensor:
        """The output. What `gradients` needs is saved on an autograd function's ``ctx``."""
        raise NotImplementedError

    def gradients(self, ctx: Any, e: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of ``x``, of each image's scale and shift ``[N, C]`` float32, and of ``added``."""
        raise NotImplementedError

    def over_images(self, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Both, summed over the images: ``[C]`` each."""
        return scale.sum(0), shift.sum(0)

    def forward(self, x: Tensor, relu: bool = False, added: Tensor | None = None) -> Tensor:
        """``[N, C, H, W]``, in and out."""
        if not self.takes(x, added):
            return followed(super().forward(x), relu, added)
        out: Tensor = _Normalise.apply(x, self.weight, self.bias, added, relu, self)
        return out


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        added: Tensor | None,
        relu: bool,
        layer: JoiningNorm,
    ) -> Tensor:
        ctx.layer = layer
        return layer.normalise(ctx, x, relu, added)

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor | None, ...]:
        dx, scale, shift, dz = ctx.layer.gradients(ctx, e)
        return dx, *ctx.layer.over_images(scale, shift), dz, None, None
