"""A network's convolutions and norms done by `kernels`, where these are faster than torch's.

Shape letters: N images, C channels in, K channels out, H and W positions.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pfl_ext.engine.cpu.kernels import CHANNELS, CpuKernels, Form, Unavailable
from pfl_ext.models.classifier import ImageClassifier

SUMS = {operator.add, operator.iadd, torch.add, "add", "add_"}
RELUS = {nn.ReLU, F.relu, torch.relu, torch.relu_, "relu", "relu_"}


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
        few = self.in_channels < CHANNELS  # whose images' gradient is torch's to find
        return taken(x, self.kernels) and not (few and x.requires_grad)

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


class MaxPool(nn.MaxPool2d):
    """Max pooling by `CpuKernels`."""

    kernels: CpuKernels

    @property
    def form(self) -> Form:
        """What `CpuKernels` must know."""
        (high, wide), (top, left) = _pair(self.kernel_size), _pair(self.padding)
        return Form(high, wide, _pair(self.stride)[0], top, left)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, C, H, W]`` -> ``[N, C, H', W']``."""
        if not (taken(x, self.kernels) and x.ndim == 4 and x.shape[1] % CHANNELS == 0):
            return super().forward(x)  # type: ignore[no-any-return]
        out: Tensor = _Pool.apply(entering(x), self)
        return out


class GroupNorm(nn.GroupNorm):
    """GroupNorm in channels-last memory, with what comes after it: nothing, a ReLU, or a sum and a ReLU."""

    kernels: CpuKernels

    def takes(self, x: Tensor, added: Tensor | None = None) -> bool:
        """Whether ``x`` ``[N, C, H, W]``, and what is added, goes this way."""
        if not taken(x, self.kernels) or x.ndim != 4:
            return False
        return added is None or (taken(added, self.kernels) and added.shape == x.shape)

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


def followed(x: Tensor, relu: bool, added: Tensor | None) -> Tensor:
    """What comes after a norm, by torch."""
    x = x if added is None else x + added
    return x.relu() if relu else x


def taken(x: Tensor, kernels: CpuKernels) -> bool:
    """Whether these images are of a kind that the compiled layers know."""
    known = x.dtype == torch.float32 or (x.dtype == torch.bfloat16 and kernels.has_halves)
    return x.device.type == "cpu" and known and (kernels.has_halves or not torch.is_autocast_enabled("cpu"))


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


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: MaxPool) -> Tensor:
        out, places = layer.kernels.max_pool(x, layer.form)
        ctx.save_for_backward(places)
        ctx.layer, ctx.form, ctx.size = layer, layer.form, x.shape
        return out

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor, None]:
        return ctx.layer.kernels.max_pool_backward(e, *ctx.saved_tensors, ctx.form, ctx.size), None


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
    """What does this network's convolutions faster; None on a GPU, where there are none that it can do, or,
    with a line on the screen, where it cannot be compiled."""
    if model.mean.device.type != "cpu" or Convolution not in map(_kind, model.backbone.modules()):
        return None
    try:
        return CpuKernels()
    except Unavailable as reason:
        print(f"convolutions are torch's own, which are slower: {reason}", file=sys.stderr)
        return None


def arithmetic(kernels: CpuKernels | None, precision: torch.dtype | None) -> str:
    """How training in this type is computed where these kernels can be had: the type, and whose layers.

    A ``precision`` of None is float32.
    """
    chosen = precision
    if kernels is not None:
        kernels, chosen = kernels.at(precision)
    kind = "float32" if chosen is None else str(chosen).removeprefix("torch.")
    if kernels is None:
        return f"{kind}, torch's layers"
    slow = precision is not None and chosen is None
    return f"{kind}, compiled layers" + (", as this processor is slow in lower precision" if slow else "")


def take_over(network: nn.Module, kernels: CpuKernels) -> None:
    """Make every layer of ``network`` that `CpuKernels` can do one of these, in channels-last memory.

    Norms take over the sums and ReLUs that follow them, where the network's forward can be written down as
    a graph.
    """
    network.to(memory_format=torch.channels_last)
    for layer in network.modules():
        kind = _kind(layer)
        if kind is not None:
            layer.__class__, layer.kernels = kind, kernels  # type: ignore[assignment]
    _join(network)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not list(m.children())


def _join(network: nn.Module) -> None:
    """Have norms do the sums and ReLUs after them that nothing else sees."""
    try:
        graph = _Tracer().trace(network)
    except Exception:  # whatever fx, or the network's own forward, makes of inputs without values
        return
    layers = dict(network.named_modules())

    def kind(node: fx.Node) -> Any:
        return type(layers[str(node.target)]) if node.op == "call_module" else node.target

    found = False
    for norm in [node for node in graph.nodes if kind(node) is GroupNorm]:
        after, added = [*norm.users], None
        if len(after) == 1 and kind(after[0]) in SUMS and _plain_sum(after[0]):
            added = next(node for node in after[0].all_input_nodes if node is not norm)
            after = [after[0], *after[0].users]
        if len(after) == 1 + (added is not None) and kind(after[-1]) in RELUS:
            with graph.inserting_before(after[-1]):
                joined = graph.call_module(str(norm.target), norm.args, {"relu": True, "added": added})
            after[-1].replace_all_uses_with(joined)
            for node in (*after[::-1], norm):
                graph.erase_node(node)
            found = True
    if found:
        forward = type(fx.GraphModule(network, graph)).forward
        network.__class__ = type(type(network).__name__, (type(network),), {"forward": forward})


def _plain_sum(node: fx.Node) -> bool:
    return len(node.args) == 2 == len(node.all_input_nodes) and not node.kwargs


def _kind(layer: nn.Module) -> type[Convolution | GroupNorm | MaxPool] | None:
    if type(layer) is nn.GroupNorm:
        return GroupNorm if layer.affine and layer.num_channels % CHANNELS == 0 else None
    if type(layer) is nn.MaxPool2d:
        (high, wide), strides = _pair(layer.kernel_size), _pair(layer.stride)
        odd = layer.ceil_mode or layer.return_indices or _pair(layer.dilation) != (1, 1) or high * wide > 255
        return MaxPool if strides[0] == strides[1] and not odd else None
    if type(layer) is not nn.Conv2d or isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        return None
    plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.stride[0] == layer.stride[1]
    small = max(layer.kernel_size) <= 3  # with larger ones torch was the faster
    images = layer.in_channels < CHANNELS or (layer.in_channels % CHANNELS == 0 and small)
    return Convolution if plain and images and layer.out_channels % CHANNELS == 0 else None


def _pair(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else value
