"""The table of implementations and number formats for each kind of layer on a CPU.

Only the processor and the kind of layer decide. No time is measured, so no result depends on a clock.

* **AMX** and **AVX512-BF16** multiply bfloat16. torch's convolutions and linear layers use them. With
  AVX512-BF16 alone, a step of CIFAR's small network takes 81 ms so, and 69 in compiled float32 (README); at
  224 pixels bfloat16 was as fast or faster. GroupNorm is bound by memory.
  torch's convolutions are fastest for bfloat16 images in channels-last memory, but there torch's norm takes
  many times as long as the compiled one (README). So compiled norms are put between torch's convolutions.
* **AVX512-FP16** adds up twice as many products of half floats as of float32. The compiled convolutions use
  it.
* **Depthwise** convolutions are computed in float32 everywhere (`depthwise`).
* **None** of these: bfloat16 would be converted before each product, so everything is float32.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple, get_args

import torch
from torch import nn

Feature = Literal["AMX", "AVX512-FP16", "AVX512-BF16", "none"]
"""Features of a processor; the first one that it has decides."""
Kind = Literal[
    "3x3 convolutions", "depthwise convolutions", "other convolutions", "GroupNorm", "pooling", "linear"
]
"""Kinds of layers. The first has stride 1; the second filters each channel by itself."""


class Way(NamedTuple):
    """An implementation, and the format of the numbers that it multiplies."""

    by: Literal["compiled", "torch"]
    format: torch.dtype


class Row(NamedTuple):
    """A way for each kind of layer. A layer that `layers` cannot compile is still torch's."""

    convolution3x3: Way
    depthwise: Way
    convolution: Way
    group_norm: Way
    pooling: Way
    linear: Way

    def way(self, kind: Kind) -> Way:
        """The way of this kind of layer."""
        return self[KINDS.index(kind)]

    @property
    def autocast(self) -> torch.dtype | None:
        """The type of torch's autocast around the network; None: there is none."""
        return None if self.linear.format == torch.float32 else self.linear.format


KINDS: tuple[Kind, ...] = get_args(Kind)
_FLOAT32, _HALF = Way("compiled", torch.float32), Way("compiled", torch.float16)
_TORCH, _TORCH_BF16 = Way("torch", torch.float32), Way("torch", torch.bfloat16)

FLOAT32 = Row(_FLOAT32, _FLOAT32, _FLOAT32, _FLOAT32, _TORCH, _FLOAT32)
"""The ways for ``runtime.precision fp32``, on every processor."""
BY_PROCESSOR: dict[Feature, Row] = {
    #           3x3, stride 1  depthwise  other convs   GroupNorm  pooling      linear
    "AMX": Row(_TORCH_BF16, _FLOAT32, _TORCH_BF16, _FLOAT32, _TORCH_BF16, _TORCH_BF16),
    "AVX512-FP16": Row(_HALF, _FLOAT32, _HALF, _FLOAT32, _TORCH_BF16, _TORCH_BF16),
    "AVX512-BF16": Row(_TORCH_BF16, _FLOAT32, _TORCH_BF16, _FLOAT32, _TORCH_BF16, _TORCH_BF16),
    "none": FLOAT32,
}
"""The ways for ``runtime.precision bf16``, by processor."""


def chosen(precision: torch.dtype | None, feature: Feature) -> Row:
    """The row for training in this type; None is float32."""
    return FLOAT32 if precision is None else BY_PROCESSOR[feature]


def kind_of(layer: nn.Module) -> Kind | None:
    """The layer's kind; None for a layer that is not in the table."""
    if isinstance(layer, nn.Conv2d):
        if layer.groups == layer.in_channels == layer.out_channels > 1:
            return "depthwise convolutions"
        plain = layer.kernel_size == (3, 3) and layer.stride == (1, 1)
        return "3x3 convolutions" if plain else "other convolutions"
    if isinstance(layer, nn.GroupNorm):
        return "GroupNorm"
    if isinstance(layer, nn.MaxPool2d | nn.AvgPool2d | nn.AdaptiveAvgPool2d):
        return "pooling"
    return "linear" if isinstance(layer, nn.Linear) else None


def described(network: nn.Module, autocast: torch.dtype | None) -> str:
    """One line that says how this network is computed in this type (None is float32).

    For example "bfloat16: convolutions by torch, GroupNorm by compiled float32, linear by torch".
    """
    found: dict[str, Counter[str]] = {name: Counter() for name in KINDS}
    for layer in network.modules():
        kind = kind_of(layer)
        if kind is not None:
            multiplied = getattr(layer, "multiplied", None)  # the format of a compiled layer
            found[kind]["torch" if multiplied is None else f"compiled {_name(multiplied)}"] += 1
    convolutions = [found[kind] for kind in KINDS[:3] if found[kind]]
    if len(convolutions) > 1 and len(set().union(*convolutions)) == 1:
        found = {"convolutions": convolutions[0], **{kind: found[kind] for kind in KINDS[3:]}}
    type_name = "float32" if autocast is None else _name(autocast)
    ways = {way for counts in found.values() for way in counts}
    if ways <= {"torch"}:
        return f"{type_name}: all layers by torch"
    parts = []
    for name, counts in found.items():
        numbers = len(counts) > 1
        each = [f"{way} ({count})" if numbers else way for way, count in sorted(counts.items())]
        parts += [f"{name} by {' and '.join(each)}"] if each else []
    return f"{type_name}: {', '.join(parts)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
