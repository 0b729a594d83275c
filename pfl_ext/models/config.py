"""What a network is built from."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn

from pfl_ext.configs import STRICT
from pfl_ext.models.classifier import Init, build_backbone
from pfl_ext.models.weights import IMAGENET


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The network."""

    arch: str = "resnet18"
    """Name of one of torchvision's classifiers, or of a network registered in `pfl_ext.models`."""
    input_size: PositiveInt = 224
    """Side of the square that the network sees, cut from the image, in pixels."""
    pretrained: bool = False
    """True: ImageNet weights and frozen BatchNorm statistics. False: from scratch, with GroupNorm."""
    groups: PositiveInt = 32
    """Most groups of a GroupNorm; the largest number up to it that divides the channels is taken."""
    bottleneck: PositiveInt | None = None
    """Units of one more linear layer before the classifier; none: there is no such layer."""
    trained: Literal["all", "two_layers"] = "all"
    """Which layers learn; two_layers: bottleneck and classifier, the others stay as they were loaded."""
    weights_sha256: str | None = None
    """SHA-256 of the file of pretrained weights; --weights fills it in. none: torchvision's own."""

    def build(
        self, num_labels: int, generator: torch.Generator, weights: Path | None, init: Init
    ) -> nn.Module:
        """The backbone, on the CPU; see `build_backbone`.

        Args:
            num_labels: its outputs.
            generator: from which its first weights are drawn.
            weights: the file with the content that `weights_sha256` names.
            init: distribution of the first weights.

        Raises:
            ValueError: when a file is asked for and none is given, or a value does not fit the network.
        """
        if weights is None and self.weights_sha256 is not None:
            raise ValueError(
                f"the config asks for weights with SHA-256 {self.weights_sha256}: give their file with "
                "--weights"
            )
        return build_backbone(
            self.arch,
            num_labels,
            norm="frozen_batch" if self.pretrained else "group",
            weights=(weights or IMAGENET) if self.pretrained else None,
            init=init,
            generator=generator,
            groups=self.groups,
            input_size=self.input_size,
            bottleneck=self.bottleneck,
            train=self.trained,
        )
