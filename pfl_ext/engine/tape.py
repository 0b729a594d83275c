"""One pass through a network for many users at once, which yields every user's own gradient.

All users share the weights here, so forward and the gradients of activations are ordinary dense work on one
large batch. Only the product of each layer's input and output gradient is formed for each user (Goodfellow
2015, arXiv 1510.01799; Rochette et al. 2019, arXiv 1912.06015). A layer's inputs and output gradients go to a
`Tape`. A `Gradient` made of them computes the norm of each user's gradient and any weighted sum of gradients.
The norms of layers with few positions come from Gram matrices, without computing gradients ("ghost norms": Li
et al. 2022, arXiv 2110.05679; Bu et al. 2022, arXiv 2205.10683).

Shape letters: B images of all users one after another, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from pfl_ext.engine.cpu.convolutions import followed
from pfl_ext.engine.gradients import Explicit, Gradient, Users, Weight, convolution_backward
from pfl_ext.engine.layout import in_same_memory
from pfl_ext.engine.norms import JoiningNorm
from pfl_ext.models.classifier import FrozenStatisticsBatchNorm2d


@dataclass
class Tape:
    """Receives the gradients of one pass, variable by variable, in the order of backward."""

    users: Users
    on_gradient: Callable[[str, Gradient], None]
    """Is called with (name of a variable, its `Gradient`) as soon as that is known."""
    trained: frozenset[str]
    """Names of the variables whose gradients are wanted; for a layer this may be only its bias."""

    def put(self, layer: nn.Module, name: str, gradient: Gradient) -> None:
        """Pass a gradient on under its full name, if it is wanted."""
        full = f"{layer.tape_name}.{name}"
        if full in self.trained:
            self.on_gradient(full, gradient)


class _Layer(torch.autograd.Function):
    """A layer whose backward returns its input's gradient and puts its weights' gradient on the tape."""

    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        x: Tensor,
        layer: nn.Module,
        net: TapedNetwork,
        relu: bool,
        added: Tensor | None,
    ) -> Tensor:
        ctx.layer, ctx.net = layer, net
        ctx.joined = False
        if joins(layer, x, added):
            ctx.joined = True
            return layer.normalise(ctx, x, relu, added)
        if isinstance(layer, nn.GroupNorm):
            return _group_norm(ctx, x, layer)
        ctx.save_for_backward(x)
        out: Tensor = type(layer).forward(layer, x)
        return out

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor | None, ...]:
        layer, tape = ctx.layer, ctx.net.tape
        dx: Tensor | None
        dz = None
        with torch.no_grad():
            if ctx.joined:
                dx, scale, shift, dz = layer.gradients(ctx, e)
                _put_norm(layer, tape, scale, shift)
            elif isinstance(layer, nn.GroupNorm):
                dx = _group_norm_backward(ctx, e, layer, tape)
            elif isinstance(layer, FrozenStatisticsBatchNorm2d):
                dx = _frozen_backward(ctx, e, layer, tape)
            else:
                dx = _linear_backward(ctx, e, layer, tape)
        return None, dx, None, None, None, dz


def joins(layer: nn.Module, x: Tensor, added: Tensor | None = None) -> TypeGuard[JoiningNorm]:
    """Whether this layer computes itself what follows it."""
    return isinstance(layer, JoiningNorm) and layer.takes(x, added)


def _put_norm(layer: nn.Module, tape: Tape, scale: Tensor, shift: Tensor) -> None:
    tape.put(layer, "weight", Explicit(tape.users.sums(scale)))
    tape.put(layer, "bias", Explicit(tape.users.sums(shift)))


def _linear_backward(ctx: Any, e: Tensor, layer: nn.Conv2d | nn.Linear, tape: Tape) -> Tensor | None:
    (x,) = ctx.saved_tensors
    dx = None
    if ctx.needs_input_grad[1]:
        if isinstance(layer, nn.Linear):
            dx = (e @ layer.weight.to(e.dtype)).to(x.dtype)
        else:
            dx = convolution_backward(layer, x, e, (True, False))[0].to(x.dtype)
    tape.put(layer, "weight", Weight(layer, x, e, tape.users))
    if layer.bias is not None:
        channel = e.ndim - 1 if isinstance(layer, nn.Linear) else 1
        other = [i for i in range(1, e.ndim) if i != channel]
        per_image = e.float().sum(other) if other else e.float()
        tape.put(layer, "bias", Explicit(tape.users.sums(per_image)))
    return dx


def _group_norm(ctx: Any, x: Tensor, layer: nn.GroupNorm) -> Tensor:
    if x.device.type != "cpu":
        if torch.is_autocast_enabled(x.device.type):
            x = x.float()  # as under autocast
        x = x.contiguous()  # torch's norm takes no other layout there
    (n, c), size = x.shape[:2], x.shape[2:].numel()
    out, mean, rstd = torch.native_group_norm(
        x, layer.weight, layer.bias, n, c, size, layer.num_groups, layer.eps
    )
    ctx.save_for_backward(x, mean, rstd)
    normal: Tensor = out
    return normal


def _group_norm_backward(ctx: Any, e: Tensor, layer: nn.GroupNorm, tape: Tape) -> Tensor:
    x, mean, rstd = ctx.saved_tensors
    (n, c), size = x.shape[:2], x.shape[2:].numel()
    e = e.to(x.dtype).contiguous(memory_format=_format(x))
    dx: Tensor = torch.ops.aten.native_group_norm_backward(
        e, x, mean, rstd, layer.weight, n, c, size, layer.num_groups, [True, False, False]
    )[0]
    shift, wide = _over_positions(e.float()), c // layer.num_groups
    centre, factor = (t.float().repeat_interleave(wide, 1) for t in (mean, rstd))
    _put_norm(layer, tape, (_products(e, x) - centre * shift) * factor, shift)
    return dx


def _frozen_backward(ctx: Any, e: Tensor, layer: FrozenStatisticsBatchNorm2d, tape: Tape) -> Tensor | None:
    (x,) = ctx.saved_tensors
    rstd = (layer.running_var + layer.eps).rsqrt()
    sums, products = _over_positions(e.float()), _products(e, x)
    _put_norm(layer, tape, (products - layer.running_mean * sums) * rstd, sums)
    if not ctx.needs_input_grad[1]:
        return None
    factor = (layer.weight * rstd).view(-1, *(1 for _ in e.shape[2:]))
    return (e * factor.to(e.dtype)).to(x.dtype)


def _products(e: Tensor, x: Tensor) -> Tensor:
    """``sum over positions of e x``: ``[B, C]`` float32."""
    return _over_positions(e.float() * x.float())


def _over_positions(x: Tensor) -> Tensor:
    """The sums ``[B, C]`` over the positions of ``x`` ``[B, C, ...]``; a vector of features has one."""
    return x.reshape(*x.shape[:2], -1).sum(2)


def _format(x: Tensor) -> torch.memory_format:
    if x.is_contiguous() or not x.is_contiguous(memory_format=torch.channels_last):
        return torch.contiguous_format
    return torch.channels_last


def _trained(layer: nn.Module) -> bool:
    """Whether the layer itself (without submodules) has trained parameters."""
    return any(p.requires_grad for p in layer.parameters(recurse=False))


KINDS = (nn.Conv2d, nn.Linear, nn.GroupNorm, FrozenStatisticsBatchNorm2d)


class TapedNetwork:
    """A copy of a classifier's backbone that shares its weights, with every trained layer on a tape."""

    def __init__(self, backbone: nn.Module) -> None:
        self.backbone = in_same_memory(backbone).requires_grad_(False)
        self.tape: Tape | None = None
        device = next(backbone.parameters()).device
        self._token = torch.zeros((), device=device, requires_grad=True)
        self._trained = frozenset(name for name, p in backbone.named_parameters() if p.requires_grad)
        frozen = {name for name, layer in backbone.named_modules() if not _trained(layer)}
        for name, layer in self.backbone.named_modules():
            if isinstance(layer, KINDS) and name not in frozen:
                layer.tape_name = name
                layer.forward = partial(self._forward, layer)  # type: ignore[method-assign]

    def _forward(
        self,
        layer: nn.Module,
        x: Tensor,
        relu: bool = False,
        added: Tensor | None = None,
        pool: bool = False,
    ) -> Tensor:
        if joins(layer, x, added):
            out: Tensor = _Layer.apply(self._token, x, layer, self, relu, added)
            return out
        return followed(_Layer.apply(self._token, x, layer, self, False, None), relu, added, pool)

    def run(
        self,
        x: Tensor,
        image_losses: Callable[[Tensor], Tensor],
        users: Users,
        shares: Tensor,
        on_gradient: Callable[[str, Gradient], None],
        autocast: Any,
    ) -> Tensor:
        """Pass the gradients of ``sum_i shares[i] loss_i`` to ``on_gradient``, one variable after another.

        Returns the losses ``[B]``.

        ``x`` is ``[B, 3, S, S]``. ``image_losses`` computes the losses ``[B]`` of the outputs, each from its
        own image alone. ``shares`` ``[B]`` float32 are computed from each user's own batch.
        """
        self.tape = Tape(users, on_gradient, self._trained)
        try:
            with torch.enable_grad(), autocast:
                outputs = self.backbone(x)
            with torch.enable_grad():
                losses = image_losses(outputs)
                total = (losses * shares).sum()
            torch.autograd.backward([total])
            return losses.detach()
        finally:
            self.tape = None
