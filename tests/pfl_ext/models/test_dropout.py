"""Dropout by keys: what it drops, that a unit's fate depends on its image's key alone, in both engines."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from pfl_ext.data.sampling import LocalSampling
from pfl_ext.data.transforms import draw_crops, draw_keys
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.engine.cpu.dense import Dropout
from pfl_ext.models.classifier import ImageClassifier, build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.dropout import (
    OF_ANCHORS,
    OF_COLOR_JITTER,
    OF_CUTOUT,
    OF_PROPOSALS,
    OF_RAND_AUGMENT,
    OF_RANDOM_ERASING,
    KeyedDropout,
    count_left_out,
    dropping,
    keyed,
    mixed,
)
from pfl_ext.models.small import NETWORKS
from pfl_ext.tasks.multi_label import MultiLabel
from tests.pfl_ext.engine.setting import LABELS, Setting, distance, drawn, rounding_of, without_noise

SIGMAS = 5


def crops_of(n: int, seed: int = 0) -> Tensor:
    """With keys, of images of 12 pixels."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(draw_keys(rng, draw_crops(rng, n, 12, 10, "crop", "both")))


def kept(layer: nn.Module, shape: tuple[int, ...], crops: Tensor) -> Tensor:
    """Which of these units the layer leaves, scaled."""
    with dropping(crops):
        out: Tensor = layer(torch.ones(shape))
    return out


def test_the_mix_is_splitmix64s() -> None:
    """The first five outputs for the seed 1234567, as published with the generator."""
    steps = (1234567 + k * 0x9E3779B97F4A7C15 for k in range(1, 6))
    signed = [(step + 2**63) % 2**64 - 2**63 for step in steps]
    got = [value % 2**64 for value in mixed(torch.tensor(signed)).tolist()]
    assert got == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_other_draws_have_numbers_of_their_own_above_all_layers() -> None:
    """They stay what they are: a run that is begun again draws by them."""
    numbers = OF_ANCHORS, OF_PROPOSALS, OF_CUTOUT, OF_COLOR_JITTER, OF_RANDOM_ERASING, OF_RAND_AUGMENT
    assert numbers == (1_048_576, 1_048_577, 1_048_578, 1_048_579, 1_048_580, 1_048_581)


