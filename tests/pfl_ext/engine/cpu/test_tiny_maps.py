"""Networks whose maps are so small that torch's bfloat16 gradients are wrong on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pfl_ext.engine.cpu import tiny_maps
from pfl_ext.models.classifier import ImageClassifier, build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.tasks.single_label import SingleLabel


def classifier(backbone: nn.Module, size: int) -> ImageClassifier:
    return ImageClassifier(backbone, task=SingleLabel(), input_size=size)


@pytest.mark.parametrize(("size", "found"), [(16, "layer4.0.conv1"), (32, None)])
def test_a_stride_on_one_pixel_is_found(size: int, found: str | None) -> None:
    network = build_backbone(ModelConfig(arch="resnet18", input_size=size), 3, torch.Generator())
    assert tiny_maps.found_in(classifier(network, size)) == found


@pytest.mark.parametrize(
    ("layer", "size", "found"),
    [
        (nn.Conv2d(3, 4, 3, 2, 1), 1, True),
        (nn.Conv2d(3, 4, 3, 1, 1), 1, False),
        (nn.Conv2d(3, 4, 1, 2), 1, False),
        (nn.Conv2d(3, 4, 5, 1, 2), 1, True),
        (nn.Conv2d(3, 4, 5, 1, "same"), 2, False),
        (nn.Conv2d(3, 4, 7, 1, 3), 2, True),
        (nn.Conv2d(3, 3, 3, 2, 1, groups=3), 1, False),
        (nn.Conv2d(3, 4, 3, 2, 2, dilation=2), 1, False),
    ],
)
def test_the_kinds_that_were_seen_wrong_and_no_others(layer: nn.Conv2d, size: int, found: bool) -> None:
    assert (tiny_maps.found_in(classifier(nn.Sequential(layer), size)) == "0") is found
