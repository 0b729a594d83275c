"""What is asked of a network's name, and of a network that has just been built.

Shape letters: S side of the input, K labels.
"""

from __future__ import annotations

import difflib

import torch
import torchvision.models as zoo
from torch import Tensor, nn

from pfl_ext.models.config import ModelConfig
from pfl_ext.models.decoders import new_in, outputs_of
from pfl_ext.models.lora_targets import selects
from pfl_ext.models.probing import agree, before_each, nothing_zero, two_images
from pfl_ext.models.small import NETWORKS
from pfl_ext.models.trained import LAYERS, head_of, new_part
from pfl_ext.registry import of_ones_own

APART = 1e-4
"""Relative difference of outputs by which rounding in a pass of one image and of two may differ."""


def check_known(arch: str) -> None:
    """Refuse a name that no network has, torchvision's or one of ours or the user's.

    Raises:
        ValueError: one line with the nearest name.
    """
    if arch not in (known := [*zoo.list_models(module=zoo), *NETWORKS.names()]):
        near = difflib.get_close_matches(arch, known, 1)
        hint = f"did you mean {near[0]}?" if near else "resnet18 is one of its names"
        raise ValueError(f"model.arch is {arch!r}, which is not a known network; {hint}{of_ones_own()}")


@torch.no_grad()
def check_size(backbone: nn.Module, arch: str, input_size: int, num_labels: int) -> list[str]:
    """Refuse a network that cannot take such images, has other outputs than labels, or draws numbers itself.

    One that mixes the images of a batch is refused, too: a batch may hold images of several users, and what
    bounds a user in private training would not bound its effect on the others' updates. So is one whose
    buffers change in a pass: they would hold users' images in the model, without being part of any update.

    Args:
        backbone: takes images ``[1, 3, S, S]``; put in training mode, where it may draw.
        arch: its name, for the error.
        input_size: S.
        num_labels: K.

    Returns:
        The names of its linear layers and convolutions, in the order in which they ran.

    Raises:
        ValueError: one line that names the network and what is wrong.
    """
    ran, state = list[str](), torch.get_rng_state()
    layers = [(name, layer) for name, layer in backbone.named_modules() if isinstance(layer, LAYERS)]
    images, of_boxes = two_images(input_size).permute(0, 3, 1, 2) / 255, outputs_of(arch) == "boxes"
    buffers = {name: buffer.clone() for name, buffer in backbone.named_buffers()}
    try:
        with nothing_zero(backbone):
            with before_each(layers, lambda name, *_: ran.append(name)):
                outputs = backbone.train()(images[:1])
            together = outputs if of_boxes else backbone(images)
    except (RuntimeError, AssertionError, ValueError) as fault:
        raise wrong_side(arch, input_size, fault) from fault
    if not state.equal(torch.get_rng_state()):
        raise ValueError(
            f"model.arch is {arch}, which draws random numbers from torch's generator, so a resumed run "
            "would differ: use nn.Dropout or torchvision's StochasticDepth there, with model.dropout true"
        )
    after = dict(backbone.named_buffers())  # and what the first pass keeps for the others
    if changed := [name for name, before in buffers.items() if not before.equal(after.get(name, before))]:
        raise ValueError(
            f"model.arch is {arch}, whose buffer {changed[0]} changes with each batch of users' images: use "
            "nn.BatchNorm2d, which is replaced here, or a norm without track_running_stats"
        )
    if of_boxes or not isinstance(outputs, Tensor) or outputs.ndim < 2:
        return ran
    if outputs.shape[1] != num_labels:
        raise ValueError(
            f"model.arch is {arch}, which has {outputs.shape[1]:,} outputs, but there are {num_labels:,} "
            "classes: give its last layer as many outputs, or choose another network"
        )
    if len(together) != 2 or not agree(together[:1], outputs, APART):
        raise ValueError(
            f"model.arch is {arch}, whose outputs for an image depend on the other images of its batch: use "
            "nn.BatchNorm2d, which is replaced here, or a norm of each image, such as nn.GroupNorm"
        )
    return ran


