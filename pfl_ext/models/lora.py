"""LoRA: frozen layers with trained low-rank updates beside them.

Hu et al. 2022 (LoRA, arXiv 2106.09685): a layer's output is ``W x + (alpha / rank) B A x``, and only A and B
are trained. B is zero at first, so the network starts unchanged. For a convolution, A is a convolution with
the same kernel, stride and padding to ``rank`` channels, and B a 1 x 1 convolution from these to the outputs.
Together they are one convolution of the layer's own shape, which `merged` adds to its weights.

With ``model.lora_trained: b`` only B is trained and A stays as drawn (Sun et al. 2024, FFA-LoRA, arXiv
2403.12313). Then the mean of users' ``B A`` is the mean of their B times A. With both trained, the server
averages A and B by themselves, and the product of these means is not the mean of the products.

A convolution with groups gets no adapter. In a depthwise one each channel's kernel is a single row of k x k
numbers, so an adapter of any rank would be larger than the kernel itself.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from pfl_ext.models.config import ModelConfig
from pfl_ext.models.probing import before_each

ADAPTERS = ("lora_a", "lora_b")
"""Names of the two layers of an adapter, as suffixes of the name of their layer."""
ADAPTERS_FILE = "adapters.safetensors"
"""File in a run directory with only the adapters, under their names in checkpoints."""
SomeModule = TypeVar("SomeModule", bound=nn.Module)


class LowRank(nn.Module):
    """A frozen layer and its adapter.

    Args:
        base: the layer, which is frozen.
        config: the rank, and alpha.
        generator: draws A as torch draws such a layer, uniformly within ``1 / sqrt(inputs of one output)``.
    """

    def __init__(self, base: nn.Linear | nn.Conv2d, config: ModelConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a, self.lora_b = _adapter(base, config.lora_rank)
        self.lora_a.requires_grad_(config.lora_trained == "both")
        self.scale = config.lora_alpha / config.lora_rank
        bound = 1 / math.sqrt(self.lora_a.weight[0].numel())
        with torch.no_grad():
            self.lora_a.weight.uniform_(-bound, bound, generator=generator)
            self.lora_b.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output plus the adapter's."""
        out: Tensor = self.base(x) + self.scale * self.lora_b(self.lora_a(x))
        return out

    def extra_repr(self) -> str:
        """The layer's settings, as torch's layers print them."""
        return f"scale={self.scale}"

    @torch.no_grad()
    def added(self) -> Tensor:
        """The adapter as weights of the layer's shape, computed in float64."""
        a, b = (layer.weight.double().flatten(1) for layer in (self.lora_a, self.lora_b))
        return (self.scale * (b @ a)).view(self.base.weight.shape)


def _adapter(base: nn.Linear | nn.Conv2d, rank: int) -> tuple[nn.Linear | nn.Conv2d, nn.Linear | nn.Conv2d]:
    """A and B without drawn weights, since torch would draw them from its global generator."""
    skip: Callable[..., nn.Linear | nn.Conv2d] = nn.utils.skip_init
    if isinstance(base, nn.Linear):
        shapes = (base.in_features, rank), (rank, base.out_features)
        return skip(nn.Linear, *shapes[0], bias=False), skip(nn.Linear, *shapes[1], bias=False)
    form = {name: getattr(base, name) for name in ("stride", "padding", "dilation", "padding_mode")}
    return (
        skip(nn.Conv2d, base.in_channels, rank, base.kernel_size, bias=False, **form),
        skip(nn.Conv2d, rank, base.out_channels, 1, bias=False),
    )


def add_adapters(
    backbone: nn.Module, head: str, config: ModelConfig, generator: torch.Generator, images: Tensor
) -> None:
    """Replace every linear layer and every convolution, except those under ``head``, by `LowRank`.

    Convolutions with groups are only frozen. So are layers that the network never calls, because it reads
    their weights itself (a transformer's projection of attention).

    Args:
        backbone: the network.
        head: name of the last layer, or of the module that holds it and the bottleneck.
        config: rank and alpha.
        generator: draws each A, in the order of the layers.
        images: ``[B, 3, S, S]``, with which the network can be run.

    Raises:
        ValueError: when there is no such layer, or the rank is above that of every layer.
    """
    called: set[str] = set()
    layers = {
        name: layer
        for name, layer in backbone.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d) and not f"{name}.".startswith(f"{head}.")
    }
    with before_each(layers.items(), lambda name, *_: called.add(name)), torch.no_grad():
        backbone(images)
    adapted = {
        name: layer for name, layer in layers.items() if name in called and getattr(layer, "groups", 1) == 1
    }
    if not adapted:
        raise ValueError(
            f"model.trained is lora, but {config.arch} has no linear layer, and no convolution without "
            "groups, before its last layer: set model.trained to all or head"
        )
    full = max(min(layer.weight.flatten(1).shape) for layer in adapted.values())
    if config.lora_rank > full:
        raise ValueError(
            f"model.lora_rank is {config.lora_rank}, but the largest rank of a layer of {config.arch} "
            f"is {full}: lower it, or set model.trained to all"
        )
    for name, layer in adapted.items():
        backbone.set_submodule(name, LowRank(layer, config, generator))


def adapters_of(module: nn.Module) -> dict[str, LowRank]:
    """The adapters by the name of their layer; empty where the network has none."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LowRank)}


def adapters_in_words(module: nn.Module) -> str | None:
    """One line about a network's adapters, and the weights that have none; None where it has no adapters."""
    adapters = adapters_of(module)
    if not adapters:
        return None
    within = tuple(f"{name}." for name in adapters)
    weights = dict(module.named_parameters())
    bare = {
        n: p for n, p in weights.items() if p.ndim > 1 and not p.requires_grad and not n.startswith(within)
    }
    rank = len(next(iter(adapters.values())).lora_a.weight)
    text = f"LoRA of rank {rank} on {len(adapters)} layer{'s' * (len(adapters) > 1)}"
    if not bare:
        return f"{text}, which are all but the last"
    added = sum(t.numel() for t in adapter_tensors(module).values())
    whole = sum(p.numel() for p in weights.values()) - added
    share = 100 * sum(p.numel() for p in bare.values()) / whole
    largest = max(bare, key=lambda name: bare[name].numel())
    kinds = f"{len(bare)} frozen weights have none" if len(bare) > 1 else "1 frozen weight has none"
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
    for name, layer in adapters_of(plain).items():
        weight = layer.base.weight
        weight.copy_(weight.double() + layer.added())
        plain.set_submodule(name, layer.base)
    return plain


@torch.no_grad()
def load_merged(module: nn.Module, tensors: Mapping[str, Tensor], adapters: Mapping[str, Tensor]) -> None:
    """Load the tensors of `merged`, and the adapters in them, to continue their training.

    Args:
        module: a network with adapters, or a plain one, for which there are no adapters.
        tensors: all of a merged network.
        adapters: as `adapter_tensors` gives them.
    """
    found = adapters_of(module)
    names = {f"{name}.{part}": f"{name}.base.{part}" for name in found for part in ("weight", "bias")}
    module.load_state_dict({**{names.get(name, name): t for name, t in tensors.items()}, **adapters})
    for layer in found.values():
        layer.base.weight.copy_(layer.base.weight.double() - layer.added())
