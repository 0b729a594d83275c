"""Detectors: places that divide an image, first outputs, the encoder's weights, what is new and trained."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torchvision.models.detection.fcos import FCOSRegressionHead

from pfl_ext.models.classifier import FrozenStatisticsBatchNorm2d, build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.decoders import EncoderDecoder, encoder_of, outputs_of
from pfl_ext.models.detection import Distances, places_of
from pfl_ext.models.pretrained import PACKAGED, source_of
from pfl_ext.models.small import NETWORKS
from pfl_ext.models.trained import head_of, new_part
from pfl_ext.models.weights import IMAGENET
from tests.pfl_ext.models.test_segmentation_models import NO_DROPOUT, REFUSED
from tests.pfl_ext.tiny_detector import Tiny

LITE, CPU = "fcos_efficientnet_lite0", torch.device("cpu")


@pytest.fixture(scope="module")
def pretrained() -> EncoderDecoder:
    return built(weights=IMAGENET)


def built(arch: str = LITE, weights: Any = None, classes: int = 4, **options: Any) -> EncoderDecoder:
    config = ModelConfig(arch, input_size=32, pretrained=weights is not None, **options)
    network = build_backbone(config, classes, torch.Generator().manual_seed(0), weights)
    assert isinstance(network, EncoderDecoder)
    return network


@pytest.mark.parametrize("encoder", ["resnet50", "mobilenet_v2", "efficientnet_lite0"])
def test_there_is_a_row_of_outputs_for_each_place(encoder: str) -> None:
    with torch.device("meta"):
        network = NETWORKS[f"fcos_{encoder}"](7, 65)
        assert network(torch.zeros(2, 3, 65, 65)).shape == (2, 9**2 + 5**2 + 3**2 + 2**2 + 1, 7 + 10)
    assert (encoder_of(f"fcos_{encoder}"), outputs_of(f"fcos_{encoder}")) == (encoder, "boxes")
    assert outputs_of(encoder) == "image"


def test_the_head_of_boxes_computes_as_torchvisions_and_grows_boxes_again_that_have_shrunk() -> None:
    """torchvision's ReLU gives 0 and no gradient where all places are negative."""
    draw = torch.Generator().manual_seed(0)
    head, theirs = Distances(32, 1, 1), FCOSRegressionHead(32, 1, 1)
    theirs.load_state_dict(head.state_dict())
    maps = [torch.randn(2, 32, n, n, generator=draw) for n in (3, 2)]
    (ours, centred), (relu, same) = head(maps), theirs(maps)
    assert torch.equal(centred, same)
    torch.testing.assert_close(
        ours.expm1().log().clamp(min=0), relu, rtol=0, atol=1e-5
    )  # the inverse of softplus
    nn.init.constant_(head.bbox_reg.bias, -9.0)
    distances, _ = head(maps)
    assert (distances > 0).all()
    distances.sum().backward()
    assert head.bbox_reg.bias.grad.abs().min() > 0


def test_places_divide_the_image_and_levels_leave_no_size_out() -> None:
    for side in (64, 65, 100):
        sizes = [-(-side // stride) for stride in (8, 16, 32, 64, 128)]
        places = places_of([(n, n) for n in sizes], side, CPU)
        levels = torch.split(places, [n * n for n in sizes])
        for n, level in zip(sizes, levels):
            x, y, stride = level[:, :3].view(n, n, 3).unbind(2)
            assert torch.allclose(stride, torch.tensor(side / n))
            assert torch.allclose(x[0], (torch.arange(n) + 0.5) * side / n)
            assert torch.equal(x, y.T)
        assert levels[0][0, 3] == 0
        assert levels[-1][0, 4] >= 1e6
        assert all(fine[0, 4] >= coarse[0, 3] for fine, coarse in pairwise(levels))


def test_at_first_each_class_is_as_rare_as_its_prior_whatever_the_weights(pretrained: EncoderDecoder) -> None:
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    for network in (pretrained, built(), built(init="he")):
        with torch.no_grad():
            found = network(images)
        assert found.dtype == torch.float32
        assert found[..., :4].sigmoid().mean().item() == pytest.approx(0.01, rel=0.9)
        assert (found[..., 5:9] >= 0).all()


def test_taps_that_meet_padding_alone_have_no_gradient_in_bfloat16() -> None:
    network = Tiny()(3, 16)
    junk = [torch.full((1 << 16,), float("nan")) for _ in range(64)]
    del junk
    with torch.autocast("cpu", torch.bfloat16):
        outputs = network.eval()(torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(2)))
    outputs.square().sum().backward()
    for name in ("p6", "p7"):
        gradient = network.get_parameter(f"decoder.pyramid.extra_blocks.{name}.weight").grad
        assert gradient is not None
        assert gradient[:, :, 1, 1].any()
        gradient[:, :, 1, 1] = 0
        assert not gradient.any()


def test_pretrained_weights_are_the_encoders_and_the_detector_is_new(pretrained: EncoderDecoder) -> None:
    published = torch.load(PACKAGED["efficientnet_lite0"].path(), weights_only=True)
    assert torch.equal(pretrained.encoder.get_parameter("stem.conv.weight"), published["_conv_stem.weight"])
    assert source_of(LITE) is source_of("efficientnet_lite0")
    theirs = dict(built().decoder.named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in pretrained.decoder.named_parameters())
    kinds = [{type(m) for m in part.modules()} for part in (pretrained.encoder, pretrained.decoder)]
    assert [FrozenStatisticsBatchNorm2d in found for found in kinds] == [True, False]
    assert [nn.GroupNorm in found for found in kinds] == [False, True]
    assert new_part(pretrained) == "decoder"
    assert head_of(pretrained)[0] == "decoder.classes.cls_logits"


def test_a_run_is_taken_up_with_its_detector_but_for_the_layer_of_the_classes(
    tmp_path: Path, pretrained: EncoderDecoder
) -> None:
    file = tmp_path / "model.safetensors"
    first: dict[str, Tensor] = {name: t + 1 for name, t in pretrained.state_dict().items()}
    safetensors.torch.save_file({f"backbone.{name}": t for name, t in first.items()}, file)
    for keep_head, classes in ((True, 4), (False, 9)):
        again = built(weights=file, keep_head=keep_head, classes=classes)
        new = {name for name, p in again.named_parameters() if not torch.equal(p, first[name])}
        layer = "decoder.classes.cls_logits"
        assert new == (set() if keep_head else {f"{layer}.weight", f"{layer}.bias"})


@pytest.mark.parametrize("trained", ["head", "lora", "norms", "bias", "last_blocks"])
def test_a_detector_is_always_trained(trained: str) -> None:
    network = built(trained=trained)
    assert all(p.requires_grad for p in network.decoder.parameters())
    of_encoder = [p.requires_grad for p in network.encoder.parameters()]
    assert not all(of_encoder)
    assert any(of_encoder) == (trained != "head")


@pytest.mark.parametrize("options, reason", [*REFUSED, ({"dropout": True}, NO_DROPOUT)])
def test_what_a_detector_does_not_go_with_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        built(**options)
