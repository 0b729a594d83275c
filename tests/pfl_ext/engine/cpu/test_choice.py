"""Each processor's way of computing each kind of layer computes what float64 does, but for its roundings.

Processors are faked by `CpuKernels.feature`: torch multiplies bfloat16 on any of them, if slowly.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.engine.cpu import check
from pfl_ext.engine.cpu import kernels as cpu_kernels
from pfl_ext.engine.cpu.choice import (
    BY_PROCESSOR,
    FLOAT32,
    KINDS,
    Feature,
    Kind,
    Row,
    chosen,
    described,
    kind_of,
)
from pfl_ext.engine.cpu.joining import Joined
from pfl_ext.engine.cpu.kernels import CpuKernels
from pfl_ext.engine.cpu.layers import CpuLayers, compilable, gains
from pfl_ext.models.classifier import ImageClassifier, build_backbone, memory_format
from pfl_ext.models.config import ModelConfig
from pfl_ext.tasks.multi_label import MultiLabel
from tests.closeness import assert_close_as_vector
from tests.closeness import norm as norm_of
from tests.pfl_ext.engine.cpu.roundings import KERNELS, compiled
from tests.pfl_ext.engine.setting import (
    BFLOAT16,
    Setting,
    distance,
    norm,
    rounding_of,
    small_backbone,
    wide_backbone,
    without_noise,
)

FEATURES = list(BY_PROCESSOR)
ROWS = {"float32": FLOAT32, **{f"bfloat16 on {name}": row for name, row in BY_PROCESSOR.items()}}
UNIT = 2.0**16
"""Unit of rounding of bfloat16, in those of float32."""


def layers_of(row: Row) -> CpuLayers:
    assert KERNELS is not None
    halves = any(way == ("compiled", torch.float16) for way in row)
    if halves and not KERNELS.has_halves:
        pytest.skip("this processor does no arithmetic with half floats")
    return CpuLayers(KERNELS, row)


def one_layer(kind: Kind) -> nn.Module:
    layer: nn.Module = {
        "3x3 convolutions": nn.Conv2d(32, 32, 3, padding=1, bias=False),
        "depthwise convolutions": nn.Conv2d(32, 32, 5, padding=2, groups=32, bias=False),
        "other convolutions": nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False),
        "GroupNorm": nn.GroupNorm(8, 32),
        "pooling": nn.MaxPool2d(3, 2, 1),
        "linear": nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 32, bias=False)),
    }[kind]
    draw = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 0, 0.1, generator=draw)
    return layer


def computed(network: nn.Module, x: Tensor, autocast: torch.dtype | None) -> list[Tensor]:
    """The output, and the gradients of images and parameters of a sum with drawn factors."""
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", autocast, enabled=autocast is not None, cache_enabled=False):
        y = network(leaf)
    e = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    return [y, *torch.autograd.grad(y, [leaf, *network.parameters()], e)]


@compiled
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_cell_of_the_table_is_right_but_for_its_roundings(kind: Kind, row: str) -> None:
    way, autocast = ROWS[row].way(kind), ROWS[row].autocast
    theirs = one_layer(kind)
    ours = layers_of(ROWS[row]).replaced(copy.deepcopy(theirs))
    if kind != "linear":
        assert hasattr(ours, "multiplied") == (way.by == "compiled")
    x = torch.randn(4, 32, 12, 12, generator=torch.Generator().manual_seed(3))
    x = (x if autocast is None else x.bfloat16().float()).contiguous(memory_format=torch.channels_last)
    found = computed(ours, x, autocast)
    assert found[0].dtype == (autocast or torch.float32) or kind == "pooling"
    assert found[0].ndim == 2 or found[0].is_contiguous(memory_format=torch.channels_last)
    assert all(gradient.dtype == torch.float32 for gradient in found[1:])
    expected = computed(copy.deepcopy(theirs).double(), x.double(), None)
    # Sums have up to 576 terms, and Winograd's magnify by 6. In lower precision weights, the layer's output
    # and the images' gradient are rounded once each; images and the output's gradient are given in it.
    roundings = 6.0 * 576 if autocast is None else 3 * UNIT
    for mine, exact in zip(found, expected, strict=True):
        assert_close_as_vector(mine.float(), exact, roundings)


@compiled
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_a_norm_between_layers_of_another_kind_has_their_type_and_memory_format(
    feature: Feature, half: bool
) -> None:
    layers = layers_of(chosen(torch.bfloat16 if half else None, feature))
    network = layers.replaced(wide_backbone())
    autocast = layers.row.autocast
    seen: list[str] = []

    def check(layer: nn.Module, given: Sequence[Tensor], out: Tensor) -> None:
        expected = autocast or torch.float32
        for tensor in (*given, out):
            if tensor.shape[1] != 3:  # the network's own images are float32
                assert tensor.dtype == expected
            assert tensor.is_contiguous(memory_format=torch.channels_last)
        seen.append(kind_of(layer) or "")

    for layer in network.modules():
        if kind_of(layer) in KINDS[:5] and not isinstance(layer, nn.AdaptiveAvgPool2d):
            layer.register_forward_hook(check)
    x = torch.randn(2, 3, 10, 10).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        network(x)
    assert len(seen) == 8


class Block(nn.Module):
    """A block of a ResNet: a norm with a ReLU after it, and one with a sum and a ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last = nn.GroupNorm(8, width), nn.GroupNorm(8, width)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm(self.first(x)))
        return F.relu(self.last(self.second(inner)) + x)


