"""EfficientNet-Lite0, whose ImageNet weights a package of the package index contains.

Tan and Le 2019 (EfficientNet, arXiv 1905.11946), in the form that TensorFlow's authors published in 2020 for
small devices: without squeeze-and-excitation, with ReLU6 for swish. Stem and last convolution have the widths
of EfficientNet-B0.

Shape letters: B images of a batch, C channels, H x W the size of a map, S side of the input, K labels.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pfl_ext.models.small import NETWORKS

STEM, LAST = 32, 1280  # channels
EPS = 1e-3  # of every BatchNorm
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
"""Blocks, kernel, stride of the first block, expansion, channels."""


class Convolution(nn.Module):
    """Convolution with TensorFlow's padding "same", BatchNorm, and ReLU6 if asked for.

    TensorFlow pads so that ``ceil(H / stride)`` rows come out, with the odd row below and the odd column to
    the right; symmetric padding would shift the map by half a pixel at each stride of 2.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1, relu: bool = True
    ) -> None:
        super().__init__()
        padding = kernel // 2 if stride == 1 else 0
        self._kernel, self._stride = kernel, stride
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(outputs, EPS)
        self.relu = nn.ReLU6(inplace=True) if relu else nn.Identity()

    def keep_size(self) -> None:
        """Pad as for a stride of 1. The caller must change the stride of ``conv`` itself."""
        self._stride = 1

    def forward(self, x: Tensor) -> Tensor:
        """``[B, C, H, W]`` -> ``[B, outputs, ceil(H / stride), ceil(W / stride)]``."""
        kernel, stride = self._kernel, self._stride
        if stride > 1:
            missing = [max(kernel - ((size - 1) % stride + 1), 0) for size in (x.shape[3], x.shape[2])]
            x = F.pad(x, [side for total in missing for side in (total // 2, total - total // 2)])
        out: Tensor = self.relu(self.norm(self.conv(x)))
        return out


class InvertedResidual(nn.Module):
    """Expand, filter each channel by itself, project (Sandler et al. 2018, arXiv 1801.04381)."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        self.expand = Convolution(inputs, wide) if expansion > 1 else nn.Identity()
        self.depthwise = Convolution(wide, wide, kernel, stride, groups=wide)
        self.project = Convolution(wide, outputs, relu=False)
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """``[B, inputs, H, W]`` -> ``[B, outputs, ceil(H / stride), ceil(W / stride)]``."""
        out: Tensor = self.project(self.depthwise(self.expand(x)))
        return x + out if self.adds else out


class EfficientNetLite(nn.Module):
    """The network; its features are the ``[B, 1280]`` that enter ``classifier``."""

    def __init__(self, num_labels: int) -> None:
        super().__init__()
        self.stem = Convolution(3, STEM, 3, 2)
        blocks, channels = [], STEM
        for count, kernel, stride, expansion, outputs in STAGES:
            for number in range(count):
                first = stride if number == 0 else 1
                blocks.append(InvertedResidual(channels, outputs, kernel, first, expansion))
                channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.last = Convolution(channels, LAST)
        self.dropout = nn.Dropout(0.2)
        self.classifier = nn.Linear(LAST, num_labels)

    def forward(self, images: Tensor) -> Tensor:
        """``[B, 3, S, S]`` -> ``[B, K]``."""
        features = self.last(self.blocks(self.stem(images))).mean((2, 3))
        out: Tensor = self.classifier(self.dropout(features))
        return out


@NETWORKS.register("efficientnet_lite0")
def efficientnet_lite0(num_labels: int, input_size: int) -> EfficientNetLite:
    """``[B, 3, S, S]`` -> ``[B, K]``; 4,652,008 parameters for K = 1,000, made for S = 224."""
    return EfficientNetLite(num_labels)
