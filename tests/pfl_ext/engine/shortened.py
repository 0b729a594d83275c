"""EfficientNet-Lite0 with few of its blocks: of each kind of layer one, for a fifth of the time."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from pfl_ext.models.efficientnet_lite import STAGES, EfficientNetLite
from pfl_ext.models.encoders import Encoder

FIRST = range(5)
"""With kernels of 3 and 5, strides of 1 and 2, with and without an expansion and a sum."""
LITTLE = (0, 1, 2, 3, 5, 8, 11, 15)
"""One or two of each of an encoder's five steps; each takes as many channels as the one before gives."""


def keep(network: nn.Module, blocks: Iterable[int]) -> None:
    """Take the other blocks out of a network or encoder; the names of these stay."""
    whole, kept = network.get_submodule("blocks"), nn.Sequential()
    for number in blocks:
        kept.add_module(str(number), whole.get_submodule(str(number)))
    network.register_module("blocks", kept)


def short_classifier(network: nn.Module) -> nn.Module:
    """The network itself, with its `FIRST` blocks and the last convolution's weights for their channels."""
    assert isinstance(network, EfficientNetLite)
    keep(network, FIRST)
    layer, channels = network.last.conv, STAGES[2][-1]
    layer.in_channels = channels
    layer.weight.data = layer.weight.data[:, :channels].contiguous()
    return network


def short_encoder(network: nn.Module) -> nn.Module:
    """The network itself, with the blocks of `LITTLE` in its encoder."""
    encoder = network.get_submodule("encoder")
    assert isinstance(encoder, Encoder)
    keep(encoder, LITTLE)
    kept = {f"blocks.{number}" for number in LITTLE}
    for step in encoder.steps:
        step[:] = [name for name in step if not name.startswith("blocks.") or name in kept]
    return network
