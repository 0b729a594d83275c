"""The CIFAR network, the bottleneck before the head, and training of the last two layers alone."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.models.classifier import ImageClassifier, build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.trained import head_of
from pfl_ext.tasks.multi_label import MultiLabel
from pfl_ext.tasks.single_label import SingleLabel
from tests.pfl_ext.engine.setting import LABELS, Setting, distance, rounding_of, small_backbone


def build(arch: str = "cifar_cnn", labels: int = 10, seed: int = 0, **options: Any) -> nn.Module:
    weights, options = options.pop("weights", None), {"init": "keras", "input_size": 32, **options}
    draw = torch.Generator().manual_seed(seed)
    return build_backbone(ModelConfig(arch, **options), labels, draw, weights)


@pytest.mark.parametrize("side", [10, 24, 32, 64])
@pytest.mark.parametrize("labels", [10, 100])
def test_the_cifar_network_has_the_papers_layers(side: int, labels: int) -> None:
    net = build(labels=labels, input_size=side)
    flat = 64 * (side // 4) ** 2
    shapes = [tuple(p.shape) for name, p in net.named_parameters() if name.endswith("weight")]
    assert shapes == [(64, 3, 5, 5), (64, 64, 5, 5), (384, flat), (192, 384), (labels, 192)]
    assert [type(layer).__name__ for layer in net.children() if isinstance(layer, nn.MaxPool2d)] == [
        "MaxPool2d"
    ] * 2
    x = torch.rand(2, 3, side, side)
    assert net(x).shape == (2, labels)
    images = (x.permute(0, 2, 3, 1) * 255).byte()
    model = ImageClassifier(net, input_size=side, task=SingleLabel())
    torch.autograd.backward(model.loss(images, torch.eye(labels)[:2]))
    assert all(p.grad is not None and p.grad.any() for p in net.parameters())


def test_the_cifar_network_has_as_many_parameters_as_it_says() -> None:
    assert sum(p.numel() for p in build().parameters()) == 1_756_426


@pytest.mark.parametrize("side", [16, 28, 32, 33])
def test_lenet_has_niid_benchs_layers(side: int) -> None:
    net = build("lenet", input_size=side)
    shapes = [tuple(p.shape) for name, p in net.named_parameters() if name.endswith("weight")]
    left = ((side - 4) // 2 - 4) // 2
    assert shapes == [(6, 3, 5, 5), (16, 6, 5, 5), (120, 16 * left**2), (84, 120), (10, 84)]
    assert net(torch.rand(2, 3, side, side)).shape == (2, 10)
    if side == 32:
        assert sum(p.numel() for p in net.parameters()) == 62_006


@pytest.mark.parametrize("side", [16, 28, 32])
@pytest.mark.parametrize(
    "arch, channels, units, total",
    [("fedavg_cnn", (32, 64), (512, 10), 878_538), ("fedrep_cnn", (64, 64), (120, 64, 10), 307_842)],
)
def test_networks_of_personalised_learning_have_their_layers(
    arch: str, channels: tuple[int, int], units: tuple[int, ...], total: int, side: int
) -> None:
    net = build(arch, input_size=side)
    shapes = [tuple(p.shape) for name, p in net.named_parameters() if name.endswith("weight")]
    left = ((side - 4) // 2 - 4) // 2
    linear = [(after, before) for before, after in pairwise((channels[1] * left**2, *units))]
    assert shapes == [(channels[0], 3, 5, 5), (channels[1], channels[0], 5, 5), *linear]
    assert net(torch.rand(2, 3, side, side)).shape == (2, 10)
    assert side != 32 or sum(p.numel() for p in net.parameters()) == total
    with pytest.raises(ValueError, match="use at least 16"):
        build(arch, input_size=15)


def test_moons_network_is_lenets_body_with_a_projection_head() -> None:
    layers = [*build("moon_cnn").children()]
    assert [str(layer) for layer in layers[:11]] == [
        str(layer) for layer in [*build("lenet").children()][:11]
    ]
    linear = [tuple(layer.weight.shape) for layer in layers[11:] if isinstance(layer, nn.Linear)]
    assert linear == [(84, 84), (256, 84), (10, 256)]
    kinds = [type(layer) for layer in layers[10:]]
    assert kinds == [nn.ReLU, nn.Linear, nn.ReLU, nn.Linear, nn.Linear], "no ReLU after the projection"
    with pytest.raises(ValueError, match="moon_cnn leaves nothing of that: use at least 16"):
        build("moon_cnn", input_size=15)


@pytest.mark.parametrize("arch", ["cifar_cnn", "lenet", "fedavg_cnn", "fedrep_cnn", "moon_cnn"])
def test_the_engine_takes_small_networks_apart(arch: str) -> None:
    assert CohortEngine(ImageClassifier(build(arch), input_size=32, task=SingleLabel()))._fusable


@pytest.mark.parametrize("init", ["keras", "torchvision"])
def test_the_cifar_network_is_a_function_of_its_generator(init: str) -> None:
    torch.manual_seed(1)
    one = build(init=init, seed=3).state_dict()
    torch.manual_seed(2)
    again, other = build(init=init, seed=3).state_dict(), build(init=init, seed=4).state_dict()
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["conv1.weight"], other["conv1.weight"])


def test_a_bottleneck_stands_between_features_and_head(tmp_path: Path) -> None:
    plain = build("mobilenet_v2", 7)
    net = build("mobilenet_v2", 7, bottleneck=64)
    name, head = head_of(net)
    shapes = {n: tuple(p.shape) for n, p in net.named_parameters()}
    before = shapes.pop(name.replace(".1.1", ".1.0") + ".weight")
    assert before == (64, 1280)
    assert tuple(head.weight.shape) == (7, 64)
    features, others = ({n: t for n, t in m.state_dict().items() if "features" in n} for m in (net, plain))
    assert all(torch.equal(features[n], others[n]) for n in others), "the features are drawn first"
    # its own saved file is one to start from, and so is a file without the bottleneck
    for saved in (net, plain):
        path = tmp_path / "model.safetensors"
        safetensors.torch.save_file({f"backbone.{n}": t for n, t in saved.state_dict().items()}, path)
        loaded = build("mobilenet_v2", 7, seed=9, bottleneck=64, weights=path)
        theirs = {n: t for n, t in loaded.state_dict().items() if "features" in n}
        assert all(torch.equal(theirs[n], features[n]) for n in features)


@pytest.mark.parametrize("arch", ["cifar_cnn", "mobilenet_v2"])
def test_both_layers_behind_the_features_are_drawn_as_the_paper_draws_linear_layers(arch: str) -> None:
    """Glorot uniform: within sqrt(6 / (in + out)) and, of a thousand weights, near it; biases are 0."""
    net = build(arch, 20, bottleneck=64)
    name, head = head_of(net)
    bottleneck = net.get_submodule(name.rpartition(".")[0] + ".0")
    for layer in (bottleneck, head):
        assert isinstance(layer, nn.Linear)
        limit = (6 / (layer.in_features + layer.out_features)) ** 0.5
        weights = layer.weight.detach()
        assert weights.numel() >= 1000
        assert 0.98 * limit < float(weights.abs().max()) <= limit
        # The variance of a uniform draw is limit^2 / 3, with a relative standard deviation of sqrt(0.8 / n).
        spread = 5 * (0.8 / weights.numel()) ** 0.5
        assert float(weights.square().mean()) == pytest.approx(limit**2 / 3, rel=spread)
        assert not layer.bias.any()


def test_two_layers_are_trained_and_nothing_else() -> None:
    net = build("mobilenet_v2", 7, bottleneck=64, trained="two_layers")
    trained = [name for name, p in net.named_parameters() if p.requires_grad]
    assert trained == [
        "classifier.1.0.weight",
        "classifier.1.0.bias",
        "classifier.1.1.weight",
        "classifier.1.1.bias",
    ]
    engine = CohortEngine(ImageClassifier(net, task=MultiLabel(), input_size=32), lanes=1)
    assert engine._fusable
    taped = [n for n, m in engine.lanes[0].net.backbone.named_modules() if hasattr(m, "tape_name")]
    assert taped == ["classifier.1.0", "classifier.1.1"], "gradients of frozen layers would be wasted"
    assert engine._layout.num_parameters == 1280 * 64 + 64 + 64 * 7 + 7


def partly_frozen() -> nn.Sequential:
    """The first half of the layers frozen, one of them with dead taps, and one in the middle of the rest."""
    net = small_backbone()
    for position in (0, 1, 3, 4, 7):
        net[position].requires_grad_(False)
    return net


@pytest.mark.parametrize("clipping", ["none", "global"])
def test_frozen_layers_stay_and_the_rest_is_trained_as_by_pfls_loop(clipping: str) -> None:
    setting = Setting([1, 2, 9, 1, 5], backbone=partly_frozen, clipping=clipping, max_norm=0.2)
    theirs, ours = setting.run(False)[0], setting.run(True, lanes=2)[0]
    assert set(ours) == {f"backbone.{n}" for n, p in partly_frozen().named_parameters() if p.requires_grad}
    assert distance(ours, theirs) <= rounding_of(setting)
    module = ImageClassifier(partly_frozen(), task=MultiLabel(), input_size=10)
    engine = CohortEngine(module, lanes=1)
    assert engine._fusable
    assert any("7.weight" in name for name in engine._trimmed._sides), (
        "a frozen layer with dead taps is tried"
    )


@pytest.mark.parametrize(
    "arch, options, message",
    [
        ("cifar_cnn", {"input_size": None}, "input_size\n.*valid integer"),
        ("cifar_cnn", {"input_size": 3}, "use at least 4"),
        ("lenet", {"input_size": 15}, "use at least 16"),
        ("cifar_cn", {}, "did you mean cifar_cnn"),
        ("cifar_cnn", {"weights": "imagenet"}, "no IMAGENET1K_V1 weights for cifar_cnn"),
        ("resnet18", {"trained": "two_layers"}, "set model.bottleneck"),
        ("squeezenet1_1", {"bottleneck": 8}, "ends in a convolution"),
    ],
)
def test_what_cannot_be_built_is_refused(arch: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(arch, LABELS, **options)


@pytest.mark.parametrize(
    "key, value, message",
    [
        (
            "trained",
            "first",
            "'all', 'head', 'two_layers', 'last_blocks', 'lora', 'bias', 'norms' or 'names'",
        ),
        ("lora_rank", 0, "greater than 0"),
        ("lora_alpha", 0, "greater than 0"),
        ("last_blocks", 0, "greater than 0"),
        ("init", "lecun", "'torchvision' or 'xavier'"),
        ("bottleneck", 0, "greater than 0"),
        ("groups", 0, "greater than 0"),
        ("input_size", -1, "greater than 0"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_by_name(key: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"{key}\n.*{message}"):
        ModelConfig(**{key: value})
