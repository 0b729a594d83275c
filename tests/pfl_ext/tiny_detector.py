"""A detector of 200,000 parameters with the layers of a large one, so that tests cost little."""

from __future__ import annotations

from torch import Tensor, nn

from pfl_ext.models.decoders import EncoderDecoder
from pfl_ext.models.detection import FCOS
from pfl_ext.models.encoders import Encoder

CHANNELS = (4, 4, 8, 8, 8)


class TinyEncoder(Encoder):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        inputs = (3, *CHANNELS)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in zip(inputs, CHANNELS)
        )

    def forward(self, images: Tensor) -> list[Tensor]:
        maps = [images]
        for block in self.blocks:
            maps.append(block(maps[-1]))
        return maps[1:]


class Tiny:
    """As `pfl_ext.models.decoders.Architecture`."""

    encoder, outputs = "lenet", "boxes"

    def __call__(self, num_labels: int, input_size: int) -> EncoderDecoder:
        return EncoderDecoder(TinyEncoder(), FCOS(CHANNELS, num_labels, width=64, convolutions=1))
