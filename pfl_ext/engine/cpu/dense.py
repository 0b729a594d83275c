"""Modules that compute linear layers and dropout by `kernels`.

Shape letters: N images, C values in, K values out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pfl_ext.data.transforms import KEY_BITS
from pfl_ext.engine.cpu.kernels import CpuKernels, is_float32
from pfl_ext.models.dropout import KeyedDropout, check_rows, keys_of_images

FEW_IMAGES = 16
"""Largest size up to which a linear layer is compiled; torch is as fast for larger ones."""


@dataclass
class Room:
    """Memory for the gradient of a large weight, which every step reuses.

    Allocating it in each step would take as long as the products.
    """

    gradient: Tensor
    after: Tensor | None = None
    """The weights after a step of gradient descent are written here; it may be the weights themselves. Then
    ``gradient`` is not written, and ``done`` is set."""
    rate: float = 0.0
    """Learning rate of that step."""
    done: bool = False


_ROOMS: ContextVar[Mapping[int, Room] | None] = ContextVar("where gradients of weights go", default=None)


@contextlib.contextmanager
def gradients_into(rooms: Mapping[int, Room]) -> Iterator[None]:
    """In this context and thread, linear layers write the gradients of their weights into ``rooms``.

    Args:
        rooms: by ``id`` of the parameter; their tensors are contiguous.
    """
    token = _ROOMS.set(rooms)
    try:
        yield
    finally:
        _ROOMS.reset(token)


class Linear(nn.Linear):
    """A linear layer by `CpuKernels`, with the ReLU after it. It shares the weights of ``layer``."""

    multiplied = torch.float32

    def __init__(self, layer: nn.Linear, kernels: CpuKernels) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias, self.kernels = layer.weight, layer.bias, kernels

    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        """``[N, C]`` -> ``[N, K]``."""
        if not is_float32(x) or x.ndim != 2:
            out = super().forward(x)
            return out.relu() if relu else out
        done: Tensor = _Linear.apply(x, self.weight, self.bias, self, relu)
        return done


class Dropout(KeyedDropout):
    """Dropout by `CpuKernels`, with the same bits as `KeyedDropout`."""

    def __init__(self, layer: KeyedDropout, kernels: CpuKernels) -> None:
        super().__init__(layer.p, layer.number, layer.wide)
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """``[N, ...]`` -> the same shape."""
        keys = keys_of_images()
        if keys is None or not self.p or not is_float32(x) or x.ndim < 2:
            return super().forward(x)
        check_rows(keys, x)
        out: Tensor = _Drop.apply(x, keys, self)
        return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Linear, relu: bool
    ) -> Tensor:
        out = linear(layer.kernels, x, weight, bias, relu)
        ctx.save_for_backward(x, weight, *([out] if relu else []))
        ctx.kernels, ctx.room = layer.kernels, (_ROOMS.get() or {}).get(id(layer.weight))
        return out

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *out = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        relu = out[0] if out else None
        return (*linear_backward(ctx.kernels, x, e, weight, relu, wanted, ctx.room), None, None)


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, layer: Dropout) -> Tensor:
        ctx.layer, ctx.keys = layer, keys
        return dropped(layer.kernels, x, keys, layer.p, layer.number, layer.wide)

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor | None, ...]:
        layer = ctx.layer
        return dropped(layer.kernels, e, ctx.keys, layer.p, layer.number, layer.wide), None, None


def linear(kernels: CpuKernels, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """``[N, C]`` by ``[K, C]`` -> ``[N, K]``, with a ReLU if ``relu`` is set."""
    x, weight = x.detach().contiguous(), weight.detach().contiguous()
    if len(x) > FEW_IMAGES:
        out = x @ weight.t() if bias is None else torch.addmm(bias.detach(), x, weight.t())
        return out.relu_() if relu else out
    out = torch.empty(len(x), len(weight))
    kernels.call("linear_layer", (x, weight, bias, out), len(x), x.shape[1], len(weight), relu)
    return out


def linear_backward(
    kernels: CpuKernels,
    x: Tensor,
    e: Tensor,
    weight: Tensor,
    out: Tensor | None,
    wanted: Sequence[bool],
    room: Room | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of ``x``, weights and bias, each if wanted, from the output's gradient.

    Args:
        x: ``[N, C]``.
        e: the output's gradient, ``[N, K]``.
        weight: ``[K, C]``.
        out: the output of `linear`, if it had a ReLU.
        wanted: which of the three gradients to compute.
        room: memory for the gradient of the weights, or for the weights after a step.
    """
    x, weight = x.detach().contiguous(), weight.detach().contiguous()
    (n, c), k = x.shape, len(weight)
    e = e.detach().contiguous()
    if out is not None:
        e = torch.ops.aten.threshold_backward(e, out, 0)
    dx = torch.empty_like(x) if wanted[0] else None
    dw = (torch.empty_like(weight) if room is None else room.gradient) if wanted[1] else None
    if n <= FEW_IMAGES:
        target, rate = dw, 0.0
        if room is not None and room.after is not None and dw is not None:
            target, rate, room.done = room.after, room.rate, True
        kernels.call("linear_gradients", (x, e, weight, dx, target), n, c, k, target is not dw, rate)
        return dx, dw, e.sum(0) if wanted[2] else None
    if dx is not None:
        torch.mm(e, weight, out=dx)
    if dw is not None:
        torch.mm(e.t(), x, out=dw)
    return dx, dw, e.sum(0) if wanted[2] else None


def dropped(kernels: CpuKernels, x: Tensor, keys: Tensor, p: float, number: int, wide: int) -> Tensor:
    """The output of a `pfl_ext.models.dropout.KeyedDropout` with these properties, for the images' keys."""
    x, n, units, places = x.detach(), len(x), x.shape[1], x[0, 0].numel()
    last = x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    if not last:
        x = x.contiguous()
    if last and wide:  # the layout that the next layer takes
        sizes, out = (places, units, units, 1), torch.empty_like(x)
    else:  # after dropout of single elements comes a linear layer
        sizes, out = (units, places, *((1, units) if last else (places, 1))), torch.empty(x.shape)
    of_units = (places, 1, 0)[wide]
    of_places = (1, 0, 0)[wide]
    of = (of_places, of_units) if last and wide else (of_units, of_places)
    least, factor = round(p * (1 << KEY_BITS)), 0.0 if p == 1 else 1 / (1 - p)
    kernels.call("drop_units", (x, keys, out), n, *sizes, number, least, *of, factor)
    return out
