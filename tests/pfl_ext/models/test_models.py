"""Networks: no live BatchNorm, reproducible initialisation, weights that fit exactly, pfl's contract."""

from __future__ import annotations

import copy
import functools
import hashlib
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torchvision
from torch import Tensor, nn

from pfl_ext.data.transforms import draw_crops
from pfl_ext.models.classifier import (
    FrozenStatisticsBatchNorm2d,
    ImageClassifier,
    assert_no_live_batchnorm,
    build_backbone,
)
from pfl_ext.models.config import Init, ModelConfig
from pfl_ext.models.trained import head_of
from pfl_ext.tasks.multi_label import MultiLabel
from tests.closeness import assert_close_as_vector

pytestmark = pytest.mark.xdist_group("models")
"""One process runs them all: `drawn_once` remembers networks."""

RESNET18 = 2 * 20 * 68
"""Roundings: twenty layers on each side. A sum of 4,608 terms counts its square root, for its roundings go
up as often as down."""


def build(
    arch: str = "resnet18",
    labels: int = 17,
    pretrained: bool = False,
    weights: str | Path | None = None,
    **more: Any,
) -> nn.Module:
    """As `drawn`; what no file has a part in is drawn once and copied, in a tenth of the time."""
    if weights is not None:
        return drawn(arch, labels, pretrained, weights, **more)
    return copy.deepcopy(drawn_once(arch, labels, pretrained, **more))


def drawn(
    arch: str,
    labels: int = 17,
    pretrained: bool = False,
    weights: str | Path | None = None,
    init: Init = "keras",
    seed: int = 0,
    **options: Any,
) -> nn.Module:
    config = ModelConfig(arch, pretrained=pretrained, init=init, **{"input_size": 64, **options})
    return build_backbone(config, labels, torch.Generator().manual_seed(seed), weights)


drawn_once = functools.lru_cache(maxsize=8)(drawn)


def build_torchvision(arch: str, generator: torch.Generator) -> nn.Module:
    """Torchvision's own network with 1,000 classes, drawn without moving the global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
        network = torchvision.models.get_model(arch, weights=None)
    assert isinstance(network, nn.Module)
    return network


def batch(n: int = 4, labels: int = 17, size: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Images, targets and crops as pfl hands them on."""
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (n, size, size, 3), np.uint8))
    targets = torch.from_numpy(rng.integers(0, 2, (n, labels), np.uint8))
    return images, targets, torch.from_numpy(draw_crops(rng, n, size, 32, "crop", "both"))


def digest(module: nn.Module) -> str:
    return hashlib.sha256(safetensors.torch.save(module.state_dict())).hexdigest()


# Frozen statistics


