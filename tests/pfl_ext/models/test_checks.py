"""Networks that do not fit the data, or the values that were given for them, are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pfl_ext.models.checks import check_groups
from pfl_ext.models.classifier import FrozenStatisticsBatchNorm2d, build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.dropout import count_left_out
from pfl_ext.models.probing import agree
from pfl_ext.models.small import NETWORKS


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    NETWORKS.names()
    monkeypatch.setattr(NETWORKS, "_things", dict(NETWORKS._things))


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("more", [-1, 0, 12])
def test_a_network_with_other_outputs_than_classes_is_refused(more: int) -> None:
    @NETWORKS.register("of_other_outputs")
    def of_other_outputs(num_labels: int, input_size: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * input_size**2, num_labels + more))

    def build() -> nn.Module:
        return build_backbone(ModelConfig("of_other_outputs", 8), 5, torch.Generator().manual_seed(0))

    if not more:
        assert build()(torch.zeros(2, 3, 8, 8)).shape == (2, 5)
        return
    said = (
        f"^model.arch is of_other_outputs, which has {5 + more} outputs, but there are 5 classes: give its "
    )
    with pytest.raises(ValueError, match=said):
        build()


@pytest.mark.usefixtures("registered")
def test_masks_of_other_classes_are_refused() -> None:
    def of_pixels(num_labels: int, input_size: int) -> nn.Module:
        return nn.Conv2d(3, num_labels + 1, 1)

    of_pixels.outputs = "pixels"  # type: ignore[attr-defined]
    NETWORKS.register("of_pixels")(of_pixels)
    with pytest.raises(ValueError, match="which has 6 outputs, but there are 5 classes"):
        build_backbone(ModelConfig("of_pixels", 8), 5, torch.Generator().manual_seed(0))


class OwnStatistics(nn.Module):
    """A norm over the images of a batch, which is no type of torch's that could be replaced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, ...]`` -> the same shape."""
        return x - x.mean(0)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("zeros", [False, True])
def test_a_network_that_mixes_the_images_of_a_batch_is_refused(zeros: bool) -> None:
    """Also one whose last layer begins with zeros."""

    @NETWORKS.register("mixing")
    def mixing(num_labels: int, input_size: int) -> nn.Module:
        head = nn.Linear(3 * input_size**2, num_labels)
        for parameter in head.parameters() if zeros else ():
            nn.init.zeros_(parameter)
        return nn.Sequential(OwnStatistics(), nn.Flatten(), head)

    with pytest.raises(
        ValueError, match=r"^model\.arch is mixing, whose outputs for an image depend on the other"
    ):
        build_backbone(ModelConfig("mixing", 8), 5, torch.Generator().manual_seed(0))


class Counting(nn.Module):
    """Keeps a sum over images in a new tensor."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` itself."""
        self.total = self.total + x.sum()
        return x


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("tracked", ["running_mean", "total"])
def test_a_network_with_buffers_that_change_in_training_is_refused(tracked: str) -> None:
    """They would be released without clipping and noise."""

    @NETWORKS.register("tracking")
    def tracking(num_labels: int, input_size: int) -> nn.Module:
        layer = Counting() if tracked == "total" else nn.InstanceNorm2d(3, track_running_stats=True)
        return nn.Sequential(layer, nn.Flatten(), nn.Linear(3 * input_size**2, num_labels))

    with pytest.raises(ValueError, match=f"^model.arch is tracking, whose buffer 0.{tracked} changes with "):
        build_backbone(ModelConfig("tracking", 8), 5, torch.Generator().manual_seed(0))


class OwnHead(nn.Module):
    """Features of a linear layer, and a head that is defined before it or after it."""

    def __init__(self, head: nn.Module, first: bool) -> None:
        super().__init__()
        if first:
            self.head = head
        self.body = nn.Linear(3 * 8**2, 7)
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.body(x.flatten(1)))
        return outputs