@compiled
@pytest.mark.parametrize("feature", FEATURES)
def test_a_mixed_networks_gradients_err_as_much_as_torchs_autocast(feature: Feature) -> None:
    layers = layers_of(BY_PROCESSOR[feature])
    draw = torch.Generator().manual_seed(5)
    theirs = nn.Sequential(
        nn.Conv2d(3, 32, 7, 2, 3), Block(32), Block(32), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, float(parameter.ndim == 1), 0.1, generator=draw)
    ours = layers.replaced(copy.deepcopy(theirs))
    assert any(isinstance(layer, Joined) for layer in ours.modules())
    x = F.interpolate(torch.rand(4, 3, 8, 8, generator=draw), size=(32, 32), mode="bicubic")
    targets = (torch.rand(4, 32, generator=draw) < 0.3).double()

    def gradients(module: nn.Module, x: Tensor, autocast: torch.dtype | None) -> list[Tensor]:
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            logits = module(x)
        loss = F.binary_cross_entropy_with_logits(logits.double(), targets)
        return list(torch.autograd.grad(loss, list(module.parameters())))

    exact = gradients(copy.deepcopy(theirs).double(), x.double(), None)
    size = norm_of(exact)
    by_torch, mixed = (
        norm_of([g.double() - e for g, e in zip(gradients(*job), exact, strict=True)]) / size
        for job in ((theirs, x, torch.bfloat16), (ours, x, layers.row.autocast))
    )
    assert mixed < 1.3 * by_torch < 0.5