@pytest.mark.parametrize("p", [0.05, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("wide, units", [(0, 12 * 5 * 5), (1, 12), (2, 1)])
def test_the_share_that_is_dropped_is_p_and_the_rest_is_scaled(p: float, wide: int, units: int) -> None:
    out = kept(KeyedDropout(p, 3, wide), (2000, 12, 5, 5), crops_of(2000))
    assert sorted({*out.flatten().tolist()}) == pytest.approx([0.0, 1 / (1 - p)])
    error = SIGMAS * math.sqrt(p * (1 - p) / (2000 * units))
    assert float((out == 0).double().mean()) == pytest.approx(p, abs=error)
    if wide:
        rows = out.flatten(3 - wide)
        assert torch.equal(rows, rows[..., :1].expand_as(rows)), "of a channel or image all goes or all stays"


def test_fates_of_images_layers_and_units_are_independent() -> None:
    """Pairs of fates agree as often as two coins do."""
    crops, p = crops_of(400), 0.5
    one, other = (kept(KeyedDropout(p, number), (400, 300), crops) > 0 for number in (0, 1))
    again = kept(KeyedDropout(p, 0), (400, 300), crops_of(400, seed=1)) > 0
    near = crops.clone()
    near[:, 7] = (near[:, 7] + 1) % 2**24  # the next key
    beside = kept(KeyedDropout(p, 0), (400, 300), near) > 0
    pairs = [(one, other), (one, again), (one, beside), (one[1:], one[:-1]), (one[:, 1:], one[:, :-1])]
    for a, b in pairs:
        assert float((a == b).double().mean()) == pytest.approx(0.5, abs=SIGMAS * math.sqrt(0.25 / a.numel()))


def test_an_image_loses_the_same_units_whoever_is_beside_it() -> None:
    crops, layer = crops_of(9), KeyedDropout(0.4, 0)
    whole = kept(layer, (9, 50), crops)
    assert torch.equal(kept(layer, (3, 50), crops[[7, 2, 5]]), whole[[7, 2, 5]])
    assert not torch.equal(whole[0], whole[1])


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_that_are_no_images_are_refused_in_one_line(compiled: bool) -> None:
    """A network of one's own may fold positions into the batch."""
    layer: Any = KeyedDropout(0.5, 0)
    if compiled:
        layer = Dropout(layer, Any)  # type: ignore[arg-type]  # it is refused before a kernel is called
    with dropping(crops_of(2)), pytest.raises(ValueError, match="dropout gets 6 rows for 2 images"):
        layer(torch.ones(6, 3))


@pytest.mark.parametrize("p, left", [(0.0, 1.0), (1.0, 0.0)])
def test_nothing_or_all_can_be_dropped(p: float, left: float) -> None:
    assert (kept(KeyedDropout(p, 0), (4, 7), crops_of(4)) == left).all()


def test_what_stands_in_for_torchs_layers() -> None:
    pairs = [(nn.Dropout(0.1), 0), (nn.Dropout2d(0.2), 1), (StochasticDepth(0.3, "row"), 2)]
    for number, (layer, wide) in enumerate(pairs):
        ours = keyed(layer, number)
        assert (ours.number, ours.wide) == (number, wide)
        assert ours.p == pytest.approx(0.1 * (number + 1))
    for layer in (nn.AlphaDropout(0.1), StochasticDepth(0.3, "batch")):
        with pytest.raises(ValueError, match=r"model\.dropout is true, and the network has .* not known"):
            keyed(layer, 0)


def network(arch: str, **options: Any) -> nn.Module:
    config = ModelConfig(arch, input_size=32, dropout=True, **options)
    return build_backbone(config, 10, torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "arch, layers, parameters",
    [
        ("simple_cnn", [(0.25, 0), (0.5, 0)], 1_626_442),
        ("vgg9", [(0.05, 1), (0.1, 0), (0.1, 0)], 3_491_530),
    ],
)
def test_networks_have_their_papers_dropout_and_size(
    arch: str, layers: list[tuple[float, int]], parameters: int
) -> None:
    net = network(arch)
    found = [(m.p, m.wide, m.number) for m in net.modules() if isinstance(m, KeyedDropout)]
    assert found == [(*layer, number) for number, layer in enumerate(layers)]
    assert sum(p.numel() for p in net.parameters()) == parameters
    plain = build_backbone(ModelConfig(arch, input_size=32), 10, torch.Generator().manual_seed(0))
    assert not any(isinstance(m, KeyedDropout) for m in plain.modules())
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(net(x), plain(x)), "without keys nothing is dropped"


def test_he_draws_all_weights_by_a_normal_distribution() -> None:
    """Variance 2 / in, whose estimate is off by sqrt(2 / n) of it; kurtosis tells it from other draws."""
    net = network("simple_cnn", init="he")
    for name, fan_in in {"conv2": 32 * 9, "fc1": 12_544}.items():
        layer = net.get_submodule(name)
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        weights = layer.weight.detach().double()
        error = SIGMAS * (2 / weights.numel()) ** 0.5
        assert float(weights.square().mean()) == pytest.approx(2 / fan_in, rel=error)
        fourth = float(weights.pow(4).mean() / weights.square().mean() ** 2)
        assert fourth == pytest.approx(3, abs=SIGMAS * (24 / weights.numel()) ** 0.5)
        assert layer.bias is not None
        assert 0 < float(layer.bias.detach().abs().max()) <= fan_in**-0.5, "torch's own"


def test_xavier_draws_all_weights_by_glorots_uniform() -> None:
    """Within sqrt(6 / (in + out)) and near it; a uniform draw's variance is a third of the limit's square."""
    net = network("simple_cnn", init="xavier")
    for name, (fan_in, fan_out) in {"conv2": (32 * 9, 64 * 9), "fc1": (12_544, 128)}.items():
        layer = net.get_submodule(name)
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        assert layer.bias is not None
        limit = (6 / (fan_in + fan_out)) ** 0.5
        weights = layer.weight.detach()
        assert 0.98 * limit < float(weights.abs().max()) <= limit
        assert float(weights.square().mean()) == pytest.approx(
            limit**2 / 3, rel=SIGMAS * (0.8 / weights.numel()) ** 0.5
        )
        assert 0 < float(layer.bias.detach().abs().max()) <= fan_in**-0.5, "torch's own"


def test_dropout_of_probability_0_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of torchvision's transformers: nothing is left out, and nothing can be kept."""

    def of_none(num_labels: int, input_size: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.0), nn.Linear(3 * input_size**2, num_labels))

    NETWORKS.names()
    monkeypatch.setitem(NETWORKS._things, "of_none", of_none)
    plain = build_backbone(ModelConfig("of_none", 8), 5, torch.Generator().manual_seed(0))
    assert count_left_out(plain) == 0
    with pytest.raises(ValueError, match=r"model\.dropout is true, but of_none has no dropout: set model"):
        network("of_none")


def test_a_network_without_dropout_is_told_so() -> None:
    with pytest.raises(ValueError, match=r"model\.dropout is true, but resnet18 has no dropout: set model"):
        network("resnet18")


def test_loss_drops_and_evaluation_does_not() -> None:
    crops = crops_of(4)
    images = torch.randint(0, 256, (4, 12, 12, 3), dtype=torch.uint8)
    targets = torch.eye(LABELS)[:4]
    model = ImageClassifier(dropping_backbone(), input_size=10, task=MultiLabel())
    plain = model.loss(images, targets, crops[:, :6])
    assert model.loss(images, targets, crops) != plain
    assert model.loss(images, targets, crops) == model.loss(images, targets, crops)
    assert model.metrics(images, targets, crops)["loss"].overall_value == pytest.approx(plain.item())
    assert torch.equal(model(images, crops), model(images, crops[:, :6]))


def dropping_backbone() -> nn.Sequential:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        KeyedDropout(0.2, 0, 1),
        nn.Conv2d(8, 16, 3),
        nn.ReLU(inplace=True),
        KeyedDropout(0.1, 1, 2),
        nn.Flatten(),
        KeyedDropout(0.25, 2),
        nn.Linear(16 * 2 * 2, 12),
        nn.ReLU(inplace=True),
        KeyedDropout(0.5, 3),
        nn.Linear(12, LABELS),
    )
    return drawn(net, 0.2, torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"clipping": "none", "max_norm": 0.0, "learning_rate": 0.05, "momentum": 0.6},
        {"clipping": "global", "mu": 0.3},
        {"scaffold": ("I", "gradient"), "clipping": "none", "max_norm": 0.0, "learning_rate": 0.05},
        {"more": [without_noise(0.3)], "by_images": False},
    ],
    ids=["plain", "momentum", "proximal", "scaffold", "private"],
)
def test_the_engine_drops_what_pfls_loop_drops(more: dict[str, Any]) -> None:
    """Users of one step, who go together, and of several; with one lane and with two."""
    sampling = LocalSampling(num_epochs=2, batch_size=4, straddle=True, flip="both", input_size=10, keys=True)
    sizes = [1, 2, 2, 9, 1, 5]
    setting = Setting(sizes, sampling, backbone=dropping_backbone, **more)
    theirs = setting.run(False)[0]
    bound = rounding_of(Setting(sizes, sampling, backbone=dropping_backbone, **more))
    for lanes in (1, 2):
        assert distance(setting.run(True, lanes=lanes)[0], theirs) <= bound
    without = Setting(sizes, LocalSampling(**{**vars(sampling), "keys": False}), backbone=dropping_backbone)
    for name, value in more.items():
        setattr(without, name, value)
    assert distance(without.run(True)[0], theirs) > 100 * bound, "and something is dropped"


def test_users_of_one_step_can_go_together() -> None:
    module = ImageClassifier(dropping_backbone(), task=MultiLabel(), input_size=10)
    assert CohortEngine(module, lanes=1)._fusable
