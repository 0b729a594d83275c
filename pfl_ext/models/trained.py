"""Which parameters of a network are trained: ``model.trained``.

The last layer is always trained, and so are other new parts: the bottleneck before it, and a decoder.
Besides,

* ``last_blocks`` trains the last N blocks of the network, whole;
* ``lora`` trains adapters of the other layers (`pfl_ext.models.lora`) and not their weights;
* ``bias`` trains every bias (Ben Zaken et al. 2022, BitFit, arXiv 2106.10199), also those of norms;
* ``norms`` trains scale and shift of every norm (Frankle et al. 2021, arXiv 2003.00152).

``names`` trains the parameters that ``model.trained_names`` names and no other, the last layer neither.

What is not trained is never summed, clipped, noised, sent or counted.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from pfl_ext.models.config import ModelConfig
from pfl_ext.models.decoders import EncoderDecoder
from pfl_ext.models.lora import add_adapters
from pfl_ext.models.lora_targets import selects
from pfl_ext.models.probing import before_each

LAYERS = (nn.Linear, nn.Conv2d)


class Bottleneck(nn.Sequential):
    """The layer that ``model.bottleneck`` adds before the last layer, and the last layer."""


def head_of(backbone: nn.Module) -> tuple[str, nn.Linear | nn.Conv2d]:
    """The last layer (a 1x1 convolution in SqueezeNet), whose outputs are the K logits, and its name."""
    layers = [(n, m) for n, m in backbone.named_modules() if isinstance(m, LAYERS)]
    return layers[-1]


@contextlib.contextmanager
def features_in(backbone: nn.Module) -> Iterator[list[Tensor]]:
    """In this context, a list gets the features of each pass: the last layer's input, float32 ``[B, D]``.

    Of features at several positions, as in a map or of tokens, it is the mean over positions.
    """
    found: list[Tensor] = []
    name, head = head_of(backbone)
    channels = -1 if isinstance(head, nn.Linear) else 1

    def add(features: Tensor) -> None:
        vectors = features.ndim == 2
        found.append(features if vectors else features.movedim(channels, 1).flatten(2).mean(2))

    with before_each([(name, head)], lambda _, __, inputs: add(inputs[0].float())):
        yield found


def part_of_classes(backbone: nn.Module) -> str:
    """Name of the module whose weights depend on the classes: the last layer, or more of a detector."""
    if isinstance(backbone, EncoderDecoder) and backbone.decoder.by_class:
        return f"decoder.{backbone.decoder.by_class}"
    return head_of(backbone)[0]


def new_part(backbone: nn.Module) -> str:
    """Name of the module that is new with pretrained weights: decoder, bottleneck or last layer."""
    if isinstance(backbone, EncoderDecoder):
        return "decoder"
    name, _ = head_of(backbone)
    parent = name.rpartition(".")[0]
    return parent if isinstance(backbone.get_submodule(parent), Bottleneck) else name


def choose_trained(backbone: nn.Module, config: ModelConfig, generator: torch.Generator) -> None:
    """Freeze all that ``config.trained`` does not train, and add adapters for lora.

    Args:
        backbone: the network with its initial weights.
        config: the network's config.
        generator: draws the adapters' weights.

    Raises:
        ValueError: one line, when the network has nothing of the kind that is to be trained.
    """
    if config.trained == "all":
        return
    head = new_part(backbone)
    images = torch.zeros(1, 3, config.input_size, config.input_size)
    backbone.requires_grad_(False)
    if config.trained == "names":
        for name in named(backbone, config.trained_names or ""):
            backbone.get_parameter(name).requires_grad_(True)
        return
    if config.trained == "last_blocks":
        for name in [name for block in _last_blocks(backbone, head, config, images) for name in block]:
            backbone.get_submodule(name).requires_grad_(True)
    elif config.trained == "lora":
        add_adapters(backbone, head, config, generator, images)
    elif config.trained in ("bias", "norms"):
        kind = _biases if config.trained == "bias" else of_norms
        found = [p for name, p in kind(backbone) if not name.startswith(f"{head}.")]
        if not found:
            what = "bias" if config.trained == "bias" else "norm with a scale"
            raise ValueError(
                f"model.trained is {config.trained}, but {config.arch} has no {what} before its last "
                "layer: set model.trained to all or head"
            )
        for parameter in found:
            parameter.requires_grad_(True)
    backbone.get_submodule(head).requires_grad_(True)


def untrained_head(backbone: nn.Module) -> str | None:
    """Name of `new_part` where none of its weights is trained; None where one is."""
    head = new_part(backbone)
    return None if any(p.requires_grad for p in backbone.get_submodule(head).parameters()) else head


def named(backbone: nn.Module, names: str) -> list[str]:
    """The parameters that ``model.trained_names`` selects, in the network's order.

    Args:
        backbone: the network.
        names: names of parameters or of modules, which stand for all of their parameters, separated by
            commas. They may be patterns (`fnmatch`), whose ``*`` also stands for dots.

    Raises:
        ValueError: one line, when a name selects nothing.
    """
    known, chosen = [name for name, _ in backbone.named_parameters()], set[str]()
    for pattern in names.split(","):
        found = [name for name in known if selects(pattern, name)]
        if not found:
            modules = [name for name, layer in backbone.named_modules() if name and [*layer.parameters()]]
            near = difflib.get_close_matches(pattern, [*modules, *known], 3, 0.5) or known[:3]
            raise ValueError(
                f"model.trained_names has {pattern}, but no parameter of the network has this name or is in "
                f"a layer of this name: choose other names, like {', '.join(near)}"
            )
        chosen.update(found)
    return [name for name in known if name in chosen]


def _biases(backbone: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The biases, found by name: torch's layers end theirs in ``bias``."""
    return ((name, p) for name, p in backbone.named_parameters() if name.endswith("bias") and p.ndim == 1)


