"""A network whose frozen blocks are run apart computes, and learns, what the whole one does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import VisionTransformer

from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.engine.cpu.layers import kernels_for, layers_for
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.prefix import Prefix
from tests.closeness import assert_close_as_vector
from tests.pfl_ext.models.test_features import classifier, images

NETWORKS: list[tuple[dict[str, Any], str]] = [
    ({"arch": "resnet18"}, "layer4.0"),
    ({"arch": "resnet18", "last_blocks": 2, "pretrained": True}, "layer3"),
    ({"arch": "mobilenet_v2"}, "features.17"),
    ({"arch": "efficientnet_lite0", "last_blocks": 3}, "blocks.13"),
    ({"arch": "cifar_cnn"}, "fc1"),
    ({"arch": "lenet", "last_blocks": 2}, "conv2"),
]


def last_blocks(**config: Any) -> ImageClassifier:
    return classifier(**{"trained": "last_blocks", **config})


@pytest.mark.parametrize("config, last", NETWORKS, ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_maps_and_the_other_layers_are_the_network(config: dict[str, Any], last: str, compiled: bool) -> None:
    """Twenty layers magnify their rounding by some powers of two."""
    whole = last_blocks(**config)
    layers = layers_for(kernels_for(whole), None) if compiled else None
    prefix = Prefix(whole, (lambda network: network) if layers is None else layers.replaced)
    assert prefix.last == last
    maps = torch.from_numpy(prefix.maps(images()))
    assert maps.shape[0] == 3
    assert_close_as_vector(prefix.classifier(maps), whole(images()).detach(), roundings=2000)
    assert prefix.maps(images()[:0]).shape == (0, maps.shape[1])
    ours, theirs = (list(each.named_parameters()) for each in (prefix.classifier, whole))
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    assert all(p is q for (_, p), (_, q) in zip(ours, theirs))
    assert prefix.classifier.state_dict().keys() == whole.state_dict().keys()


def test_the_gradient_of_the_other_layers_is_the_networks_and_users_share_a_pass() -> None:
    whole = last_blocks(arch="lenet", last_blocks=2)
    prefix, targets = Prefix(whole), torch.eye(5)[[0, 3, 4]]
    maps = torch.from_numpy(prefix.maps(images()))
    losses = whole.loss(images(), targets), prefix.classifier.loss(maps, targets)
    trained = [p for p in whole.parameters() if p.requires_grad]
    of_images, of_maps = (torch.autograd.grad(loss, trained) for loss in losses)
    assert_close_as_vector(of_maps, of_images, roundings=200)
    assert CohortEngine(prefix.classifier, lanes=1)._fusable


class Doubled(nn.Module):
    """Whose trained layer sees more than what the block before it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.head = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x).tanh()
        out: torch.Tensor = self.head(self.second(first * first).mean((2, 3)) + first.mean((2, 3)))
        return out


@pytest.mark.parametrize(
    "config, why",
    [
        ({"arch": "lenet", "trained": "all"}, "the first block is trained"),
        ({"arch": "resnet18", "last_blocks": 8}, "what bn1 gives is more than 4 times"),
    ],
    ids=str,
)
def test_what_cannot_be_run_apart_says_why(config: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Prefix(last_blocks(**config))


def test_a_network_that_takes_nothing_but_images_says_why() -> None:
    """torchvision's transformers cut an image into patches in ``forward``; the reason was Python's own."""
    whole = last_blocks(arch="lenet")
    network = VisionTransformer(whole.input_size, whole.input_size // 2, 2, 2, 8, 8, num_classes=5)
    network.requires_grad_(False)
    network.encoder.get_submodule("layers.encoder_layer_1").requires_grad_(True)
    whole.backbone = network
    with pytest.raises(ValueError, match=r"layers after .*encoder_layer_0 cannot be run by themselves"):
        Prefix(whole)


def test_what_precedes_the_blocks_and_is_no_module_is_noticed() -> None:
    whole = last_blocks(arch="lenet")
    whole.backbone = Doubled()
    whole.backbone.first.requires_grad_(False)
    with torch.no_grad():
        for parameter in whole.backbone.parameters():
            parameter.mul_(3)
    prefix = Prefix(whole)  # the map is what first gives, and tanh is run after it
    maps = torch.from_numpy(prefix.maps(images()))
    assert_close_as_vector(prefix.classifier(maps), whole(images()).detach(), roundings=200)
    whole.backbone.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))
    with pytest.raises(ValueError, match="more than the blocks up to first stands before the trained"):
        Prefix(whole)
