"""Random features: their products are a kernel's, nothing trains them, and they are saved with the model."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from pfl_ext.models import random_features
from pfl_ext.models.classifier import ImageClassifier, build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.features import Split
from pfl_ext.models.prefix import Prefix
from pfl_ext.models.random_features import OnRandomFeatures, RandomFeatures
from pfl_ext.models.trained import head_of
from pfl_ext.tasks.single_label import SingleLabel
from tests.closeness import assert_close_as_vector

LABELS, SIDE, INPUTS = 5, 32, 6
LENET = 84  # features of lenet
SEEDS = 300


def build(arch: str = "lenet", seed: int = 0, labels: int = LABELS, **options: Any) -> nn.Module:
    weights = options.pop("weights", None)
    config = ModelConfig(arch, **{"input_size": SIDE, "groups": 4, "random_features": 48, **options})
    return build_backbone(config, labels, torch.Generator().manual_seed(seed), weights)


def last_of(network: nn.Module) -> OnRandomFeatures:
    (found,) = [layer for layer in network.modules() if isinstance(layer, OnRandomFeatures)]
    return found


def classifier(network: nn.Module) -> ImageClassifier:
    return ImageClassifier(network, task=SingleLabel(), input_size=SIDE)


def images(count: int = 3) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, SIDE, SIDE, 3), generator=draw).byte()


def vectors(count: int, inputs: int = INPUTS) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("width", [0.4, 1.0, 2.0])
@pytest.mark.parametrize("outputs", [16, 64, 256])
def test_products_are_the_kernels_but_for_an_error_that_falls_with_the_root_of_their_number(
    outputs: int, width: float
) -> None:
    """The variance ``(1 + (1 - k^2)^2) / (2 D)``. The mean of n squares of normal numbers has a relative
    deviation of ``sqrt(2 / n)``, of which five are allowed; the bound falls fourfold where D rises so.
    """
    pair = vectors(2)
    unit = pair.double() / pair.double().norm(dim=1, keepdim=True)
    k = math.exp(-float((unit[0] - unit[1]).square().sum()) / (2 * width**2))
    variance = (1 + (1 - k**2) ** 2) / (2 * outputs)
    errors = []
    for seed in range(SEEDS):
        x, z = RandomFeatures(INPUTS, outputs, width, seed)(pair).double()
        errors.append(float(x @ z) - k)
    assert abs(np.mean(errors)) <= 5 * math.sqrt(variance / SEEDS)
    assert np.mean(np.square(errors)) == pytest.approx(variance, rel=5 * math.sqrt(2 / SEEDS))


def test_they_are_cosines_in_float64_too() -> None:
    layer, x = RandomFeatures(INPUTS, 40, 0.7, 3), vectors(9)
    z = x.double().numpy()
    z = z / np.linalg.norm(z, axis=1, keepdims=True)
    angles = z @ layer.frequencies.double().numpy().T + layer.phases.double().numpy()
    expected = np.sqrt(2 / 40) * np.cos(angles)
    # an angle is a sum of 7 terms of up to 12, so that its rounding is 12 times that of a number near 1
    assert_close_as_vector(layer(x), expected, roundings=12 * (2 * INPUTS + 8))
    assert_close_as_vector(layer.double()(x.double()), expected, roundings=12 * (2 * INPUTS + 8))


def test_no_features_are_longer_than_the_root_of_two_and_their_length_does_not_count() -> None:
    layer, x = RandomFeatures(INPUTS, 100, 1.0, 0), vectors(50)
    norms = layer(x).double().norm(dim=1)
    assert float(norms.max()) <= math.sqrt(2) * (1 + 2**-20)
    assert float(norms.square().mean()) == pytest.approx(1, abs=5 * math.sqrt(1 / 200))
    assert_close_as_vector(layer(1000 * x), layer(x), roundings=12 * 2 * (2 * INPUTS + 8))
    assert layer(torch.zeros(1, INPUTS)).isfinite().all()


def test_the_draw_is_a_function_of_the_seed_alone() -> None:
    state = torch.get_rng_state()
    first = last_of(build()).random
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    for other in (build(labels=9), build(init="he"), build(trained="head"), build(groups=2)):
        assert torch.equal(last_of(other).random.frequencies, first.frequencies)
        assert torch.equal(last_of(other).random.phases, first.phases)
    other = last_of(build(seed=1)).random
    assert not torch.equal(other.frequencies, first.frequencies)
    assert not torch.equal(other.phases, first.phases)
    more = last_of(build(random_features=70)).random
    assert torch.equal(more.frequencies[:48], first.frequencies)
    assert torch.equal(more.phases[:48], first.phases)
    wide = last_of(build(random_features_width=4.0)).random
    assert torch.equal(wide.frequencies * 4, first.frequencies)
    assert 0 <= float(first.phases.min()) < float(first.phases.max()) < 2 * math.pi


def test_a_narrower_type_for_training_leaves_them_as_they_are() -> None:
    layer, x = RandomFeatures(INPUTS, 40, 1.0, 0), vectors(4)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, layer(x))


@pytest.mark.parametrize(
    ("arch", "place", "width"),
    [
        ("lenet", "fc3", LENET),
        ("resnet18", "fc", 512),
        ("mobilenet_v2", "classifier.1", 1280),
    ],
)
@pytest.mark.parametrize("trained", ["all", "head"])
def test_they_stand_before_the_last_layer_and_no_step_changes_them(
    arch: str, place: str, width: int, trained: str
) -> None:
    net = build(arch, trained=trained)
    last = net.get_submodule(place)
    assert isinstance(last, OnRandomFeatures)
    assert head_of(net) == (f"{place}.linear", last.linear)
    assert last.random.frequencies.shape == (48, width)
    assert last.linear.weight.shape == (LABELS, 48)
    learn = [name for name, p in net.named_parameters() if p.requires_grad]
    assert learn[-2:] == [f"{place}.linear.weight", f"{place}.linear.bias"]
    assert (len(learn) == 2) == (trained == "head")
    before = {name: t.clone() for name, t in net.state_dict().items()}
    model = classifier(net)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    torch.autograd.backward(model.loss(images(), torch.eye(LABELS)[[0, 3, 4]]))
    optimizer.step()
    changed = {name for name, t in net.state_dict().items() if not torch.equal(t, before[name])}
    assert {f"{place}.linear.weight", f"{place}.linear.bias"} <= changed <= set(learn)
    assert len(changed) > 2 or trained == "head", "gradients go through them"


@pytest.mark.parametrize("trained", ["last_blocks", "lora", "bias", "norms"])
def test_part_of_a_network_is_trained_before_them(trained: str) -> None:
    net, plain = (build("resnet18", trained=trained, random_features=d) for d in (48, None))
    learn, without = (
        [name for name, p in network.named_parameters() if p.requires_grad] for network in (net, plain)
    )
    assert learn == [name.replace("fc.", "fc.linear.") for name in without]
    assert len(learn) > 2


def test_blocks_before_them_run_once_a_round() -> None:
    whole = classifier(build(trained="last_blocks"))
    prefix = Prefix(whole)
    with torch.no_grad():
        alone = prefix.classifier(torch.from_numpy(prefix.maps(images())))
        assert_close_as_vector(alone, whole(images()), roundings=8)


def test_features_are_those_of_the_network_and_are_kept_under_the_same_name() -> None:
    """Whatever random features follow, and however many: what is kept are the network's own."""
    plain, few, many = (
        Split(classifier(build(trained="head", random_features=d, random_features_width=w)))
        for d, w in ((None, 1.0), (48, 1.0), (300, 0.5))
    )
    assert plain.width == few.width == many.width == LENET
    assert plain.digest() == few.digest() == many.digest()
    assert plain.digest() != Split(classifier(build(trained="head", seed=1))).digest()
    whole = classifier(build(trained="head"))
    split = Split(whole)
    text = str(whole.backbone)
    split.digest()
    assert str(whole.backbone) == text, "the network is as it was"
    features = torch.from_numpy(split.features(images()))
    assert torch.equal(features, torch.from_numpy(plain.features(images())))
    with torch.no_grad():
        assert_close_as_vector(split.classifier(features), whole(images()), roundings=200)


