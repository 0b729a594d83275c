"""Modules that compute a network's convolutions by `kernels` and `narrow`.

Shape letters: N images, C channels in, K channels out, H and W positions.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfl_ext.engine.cpu.kernels import CHANNELS, CpuKernels, Form, is_float32
from pfl_ext.engine.cpu.narrow import (
    After,
    Laid,
    few_channels,
    few_channels_backward,
    first,
    first_backward,
    lay_out,
    pooled,
)

LARGEST_SIDE = 64
"""Largest side of images, in pixels. A vector holds the same place of several images, so larger images would
not stay in the cache. Pooled convolutions were not measured on larger ones."""


class Compiled(nn.Conv2d):
    """A layer that replaces a convolution and shares its weights.

    ``multiplied`` is the format of the numbers that it multiplies.
    """

    multiplied = torch.float32

    def __init__(self, layer: nn.Conv2d, kernels: CpuKernels) -> None:
        super().__init__(
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,  # type: ignore[arg-type]
            layer.stride,  # type: ignore[arg-type]
            layer.padding,  # type: ignore[arg-type]
            groups=layer.groups,
            bias=layer.bias is not None,
            device="meta",
        )
        self.weight, self.bias, self.kernels = layer.weight, layer.bias, kernels

    @property
    def sides(self) -> tuple[int, int]:
        """The padding above the image and to its left."""
        assert not isinstance(self.padding, str)
        top, left = self.padding
        return top, left

    @property
    def form(self) -> Form:
        """The form of the convolution, for `CpuKernels`."""
        high, wide = self.kernel_size
        return Form(high, wide, self.stride[0], *self.sides)


class Convolution(Compiled):
    """A convolution by `CpuKernels`. ``multiplied`` applies where torch's autocast is on."""

    def __init__(self, layer: nn.Conv2d, kernels: CpuKernels, multiplied: torch.dtype) -> None:
        super().__init__(layer, kernels)
        self.multiplied = multiplied

    def takes(self, x: Tensor) -> bool:
        """Whether ``x`` ``[N, C, H, W]`` goes this way."""
        half = x.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu")
        return taken(x) and (self.kernels.has_halves or not half)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, C, H, W]`` -> ``[N, K, H', W']``."""
        if not self.takes(x):
            return super().forward(x)
        out: Tensor = _Convolve.apply(entering(x), self.weight, self)
        return out if self.bias is None else out + self.bias[:, None, None].to(out.dtype)

    def gradients(
        self, x: Tensor, e: Tensor, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of ``x`` and weights, if wanted, from the output's gradient ``e`` ``[N, K, H', W']``."""
        return self.kernels.convolution_backward(x, e, self.weight, self.form, wanted)


