"""Decoders: sizes as published, dilation without another function, the encoder's weights, what is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from pfl_ext.models.classifier import FrozenStatisticsBatchNorm2d, build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.decoders import EncoderDecoder, encoder_of
from pfl_ext.models.encoders import Encoder
from pfl_ext.models.pretrained import PACKAGED, source_of
from pfl_ext.models.small import NETWORKS
from pfl_ext.models.weights import IMAGENET

LITE = "deeplabv3plus_efficientnet_lite0"


def built(arch: str = LITE, weights: Any = None, classes: int = 4, **options: Any) -> EncoderDecoder:
    config = ModelConfig(arch, input_size=16, pretrained=weights is not None, **options)
    network = build_backbone(config, classes, torch.Generator().manual_seed(0), weights)
    assert isinstance(network, EncoderDecoder)
    return network


@pytest.mark.parametrize(
    "arch, parameters, of_encoder",
    [
        ("deeplabv3plus_resnet101", 59_344_309, 42_500_160),
        ("deeplabv3plus_mobilenet_v2", 5_816_053, 1_811_712),
        ("unet_resnet101", 51_516_133, 42_500_160),
        ("unet_mobilenet_v2", 7_912_845 - 1_281_000, 2_223_872),
    ],
)
def test_networks_are_as_large_as_fedcvs(arch: str, parameters: int, of_encoder: int) -> None:
    """FedCV's table 3, exactly; its UNet on MobileNetV2 counts a classifier that it does not run."""
    with torch.device("meta"):
        network = NETWORKS[arch](21, 64)
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert isinstance(network, EncoderDecoder)
    assert sum(p.numel() for p in network.encoder.parameters()) == of_encoder


@pytest.mark.parametrize("decoder", ["deeplabv3plus", "unet"])
@pytest.mark.parametrize("encoder", ["resnet18", "mobilenet_v2", "efficientnet_lite0"])
def test_outputs_are_as_large_as_images_and_maps_have_their_strides(decoder: str, encoder: str) -> None:
    side = 33
    with torch.device("meta"):
        network = NETWORKS[f"{decoder}_{encoder}"](7, side)
        images = torch.zeros(2, 3, side, side)
        maps = network.encoder(images)  # type: ignore[operator]
        assert network.decoder(maps, images).shape == (2, 7, side, side)  # type: ignore[operator]
    assert tuple(x.shape[1] for x in maps) == network.encoder.channels  # type: ignore[union-attr]
    strides = [2, 4, 8, 16, 16 if decoder == "deeplabv3plus" else 32]
    assert [x.shape[2] for x in maps] == [-(-side // stride) for stride in strides]


@pytest.mark.parametrize("arch, first", [("resnet18", 0), ("mobilenet_v2", 0), ("efficientnet_lite0", 1)])
def test_a_dilated_map_has_the_narrow_one_at_every_second_place(arch: str, first: int) -> None:
    """TensorFlow's padding of Lite0 puts the places of a stride at odd numbers."""
    torch.manual_seed(0)
    narrow, wide = Encoder(arch, dilated=False, widened=False), Encoder(arch, dilated=True, widened=False)
    wide.load_state_dict(narrow.state_dict())
    images = torch.randn(1, 3, 128, 128).double()
    with torch.no_grad():
        expected, found = narrow.double().eval()(images)[-1], wide.double().eval()(images)[-1]
    assert expected.std() > 0
    torch.testing.assert_close(found[:, :, first::2, first::2], expected, rtol=1e-9, atol=1e-9)


def test_an_encoder_starts_from_its_classifiers_weights_and_a_decoder_from_drawn_ones() -> None:
    network, scratch = built(weights=IMAGENET), built()
    published = torch.load(PACKAGED["efficientnet_lite0"].path(), weights_only=True)
    assert torch.equal(network.encoder.get_parameter("stem.conv.weight"), published["_conv_stem.weight"])
    assert torch.equal(
        network.encoder.get_buffer("blocks.0.depthwise.norm.running_mean"),
        published["_blocks.0._bn1.running_mean"],
    )
    theirs = dict(scratch.decoder.named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in network.decoder.named_parameters())
    kinds = {type(m) for m in network.encoder.modules()}
    assert FrozenStatisticsBatchNorm2d in kinds
    assert nn.GroupNorm not in kinds
    assert FrozenStatisticsBatchNorm2d not in {type(m) for m in network.decoder.modules()}
    assert source_of(LITE) is source_of("efficientnet_lite0")
    assert encoder_of("resnet18") == "resnet18"


def test_a_run_is_taken_up_with_its_decoder_and_with_its_head_if_that_is_kept(tmp_path: Path) -> None:
    first, file = built(), tmp_path / "model.safetensors"
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(1)
    tensors = {f"backbone.{name}": t for name, t in first.state_dict().items()}
    buffers = {f"backbone.{name}": t for name, t in built(weights=IMAGENET).state_dict().items()}
    safetensors.torch.save_file({**buffers, **tensors}, file)
    for keep_head, classes in ((True, 4), (False, 4), (False, 9)):
        again = built(weights=file, keep_head=keep_head, classes=classes)
        same = {name for name, p in again.named_parameters() if torch.equal(p, first.get_parameter(name))}
        new = {name for name, _ in again.named_parameters()} - same
        assert new == (set() if keep_head else {"decoder.classifier.weight", "decoder.classifier.bias"})


@pytest.mark.parametrize("trained", ["head", "lora", "norms", "bias", "last_blocks"])
def test_a_decoder_is_always_trained(trained: str) -> None:
    network = built(weights=IMAGENET, trained=trained)
    assert all(p.requires_grad for p in network.decoder.parameters())
    of_encoder = [p.requires_grad for p in network.encoder.parameters()]
    assert not all(of_encoder)
    assert any(of_encoder) == (trained != "head")


REFUSED = [
    ({"bottleneck": 8}, "ends in a convolution, before which there is no bottleneck; leave it out"),
    ({"random_features": 8}, "ends in a convolution, which takes no random features"),
    ({"channel_norm": "data"}, "has no norm for it: set it to group"),
    ({"weights": IMAGENET, "keep_head": True}, "holds no decoder of .*: set model.keep_head to false"),
]
"""What no network with a decoder goes with."""
NO_DROPOUT = "has no dropout: set model.dropout to false"


@pytest.mark.parametrize(
    "options, reason",
    [
        *REFUSED,
        ({"arch": "unet_efficientnet_lite0", "dropout": True}, NO_DROPOUT),
        (
            {"arch": "unet_resnet19"},
            ("model.arch is 'unet_resnet19', which is not a known network; did you mean unet_resnet1"),
        ),
    ],
)
def test_what_a_decoder_does_not_go_with_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        built(**options)
