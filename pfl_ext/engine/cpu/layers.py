"""Modules that do a network's convolutions and norms by `kernels`, where `choice` says so.

Shape letters: N images, C channels in, K channels out, H and W positions.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfl_ext.engine.cpu.build import Unavailable
from pfl_ext.engine.cpu.check import checked
from pfl_ext.engine.cpu.choice import FLOAT32, Row, chosen, kind_of
from pfl_ext.engine.cpu.dense import Dropout, Linear
from pfl_ext.engine.cpu.joining import joined
from pfl_ext.engine.cpu.kernels import CHANNELS, After, CpuKernels, Form, Laid
from pfl_ext.models.classifier import FrozenStatisticsBatchNorm2d, ImageClassifier
from pfl_ext.models.dropout import KeyedDropout

FEW, LARGEST_SIDE = 16, 64
"""Channels, in or out, below which a convolution is `FewChannels`; a side beyond which images, whose places a
vector holds side by side, would not stay in the cache."""


class Convolution(nn.Conv2d):
    """A convolution by `CpuKernels`, with another's weights.

    ``multiplied``: the format of the numbers that it multiplies where torch's autocast is on.
    """

    def __init__(self, layer: nn.Conv2d, kernels: CpuKernels, multiplied: torch.dtype) -> None:
        super().__init__(
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,  # type: ignore[arg-type]
            layer.stride,  # type: ignore[arg-type]
            layer.padding,  # type: ignore[arg-type]
            bias=layer.bias is not None,
            device="meta",
        )
        self.weight, self.bias = layer.weight, layer.bias
        self.kernels, self.multiplied = kernels, multiplied

    @property
    def form(self) -> Form:
        """What `CpuKernels` must know."""
        assert not isinstance(self.padding, str)
        (high, wide), (top, left) = self.kernel_size, self.padding
        return Form(high, wide, self.stride[0], top, left)

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
        """From ``e`` ``[N, K, H', W']``, the output's gradient: those of ``x`` and the weights, if wanted."""
        return self.kernels.convolution_backward(x, e, self.weight, self.form, wanted)


