"""Networks with compiled layers compute, learn and keep to bounds as torch's do."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfl_ext.data.transforms import CROP_COLUMNS, KEY_COLUMNS
from pfl_ext.engine.cpu import kernels as cpu_kernels
from pfl_ext.engine.cpu.choice import BY_PROCESSOR, FLOAT32, described
from pfl_ext.engine.cpu.convolutions import Convolution, FewChannels
from pfl_ext.engine.cpu.layers import CpuLayers, GroupNorm, kernels_for
from pfl_ext.models.classifier import ImageClassifier, build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.dropout import dropping
from pfl_ext.tasks.multi_label import MultiLabel
from tests.pfl_ext.engine.cpu.roundings import (
    KERNELS,
    UNIT,
    WINOGRAD,
    compiled,
    relative,
    with_drawn_weights,
    with_halves,
)
from tests.pfl_ext.engine.setting import (
    BFLOAT16,
    Setting,
    distance,
    in_float64,
    rounding_of,
    wide_backbone,
)


@with_halves
@pytest.mark.parametrize("norm", ["group", "frozen_batch"])
def test_in_bfloat16_a_networks_gradients_err_as_much_as_torchs(norm: str) -> None:
    assert KERNELS is not None
    network = resnet(norm)
    taken = CpuLayers(KERNELS, BY_PROCESSOR["AVX512-FP16"]).replaced(copy.deepcopy(network))
    draw = torch.Generator().manual_seed(4)
    x = F.interpolate(torch.rand(6, 3, 8, 8, generator=draw), size=(64, 64), mode="bicubic")
    targets = (torch.rand(6, 17, generator=draw) < 0.3).double()

    def gradients(module: nn.Module, x: Tensor) -> Tensor:
        loss = F.binary_cross_entropy_with_logits(module(x).double(), targets)
        return torch.cat([g.double().flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])

    exact = gradients(copy.deepcopy(network).double(), x.double())
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = (relative(gradients(module, x), exact) for module in (network, taken))
        assert taken.layer1(torch.zeros(1, 64, 8, 8)).dtype == torch.bfloat16  # type: ignore[operator]
    assert 1e-3 < ours < 1.3 * theirs < 0.3


@compiled
@pytest.mark.parametrize("channels", [(16, 64), (31, 32), (32, 33)])
def test_a_convolution_of_other_channels_is_torchs(channels: tuple[int, int]) -> None:
    assert KERNELS is not None
    theirs = nn.Conv2d(*channels, 3)
    assert CpuLayers(KERNELS, FLOAT32).replaced(theirs) is theirs


def resnet(norm: str) -> nn.Module:
    draw = torch.Generator().manual_seed(5)
    return build_backbone(
        ModelConfig(input_size=40, init="keras", pretrained=norm == "frozen_batch"), 17, draw
    )


def assert_same(ours: nn.Module, theirs: nn.Module, x: Tensor, off: float | None = None) -> None:
    """In what they compute and in their gradients, as `rounding_of` has it for a round.

    Args:
        ours: with compiled layers.
        theirs: with torch's.
        x: images.
        off: by how much the weights are off that move as far as rounding may; None for float32's rounding.
    """

    def computed(network: nn.Module) -> list[Tensor]:
        y = network(x)
        return [y, *torch.autograd.grad(y.square().mean(), list(network.parameters()))]

    layers = [m for m in theirs.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    off = off or WINOGRAD / 3 * UNIT * max([9, *(layer.weight[0].numel() for layer in layers)]) ** 0.5
    with torch.autocast("cpu", enabled=False):
        exact, *moved = (
            computed(in_float64(copy.deepcopy(theirs), *how)) for how in ((0.0, 0), (off, 1), (off, 2))
        )
    for mine, right, *others in zip(computed(ours), exact, *moved, strict=True):
        assert relative(mine, right) <= max(2 * relative(other, right) for other in others)


@compiled
@pytest.mark.parametrize("norm", ["group", "frozen_batch"])
def test_a_network_taken_over_computes_the_same(norm: str) -> None:
    theirs = resnet(norm)
    assert KERNELS is not None
    ours = CpuLayers(KERNELS, FLOAT32).replaced(copy.deepcopy(theirs))
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    kinds = [type(layer) for layer in ours.modules()]
    assert kinds.count(Convolution) == 19, "all but the first, of three channels"
    assert kinds.count(GroupNorm) == (20 if norm == "group" else 0)
    x = torch.randn(3, 3, 40, 40, generator=torch.Generator().manual_seed(1))
    assert_same(ours, theirs, x)
    again = copy.deepcopy(ours)
    assert again.layer1[0].conv1.kernels is KERNELS  # type: ignore[union-attr, index]
    again.requires_grad_(False).get_parameter("fc.weight").zero_()
    assert not torch.equal(again(x), ours(x)), "a copy has weights of its own"
    relus = [layer for layer in ours.modules() if isinstance(layer, nn.ReLU)]
    seen: list[nn.Module] = []
    for relu in relus:
        relu.register_forward_hook(lambda layer, *_: seen.append(layer))
    with torch.no_grad():
        ours(x)
        assert len(seen) == (0 if norm == "group" else 17)
        diverged = ours(torch.full_like(x, torch.nan))
    assert diverged.isnan().all(), "what has diverged must show"


@compiled
@pytest.mark.parametrize("arch", ["lenet", "cifar_cnn"])
def test_a_network_of_few_channels_taken_over_computes_the_same(arch: str) -> None:
    theirs = build_backbone(ModelConfig(arch, 32), 10, torch.Generator().manual_seed(5))
    assert KERNELS is not None
    ours = CpuLayers(KERNELS, FLOAT32).replaced(copy.deepcopy(theirs))
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    taken = [name for name, layer in ours.named_modules() if isinstance(layer, FewChannels)]
    assert taken == (["conv1", "conv2"] if arch == "lenet" else ["conv1"])
    seen: list[nn.Module] = []
    for layer in ours.modules():
        if isinstance(layer, nn.ReLU | nn.MaxPool2d):
            layer.register_forward_hook(lambda layer, *_: seen.append(layer))
    x = torch.randn(19, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    assert_same(ours, theirs, x)
    seen.clear()
    with torch.no_grad():
        ours(x)
        assert not seen, "what follows a taken convolution is done by it"
        diverged = ours(torch.full_like(x, torch.nan))
    assert diverged.isnan().all(), "what has diverged must show"
    kinds = ("other convolutions", "pooling", "linear")
    assert described(ours, None) == f"float32: {', '.join(f'{kind} by compiled float32' for kind in kinds)}"


@compiled
@pytest.mark.parametrize("arch", ["simple_cnn", "vgg9"])
def test_a_network_with_dropout_taken_over_computes_the_same(arch: str) -> None:
    theirs = build_backbone(ModelConfig(arch, 32, dropout=True), 10, torch.Generator().manual_seed(5))
    assert KERNELS is not None
    ours = CpuLayers(KERNELS, FLOAT32).replaced(copy.deepcopy(theirs))
    x = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    crops = torch.arange(5.0)[:, None].expand(5, CROP_COLUMNS + KEY_COLUMNS)
    with dropping(crops):
        assert_same(ours, theirs, x)
        dropped = ours(x)
    assert not torch.equal(dropped, ours(x))


@compiled
def test_large_images_are_not_said_to_go_by_convolutions_of_few_channels() -> None:
    assert KERNELS is not None
    layers = CpuLayers(KERNELS, FLOAT32)
    assert type(layers.replaced(nn.Conv2d(3, 64, 3), 64)) is FewChannels
    assert type(layers.replaced(nn.Conv2d(3, 64, 3), 65)) is nn.Conv2d


class OddlyFollowed(nn.Module):
    """ReLUs and poolings that may not be joined to the convolutions before them, or only in part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.third, self.fourth, self.fifth = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.overlapping, self.rounded = nn.MaxPool2d(2, 1), nn.MaxPool2d(2, ceil_mode=True)
        self.wide, self.plain = nn.MaxPool2d(3), nn.MaxPool2d((2, 2), padding=0)

    def forward(self, x: Tensor) -> Tensor:
        a = self.overlapping(self.first(x).relu())
        b = self.second(a)
        c = b.relu() + b
        d = self.rounded(self.third(c)).relu()
        e = self.plain(self.plain(self.fourth(d)))
        return torch.tanh(self.wide(F.relu(self.fifth(e).relu())))


