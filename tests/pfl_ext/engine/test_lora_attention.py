"""Adapters of attention are trained by the engine as by pfl's loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision.models as zoo
from torch import nn

from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.lora import adapters_of
from pfl_ext.models.trained import choose_trained
from pfl_ext.tasks.multi_label import MultiLabel
from tests.pfl_ext.engine.setting import BFLOAT16, Setting, distance, private, rounding_of

SIZES = [1, 2, 9, 1, 5]
LABELS = 17


def vit() -> nn.Module:
    net: nn.Module = zoo.VisionTransformer(10, 5, 2, 2, hidden_dim=8, mlp_dim=16, num_classes=LABELS)
    return net


def swin() -> nn.Module:
    net: nn.Module = zoo.SwinTransformer(
        [2, 2], 8, [2], [2], [3, 3], stochastic_depth_prob=0.0, num_classes=LABELS
    )
    return net


def adapted(whole: Callable[[], nn.Module] = vit, **options: Any) -> nn.Module:
    """A network that has been trained for a while: neither A nor B is zero."""
    torch.manual_seed(0)
    backbone, draw = whole(), torch.Generator().manual_seed(6)
    nn.init.normal_(list(backbone.modules())[-1].weight, generator=draw)  # torchvision's is zero
    config = ModelConfig("small", input_size=10, trained="lora", lora_rank=3, **options)
    choose_trained(backbone, config, draw)
    for layer in adapters_of(backbone).values():
        nn.init.normal_(layer.lora_b.weight, std=0.2, generator=draw)
    return backbone