class FewChannels(nn.Conv2d):
    """A convolution of few channels by `CpuKernels`, with the ReLU and the 2 x 2 max-pooling after it.

    Its weights are another's. Where torch's autocast is on, torch computes it.
    """

    multiplied = torch.float32

    def __init__(self, layer: nn.Conv2d, kernels: CpuKernels) -> None:
        super().__init__(
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,  # type: ignore[arg-type]
            padding=layer.padding,  # type: ignore[arg-type]
            bias=layer.bias is not None,
            device="meta",
        )
        self.weight, self.bias, self.kernels = layer.weight, layer.bias, kernels

    def takes(self, x: Tensor) -> bool:
        """Whether ``x`` ``[N, C, H, W]`` goes this way."""
        return _float32(x) and max(x.shape[2:]) <= LARGEST_SIDE

    def forward(self, x: Tensor, relu: bool = False, pool: bool = False) -> Tensor:
        """``[N, C, H, W]`` -> ``[N, K, H', W']``."""
        if not self.takes(x):
            return followed(super().forward(x), relu, None, pool)
        kind: Any = _First if self._first(x, pool) else _Few
        out: Tensor = kind.apply(x, self.weight, self.bias, self, After(relu, pool))
        return out

    def _first(self, x: Tensor, pool: bool) -> bool:
        """Whether vectors are filled with channels: of the first layer, whose outputs are not pooled."""
        return not (pool or x.requires_grad) and self.out_channels % CHANNELS == 0

    def gradients(
        self, x: Tensor, e: Tensor, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """From ``e`` ``[N, K, H', W']``, the convolution's gradient: those of ``x`` and the weights."""
        laid = Laid(self.kernels.laid(x, *self.sides))
        return self.kernels.few_channels_backward(e, self.weight, self.sides, After(), laid, wanted)[:2]

    @property
    def sides(self) -> tuple[int, int]:
        """The padding above and to the left."""
        assert not isinstance(self.padding, str)
        top, left = self.padding
        return top, left


class PooledConvolution(Convolution):
    """A convolution of more channels by `CpuKernels`, with the 2 x 2 max-pooling, and ReLU, after it.

    Where nothing is pooled it is a `Convolution`, or torch's.
    """

    def __init__(self, layer: nn.Conv2d, kernels: CpuKernels) -> None:
        super().__init__(layer, kernels, torch.float32)
        self.whole = compilable(layer)

    def takes(self, x: Tensor) -> bool:
        """Whether ``x`` goes by `Convolution` where nothing is pooled."""
        return self.whole and super().takes(x)

    def forward(self, x: Tensor, relu: bool = False, pool: bool = False) -> Tensor:
        """``[N, C, H, W]`` -> ``[N, K, H', W']``."""
        if not pool or not _float32(x):
            return followed(super().forward(x), relu, None, pool)
        out: Tensor = _Pool.apply(x, self.weight, self.bias, self, relu)
        return out


class GroupNorm(nn.GroupNorm):
    """GroupNorm in channels-last memory, with what comes after it: nothing, a ReLU, or a sum and a ReLU.

    Its scale and shift are another's. It multiplies float32 also where its images are bfloat16.
    """

    def __init__(self, layer: nn.GroupNorm, kernels: CpuKernels, multiplied: torch.dtype) -> None:
        super().__init__(layer.num_groups, layer.num_channels, layer.eps, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.kernels, self.multiplied = kernels, multiplied

    def takes(self, x: Tensor, added: Tensor | None = None) -> bool:
        """Whether ``x`` ``[N, C, H, W]``, and what is added, goes this way."""
        if not taken(x) or x.ndim != 4:
            return False
        return added is None or (taken(added) and added.shape == x.shape)

    def forward(self, x: Tensor, relu: bool = False, added: Tensor | None = None) -> Tensor:
        """``[N, C, H, W]``, in and out."""
        if not self.takes(x, added):
            return followed(super().forward(x), relu, added)
        out: Tensor = _Normalise.apply(x, self.weight, self.bias, added, relu, self)
        return out

    def normalise(self, ctx: Any, x: Tensor, relu: bool, added: Tensor | None) -> Tensor:
        """The output, with what `gradients` needs left on an autograd function's ``ctx``."""
        x, added = entering(x), None if added is None else entering(added)
        out, mean, rstd = self.kernels.group_norm(
            x, self.weight, self.bias, self.num_groups, self.eps, relu, added
        )
        ctx.save_for_backward(x, mean, rstd, *([] if added is None else [out]))
        ctx.relu = relu
        return out

    def gradients(self, ctx: Any, e: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """As `CpuKernels.group_norm_backward`."""
        x, mean, rstd, *out = ctx.saved_tensors
        return self.kernels.group_norm_backward(x, e, self.weight, self.bias, mean, rstd, ctx.relu, *out)


def followed(x: Tensor, relu: bool, added: Tensor | None, pool: bool = False) -> Tensor:
    """What comes after a norm or a convolution, by torch."""
    x = x if added is None else x + added
    x = x.relu() if relu else x
    return F.max_pool2d(x, 2) if pool else x


def _float32(x: Tensor) -> bool:
    """Whether these are images that are multiplied as float32, on a CPU."""
    plain = x.device.type == "cpu" and x.dtype == torch.float32 and x.ndim == 4 and x.numel() > 0
    return plain and not torch.is_autocast_enabled("cpu")


def taken(x: Tensor) -> bool:
    """Whether these images are of a kind that the compiled layers know."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)


def entering(x: Tensor) -> Tensor:
    """Images as a compiled layer takes them: where torch's autocast is on, in bfloat16."""
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


class _Few(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: FewChannels, after: After
    ) -> Tensor:
        out, laid = layer.kernels.few_channels(x, weight, bias, layer.sides, after)
        ctx.save_for_backward(weight, *laid)
        ctx.layer, ctx.after = layer, after
        return out

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor | None, ...]:
        weight, *laid = ctx.saved_tensors
        layer, wanted = ctx.layer, ctx.needs_input_grad
        dx, dw, db = layer.kernels.few_channels_backward(
            e, weight, layer.sides, ctx.after, Laid(*laid), (wanted[0], wanted[1] or wanted[2])
        )
        return dx, dw, db if wanted[2] else None, None, None


class _First(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: FewChannels, after: After
    ) -> Tensor:
        out, images = layer.kernels.first(x, weight, bias, layer.sides, after.relu)
        ctx.save_for_backward(weight, images, out)
        ctx.layer, ctx.after = layer, after
        return out

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor | None, ...]:
        weight, images, out = ctx.saved_tensors
        dw, db = ctx.layer.kernels.first_backward(images, e, out, weight, ctx.after.relu)
        return None, dw, db if ctx.needs_input_grad[2] else None, None, None


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: PooledConvolution, relu: bool
    ) -> Tensor:
        sides = layer.form.top, layer.form.left
        out, laid = layer.kernels.pooled(x, weight, bias, sides, relu)
        ctx.save_for_backward(weight, laid.images, laid.places)
        ctx.layer, ctx.sides = layer, sides
        return out

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor | None, ...]:
        weight, images, places = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        dx, dw, db = ctx.layer.kernels.pooled_backward(
            e, weight, ctx.sides, Laid(images, None, places), (wanted[0], wanted[1] or wanted[2])
        )
        return dx, dw, db if wanted[2] else None, None, None


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, added: Tensor | None, relu: bool, layer: GroupNorm
    ) -> Tensor:
        ctx.layer = layer
        return layer.normalise(ctx, x, relu, added)

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor | None, ...]:
        dx, scale, shift, dz = ctx.layer.gradients(ctx, e)
        return dx, scale.sum(0), shift.sum(0), dz, None, None


