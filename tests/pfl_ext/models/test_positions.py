"""Weights of a vision transformer for images of another size: what is interpolated, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision.models as zoo
from torch import Tensor, nn

from dataset.files import file_digest
from pfl_ext.models import pretrained, weights
from pfl_ext.models.classifier import build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.parties import PartyNetworks
from pfl_ext.models.positions import Resized, resized_in
from pfl_ext.models.small import NETWORKS
from pfl_ext.models.weights import load_weights

PLACE, HEAD = "encoder.pos_embedding", "heads.head"


def vit(patches: int, labels: int = 3, width: int = 2) -> nn.Module:
    """A vision transformer for images of so many patches of 5 pixels on a side."""
    side: int = patches * 5
    net: nn.Module = zoo.VisionTransformer(side, 5, 1, 1, hidden_dim=width, mlp_dim=4, num_classes=labels)
    return net


def state(patches: int, **options: int) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in vit(patches, **options).state_dict().items()}


def ramp(patches: int) -> Tensor:
    """Each patch's row and column, after a class token of 7 and 8."""
    place = torch.arange(float(patches))
    grid = torch.stack(torch.meshgrid(place, place, indexing="ij"), -1).reshape(1, -1, 2)
    return torch.cat([torch.tensor([[[7.0, 8.0]]]), grid], 1)


def test_a_ramp_stays_a_ramp_away_from_the_border() -> None:
    """From 4 to 7 patches, corner to corner, each second patch lies half between two of the weights.

    There the cubic kernel has -3/32, 19/32, 19/32, -3/32. Beyond the border it sees the patch at the border:
    0 * 19/32 + 1 * 19/32 - 2 * 3/32 = 13/32.
    """
    network, tensors = vit(7), {**state(4), PLACE: ramp(4)}
    load_weights(network, HEAD, "vit", tensors, "w.pth")
    sides = torch.tensor([0, 13 / 32, 1, 1.5, 2, 3 - 13 / 32, 3])
    expected = torch.stack(torch.meshgrid(sides, sides, indexing="ij"), -1)
    found = network.get_parameter(PLACE)[0]
    torch.testing.assert_close(found[1:].reshape(7, 7, 2), expected, rtol=0, atol=1e-6)
    assert found[0].tolist() == [7, 8], "the class token has no place"
    assert torch.equal(tensors[PLACE], ramp(4)), "the caller's tensors stay"
    assert resized_in(network) == Resized(4, 7, 5)
    assert resized_in(nn.Sequential(network)) == Resized(4, 7, 5)
    assert str(resized_in(network)) == (
        "the position embedding of the weights is for 4 x 4 patches (images of 20 pixels): interpolated to "
        "7 x 7 patches (images of 35 pixels)"
    )


def test_weights_for_the_same_images_are_copied() -> None:
    network, tensors = vit(4), state(4)
    load_weights(network, None, "vit", tensors, "w.pth")
    assert torch.equal(network.get_parameter(PLACE), tensors[PLACE])
    assert resized_in(network) is None


def test_weights_in_half_precision_and_of_parties_in_a_runs_model_are_interpolated() -> None:
    both, tensors = PartyNetworks([vit(2), vit(2)]), PartyNetworks([vit(3), vit(3)]).state_dict()
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    load_weights(
        both, None, "vit", {f"backbone.{name}": t for name, t in halves.items()}, "model.safetensors"
    )
    assert resized_in(both) == Resized(3, 2, 5)
    for k in (0, 1):
        given = halves[f"networks.{k}.{PLACE}"].float()
        found = both.get_parameter(f"networks.{k}.{PLACE}")
        assert torch.equal(found[:, [0, 1, 2, 3, 4]], given[:, [0, 1, 3, 7, 9]]), "the corners stay"


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({**state(4), PLACE: torch.zeros(1, 13, 2)}, r"encoder\.pos_embedding is \(1, 13, 2\)"),
        ({**state(4), PLACE: torch.zeros(1, 16, 2)}, r"\(1, 16, 2\) torch.float32 for \(1, 10, 2\)"),
        ({**state(4), PLACE: torch.zeros(17, 2)}, r"encoder\.pos_embedding is \(17, 2\)"),
        ({**state(4), PLACE: torch.zeros(1, 0, 2)}, r"encoder\.pos_embedding is \(1, 0, 2\)"),
        ({**state(4), PLACE: torch.zeros(1, 17, 2, dtype=torch.int64)}, r"\(1, 17, 2\) torch.int64"),
        (state(1), r"encoder\.pos_embedding is \(1, 2, 2\)"),
        (state(4, width=3), "of the wrong shape or type class_token"),
    ],
    ids=["not square", "no class token", "not three", "empty", "integers", "one patch", "width"],
)
def test_what_cannot_be_interpolated_is_refused(tensors: dict[str, Tensor], message: str) -> None:
    network = vit(3)
    with pytest.raises(ValueError, match=message):
        load_weights(network, HEAD, "vit", tensors, "w.pth")
    assert resized_in(network) is None


