"""Networks with outputs for boxes: an encoder (`pfl_ext.models.encoders`) and a detector of its maps.

``model.arch`` is ``fcos_`` and the encoder's name, as ``fcos_efficientnet_lite0``. Pyramid and heads are
torchvision's, and narrower, for small images and few cores.

Shape letters: B images of a batch, S the side of the input, h x w the size of a map, A places of an image at
which a box may be predicted, C classes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.detection.fcos import FCOSClassificationHead, FCOSRegressionHead
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelP6P7

from pfl_ext.models.decoders import Architecture, Decoder
from pfl_ext.models.encoders import FORMS
from pfl_ext.models.small import NETWORKS
from pfl_ext.tasks.detection import NO_LIMIT

WIDTH, CONVOLUTIONS = 96, 2
"""Channels of pyramid and heads, and convolutions of a head before its last; torchvision's are 256 and 4."""
FIRST = 2
"""Index of the first of the encoder's five maps from which boxes are predicted: that of stride 8."""
SMALLEST, LARGEST = 4, 8
"""Least and greatest distance, in strides, from a place to the farthest side of its level's boxes."""


class CoarseLevels(LastLevelP6P7):
    """The two coarsest maps, never in bfloat16, for which they are too small to matter.

    If a convolution of stride 2 has a map of one pixel, torch 2.15 on a CPU leaves uninitialised memory in
    the bfloat16 gradient of taps that meet only padding.
    """

    def forward(self, p: list[Tensor], c: list[Tensor], names: list[str]) -> tuple[list[Tensor], list[str]]:
        """The pyramid's maps, the encoder's and names -> the pyramid's with two more, and their names."""
        found: tuple[list[Tensor], list[str]]
        if p[-1].dtype != torch.bfloat16:
            found = super().forward(p, c, names)
            return found
        with torch.autocast(p[-1].device.type, enabled=False):
            found = super().forward([x.float() for x in p], [x.float() for x in c], names)
        return found


class Distances(FCOSRegressionHead):
    """The head of boxes, with a softplus where torchvision's has a ReLU.

    A ReLU that gives 0 at every place has no gradient. Then boxes stop learning while classes go on. On
    Street this happened in the first epoch of central training.
    """

    def forward(self, x: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The pyramid's maps -> distances ``[B, A, 4]`` and logits of centre-ness ``[B, A, 1]``."""
        found = [self.conv(level) for level in x]
        distances = [F.softplus(self.bbox_reg(level)) for level in found]
        return _by_place(distances), _by_place([self.bbox_ctrness(level) for level in found])


def _by_place(maps: Sequence[Tensor]) -> Tensor:
    """``[B, n, h, w]`` of each level -> ``[B, A, n]``."""
    return torch.cat([level.flatten(2).transpose(1, 2) for level in maps], 1)


class FCOS(Decoder):
    """A pyramid of five maps, at each place of which there is at most one box.

    Tian et al. 2019 (arXiv 1904.01355), with centre-ness beside the boxes as in the authors' later version
    (arXiv 2006.09214) and in torchvision.

    Its outputs are float32 ``[B, A, C + 10]``, a row for each place: C logits, a logit of centre-ness, the
    distances to left, top, right and bottom in strides, the place's x, y and stride in pixels of the input,
    and the least and the greatest distance, in pixels, for which the place is responsible.
    """

    def __init__(
        self,
        channels: Sequence[int],
        num_classes: int,
        width: int = WIDTH,
        convolutions: int = CONVOLUTIONS,
    ) -> None:
        super().__init__()
        more = CoarseLevels(width, width)
        self.pyramid = FeaturePyramidNetwork(list(channels[FIRST:]), width, extra_blocks=more)
        self.boxes = Distances(width, 1, convolutions)
        self.classes = FCOSClassificationHead(width, 1, num_classes, convolutions)

    def forward(self, maps: Sequence[Tensor], images: Tensor) -> Tensor:
        """See `Decoder.forward`."""
        named = OrderedDict((str(number), x) for number, x in enumerate(maps[FIRST:]))
        levels = list(self.pyramid(named).values())
        logits, (distances, centred) = self.classes(levels), self.boxes(levels)
        places = places_of([(x.shape[2], x.shape[3]) for x in levels], images.shape[3], images.device)
        parts: list[Any] = [logits, centred, distances, places.expand(len(images), -1, -1)]
        return torch.cat([part.float() for part in parts], 2)


def places_of(sizes: Sequence[tuple[int, int]], side: int, device: torch.device) -> Tensor:
    """The places of maps of these heights and widths, finest first, row by row: ``[A, 5]`` float32.

    A map's places divide the image evenly, and each is the centre of its part. The columns are x, y, the
    width of a part, and the least and the greatest distance of a box's sides: `SMALLEST` and `LARGEST` parts.
    The finest map also has all smaller boxes, and the coarsest all larger ones.
    """
    found = []
    for number, (height, width) in enumerate(sizes):
        stride = side / width
        y, x = torch.meshgrid(
            (torch.arange(height, device=device) + 0.5) * (side / height),
            (torch.arange(width, device=device) + 0.5) * stride,
            indexing="ij",
        )
        least = 0.0 if number == 0 else SMALLEST * stride
        greatest = NO_LIMIT if number == len(sizes) - 1 else LARGEST * stride
        of_level = [torch.full_like(x, value) for value in (stride, least, greatest)]
        found.append(torch.stack([x, y, *of_level], 2).view(-1, 5))
    return torch.cat(found)


for _encoder in FORMS:
    NETWORKS.add(f"fcos_{_encoder}", Architecture(FCOS, _encoder, "boxes"))