class Similarity(nn.Module):
    """A head that is no linear layer: cosines with a vector of each class."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cosine_similarity(x[:, None], self.weight[None], dim=2)


@pytest.mark.usefixtures("registered")
def test_another_layer_than_the_last_one_is_not_taken_for_the_head() -> None:
    NETWORKS.register("head_last")(lambda labels, side: OwnHead(nn.Linear(7, labels), first=False))
    NETWORKS.register("head_first")(lambda labels, side: OwnHead(nn.Linear(7, labels), first=True))
    NETWORKS.register("similarity")(lambda labels, side: OwnHead(Similarity(), first=False))
    NETWORKS.register("no_layer")(lambda labels, side: nn.Sequential(nn.AvgPool2d(side), nn.Flatten()))

    def build(arch: str, labels: int = 5, **options: Any) -> list[str]:
        config = ModelConfig(arch, 8, **options)
        network = build_backbone(config, labels, torch.Generator().manual_seed(0))
        return [name for name, p in network.named_parameters() if p.requires_grad]

    assert build("head_last", trained="head") == ["head.weight", "head.bias"]
    for trained in ("all", "head"):
        with pytest.raises(ValueError, match="which defines body after head, but runs head last"):
            build("head_first", trained=trained)
    assert build("similarity") == ["body.weight", "body.bias", "head.weight"]
    for options in ({"trained": "head"}, {"pretrained": True}):
        with pytest.raises(ValueError, match="layer body has 7 outputs, but there are 5 classes, so"):
            build("similarity", **options)
    with pytest.raises(ValueError, match="which has no nn"):
        build("no_layer", labels=3)


def frozen_at_first(labels: int, side: int) -> nn.Module:
    """A network that freezes its first layer and the scale of its norm itself."""
    frozen = nn.Conv2d(3, 4, 3, padding=1).requires_grad_(False)
    norm = nn.BatchNorm2d(4)
    norm.weight.requires_grad_(False)
    return nn.Sequential(frozen, norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, labels))


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("pretrained", [False, True])
def test_what_a_network_freezes_itself_stays_frozen_or_the_choice_is_refused(pretrained: bool) -> None:
    NETWORKS.register("frozen_at_first")(frozen_at_first)

    def build(trained: Any) -> nn.Module:
        config = ModelConfig("frozen_at_first", 8, trained=trained, pretrained=pretrained)
        return build_backbone(config, 5, torch.Generator().manual_seed(0))

    network = build("all")
    norm = FrozenStatisticsBatchNorm2d if pretrained else nn.GroupNorm
    assert isinstance(network.get_submodule("1"), norm)
    trained = [name for name, p in network.named_parameters() if p.requires_grad]
    assert trained == ["1.bias", "4.weight", "4.bias"]
    for kind in ("head", "last_blocks", "lora", "bias", "norms"):
        message = f"^model.trained is {kind}, but frozen_at_first itself freezes 0.weight and 2 more: set "
        with pytest.raises(ValueError, match=message):
            build(kind)


@pytest.mark.parametrize(
    ("arch", "refused"),
    [("lenet", True), ("resnet18", False), ("scatternet", False), ("darts_search", False)],
)
def test_a_number_of_groups_is_refused_where_there_are_none(arch: str, refused: bool) -> None:
    config = ModelConfig(arch, 32, groups=4)
    backbone = build_backbone(config, 5, torch.Generator().manual_seed(0))
    check_groups(backbone, ModelConfig(arch, 32))
    if not refused:
        check_groups(backbone, config)
        return
    said = "^model.groups is 4, but lenet has no GroupNorm: remove it, or set it to 32$"
    with pytest.raises(ValueError, match=said):
        check_groups(backbone, config)


class Transformer(nn.Module):
    """torch's own encoder layer, whose dropout is 0.1 unless one says otherwise, in its attention, too."""

    def __init__(self, num_labels: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.head = nn.Linear(8, num_labels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.layer(self.embed(x).flatten(2).transpose(1, 2)).mean(1))
        return outputs


class OwnDropout(nn.Sequential):
    """Dropout that is no module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = super().forward(nn.functional.dropout(x, 0.3, self.training))  # type: ignore[no-untyped-call]
        return outputs


@pytest.mark.usefixtures("registered")
def test_a_network_that_draws_by_itself_is_refused_and_attention_loses_its_dropout() -> None:
    def of_sequence(num_labels: int, input_size: int) -> nn.Module:
        return OwnDropout(nn.Flatten(), nn.Linear(3 * input_size**2, num_labels)).eval()

    def of_attention(num_labels: int, input_size: int) -> nn.Module:
        return Transformer(num_labels)

    NETWORKS.register("of_sequence")(of_sequence)
    NETWORKS.register("of_attention")(of_attention)

    def built(arch: str, dropout: bool = False) -> nn.Module:
        return build_backbone(ModelConfig(arch, 8, dropout=dropout), 5, torch.Generator().manual_seed(0))

    for arch, dropout in (("of_sequence", False), ("of_attention", True)):
        with pytest.raises(
            ValueError, match=f"^model.arch is {arch}, which draws random numbers from torch's"
        ):
            built(arch, dropout)
    network, images = built("of_attention"), torch.rand(2, 3, 8, 8)
    assert count_left_out(network) == 4, "three layers, and attention"
    assert network.training
    assert network(images).equal(network(images))


def test_outputs_that_are_not_finite_are_no_fault_of_the_network() -> None:
    """Training says that it has diverged; before that, comparing outputs ended in a traceback."""
    outputs = torch.tensor([1.0, torch.nan, torch.inf])
    assert agree(outputs, outputs, 1e-6)
    assert not agree(outputs + torch.tensor([0.1, 0, 0]), outputs[[0, 1, 0]], 1e-6)
    assert not agree(torch.tensor([1.1]), torch.tensor([1.0]), 1e-6)
