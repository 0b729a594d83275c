"""LoRA: frozen layers with trained low-rank updates beside them.

Hu et al. 2022 (LoRA, arXiv 2106.09685): a layer's output is ``W x + (alpha / rank) B A x``, and only A and B
are trained. B is zero at first, so the network starts unchanged. For a convolution, A is a convolution with
the same kernel, stride and padding to ``rank`` channels, and B a 1 x 1 convolution from these to the outputs.
Together they are one convolution of the layer's own shape, which `merged` adds to its weights.

Each projection of `nn.MultiheadAttention` is a layer of its own here, though torch keeps the weights of three
of them in one matrix. Of a linear layer whose weights the network reads without calling the layer, it reads
``W + (alpha / rank) B A``.

With ``model.lora_trained: b`` only B is trained and A stays as drawn (Sun et al. 2024, FFA-LoRA, arXiv
2403.12313). Then the mean of users' ``B A`` is the mean of their B times A. With both trained, the server
averages A and B by themselves, and the product of these means is not the mean of the products.

A convolution with groups gets no adapter. In a depthwise one each channel's kernel is a single row of k x k
numbers, so an adapter of any rank would be larger than the kernel itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from pfl_ext.models.config import ModelConfig
from pfl_ext.models.lora_layers import PARTS, Adapter, LowRank, LowRankAttention, adapt, without_adapters
from pfl_ext.models.lora_targets import targets

ADAPTERS = ("lora_a", "lora_b")
"""Names of the two layers of an adapter, as suffixes of the name of their layer."""
ADAPTERS_FILE = "adapters.safetensors"
"""File in a run directory with only the adapters, under their names in checkpoints."""
SomeModule = TypeVar("SomeModule", bound=nn.Module)


def add_adapters(
    backbone: nn.Module, head: str, config: ModelConfig, generator: torch.Generator, images: Tensor
) -> None:
    """Give the layers that ``config.lora_targets`` selects, except those under ``head``, an adapter each.

    Args:
        backbone: the network.
        head: name of the last layer, or of the module that holds it and the bottleneck.
        config: rank, alpha and layers.
        generator: draws each A, in the order of the layers.
        images: ``[B, 3, S, S]``, with which the network can be run.

    Raises:
        ValueError: when there is no such layer, or the rank is above that of every layer.
    """
    places = targets(backbone, head, config, images)
    full = max(place.full_rank for place in places)
    if config.lora_rank > full:
        raise ValueError(
            f"model.lora_rank is {config.lora_rank}, but the largest rank of a layer of {config.arch} "
            f"is {full}: lower it, or set model.trained to all"
        )
    for name, layer, part in places:
        if isinstance(layer, nn.MultiheadAttention):
            adapt(layer, str(part), config, generator)
        else:
            backbone.set_submodule(name, LowRank(layer, config, generator))


def adapters_of(module: nn.Module) -> dict[str, Adapter]:
    """The adapters by the name of their layer; empty where the network has none."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, Adapter)}


def adapted(module: nn.Module) -> Iterator[tuple[str, Tensor, Adapter]]:
    """The name of every layer with an adapter, its frozen weights, which are no copy, and the adapter."""
    for name, layer in module.named_modules():
        if isinstance(layer, LowRank):
            yield name, layer.base.weight, layer
        elif isinstance(layer, LowRankAttention):
            for part, adapter in layer.parts().items():
                yield f"{name}.{part}", layer.weight_of(part), adapter


def _bare(module: nn.Module) -> dict[str, int]:
    """The sizes of the frozen weights without an adapter by name; a part of attention has its own name."""
    within = tuple(f"{name}." for name in adapters_of(module))
    frozen = ((n, p) for n, p in module.named_parameters() if p.ndim > 1 and not p.requires_grad)
    bare = {name: p.numel() for name, p in frozen if not name.startswith(within)}
    for name, layer in module.named_modules():
        if isinstance(layer, LowRankAttention):
            for weight, _ in layer.named_parameters():
                if weight.endswith("proj_weight") or weight == "out_proj.weight":
                    del bare[f"{name}.{weight}"]
            without = [part for part in PARTS if part not in layer.parts()]
            bare |= {f"{name}.{part}": layer.weight_of(part).numel() for part in without}
    return bare


def adapters_in_words(module: nn.Module) -> str | None:
    """One line about a network's adapters, and the weights that have none; None where it has no adapters."""
    adapters = adapters_of(module)
    if not adapters:
        return None
    rank = len(next(iter(adapters.values())).lora_a.weight)
    text = f"LoRA of rank {rank} on {len(adapters)} layer{'s' * (len(adapters) > 1)}"
    bare = _bare(module)
    if not bare:
        return f"{text}, which are all but the last"
    added = sum(t.numel() for t in adapter_tensors(module).values())
    share = 100 * sum(bare.values()) / (sum(p.numel() for p in module.parameters()) - added)
    kinds = f"{len(bare)} frozen weights have none" if len(bare) > 1 else "1 frozen weight has none"
    largest = max(bare, key=lambda name: bare[name])
    return f"{text}; {kinds} ({share:.0f} % of the parameters), the largest is {largest}"


def adapter_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A and B of every adapter under their names in ``module``."""
    return {
        f"{name}.{part}.weight": layer.get_parameter(f"{part}.weight")
        for name, layer in adapters_of(module).items()
        for part in ADAPTERS
    }


@torch.no_grad()
def merged(module: SomeModule) -> SomeModule:
    """A copy with the adapters added to the weights, under the plain network's names; or ``module`` itself.

    Its outputs differ by rounding, since layer and adapter are added before the product instead of after.
    """
    if not adapters_of(module):
        return module
    plain = copy.deepcopy(module)
    for _, weight, adapter in adapted(plain):
        weight.copy_(weight.double() + adapter.added())
    for name, layer in list(plain.named_modules()):
        if isinstance(layer, LowRank):
            plain.set_submodule(name, layer.base)
        elif isinstance(layer, LowRankAttention):
            without_adapters(layer)
    return plain


@torch.no_grad()
def load_merged(module: nn.Module, tensors: Mapping[str, Tensor], adapters: Mapping[str, Tensor]) -> None:
    """Load the tensors of `merged`, and the adapters in them, to continue their training.

    Args:
        module: a network with adapters, or a plain one, for which there are no adapters.
        tensors: all of a merged network.
        adapters: as `adapter_tensors` gives them.
    """
    found = [name for name, layer in module.named_modules() if isinstance(layer, LowRank)]
    names = {f"{name}.{part}": f"{name}.base.{part}" for name in found for part in ("weight", "bias")}
    module.load_state_dict({**{names.get(name, name): t for name, t in tensors.items()}, **adapters})
    for _, weight, adapter in adapted(module):
        weight.copy_(weight.double() - adapter.added())
