"""The layers of LoRA: a frozen layer with its adapter, and attention with an adapter for each projection.

Shape letters: B images, L and S positions of queries and of keys, E width of attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfl_ext.models.config import ModelConfig

PARTS = ("query", "key", "value", "out")
"""The projections of attention, by the names that they have as layers."""


class Adapter(nn.Module):
    """A and B of a layer, which are drawn here.

    Args:
        base: the layer; or a projection of attention, as a linear layer of its shape.
        config: the rank, alpha, and whether A is trained.
        generator: draws A as torch draws such a layer, uniformly within ``1 / sqrt(inputs of one output)``.
    """

    lora_a: nn.Linear | nn.Conv2d
    lora_b: nn.Linear | nn.Conv2d

    def __init__(self, base: nn.Linear | nn.Conv2d, config: ModelConfig, generator: torch.Generator) -> None:
        super().__init__()
        self._draw(base, config, generator)

    def _draw(self, base: nn.Linear | nn.Conv2d, config: ModelConfig, generator: torch.Generator) -> None:
        self.lora_a, self.lora_b = _empty(base, config.lora_rank)
        self.lora_a.requires_grad_(config.lora_trained == "both")
        self.scale = config.lora_alpha / config.lora_rank
        bound = 1 / math.sqrt(self.lora_a.weight[0].numel())
        with torch.no_grad():
            self.lora_a.weight.uniform_(-bound, bound, generator=generator)
            self.lora_b.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """What the adapter adds to the layer's output."""
        out: Tensor = self.scale * self.lora_b(self.lora_a(x))
        return out

    def extra_repr(self) -> str:
        """The layer's settings, as torch's layers print them."""
        return f"scale={self.scale}"

    def update(self) -> Tensor:
        """What the adapter adds to a linear layer's weights, for networks that read these.

        Not in half precision, also where autocast is on: it is small beside the weights.
        """
        with torch.autocast(self.lora_a.weight.device.type, enabled=False):
            return self.scale * (self.lora_b.weight @ self.lora_a.weight)

    @torch.no_grad()
    def added(self) -> Tensor:
        """The adapter as weights of the layer's matrix ``[outputs, inputs of one output]``, in float64."""
        a, b = (layer.weight.double().flatten(1) for layer in (self.lora_a, self.lora_b))
        return self.scale * (b @ a)


class LowRank(Adapter):
    """A frozen layer and its adapter. Arguments as for `Adapter`."""

    def __init__(self, base: nn.Linear | nn.Conv2d, config: ModelConfig, generator: torch.Generator) -> None:
        nn.Module.__init__(self)
        self.base = base.requires_grad_(False)
        self._draw(base, config, generator)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output plus the adapter's."""
        out: Tensor = self.base(x) + super().forward(x)
        return out

    @property
    def weight(self) -> Tensor:
        """The weights of the layer and of the adapter together, for a network that reads them."""
        return self.base.weight + self.update()

    @property
    def bias(self) -> Tensor | None:
        """The layer's, for a network that reads it."""
        return self.base.bias

    @torch.no_grad()
    def added(self) -> Tensor:
        """The adapter as weights of the layer's shape, in float64."""
        return super().added().view(self.base.weight.shape)