@pytest.mark.parametrize("training", [True, False])
def test_frozen_batchnorm_is_batchnorm_in_eval_mode_with_its_gradients(training: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    live = nn.BatchNorm2d(5, eps=1e-3).eval()
    for tensor in (live.weight.data, live.bias.data, live.running_mean):
        assert tensor is not None
        tensor.normal_(generator=generator)
    assert live.running_var is not None
    live.running_var.uniform_(0.1, 3, generator=generator)
    frozen = FrozenStatisticsBatchNorm2d(5, eps=1e-3)
    frozen.load_state_dict({k: v.clone() for k, v in live.state_dict().items() if k != "num_batches_tracked"})
    frozen.train(training)
    x = torch.randn(3, 5, 4, 4, generator=generator)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    assert_close_as_vector(frozen(a), live(b), 16)
    torch.autograd.backward((frozen(a) ** 3).sum())
    torch.autograd.backward((live(b) ** 3).sum())
    for got, expected in ((a, b), (frozen.weight, live.weight), (frozen.bias, live.bias)):
        assert got.grad is not None
        assert expected.grad is not None
        assert_close_as_vector(got.grad, expected.grad, 2 * 64)  # sums of 48 cubes of the above
    assert {name for name, _ in frozen.named_parameters()} == {"weight", "bias"}


def test_a_network_with_frozen_statistics_is_torchvisions_in_eval_mode_whatever_its_eps(
    tmp_path: Path,
) -> None:
    """MobileNetV3's norms have eps 1e-3; with variances of its size, any other eps shows in the logits."""
    generator = torch.Generator().manual_seed(3)
    theirs = build_torchvision("mobilenet_v3_small", generator)
    norms = [m for m in theirs.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {m.eps for m in norms} == {1e-3}
    for m in norms:
        assert m.running_var is not None
        m.running_var.uniform_(1e-4, 1e-3, generator=generator)
    torch.save(theirs.state_dict(), tmp_path / "mobilenet.pth")
    ours = build("mobilenet_v3_small", 1000, True, tmp_path / "mobilenet.pth")
    (_, new), (_, old) = head_of(ours), head_of(theirs)
    new.load_state_dict(old.state_dict())  # ours is always new
    x = torch.randn(3, 3, 32, 32, generator=generator)
    with torch.no_grad():
        expected, got = theirs.eval()(x).double(), ours.train()(x).double()
    # Float32 sums of up to 1,024 products err by some 32 * 2^-24 of their size, in each of 52 layers.
    assert float((got - expected).norm()) <= 52 * 2**-19 * float(expected.norm())


def test_no_running_statistic_ever_moves_and_every_parameter_does(weights_file: Path) -> None:
    model = ImageClassifier(
        build(pretrained=True, weights=weights_file), task=MultiLabel(), input_size=32
    ).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.autograd.backward(model.loss(*batch()))
    optimizer.step()
    model.metrics(*batch())
    parameters = dict(model.named_parameters())
    statistics = [name for name in before if name.endswith(("running_mean", "running_var"))]
    assert len(statistics) == 40
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) == (name not in parameters), name


@pytest.mark.parametrize(
    ("arch", "pretrained"),
    [("resnet18", True), ("resnet50", False), *product(["mobilenet_v2", "efficientnet_b0"], [False, True])],
)
def test_every_arch_trains_in_both_norms_the_same_in_train_and_eval_mode(arch: str, pretrained: bool) -> None:
    model = ImageClassifier(build(arch, 3, pretrained), task=MultiLabel(), input_size=32).train()
    assert_no_live_batchnorm(model)
    kind = FrozenStatisticsBatchNorm2d if pretrained else nn.GroupNorm
    reference = torchvision.models.get_model(arch, weights=None)
    live = [name for name, m in reference.named_modules() if isinstance(m, nn.BatchNorm2d)]
    assert [name for name, m in model.backbone.named_modules() if isinstance(m, kind)] == live
    images, targets, crops = batch(labels=3)
    random_state = torch.get_rng_state()
    logits = model(images, crops)
    assert logits.shape == (4, 3)
    torch.autograd.backward(model.loss(images, targets, crops))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert torch.equal(model.eval()(images, crops), logits)
    assert torch.equal(torch.get_rng_state(), random_state), "training draws from the global generator"


def test_an_image_does_not_see_the_others_of_its_batch() -> None:
    model = ImageClassifier(build(), task=MultiLabel(), input_size=32).train()
    images, _, crops = batch()
    assert_close_as_vector(model(images, crops)[1:2], model(images[1:2], crops[1:2]), RESNET18)


def test_a_live_batchnorm_is_found() -> None:
    with pytest.raises(AssertionError, match=r"live BatchNorm at 1\.0"):
        assert_no_live_batchnorm(nn.Sequential(nn.ReLU(), nn.Sequential(nn.BatchNorm2d(3))))
    with pytest.raises(AssertionError, match="live BatchNorm"):
        ImageClassifier(nn.Sequential(nn.BatchNorm2d(3)), task=MultiLabel(), input_size=8)


def test_group_counts_are_the_largest_divisor_up_to_the_number_asked_for() -> None:
    resnet = [m for m in build().modules() if isinstance(m, nn.GroupNorm)]
    assert len(resnet) == 20
    assert {(m.num_groups, m.eps) for m in resnet} == {(32, 1e-5)}
    found = {
        m.num_channels: m.num_groups
        for m in build("mobilenet_v2", 3).modules()
        if isinstance(m, nn.GroupNorm)
    }
    assert {c: found[c] for c in (16, 24, 32, 144, 1280)} == {16: 16, 24: 24, 32: 32, 144: 24, 1280: 32}
    assert {m.num_groups for m in build(groups=5).modules() if isinstance(m, nn.GroupNorm)} == {4}


@pytest.mark.parametrize(("labels", "millions"), [(17, 11.19), (1628, 12.01)])
@pytest.mark.parametrize("pretrained", [False, True], ids=["group", "frozen_batch"])
def test_resnet18_has_the_papers_number_of_parameters(labels: int, millions: float, pretrained: bool) -> None:
    backbone = build(labels=labels, pretrained=pretrained)
    assert round(sum(p.numel() for p in backbone.parameters()) / 1e6, 2) == millions
    name, head = head_of(backbone)
    assert (name, head.bias is not None and len(head.bias)) == ("fc", labels)


# Initialisation


@pytest.mark.parametrize("init", ["keras", "torchvision"])
@pytest.mark.parametrize("arch", ["mobilenet_v2", "squeezenet1_1"])
def test_initialisation_is_a_function_of_its_generator_alone(arch: str, init: Init) -> None:
    random_state = torch.get_rng_state()
    first = digest(drawn(arch, init=init))
    assert torch.equal(torch.get_rng_state(), random_state), "the global generator was used"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        assert digest(drawn(arch, init=init)) == first
    assert digest(drawn(arch, init=init, seed=1)) != first


def test_torchvisions_initialisation_is_torchvisions() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        theirs = torchvision.models.resnet18(num_classes=17).state_dict()
    ours = build(init="torchvision", seed=3).state_dict()
    assert set(ours) == {n for n in theirs if not n.endswith(("running_mean", "running_var", "tracked"))}
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_the_papers_initialisation_is_keras_he_normal_and_glorot_uniform() -> None:
    backbone = build(labels=1628)
    for module in backbone.modules():
        if isinstance(module, nn.Conv2d):
            std = math.sqrt(2 / module.weight[0].numel())
            assert module.weight.std().item() == pytest.approx(std, rel=0.03)
            assert module.weight.abs().max().item() <= 2 * std / 0.8796 * 1.0001, "cut at two deviations"
            assert module.weight.abs().max().item() > 1.9 * std / 0.8796
            assert abs(module.weight.mean().item()) < 4 * std / math.sqrt(module.weight.numel())
        elif isinstance(module, nn.Linear):
            limit = math.sqrt(6 / (512 + 1628))
            assert 0.999 * limit < module.weight.abs().max().item() <= limit
            assert module.weight.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.01)
            assert not module.bias.any()
        elif isinstance(module, nn.GroupNorm):
            assert (module.weight == 1).all()
            assert not module.bias.any()
    distinct = {m.weight.flatten()[0].item() for m in backbone.modules() if isinstance(m, nn.Conv2d)}
    assert len(distinct) == 20, "every layer has draws of its own"


# Weights files


# The classifier


# Mistakes


@pytest.mark.filterwarnings("ignore:The default weight initialization:FutureWarning")
def test_mistakes_in_names_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"arch is 'resnet81', which is not a known network; did you mean resnet18\?"
    ):
        build("resnet81")
    with pytest.raises(ValueError, match="inception_v3 has auxiliary outputs"):
        build("inception_v3")
    with pytest.raises(ValueError, match="num_labels is 0"):
        build(labels=0)


@pytest.mark.parametrize(
    ("arch", "side"), [("alexnet", 32), ("vit_b_32", 33), ("squeezenet1_0", 8)], ids=lambda value: str(value)
)
def test_images_that_a_network_cannot_take_are_refused(arch: str, side: int) -> None:
    with pytest.raises(
        ValueError, match=rf"{arch} cannot take images of {side} x {side} pixels \(.*\): choose"
    ):
        build(arch, input_size=side)


def test_a_vision_transformer_is_made_for_the_size_of_its_images() -> None:
    assert drawn("vit_b_32", input_size=64)(torch.zeros(2, 3, 64, 64)).shape == (2, 17)