@compiled
def test_what_must_not_be_joined_to_a_convolution_is_not() -> None:
    assert KERNELS is not None
    theirs = OddlyFollowed()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, 0.1, 0.5, generator=torch.Generator().manual_seed(3))
    ours = CpuLayers(KERNELS, FLOAT32).replaced(copy.deepcopy(theirs))
    assert_same(ours, theirs, torch.randn(2, 3, 27, 27, generator=torch.Generator().manual_seed(1)))


class Odd(nn.Module):
    """Sums and ReLUs after norms that may not be joined to them, or only with care."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.GroupNorm(4, 32) for _ in range(3))
        self.fourth, self.fifth = (nn.GroupNorm(4, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        a = torch.add(self.first(x), x, alpha=3).relu()
        b = self.second(a)
        c = b.relu() * b
        d = F.relu(self.third(c) + c.mean((2, 3), keepdim=True))
        e = self.fourth(d)
        f = (e + e).relu() + (self.fifth(d) + 1.0).relu()
        return torch.relu(d + self.fifth(f))


@compiled
@pytest.mark.parametrize("half", [False, True])
def test_what_must_not_be_joined_is_not(half: bool) -> None:
    assert KERNELS is not None
    theirs = Odd()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, 0.5, 0.5, generator=torch.Generator().manual_seed(3))
    ours = CpuLayers(KERNELS, BY_PROCESSOR["AMX"]).replaced(copy.deepcopy(theirs))
    x = torch.randn(2, 32, 5, 5, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=half):  # where sums have terms of both types
        assert_same(ours, theirs, x, BFLOAT16[0] * BFLOAT16[1] if half else None)


class Branching(nn.Sequential):
    """Whose way depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        return x.relu() if x.sum() > 0 else x