@compiled
@pytest.mark.parametrize("feature", FEATURES)
def test_a_round_in_bfloat16_is_computed_as_the_table_says(
    feature: Feature, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = layers_of(BY_PROCESSOR[feature]).row
    monkeypatch.setattr(CpuKernels, "feature", feature)
    setting = Setting([1, 6, 9], backbone=wide_backbone)
    allowed = rounding_of(setting, *BFLOAT16)
    exact = setting.run(True)[0]
    setting.amp = torch.bfloat16
    calls: list[str] = []
    call = CpuKernels.call

    def counted(self: CpuKernels, name: str, tensors: Sequence[Tensor], *rest: float) -> None:
        if tensors[0].dtype == torch.bfloat16:  # the engine tries its float32 network, too
            calls.append(name)
        call(self, name, tensors, *rest)

    monkeypatch.setattr(CpuKernels, "call", counted)
    monkeypatch.setattr(check, "check", lambda *_: None)  # which calls everything
    apart = distance(setting.run(True, lanes=1)[0], exact)
    assert apart <= allowed
    assert (apart > 2**-14) == (row.autocast is not None)
    assert ("group_norm_backward" in calls) == (row.autocast is not None)
    assert ("convolve_backward" in calls) == (row.convolution.format == torch.float16)


@compiled
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("size", [3, 40], ids=["one step", "more steps"])
def test_in_no_way_does_a_users_part_of_a_private_sum_exceed_the_bound(
    size: int, feature: Feature, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers_of(BY_PROCESSOR[feature])
    monkeypatch.setattr(CpuKernels, "feature", feature)
    setting = Setting([size], by_images=False, more=[without_noise(0.01)], clipping="none")
    setting.backbone, setting.amp = wide_backbone, torch.bfloat16
    assert 0.0099 < norm(setting.run(True)[0]) <= 0.01


def engine(backbone: nn.Module | None = None, **options: Any) -> CohortEngine:
    return CohortEngine(
        ImageClassifier(backbone or wide_backbone(), task=MultiLabel(), input_size=10), lanes=1, **options
    )


@compiled
def test_what_is_recorded_names_each_kind_of_layer_and_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {}
    for feature in ("AMX", "AVX512-BF16", "none"):
        monkeypatch.setattr(CpuKernels, "feature", feature)
        said[feature] = engine().arithmetic(torch.bfloat16)
    linear = "linear by compiled float32"
    mixed = "convolutions by torch, GroupNorm by compiled float32, pooling by torch, linear by torch"
    convolutions = (
        "3x3 convolutions by compiled float32 (1) and torch (1), other convolutions by compiled float32"
    )
    plain = mixed.replace("convolutions by torch", convolutions).replace("linear by torch", linear)
    assert said["AMX"] == said["AVX512-BF16"] == f"bfloat16: {mixed}"
    assert said["none"] == engine().arithmetic(None) == f"float32: {plain}"
    assert engine(cpu_kernels=False).arithmetic(torch.bfloat16) == "bfloat16: all layers by torch"
    assert engine(small_backbone()).arithmetic(None) == "float32: all layers by torch"
    config = ModelConfig("cifar_cnn", 32, init="keras")
    cifar = build_backbone(config, 10, torch.Generator().manual_seed(0))
    assert gains(cifar)
    taken = CpuLayers(KERNELS, FLOAT32).replaced(cifar)  # type: ignore[arg-type]
    kinds = ("other convolutions", "pooling", "linear")
    assert described(taken, None) == f"float32: {', '.join(f'{kind} by compiled float32' for kind in kinds)}"
    assert all(memory_format(p) == torch.channels_last for p in taken.parameters() if p.ndim == 4)


@compiled
@pytest.mark.parametrize(
    ("flags", "halves", "feature"),
    [
        ("avx512f amx_bf16 avx512_bf16 avx512_fp16", True, "AMX"),
        ("avx512f avx512_bf16 avx512_fp16", True, "AVX512-FP16"),
        (
            "avx512f avx512_bf16 avx512_fp16",
            False,
            "AVX512-BF16",
        ),  # of a compiler that does not know the others
        ("avx512f avx512_bf16", False, "AVX512-BF16"),
        ("avx2 fma", False, "none"),
    ],
)
def test_a_processor_is_known_by_its_flags(
    flags: str, halves: bool, feature: Feature, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = CpuKernels()
    monkeypatch.setattr(cpu_kernels, "processor", lambda: f"x86_64flags : {flags}")
    kernels.has_halves = halves
    assert kernels.feature == feature


def test_layers_of_which_the_table_says_nothing_have_no_kind() -> None:
    assert kind_of(nn.ReLU()) is None
    assert kind_of(nn.Conv2d(3, 8, 3, stride=2)) == "other convolutions"
    assert not compilable(nn.Linear(32, 32))
