"""EfficientNet-Lite0 beside the network of the package efficientnet_lite_pytorch, on the real weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from efficientnet_lite_pytorch import EfficientNet
from torch import Tensor, nn

from pfl_ext.data.normalisation import FIXED
from pfl_ext.data.transforms import normalise
from pfl_ext.models.classifier import FrozenStatisticsBatchNorm2d, build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.dropout import KeyedDropout
from pfl_ext.models.efficientnet_lite import EfficientNetLite
from pfl_ext.models.pretrained import PACKAGED
from pfl_ext.models.weights import IMAGENET, read_weights

ARCH = "efficientnet_lite0"
CLASSES = 1000


@pytest.fixture(scope="module")
def published() -> dict[str, Tensor]:
    """The package's tensors under its names."""
    return dict(torch.load(PACKAGED[ARCH].path(), weights_only=True))


def frozen(**options: Any) -> nn.Module:
    config = ModelConfig(ARCH, pretrained=True, **options)
    return build_backbone(config, CLASSES, torch.Generator().manual_seed(1), IMAGENET)


@torch.no_grad()
@pytest.mark.parametrize("side", [128, 224, 97, 33])
@pytest.mark.parametrize("pads_for_any_size", [False, True])
def test_outputs_are_those_of_the_packages_network(
    side: int, pads_for_any_size: bool, published: dict[str, Tensor]
) -> None:
    """The package pads for one size of images, or for whichever comes: both are TensorFlow's "same"."""
    theirs = EfficientNet.from_name("efficientnet-lite0", image_size=None if pads_for_any_size else side)
    theirs.load_state_dict(published)
    ours = EfficientNetLite(CLASSES)
    ours.load_state_dict(read_weights(ARCH, IMAGENET)[0])
    images = torch.randn(3, 3, side, side, generator=torch.Generator().manual_seed(side))
    expected = theirs.eval()(images)
    assert torch.linalg.norm(ours.eval()(images) - expected) <= 1e-5 * torch.linalg.norm(expected)


@torch.no_grad()
def test_the_backbone_for_training_is_the_packages_network_but_for_its_head(
    published: dict[str, Tensor],
) -> None:
    """Statistics are frozen, with TensorFlow's eps, in training mode as well."""
    backbone = frozen().train()
    norms = [m for m in backbone.modules() if isinstance(m, FrozenStatisticsBatchNorm2d)]
    assert len(norms) == 49
    assert {norm.eps for norm in norms} == {1e-3}
    backbone.classifier.load_state_dict(  # type: ignore[union-attr]
        {name: published[f"_fc.{name}"] for name in ("weight", "bias")}
    )
    theirs = EfficientNet.from_name("efficientnet-lite0", image_size=64)
    theirs.load_state_dict(published)
    images = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    expected = theirs.eval()(images)
    assert torch.linalg.norm(backbone(images) - expected) <= 1e-5 * torch.linalg.norm(expected)


def test_its_input_is_a_pixel_less_127_over_128() -> None:
    pixels = torch.arange(256.0).expand(1, 3, 1, 256)
    mean, std = (torch.tensor(values) for values in FIXED["efficientnet_lite"])
    torch.testing.assert_close(normalise(pixels / 255, mean, std), (pixels - 127) / 128, rtol=0, atol=1e-6)


def test_it_has_the_published_size_and_dropout_before_its_classifier() -> None:
    assert sum(p.numel() for p in EfficientNetLite(CLASSES).parameters()) == 4_652_008
    dropouts = [m for m in frozen(dropout=True).modules() if isinstance(m, KeyedDropout)]
    assert [dropout.p for dropout in dropouts] == [0.2]


@pytest.mark.parametrize("init", ["torchvision", "keras", "he", "xavier"])
def test_from_scratch_it_has_group_norm_whose_groups_divide_every_width(init: Any) -> None:
    net = build_backbone(ModelConfig(ARCH, init=init, groups=32), 7, torch.Generator().manual_seed(1))
    groups = {(m.num_channels, m.num_groups) for m in net.modules() if isinstance(m, nn.GroupNorm)}
    assert {channels for channels, _ in groups} >= {16, 24, 40, 80, 112, 192, 320, 1280}
    assert all(channels % number == 0 for channels, number in groups)
    out = net(torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2)))
    assert out.shape == (2, 7)
    assert out.isfinite().all()