class FewChannels(Compiled):
    """A convolution of few channels by `CpuKernels`, with the ReLU and the 2 x 2 max-pooling after it.

    torch computes it where its autocast is on.
    """

    def takes(self, x: Tensor) -> bool:
        """Whether ``x`` ``[N, C, H, W]`` goes this way."""
        return float32_images(x) and max(x.shape[2:]) <= LARGEST_SIDE

    def forward(self, x: Tensor, relu: bool = False, pool: bool = False) -> Tensor:
        """``[N, C, H, W]`` -> ``[N, K, H', W']``."""
        if not self.takes(x):
            return followed(super().forward(x), relu, None, pool)
        kind: Any = _First if self._first(x, pool) else _Followed
        out: Tensor = kind.apply(x, self.weight, self.bias, self, After(relu, pool))
        return out

    def _first(self, x: Tensor, pool: bool) -> bool:
        """Whether vectors hold channels: for a first layer whose outputs are not pooled."""
        return not (pool or x.requires_grad) and self.out_channels % CHANNELS == 0

    def gradients(
        self, x: Tensor, e: Tensor, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of ``x`` and the weights, from the convolution's gradient ``e`` ``[N, K, H', W']``."""
        laid = Laid(lay_out(self.kernels, x, *self.sides))
        return few_channels_backward(self.kernels, e, self.weight, self.sides, After(), laid, wanted)[:2]


class PooledConvolution(Convolution):
    """A convolution of more channels by `CpuKernels`, with the ReLU and the 2 x 2 max-pooling after it.

    If nothing is pooled it computes as `Convolution` where ``whole`` is set, and else as torch's.
    """

    def __init__(self, layer: nn.Conv2d, kernels: CpuKernels, whole: bool) -> None:
        super().__init__(layer, kernels, torch.float32)
        self.whole = whole

    def takes(self, x: Tensor) -> bool:
        """Whether `Convolution` computes ``x`` if nothing is pooled."""
        return self.whole and super().takes(x)

    def forward(self, x: Tensor, relu: bool = False, pool: bool = False) -> Tensor:
        """``[N, C, H, W]`` -> ``[N, K, H', W']``."""
        if not pool or not float32_images(x) or max(x.shape[2:]) > LARGEST_SIDE:
            return followed(super().forward(x), relu, None, pool)
        out: Tensor = _Followed.apply(x, self.weight, self.bias, self, After(relu, pool))
        return out


def regular(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether this is a convolution with zeros around its images, without dilation, of one stride."""
    if type(layer) is not nn.Conv2d or isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        return False
    return layer.dilation == (1, 1) and layer.stride[0] == layer.stride[1]


def by_torch(
    layer: nn.Conv2d, x: Tensor, e: Tensor, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """torch's gradients of a convolution's input and weights, if wanted, in the type of ``e``."""
    dx, dw, _ = torch.ops.aten.convolution_backward(
        e,
        x.to(e.dtype),
        layer.weight.to(e.dtype),
        None,
        layer.stride,
        layer.padding,
        layer.dilation,
        False,
        [0, 0],
        layer.groups,
        [*wanted, False],
    )
    return dx, dw


def followed(x: Tensor, relu: bool, added: Tensor | None, pool: bool = False) -> Tensor:
    """Compute with torch what follows a norm or a convolution."""
    x = x if added is None else x + added
    x = x.relu() if relu else x
    return F.max_pool2d(x, 2) if pool else x


def float32_images(x: Tensor) -> bool:
    """Whether these are float32 images on a CPU, without autocast."""
    return is_float32(x) and x.ndim == 4


def taken(x: Tensor) -> bool:
    """Whether the compiled layers know this kind of images."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)


def entering(x: Tensor) -> Tensor:
    """The images in the type that a compiled layer takes: bfloat16 where torch's autocast is on."""
    return x.to(torch.bfloat16) if torch.is_autocast_enabled("cpu") else x


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


class _Followed(torch.autograd.Function):
    """A convolution with what follows it, by `few_channels` or `pooled`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Compiled, after: After
    ) -> Tensor:
        compute = pooled if isinstance(layer, PooledConvolution) else few_channels
        out, laid = compute(layer.kernels, x, weight, bias, layer.sides, after)
        ctx.save_for_backward(weight, *laid)
        ctx.layer, ctx.after = layer, after
        return out

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor | None, ...]:
        weight, *laid = ctx.saved_tensors
        layer, wanted = ctx.layer, ctx.needs_input_grad
        dx, dw, db = few_channels_backward(
            layer.kernels, e, weight, layer.sides, ctx.after, Laid(*laid), (wanted[0], wanted[1] or wanted[2])
        )
        return dx, dw, db if wanted[2] else None, None, None


class _First(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: FewChannels, after: After
    ) -> Tensor:
        out, images = first(layer.kernels, x, weight, bias, layer.sides, after.relu)
        ctx.save_for_backward(weight, images, out)
        ctx.layer, ctx.after = layer, after
        return out

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor | None, ...]:
        weight, images, out = ctx.saved_tensors
        dw, db = first_backward(ctx.layer.kernels, images, e, out, weight, ctx.after.relu)
        return None, dw, db if ctx.needs_input_grad[2] else None, None, None