@compiled
def test_a_network_that_cannot_be_written_down_stays_as_it_is() -> None:
    assert KERNELS is not None
    network = Branching(nn.GroupNorm(4, 32))
    assert CpuLayers(KERNELS, FLOAT32).replaced(network) is network
    assert type(network[0]) is GroupNorm


def test_layers_that_are_not_plain_stay_torchs() -> None:
    odd = nn.Sequential(
        nn.Conv2d(32, 32, 3, groups=2),
        nn.Conv2d(32, 32, 3, dilation=2),
        nn.Conv2d(32, 32, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(32, 32, 3, padding="same"),
        nn.Conv2d(32, 32, 3, stride=(1, 2)),
        nn.Conv2d(32, 32, 5),
        nn.Conv2d(48, 32, 3),
        nn.Conv2d(3, 24, 3, stride=2),
        nn.Conv2d(3, 24, 1),
        nn.GroupNorm(2, 24),
    )
    before = [type(layer) for layer in odd]
    assert kernels_for(ImageClassifier(odd, task=MultiLabel(), input_size=10)) is None
    CpuLayers(object(), FLOAT32).replaced(odd)  # type: ignore[arg-type]
    assert [type(layer) for layer in odd] == before


@compiled
@pytest.mark.parametrize(
    "lanes, more, winograd",
    [
        (1, {}, True),
        (2, {}, False),
        (1, {"momentum": 0.6}, False),
        (2, {"momentum": 0.6}, True),
        (1, {"weight_decay": 0.05}, True),
        (2, {"weight_decay": 0.05}, False),
        (1, {"mu": 0.3}, False),
        (2, {"mu": 0.3}, True),
    ],
    ids=str,
)
def test_a_cohort_trained_by_compiled_layers_is_that_of_pfls_loop(
    lanes: int, more: dict[str, float], winograd: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_kernels, "WEIGHTS", -1e12 if winograd else 1e12)
    setting = Setting([1, 2, 5], max_norm=0.3, learning_rate=0.1, backbone=wide_backbone)
    for name, value in more.items():
        setattr(setting, name, value)
    theirs, ours = setting.run(False)[0], setting.run(True, lanes=lanes)[0]
    allowed = rounding_of(setting, roundings=WINOGRAD * (288 / 9) ** 0.5 if winograd else None)
    assert distance(ours, theirs) <= allowed
    assert ("conv3x3_backward" in calls) == winograd
    assert "convolve_backward" in calls
    assert "group_norm_backward" in calls
    without = setting.run(True, lanes=lanes, cpu_kernels=False)[0]
    assert 0 < distance(without, theirs) <= allowed


def narrow_backbone() -> nn.Module:
    """With convolutions of few channels, taped, trimmed and not."""
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 20, 3, padding=1, bias=False),
        nn.MaxPool2d(2),
        nn.ReLU(inplace=True),
        nn.Conv2d(20, 7, (3, 1), padding=(1, 0)),
        nn.Flatten(),
        nn.Linear(28, 5),
    )
    return with_drawn_weights(net)


@compiled
@pytest.mark.parametrize("clipping", ["none", "global", "variable"])
def test_a_cohort_trained_by_convolutions_of_few_channels_is_that_of_pfls_loop(
    clipping: str, calls: list[str]
) -> None:
    setting = Setting([1, 2, 9, 5], learning_rate=0.1, backbone=narrow_backbone, momentum=0.6)
    setting.clipping, setting.max_norm = clipping, 0.3
    theirs, ours = setting.run(False)[0], setting.run(True, lanes=2)[0]
    assert calls.count("few_channels_backward") > 0
    allowed = rounding_of(setting)
    assert distance(ours, theirs) <= allowed
    without = setting.run(True, lanes=2, cpu_kernels=False)[0]
    assert 0 < distance(without, theirs) <= allowed


@compiled
def test_the_same_round_is_bitwise_the_same_again() -> None:
    setting = Setting([3, 12, 7], backbone=wide_backbone)
    first, second = (setting.run(True, lanes=2)[0] for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