def test_nothing_is_interpolated_to_a_single_patch() -> None:
    message = (
        r"pos_embedding is \(1, 17, 2\).*; give weights of vit for images of this size, or choose another"
    )
    with pytest.raises(ValueError, match=message):
        load_weights(vit(1), HEAD, "vit", state(4), "w.pth")


def test_tables_of_other_windows_are_refused() -> None:
    """torchvision interpolates none for Swin, whose tables depend on the window, not on the images."""

    def swin(window: int) -> nn.Module:
        sides = [window, window]
        net: nn.Module = zoo.SwinTransformer([2, 2], 4, [2], [2], sides, stochastic_depth_prob=0.0)
        return net

    with pytest.raises(ValueError, match=r"relative_position_bias_table is \(49, 2\) .* for \(9, 2\)"):
        load_weights(swin(2), None, "swin", swin(4).state_dict(), "w.pth")


def earlier(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names that torchvision's files have."""
    pairs = (
        (r"mlp\.0\.", "mlp.linear_1."),
        (r"mlp\.3\.", "mlp.linear_2."),
        (r"(denselayer\d\.\w+)([12])", r"\1.\2"),
    )
    found = {}
    for name, tensor in tensors.items():
        for today, before in pairs:
            name = re.sub(today, before, name)
        found[name] = tensor
    return found


def densenet() -> nn.Module:
    """With norms that have no count of batches, as those that are frozen."""
    network: nn.Module = zoo.DenseNet(2, (1,), 2, num_classes=3)
    for layer in network.modules():
        layer._buffers.pop("num_batches_tracked", None)
    return network


@pytest.mark.parametrize("build", [lambda: vit(3), densenet], ids=["vit", "densenet"])
def test_torchvisions_files_are_older_than_the_names_of_its_layers(build: Any) -> None:
    given, network = build().state_dict(), build()
    assert earlier(given).keys() != given.keys()
    load_weights(network, None, "it", earlier(given), "w.pth")
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, given[name]), name


def test_a_network_that_has_such_names_itself_keeps_them() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Module()
            self.mlp.linear_1 = nn.Linear(2, 2)

    network, given = Own(), {name: tensor + 1 for name, tensor in Own().state_dict().items()}
    load_weights(network, None, "own", given, "w.pth")
    assert torch.equal(network.get_parameter("mlp.linear_1.bias"), given["mlp.linear_1.bias"])


def test_the_known_weights_of_a_network_are_interpolated_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As torchvision's, for which ``model.pretrained`` alone is enough; adapters come after."""
    torch.save(earlier(state(4, labels=1000)), file := tmp_path / "own.pth")
    known = pretrained.Source(file.name, file_digest(file), lambda: file, is_torchvisions=True)
    NETWORKS.names()
    own: dict[str, Any] = {**NETWORKS._things, "own_vit": lambda labels, side: vit(side // 5, labels)}
    monkeypatch.setattr(NETWORKS, "_things", own)
    monkeypatch.setattr(weights, "source_of", lambda arch: known)
    config = ModelConfig("own_vit", input_size=35, pretrained=True, trained="lora", lora_rank=1)
    network = build_backbone(config, 3, torch.Generator().manual_seed(0), "imagenet")
    assert resized_in(network) == Resized(4, 7, 5)
    assert network.get_parameter(PLACE).shape == (1, 50, 2)
