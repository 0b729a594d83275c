"""Depths of parameters, and learning rates that fall with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision.models as zoo
from torch import nn

from pfl_ext.models.classifier import RATE_FACTOR, ImageClassifier
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.depths import Depths, check_layer_decay
from pfl_ext.models.prefix import Prefix
from pfl_ext.models.trained import choose_trained
from pfl_ext.tasks.single_label import SingleLabel
from tests.pfl_ext.models.test_trained import SIDE, build


def vit() -> nn.Module:
    net: nn.Module = zoo.VisionTransformer(10, 5, 2, 2, hidden_dim=8, mlp_dim=8, num_classes=3)
    return net


def depths(backbone: nn.Module) -> dict[str, int]:
    found = Depths.of_network(backbone)
    return {name: found.depth(name) for name, _ in backbone.named_parameters()}


def timms(name: str) -> int:
    """The depth by timm's rule for its vision transformers, whose final norm is in the last block."""
    if name.startswith("encoder.layers.encoder_layer_"):
        return 1 + int(name.split(".")[2].rpartition("_")[2])
    return {"encoder.ln": 2, "heads.head": 3}.get(name.rpartition(".")[0], 0)


def test_a_vision_transformers_depths_are_timms() -> None:
    found = depths(vit())
    assert found == {name: timms(name) for name in found}
    assert {name for name, depth in found.items() if not depth} == {
        *("class_token", "encoder.pos_embedding", "conv_proj.weight", "conv_proj.bias")
    }
    assert found["encoder.layers.encoder_layer_0.self_attention.in_proj_weight"] == 1


def test_adapters_and_decoders_have_the_depth_of_their_block() -> None:
    plain, adapted = vit(), vit()
    config = ModelConfig("vit", input_size=10, trained="lora", lora_rank=1)
    choose_trained(adapted, config, torch.Generator().manual_seed(0))
    assert Depths.of_network(adapted) == Depths.of_network(plain)
    trained = depths(adapted)
    assert {trained[name] for name in trained if "lora_" in name} == {0, 1, 2}
    encoder = depths(build("unet_resnet18"))
    assert (encoder["encoder.bn1.weight"], encoder["encoder.layer1.0.conv1.weight"]) == (0, 1)
    assert {depth for name, depth in encoder.items() if name.startswith("decoder.")} == {9}


def test_each_rate_is_a_group_of_the_optimiser() -> None:
    module = ImageClassifier(vit(), task=SingleLabel(), input_size=10)
    groups = module.rate_groups(0.5, 8.0, 0.5)
    factors = {id(p): group[RATE_FACTOR] for group in groups for p in group["params"]}
    for name, parameter in module.backbone.named_parameters():
        assert factors[id(parameter)] == (8.0 if timms(name) == 3 else 0.5 ** (3 - timms(name))), name
    assert [(group["lr"], group[RATE_FACTOR]) for group in groups] == [
        *((0.0625, 0.125), (0.125, 0.25), (0.25, 0.5), (4.0, 8.0))
    ]
    assert [group.get(RATE_FACTOR) for group in module.rate_groups(0.5, 1.0, 0.5)] == [0.125, 0.25, 0.5, None]


def test_layers_behind_frozen_ones_keep_their_depth() -> None:
    """Also where they are trained without the frozen blocks before them, on what these computed."""
    whole = ImageClassifier(
        build("lenet", trained="last_blocks", last_blocks=2), task=SingleLabel(), input_size=SIDE
    )
    after = Prefix(whole).classifier
    both = [
        [(group.get(RATE_FACTOR), len(group["params"])) for group in each.rate_groups(1.0, 1.0, 0.5)]
        for each in (whole, after)
    ]
    assert both == [[(0.25, 2), (0.5, 2), (None, 2)]] * 2
    assert after.depths == whole.depths


class Branches(nn.Module):
    """The block that is defined first runs last."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first, self.fc = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.Linear(3, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(self.second(self.first(images)).mean((2, 3)))
        return out


@pytest.mark.parametrize(
    "backbone, decay, message",
    [
        (Branches, 0.5, "local.layer_decay is 0.5, but the blocks of it are not run one after another"),
        (
            vit,
            0.02,
            r"the first of 3 blocks has 8e-06 times the learning rate, .* choose a larger one, as 0.03,",
        ),
        (lambda: vit().heads, 0.5, "but only the last layer is trained: set local.layer_decay to 1"),
    ],
    ids=["order", "small", "head"],
)
def test_a_decay_without_effect_or_order_is_refused(backbone: Any, decay: float, message: str) -> None:
    config = ModelConfig("it", input_size=10)
    check_layer_decay(network := backbone(), config, "local.layer_decay", 1.0)
    with pytest.raises(ValueError, match=message):
        check_layer_decay(network, config, "local.layer_decay", decay)


def test_a_decay_of_blocks_in_order_is_accepted() -> None:
    check_layer_decay(vit(), ModelConfig("it", input_size=10), "local.layer_decay", 0.03)