def of_norms(backbone: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of norms, found by the name of the layer's type, as for all of torch's and ours."""
    for layer, module in backbone.named_modules():
        if "Norm" in type(module).__name__:
            for name, parameter in module.named_parameters(recurse=False):
                yield f"{layer}.{name}", parameter


def _last_blocks(
    backbone: nn.Module, head: str, config: ModelConfig, images: Tensor
) -> Sequence[Sequence[str]]:
    blocks = blocks_of(backbone, head)
    if not follow_one_another(backbone, [*(name for block in blocks for name in block), head], images):
        raise ValueError(
            f"model.trained is last_blocks, and the blocks of {config.arch} are not run one after another, "
            "each once: set model.trained to another value"
        )
    if len(blocks) < 2:
        raise ValueError(
            f"model.trained is last_blocks, but {config.arch} has only one block before its last layer: "
            "set model.trained to all"
        )
    if config.last_blocks >= len(blocks):
        raise ValueError(
            f"model.last_blocks is {config.last_blocks}, and {config.arch} has {len(blocks)} blocks before "
            f"its last layer, of which one stays as it is: choose at most {len(blocks) - 1}, or set "
            "model.trained to all"
        )
    return blocks[-config.last_blocks :]


def blocks_of(backbone: nn.Module, head: str) -> list[list[str]]:
    """The names of the modules of every block before the head, first to last.

    A block is what a network repeats: the residual block of a ResNet or an EfficientNet, the encoder block of
    a transformer, a single layer of a small network. To find blocks, a network is divided into its children.
    A child is divided further if it is a plain sequence or has a sequence of modules of one class. A norm
    outside of these belongs to the block before it.
    """
    blocks: list[list[str]] = []
    for name in _pieces(backbone, "", head):
        has_layer = any(isinstance(layer, LAYERS) for layer in backbone.get_submodule(name).modules())
        if has_layer or not blocks:
            blocks.append([])
        blocks[-1].append(name)
    return blocks


def _pieces(module: nn.Module, prefix: str, head: str) -> Iterator[str]:
    """The names of the modules with parameters that are not taken apart further, without the head."""
    for child_name, child in module.named_children():
        name = prefix + child_name
        if name == head:
            continue
        if head.startswith(f"{name}.") or type(child) in (nn.Sequential, nn.ModuleList) or _repeats(child):
            yield from _pieces(child, f"{name}.", head)
        elif next(child.parameters(), None) is not None:
            yield name


def _repeats(module: nn.Module) -> bool:
    """Whether the module is, or has as a child, a sequence of modules of one class that have children."""
    for sequence in (module, *module.children()):
        kinds = {type(part) for part in sequence.children()}
        if isinstance(sequence, nn.Sequential | nn.ModuleList) and len(sequence) > 1 and len(kinds) == 1:
            first = next(sequence.children())
            # layers with norm and activation, of which torchvision's blocks consist, are sequences
            if next(first.children(), None) is not None and not isinstance(first, nn.Sequential):
                return True
    return False


def follow_one_another(backbone: nn.Module, names: Sequence[str], images: Tensor) -> bool:
    """Whether the network runs these modules in this order, and each once."""
    entered: list[str] = []
    layers = [(name, backbone.get_submodule(name)) for name in names]
    with before_each(layers, lambda name, *_: entered.append(name)), torch.no_grad():
        backbone(images)
    return entered == list(names)
