"""A network on a GPU in half precision: channels-last memory, with norms that keep it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from pfl_ext.engine.cpu.joining import joined
from pfl_ext.engine.layout import Layout
from pfl_ext.engine.norms import JoiningNorm

if TYPE_CHECKING:
    from pfl_ext.engine.gpu_steps import Steps


class GroupNorm(JoiningNorm):
    """`JoiningNorm` by `gpu_kernels`. Sums are float32; images keep the convolutions' type."""

    multiplied = torch.float32

    def takes(self, x: Tensor, added: Tensor | None = None) -> bool:
        """Whether this layer computes ``x`` ``[N, C, H, W]`` and ``added`` itself; torch computes float32."""
        if type(x) is not Tensor or not x.is_cuda or x.ndim != 4 or x.dtype != torch.bfloat16:
            return False
        return added is None or (added.dtype == x.dtype and added.shape == x.shape)

    def normalise(self, ctx: Any, x: Tensor, relu: bool, added: Tensor | None) -> Tensor:
        """The output. What `gradients` needs is saved on an autograd function's ``ctx``."""
        from pfl_ext.engine.gpu_kernels import group_norm  # Triton exists only with CUDA

        x, added = _there(x), None if added is None else _there(added)
        out, mean, rstd = group_norm(x, self.weight, self.bias, self.num_groups, self.eps, relu, added)
        ctx.save_for_backward(x, mean, rstd, *([] if added is None else [out]))
        ctx.relu = relu
        return out

    def gradients(self, ctx: Any, e: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of ``x``, of each image's scale and shift ``[N, C]`` float32, and of ``added``."""
        from pfl_ext.engine.gpu_kernels import group_norm_backward

        x, mean, rstd, *out = ctx.saved_tensors
        return group_norm_backward(x, _there(e), self.weight, self.bias, mean, rstd, ctx.relu, *out)

    def over_images(self, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Both, summed over the images: ``[C]`` each."""
        from pfl_ext.engine.gpu_kernels import over_images

        return over_images(scale, shift)


def _there(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


class GpuLayers(NamedTuple):
    """The layers for training in this type of torch's autocast on a GPU."""

    autocast: torch.dtype

    def replaced(self, network: nn.Module, side: int = 0) -> nn.Module:
        """The network in channels-last memory, which suits convolutions in half precision, with `GroupNorm`.

        It shares parameters and all other layers with ``network``, which must not be used any more.
        """
        network.to(memory_format=torch.channels_last)
        if not has_triton():
            return network
        for name, layer in list(network.named_modules()):
            if type(layer) is nn.GroupNorm and layer.affine:
                if layer is network:
                    return GroupNorm(layer)
                network.set_submodule(name, GroupNorm(layer))
        return joined(network, GroupNorm, _Nothing, _Nothing)


class _Nothing(nn.Module):
    """A type that no layer has, so that nothing is joined to it."""


def steps_for(layout: Layout, are_short: Sequence[bool]) -> Steps | None:
    """SGD steps in few launches on a GPU; None where torch's operations make them, variable by variable.

    Args:
        are_short: which variables' gradients are of a shorter type.
    """
    on_gpu = layout.device.type == "cuda" and type(layout.zeros()) is Tensor  # not on one that is pretended
    if not (on_gpu and has_triton() and 0 < layout.num_parameters < 2**31):
        return None
    from pfl_ext.engine.gpu_steps import Steps

    return Steps(layout, are_short)


def has_triton() -> bool:
    """Whether there is Triton, which exists only with CUDA."""
    return importlib.util.find_spec("triton") is not None
