"""Modules that do linear layers and dropout by `kernels`.

Shape letters: N images, C values in, K values out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from pfl_ext.engine.cpu.kernels import CpuKernels, Room
from pfl_ext.models.dropout import KeyedDropout, keys_of_images

_ROOMS: ContextVar[Mapping[int, Room]] = ContextVar("where gradients of weights go", default={})


@contextlib.contextmanager
def gradients_into(rooms: Mapping[int, Room]) -> Iterator[None]:
    """Within, in this thread, linear layers write the gradients of their weights there.

    Args:
        rooms: by ``id`` of the parameter; each tensor in it is contiguous.
    """
    token = _ROOMS.set(rooms)
    try:
        yield
    finally:
        _ROOMS.reset(token)


class Linear(nn.Linear):
    """A linear layer by `CpuKernels`, with the ReLU after it. Its weights are another's."""

    multiplied = torch.float32

    def __init__(self, layer: nn.Linear, kernels: CpuKernels) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias, self.kernels = layer.weight, layer.bias, kernels

    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        """``[N, C]`` -> ``[N, K]``."""
        if not _plain(x) or x.ndim != 2:
            out = super().forward(x)
            return out.relu() if relu else out
        done: Tensor = _Linear.apply(x, self.weight, self.bias, self, relu)
        return done


class Dropout(KeyedDropout):
    """Dropout by `CpuKernels`; it drops what `KeyedDropout` does, bit by bit."""

    def __init__(self, layer: KeyedDropout, kernels: CpuKernels) -> None:
        super().__init__(layer.p, layer.number, layer.wide)
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """``[N, ...]`` -> the same shape."""
        keys = keys_of_images()
        if keys is None or not self.p or not _plain(x):
            return super().forward(x)
        assert len(keys) == len(x), "a key for each image"
        out: Tensor = _Drop.apply(x, keys, self)
        return out


def _plain(x: Tensor) -> bool:
    """Whether these are numbers that are multiplied as float32, on a CPU."""
    plain = x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0
    return plain and not torch.is_autocast_enabled("cpu")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Linear, relu: bool
    ) -> Tensor:
        out = layer.kernels.linear(x, weight, bias, relu)
        ctx.save_for_backward(x, weight, *([out] if relu else []))
        ctx.kernels, ctx.room = layer.kernels, _ROOMS.get().get(id(layer.weight))
        return out

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *out = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        relu = out[0] if out else None
        return (*ctx.kernels.linear_backward(x, e, weight, relu, wanted, ctx.room), None, None)


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, layer: Dropout) -> Tensor:
        ctx.layer, ctx.keys = layer, keys
        return layer.kernels.dropped(x, keys, layer.p, layer.number, layer.wide)

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor | None, ...]:
        layer = ctx.layer
        return layer.kernels.dropped(e, ctx.keys, layer.p, layer.number, layer.wide), None, None
