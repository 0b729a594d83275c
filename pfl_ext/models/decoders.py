"""Networks of an encoder (`pfl_ext.models.encoders`) and a decoder of its maps.

A file of this folder has the decoders of one task and registers a network for each encoder. Pretrained
weights are the encoder's; a decoder is new, has GroupNorm, and is always trained.

Shape letters: B images of a batch, S the side of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from pfl_ext.models.encoders import Encoder
from pfl_ext.models.small import NETWORKS
from pfl_ext.tasks.task import Outputs


class Decoder(nn.Module):
    """From an encoder's maps to a task's outputs. Its last layer alone depends on the classes."""

    def forward(self, maps: Sequence[Tensor], images: Tensor) -> Tensor:
        """Five maps, and the images ``[B, 3, S, S]``, whose size alone is read -> ``[B, ...]``."""
        raise NotImplementedError


class EncoderDecoder(nn.Module):
    """An encoder, and a decoder of its maps.

    Args:
        encoder: gives the maps.
        decoder: of maps with these channels.
    """

    def __init__(self, encoder: Encoder, decoder: Decoder) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, images: Tensor) -> Tensor:
        """``[B, 3, S, S]`` -> what the decoder gives."""
        out: Tensor = self.decoder(self.encoder(images), images)
        return out


@dataclass(frozen=True)
class Architecture:
    """What builds one of these networks."""

    decoder: Callable[[Sequence[int], int], Decoder]
    """From the channels of the maps and the number of classes."""
    encoder: str
    """The ``model.arch`` of the classifier that it is, whose weights it starts from."""
    outputs: Outputs
    """What the network has outputs for."""
    dilated: bool = False
    widened: bool = False
    """See `Encoder`."""

    def __call__(self, num_labels: int, input_size: int) -> EncoderDecoder:
        """The network; it is the same for any side of the input."""
        encoder = Encoder(self.encoder, dilated=self.dilated, widened=self.widened)
        return EncoderDecoder(encoder, self.decoder(encoder.channels, num_labels))


def encoder_of(arch: str) -> str:
    """The classifier whose weights a network starts from; a network without decoder is its own.

    What builds a network with a decoder says it as ``encoder``, as `Architecture` does.
    """
    network = NETWORKS[arch] if arch in NETWORKS.names() else None
    return str(getattr(network, "encoder", arch))


def outputs_of(arch: str) -> Outputs:
    """What a network has outputs for; what builds one with a decoder says it as ``outputs``."""
    network = NETWORKS[arch] if arch in NETWORKS.names() else None
    found: Outputs = getattr(network, "outputs", "image")
    return found