def check_last_layer(backbone: nn.Module, config: ModelConfig, num_labels: int, ran: list[str]) -> None:
    """Refuse a network of which another layer than the last one would be taken for the head.

    `head_of` takes the linear layer or convolution that the network defines last. It must also run last, and
    where only the head is new or trained, it must make the outputs. ``ran`` is the result of `check_size`.

    Raises:
        ValueError: one line that names the layer and the remedy.
    """
    arch = config.arch
    if outputs_of(arch) == "boxes":
        return
    if not any(isinstance(layer, LAYERS) for layer in backbone.modules()):
        raise ValueError(f"model.arch is {arch}, which has no nn.Linear or nn.Conv2d as head")
    name, head = head_of(backbone)
    if ran and ran[-1] != name:
        raise ValueError(
            f"model.arch is {arch}, which defines {name} after {ran[-1]}, but runs {ran[-1]} last: define "
            f"{ran[-1]} last, since the layer defined last is taken for the head"
        )
    only_head = config.trained not in ("all", "names") or (config.pretrained and not config.keep_head)
    if only_head and head.weight.shape[0] != num_labels:
        raise ValueError(
            f"model.arch is {arch}, whose last layer {name} has {head.weight.shape[0]:,} outputs, but there "
            f"are {num_labels:,} classes, so it is not the head: make the head an nn.Linear or nn.Conv2d, "
            "or set model.trained to all and model.pretrained to false"
        )


def check_own_parameters(backbone: nn.Module, config: ModelConfig) -> None:
    """Refuse to choose what is trained of a network that says so itself.

    If it has frozen parameters, ``model.trained`` would train those, or freeze what the network trains in
    their place. If it has new parameters (`new_in`), they would stay as they were drawn.

    Raises:
        ValueError: one line that names the first such parameter and the remedy.
    """
    named = dict(backbone.named_parameters())
    new = new_in(config.arch)
    if absent := next((name for name in new if not any(selects(name, known) for known in named)), None):
        raise ValueError(f"{config.arch} declares {absent} as new, but no parameter has this name")
    if new and config.trained not in ("all", "names"):
        raise ValueError(
            f"model.trained is {config.trained}, but {config.arch} has new parameters ({','.join(new)}), "
            "which would stay as they were drawn: set it to all, or to names with model.trained_names"
        )
    frozen = [name for name, parameter in named.items() if not parameter.requires_grad]
    if frozen and config.trained != "all":
        others = f" and {len(frozen) - 1:,} more" if len(frozen) > 1 else ""
        raise ValueError(
            f"model.trained is {config.trained}, but {config.arch} itself freezes {frozen[0]}{others}: set "
            "model.trained to all, which leaves these frozen, or freeze none in the network"
        )


def check_head_rate(backbone: nn.Module, key: str, factor: float) -> None:
    """Refuse a learning rate of the head (decoder, bottleneck and last layer) where nothing of it is trained.

    Args:
        backbone: the network, with its trained part chosen.
        key: the factor's key in the config.
        factor: the head's learning rate relative to the others'.

    Raises:
        ValueError: one line that names the key and the remedy.
    """
    head = backbone.get_submodule(new_part(backbone))
    if factor != 1 and not any(parameter.requires_grad for parameter in head.parameters()):
        raise ValueError(f"{key} is {factor:g}, but the last layer is not trained: set {key} to 1")


def wrong_side(arch: str, input_size: int, fault: Exception) -> ValueError:
    """The error of a network that cannot take images of this size."""
    reason = str(fault).partition("\n")[0].rstrip("!.")
    return ValueError(
        f"{arch} cannot take images of {input_size} x {input_size} pixels ({reason}): "
        "choose another model.input_size"
    )


def check_groups(backbone: nn.Module, config: ModelConfig) -> None:
    """Refuse a number of groups in a network that has none.

    Whoever builds a network for training calls this. A run that was trained with such a value can be read.

    Raises:
        ValueError: one line that names the key, and its default.
    """
    default = ModelConfig().groups
    if config.groups == default or config.channel_norm == "data" or config.has_fixed_statistics:
        return  # the rules of the config say that the key has no effect with the two others
    if not any(isinstance(layer, nn.GroupNorm) for layer in backbone.modules()):
        raise ValueError(
            f"model.groups is {config.groups}, but {config.arch} has no GroupNorm: remove it, or set it to "
            f"{default}"
        )
