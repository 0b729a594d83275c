"""Networks with outputs for each pixel: an encoder (`pfl_ext.models.encoders`) and a decoder of its maps.

``model.arch`` is the decoder's name and the encoder's, as ``deeplabv3plus_efficientnet_lite0``. Pretrained
weights are the encoder's; a decoder is new, has GroupNorm, and is always trained (`pfl_ext.models.decoders`).

Shape letters: B images of a batch, S the side of input and outputs, h x w the size of a map, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfl_ext.models.decoders import Architecture, Decoder
from pfl_ext.models.encoders import FORMS
from pfl_ext.models.small import NETWORKS

RATES = (6, 12, 18)
"""Dilations of the pyramid's convolutions, for a map of stride 16."""
WIDE, LOW = 256, 48
UNET = (256, 128, 64, 32, 16)
"""Channels of UNet's five blocks."""


def _convolution(inputs: int, outputs: int, kernel: int = 1, dilation: int = 1) -> nn.Sequential:
    """A convolution with norm and ReLU that keeps the size; `pfl_ext.models.classifier` chooses the norm."""
    padding = dilation * (kernel // 2)
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, padding=padding, dilation=dilation, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class DeepLabV3Plus(Decoder):
    """A pyramid of dilated convolutions on the last map, then one sharper map beside it.

    Chen et al. 2018 (arXiv 1802.02611), with an output stride of 16. Maps are scaled bilinearly about the
    pixels' centres (``align_corners`` false), as images are.
    """

    def __init__(self, channels: Sequence[int], num_classes: int) -> None:
        super().__init__()
        deep, low = channels[-1], channels[1]
        rates = [_convolution(deep, WIDE, 3, rate) for rate in RATES]
        self.pyramid = nn.ModuleList([_convolution(deep, WIDE), *rates])
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), *_convolution(deep, WIDE))
        self.projected = nn.Sequential(*_convolution(WIDE * (len(RATES) + 2), WIDE), nn.Dropout(0.5))
        self.low = _convolution(low, LOW)
        self.refined = nn.Sequential(
            *_convolution(WIDE + LOW, WIDE, 3), nn.Dropout(0.5), *_convolution(WIDE, WIDE, 3), nn.Dropout(0.1)
        )
        self.classifier = nn.Conv2d(WIDE, num_classes, 1)

    def forward(self, maps: Sequence[Tensor], images: Tensor) -> Tensor:
        """See `Decoder.forward`."""
        branches = [branch(maps[-1]) for branch in self.pyramid]
        branches.append(self.pooled(maps[-1]).expand_as(branches[0]))
        deep, low = self.projected(torch.cat(branches, 1)), self.low(maps[1])
        joined = torch.cat([_scaled(deep, low), low], 1)
        return _scaled(self.classifier(self.refined(joined)), images)


def _scaled(x: Tensor, like: Tensor) -> Tensor:
    """``[B, C, h, w]`` at the height and width of another tensor, bilinearly."""
    return F.interpolate(x, like.shape[2:], mode="bilinear", align_corners=False)


class UNet(Decoder):
    """Five blocks. Each doubles the size of a map and takes in the encoder's map of that size.

    Ronneberger et al. 2015 (arXiv 1505.04597), with padded convolutions and an encoder of any kind.
    """

    def __init__(self, channels: Sequence[int], num_classes: int) -> None:
        super().__init__()
        skipped, inputs = [*channels[-2::-1], 0], channels[-1]
        blocks = []
        for skip, outputs in zip(skipped, UNET):
            both = (*_convolution(inputs + skip, outputs, 3), *_convolution(outputs, outputs, 3))
            blocks.append(nn.Sequential(*both))
            inputs = outputs
        self.blocks = nn.ModuleList(blocks)
        self.classifier = nn.Conv2d(inputs, num_classes, 3, padding=1)

    def forward(self, maps: Sequence[Tensor], images: Tensor) -> Tensor:
        """See `Decoder.forward`."""
        x = maps[-1]
        for block, skip in zip(self.blocks, (*maps[-2::-1], None)):
            like = images if skip is None else skip
            x = F.interpolate(x, like.shape[2:], mode="nearest")
            x = block(x if skip is None else torch.cat([x, skip], 1))
        logits: Tensor = self.classifier(x)
        return logits


DECODERS: Mapping[str, type[DeepLabV3Plus | UNet]] = {"deeplabv3plus": DeepLabV3Plus, "unet": UNet}
for _name, _kind in DECODERS.items():
    for _encoder in FORMS:
        _is_unet = _kind is UNet
        _network = Architecture(_kind, _encoder, "pixels", dilated=not _is_unet, widened=_is_unet)
        NETWORKS.add(f"{_name}_{_encoder}", _network)