class LowRankAttention(nn.MultiheadAttention):
    """torch's attention with an adapter for some of its projections, as if each were a linear layer.

    An `nn.MultiheadAttention` becomes one by `adapt`, and keeps the names of its weights. An adapter is a
    submodule of the name of its part, of `PARTS`, and its layers are called with images first.
    """

    def parts(self) -> dict[str, Adapter]:
        """The adapters by the name of their part."""
        return {name: part for name in PARTS if isinstance(part := self._modules.get(name), Adapter)}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention.forward`."""
        masked = key_padding_mask is not None or attn_mask is not None
        extended = self.bias_k is not None or self.add_zero_attn
        if query.ndim == 3 and not (masked or extended or need_weights):
            return self._attend(query, key, value), None
        turned = self.batch_first and query.ndim == 3
        # one tensor that is given twice stays one, for which torch has a faster way
        inputs = {id(t): t.transpose(0, 1) if turned else t for t in (query, key, value)}
        query, key, value = (inputs[id(t)] for t in (query, key, value))
        q, k, v, out = (self._updated(part) for part in PARTS)
        packed = self.in_proj_weight is not None
        result, weights = F.multi_head_attention_forward(
            query,
            key,
            value,
            self.embed_dim,
            self.num_heads,
            torch.cat([q, k, v]) if packed else None,
            self.in_proj_bias,
            self.bias_k,
            self.bias_v,
            self.add_zero_attn,
            self.dropout,
            out,
            self.out_proj.bias,
            training=self.training,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            use_separate_proj_weight=not packed,
            q_proj_weight=q,
            k_proj_weight=k,
            v_proj_weight=v,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )
        return (result.transpose(0, 1) if turned else result), weights

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of all positions to all, by torch's operations in torch's order: with B = 0, by its bits.

        Layers of adapters are called, so that a pass for many users has each user's gradient.
        """
        inputs = [t.transpose(0, 1) if self.batch_first else t for t in (query, key, value)]
        if self.in_proj_weight is not None and query is key is value:
            three = F.linear(inputs[0], self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            weights = (self.weight_of(part) for part in PARTS)
            three = tuple(F.linear(*given) for given in zip(inputs, weights, biases))
        heads = [
            self._adapted(part, x, y).reshape(*y.shape[:2], self.num_heads, -1).permute(1, 2, 0, 3)
            for part, x, y in zip(PARTS, inputs, three)
        ]
        dropped = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], dropout_p=dropped)
        mixed = mixed.permute(2, 0, 1, 3).flatten(2)
        out = self._adapted("out", mixed, self.out_proj(mixed))
        return out.transpose(0, 1) if self.batch_first else out

    def _adapted(self, part: str, x: Tensor, y: Tensor) -> Tensor:
        """The output ``y`` of a projection of ``x``, both ``[positions, B, ...]``, with its adapter's."""
        adapter = self._modules.get(part)
        return y if adapter is None else y + adapter(x.transpose(0, 1)).transpose(0, 1)

    def weight_of(self, part: str) -> Tensor:
        """The frozen weights of a part, which are no copy."""
        if part == "out":
            return self.out_proj.weight
        if self.in_proj_weight is not None:
            return self.in_proj_weight.chunk(3)[PARTS.index(part)]
        return self.get_parameter(f"{part[0]}_proj_weight")

    def _updated(self, part: str) -> Tensor:
        """The weights of a part and of its adapter together."""
        adapter = self.parts().get(part)
        return self.weight_of(part) if adapter is None else self.weight_of(part) + adapter.update()


def shape_of(attention: nn.MultiheadAttention, part: str) -> nn.Linear:
    """A linear layer without weights in the shape of a projection."""
    inputs = {"key": attention.kdim, "value": attention.vdim}.get(part, attention.embed_dim)
    return nn.Linear(inputs, attention.embed_dim, device="meta")


def adapt(
    attention: nn.MultiheadAttention, part: str, config: ModelConfig, generator: torch.Generator
) -> None:
    """Give a projection an adapter."""
    attention.__class__ = LowRankAttention
    attention.add_module(part, Adapter(shape_of(attention, part), config, generator))
    # what says so has torch's encoder layers call attention in evaluation, too, instead of reading weights
    attention._qkv_same_embed_dim = False


def without_adapters(attention: nn.MultiheadAttention) -> None:
    """Take `adapt` back."""
    for part in PARTS:
        attention._modules.pop(part, None)
    attention.__class__ = nn.MultiheadAttention
    attention._qkv_same_embed_dim = attention.in_proj_weight is not None


def _empty(base: nn.Linear | nn.Conv2d, rank: int) -> tuple[nn.Linear | nn.Conv2d, nn.Linear | nn.Conv2d]:
    """A and B without drawn weights, since torch would draw them from its global generator."""
    skip: Callable[..., nn.Linear | nn.Conv2d] = nn.utils.skip_init
    if isinstance(base, nn.Linear):
        shapes = (base.in_features, rank), (rank, base.out_features)
        return skip(nn.Linear, *shapes[0], bias=False), skip(nn.Linear, *shapes[1], bias=False)
    form: dict[str, Any] = {n: getattr(base, n) for n in ("stride", "padding", "dilation", "padding_mode")}
    return (
        skip(nn.Conv2d, base.in_channels, rank, base.kernel_size, bias=False, **form),
        skip(nn.Conv2d, rank, base.out_channels, 1, bias=False),
    )