def saved(network: nn.Module, path: Path) -> Path:
    tensors = {f"backbone.{name}": t for name, t in network.state_dict().items()}
    safetensors.torch.save_file(tensors, path)
    return path


def test_a_saved_model_gives_the_same_outputs_after_loading(tmp_path: Path) -> None:
    net = build(pretrained=True, weights=saved(build(), tmp_path / "start.safetensors"))
    file = saved(net, tmp_path / "model.safetensors")
    fresh = copy.deepcopy(net)
    for tensor in fresh.state_dict().values():
        tensor.zero_()
    fresh.load_state_dict(
        {n.removeprefix("backbone."): t for n, t in safetensors.torch.load_file(file).items()}
    )
    kept = build(pretrained=True, keep_head=True, weights=file, seed=7)
    x = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    for other in (fresh, kept):
        assert torch.equal(other(x), net(x))
    assert torch.equal(last_of(kept).random.phases, last_of(net).random.phases), "the file's, as its head is"


def test_a_new_head_has_the_runs_own_whatever_the_file_had(tmp_path: Path) -> None:
    file = saved(build(seed=4, random_features=30), tmp_path / "model.safetensors")
    net = build(pretrained=True, weights=file)
    assert torch.equal(last_of(net).random.frequencies, last_of(build()).random.frequencies)
    assert torch.equal(net.get_parameter("fc1.weight"), build(seed=4).get_parameter("fc1.weight"))
    plain = build(pretrained=True, weights=file, random_features=None)
    assert isinstance(plain.get_submodule("fc3"), nn.Linear)


def test_a_kept_head_that_took_other_features_is_refused(tmp_path: Path) -> None:
    file = saved(build(), tmp_path / "model.safetensors")
    kept: dict[str, Any] = {"pretrained": True, "keep_head": True, "weights": file}
    with pytest.raises(ValueError, match="width is 2, and the weights file's last layer was trained on rand"):
        build(**kept, random_features_width=2.0)
    for options in ({"random_features": 30}, {"random_features": None}):
        with pytest.raises(ValueError, match="does not fit lenet"):
            build(**kept, **options)
    plain = saved(build(random_features=None), tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match=r"missing fc3\.linear\.bias.*set model\.keep_head to false"):
        build(**{**kept, "weights": plain})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "squeezenet1_1"}, "squeezenet1_1 ends in a convolution, which takes no random features"),
        ({"bottleneck": 8}, "model.random_features is 48 and model.bottleneck is 8, but only one layer can"),
        ({"trained": "two_layers", "bottleneck": 8}, "set one of them to none"),
        ({"trained": "two_layers"}, "two_layers, which needs a bottleneck"),
        ({"random_features": 0}, "greater than 0"),
        ({"random_features_width": 1e-300}, "greater than or equal to 0.001"),
        ({"random_features": 10**12}, r"takes 336,000\.0 GB in each copy of it"),
    ],
)
def test_what_cannot_be_built_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_a_machine_with_little_memory_refuses_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    build(random_features=1000)
    monkeypatch.setattr(random_features, "physical_memory", lambda: 4 * 4 * LENET * 999)
    with pytest.raises(ValueError, match="choose fewer"):
        build(random_features=1000)
