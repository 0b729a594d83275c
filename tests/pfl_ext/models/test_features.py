"""A network that is split where its trained layers begin computes what the whole one computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pfl_ext.models.classifier import ImageClassifier, build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.features import Split
from pfl_ext.tasks.single_label import SingleLabel
from tests.closeness import assert_close_as_vector


def classifier(seed: int = 0, **config: Any) -> ImageClassifier:
    model = ModelConfig(**{"input_size": 32, "trained": "head", "groups": 4, **config})
    backbone = build_backbone(model, 5, torch.Generator().manual_seed(seed))
    return ImageClassifier(backbone, task=SingleLabel(), input_size=model.input_size)


def images(count: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (count, 32, 32, 3), generator=torch.Generator().manual_seed(1)).byte()


@pytest.mark.parametrize(
    ("config", "width"),
    [
        ({"arch": "resnet18"}, 512),
        ({"arch": "mobilenet_v2"}, 1280),
        ({"arch": "lenet"}, 84),
        ({"arch": "shufflenet_v2_x0_5"}, 1024),
        ({"arch": "resnet18", "trained": "two_layers", "bottleneck": 8}, 512),
    ],
    ids=str,
)
def test_features_and_trained_layers_are_the_network(config: dict[str, Any], width: int) -> None:
    """The same layers on the same numbers: no rounding is different, but that of the batch."""
    whole = classifier(**config)
    split = Split(whole)
    features = torch.from_numpy(split.features(images()))
    assert features.shape == (3, width)
    assert_close_as_vector(split.classifier(features), whole(images()).detach(), roundings=8)
    names = [name for name, p in whole.named_parameters() if p.requires_grad]
    assert names == [name for name, p in split.classifier.named_parameters() if p.requires_grad]
    assert split.classifier.state_dict().keys() == whole.state_dict().keys()


def test_a_step_of_the_trained_layers_is_one_of_the_network() -> None:
    whole = classifier(arch="lenet")
    split = Split(whole)
    targets = torch.eye(5)[[0, 3, 4]]
    features = torch.from_numpy(split.features(images()))
    losses = (
        whole.loss(images(), targets),
        split.classifier.loss(features, targets),
    )
    trained = [p for p in whole.parameters() if p.requires_grad]
    of_images, of_features = (torch.autograd.grad(loss, trained) for loss in losses)
    assert_close_as_vector(of_features, of_images, roundings=40)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"arch": "lenet", "trained": "all"}, "trained layers are not one module"),
        ({"arch": "squeezenet1_1"}, "more than a vector for each image"),
    ],
)
def test_what_cannot_be_split_says_why(config: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Split(classifier(**config))


@pytest.mark.parametrize("after", [nn.Softmax(1), nn.LeakyReLU(0.5), nn.Hardtanh(-1e-3, 1e-3)], ids=str)
def test_layers_after_the_trained_ones_are_noticed(after: nn.Module) -> None:
    """Also one that changes no output by more than the largest of them, or none of a layer of zeros."""
    whole = classifier(arch="lenet")
    if isinstance(after, nn.Hardtanh):
        for parameter in whole.backbone.get_submodule("fc3").parameters():
            nn.init.zeros_(parameter)
    whole.backbone.add_module("after", after)
    with pytest.raises(ValueError, match="more than the layer fc3 follows"):
        Split(whole)


def test_the_digest_knows_frozen_weights_and_the_transform_alone() -> None:
    whole = classifier(arch="lenet")
    before = Split(whole).digest()
    assert before == Split(classifier(arch="lenet")).digest()
    with torch.no_grad():
        whole.backbone.get_parameter("fc3.weight").add_(1)
    assert Split(whole).digest() == before
    with torch.no_grad():
        whole.backbone.get_parameter("fc2.bias").add_(1e-3)
    assert Split(whole).digest() != before
    shifted = classifier(arch="lenet")
    shifted.mean += 1e-3
    assert Split(shifted).digest() != before