def kernels_for(model: ImageClassifier) -> CpuKernels | None:
    """The compiled functions; None on a GPU, for a network that gains nothing by them, or, with a line on the
    screen, where they cannot be compiled."""
    if model.mean.device.type != "cpu" or not gains(model.trained_part):
        return None
    try:
        return checked()
    except Unavailable as reason:
        print(f"convolutions are torch's own, which are slower: {reason}", file=sys.stderr)
        return None


class CpuLayers(NamedTuple):
    """The compiled functions, and the table's row of what they do in a network."""

    kernels: CpuKernels
    row: Row

    def replaced(self, network: nn.Module, side: int = 0) -> nn.Module:
        """The network in channels-last memory, with modules of here for the layers that the row has compiled.

        It shares parameters and all other layers with ``network``, which is of no further use. ``side``: of
        its images, in pixels.
        """
        network.to(memory_format=torch.channels_last)
        normed = any(isinstance(m, nn.GroupNorm | FrozenStatisticsBatchNorm2d) for m in network.modules())
        for name, layer in list(network.named_modules()):
            kind = kind_of(layer)
            dense = self._dense(layer)
            if dense is not None:
                if layer is network:
                    return dense
                network.set_submodule(name, dense)
                continue
            if kind is None or self.row.way(kind).by != "compiled" or not compilable(layer):
                continue
            # a norm would have the images in channels-last memory again
            if few(layer) and (normed or side > LARGEST_SIDE):
                continue
            multiplied = self.row.way(kind).format
            made: nn.Module
            if isinstance(layer, nn.GroupNorm):
                made = GroupNorm(layer, self.kernels, multiplied)
            elif few(layer):  # by torch in bfloat16
                made = FewChannels(layer, self.kernels)
            else:
                made = Convolution(layer, self.kernels, multiplied)
            if layer is network:
                return made
            network.set_submodule(name, made)
        return joined(network, GroupNorm, FewChannels, Linear, self._pooled)

    def _dense(self, layer: nn.Module) -> nn.Module | None:
        if type(layer) is KeyedDropout:
            return Dropout(layer, self.kernels)
        if type(layer) is nn.Linear and self.row.way("linear").by == "compiled":
            return Linear(layer, self.kernels)
        return None

    def _pooled(self, layer: nn.Module) -> nn.Module | None:
        """What stands for a convolution whose outputs are pooled, if it is another module."""
        if not poolable(layer) or self.row.way("other convolutions") != FLOAT32.convolution:
            return None
        return PooledConvolution(layer, self.kernels)


def gains(network: nn.Module) -> bool:
    """Whether `CpuLayers.replaced` makes a network faster: by a compiled layer, or by channels-last memory.

    In that memory torch's convolutions and pooling are faster (by a tenth of a step of `cifar_cnn`), but its
    GroupNorm is slower: where nothing but convolutions of few channels is compiled, the norms decide.
    """
    layers = list(network.modules())
    norms = any(isinstance(layer, nn.GroupNorm) for layer in layers)
    convolutions = any(isinstance(layer, nn.Conv2d) for layer in layers)
    return any(compilable(layer) and not few(layer) for layer in layers) or (convolutions and not norms)


def layers_for(kernels: CpuKernels | None, precision: torch.dtype | None) -> CpuLayers | None:
    """What is compiled for training in this type, None being float32; None without compiled functions."""
    return None if kernels is None else CpuLayers(kernels, chosen(precision, kernels.feature))


def compilable(layer: nn.Module) -> bool:
    """Whether there is a module of here that does what this layer of torch's does."""
    if type(layer) is nn.GroupNorm:
        return layer.affine and layer.num_channels % CHANNELS == 0
    if few(layer):
        return True
    if not _plain(layer):
        return False
    small = max(layer.kernel_size) <= 3  # torch is faster with larger ones
    return small and layer.in_channels % CHANNELS == 0 and layer.out_channels % CHANNELS == 0


def few(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether a convolution has so few channels that vectors are better filled with images."""
    if not _plain(layer) or layer.stride != (1, 1) or layer.kernel_size == (1, 1):
        return False
    return min(layer.in_channels, layer.out_channels) < FEW


def poolable(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether a convolution, of which few channels are not thought of, can be `PooledConvolution`."""
    plain = type(layer) is Convolution or _plain(layer)
    return plain and layer.stride == (1, 1) and layer.out_channels >= FEW  # type: ignore[union-attr, return-value]


def _plain(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    if type(layer) is not nn.Conv2d or isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        return False
    return layer.groups == 1 and layer.dilation == (1, 1) and layer.stride[0] == layer.stride[1]
