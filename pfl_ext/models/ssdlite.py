"""SSDLite: a detector whose boxes start from default boxes at each place of six maps.

``model.arch`` is ``ssdlite_mobilenet_v3_large``, torchvision's network, or ``ssdlite_efficientnet_lite0``.

Shape letters: B images of a batch, S the side of the input, h x w the size of a map, A default boxes of an
image, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.ssdlite import SSDLiteClassificationHead, SSDLiteRegressionHead
from torchvision.ops import Conv2dNormActivation

from pfl_ext.models.decoders import Architecture, Decoder
from pfl_ext.models.encoders import Form
from pfl_ext.models.small import NETWORKS
from pfl_ext.tasks.detection_ssd import SSDDetection

EXTRA = (512, 256, 256, 128)
"""Channels of the maps that the detector adds to the encoder's two."""
RATIOS, SMALLEST, LARGEST = (2, 3), 0.2, 0.95
"""Ratios of a default box's sides besides 1, and the sides of the first and the last map's default boxes
relative to the image, as in torchvision."""
OF_A_GROUP = 16
"""Channels of a norm's group. So even a map of one pixel has this many numbers for a mean."""
DEVIATION = 0.03
"""Standard deviation of the initial weights, as in torchvision."""


class SSDLite(Decoder):
    """Four more maps, and for each of the six maps two small networks, of the classes and of the boxes.

    Liu et al. 2016 (arXiv 1512.02325) with the depthwise convolutions of Sandler et al. 2018 (arXiv
    1801.04381), section 6.2; the first map is within the block that halves the last time (Howard et al. 2019,
    arXiv 1905.02244, section 6.3). Heads and default boxes are torchvision's. Norms are GroupNorm from the
    start: with 32 groups, as elsewhere, the smallest maps would have two numbers in a group.

    Its outputs are float32 ``[B, A, C + 10]``, a row for each default box: C + 1 logits, of the background
    first, four offsets, the box's corners in pixels of the input, and S.

    Args:
        channels: channels of the encoder's two maps.
        num_classes: C.
        more: channels of the maps that are added.
    """

    by_class: ClassVar[str] = "classes"

    def __init__(self, channels: Sequence[int], num_classes: int, more: Sequence[int] = EXTRA) -> None:
        super().__init__()
        self.extra = nn.ModuleList(_block(before, after) for before, after in pairwise((channels[-1], *more)))
        for layer in self.extra.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, std=DEVIATION)
        widths = [*channels, *more]
        self.defaults = DefaultBoxGenerator(
            [list(RATIOS) for _ in widths], min_ratio=SMALLEST, max_ratio=LARGEST
        )
        counts = self.defaults.num_anchors_per_location()
        self.boxes = SSDLiteRegressionHead(widths, counts, _norm)
        self.classes = SSDLiteClassificationHead(widths, counts, num_classes + 1, _norm)

    def forward(self, maps: Sequence[Tensor], images: Tensor) -> Tensor:
        """See `Decoder.forward`; there are two maps."""
        levels = list(maps)
        for block in self.extra:
            levels.append(block(levels[-1]))
        side = images.shape[3]
        with torch.autocast(images.device.type, enabled=False):
            (anchors,) = self.defaults(ImageList(images[:1].float(), [(side, side)]), levels)
        logits, offsets = self.classes(levels), self.boxes(levels)
        fixed = torch.cat([anchors, torch.full_like(anchors[:, :1], side)], 1).expand(len(images), -1, -1)
        return torch.cat([logits.float(), offsets.float(), fixed.float()], 2)


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(max(1, channels // OF_A_GROUP), channels)


def _block(inputs: int, outputs: int) -> nn.Sequential:
    """Reduce to half the channels, halve the map channel by channel, then combine all channels."""
    middle = outputs // 2
    layer = partial(Conv2dNormActivation, norm_layer=_norm, activation_layer=nn.ReLU6)
    return nn.Sequential(
        layer(inputs, middle, kernel_size=1),
        layer(middle, middle, kernel_size=3, stride=2, groups=middle),
        layer(middle, outputs, kernel_size=1),
    )


def _mobilenet(fixed: bool) -> Form:
    """MobileNetV3 up to the expansion of the last block that halves, and the rest. From scratch it has half
    of the last channels, as in torchvision and as Howard et al. do for detection."""
    first = [*(f"features.{number}" for number in range(13)), "features.13.block.0"]
    rest = [*(f"features.13.block.{part}" for part in (1, 2, 3)), *(f"features.{n}" for n in (14, 15, 16))]
    return Form((first, rest), (672, 960 if fixed else 480), options={"reduced_tail": not fixed})


def _lite(fixed: bool) -> Form:
    """The same split of EfficientNet-Lite0, always with all channels, since its weights are for these."""
    first = ["stem", *(f"blocks.{number}" for number in range(11)), "blocks.11.expand"]
    rest = ["blocks.11.depthwise", "blocks.11.project", *(f"blocks.{n}" for n in range(12, 16)), "last"]
    return Form((first, rest), (672, 1280))


for _encoder, _form in (("mobilenet_v3_large", _mobilenet), ("efficientnet_lite0", _lite)):
    _network = Architecture(SSDLite, _encoder, "boxes", form=_form, task=SSDDetection)
    NETWORKS.add(f"ssdlite_{_encoder}", _network)
