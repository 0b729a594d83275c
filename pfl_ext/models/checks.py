"""What is asked of a network that has just been built.

Shape letters: S side of the input, K labels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pfl_ext.models.config import ModelConfig
from pfl_ext.models.decoders import outputs_of


@torch.no_grad()
def check_size(backbone: nn.Module, arch: str, input_size: int, num_labels: int) -> None:
    """Refuse a network that cannot take images of this size, or has more or fewer outputs than labels.

    Args:
        backbone: takes images ``[1, 3, S, S]``.
        arch: its name, for the error.
        input_size: S.
        num_labels: K.

    Raises:
        ValueError: one line that names the network and both numbers.
    """
    try:
        outputs = backbone(torch.zeros(1, 3, input_size, input_size))
    except (RuntimeError, AssertionError, ValueError) as fault:
        raise wrong_side(arch, input_size, fault) from fault
    if outputs_of(arch) == "boxes" or not isinstance(outputs, Tensor) or outputs.ndim < 2:
        return
    if outputs.shape[1] != num_labels:
        raise ValueError(
            f"model.arch is {arch}, which has {outputs.shape[1]:,} outputs, but there are {num_labels:,} "
            "classes: give its last layer as many outputs, or choose another network"
        )


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
