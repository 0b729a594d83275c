"""Weights that are kept in bfloat16 besides: the network computes what it computes under autocast."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pfl_ext.engine.layout import Layout, trained
from pfl_ext.engine.short_weights import ShortWeights, converted_once
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.detection import CoarseLevels
from pfl_ext.tasks.multi_label import MultiLabel

SIDE = 12


def network(backbone: nn.Module) -> ImageClassifier:
    torch.manual_seed(1)
    return ImageClassifier(backbone, input_size=SIDE, exact_crops=True, task=MultiLabel())


def small() -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 5, 3, bias=False),
        nn.GroupNorm(1, 5),
        nn.ReLU(),
        nn.Conv2d(5, 7, 3),
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(7 * 64, 17))


class Shared(nn.Module):
    """Its convolution is used twice; its linear layers have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)
        self.one, self.other = nn.Linear(400, 400), nn.Linear(400, 400)
        self.other.weight = self.one.weight
        self.last = nn.Linear(400, 17)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.other(self.one(self.twice(self.twice(self.first(x))).flatten(1))))
        return out


class Unconverted(nn.Module):
    """A part without autocast, as `CoarseLevels` are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.exact, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Linear(400, 17)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            x = self.exact(x.float())
        out: Tensor = self.last(x.flatten(1))
        return out


def made(backbone: nn.Module) -> tuple[ImageClassifier, ShortWeights, Layout]:
    model = network(backbone)
    layout = Layout.of(model)
    short = ShortWeights.of(model, layout, layout.gather(model), torch.bfloat16)
    short.refresh()
    return model, short, layout


def names_of(model: ImageClassifier) -> list[str]:
    named = [name for name, p in model.named_parameters() if p.requires_grad]
    return [name for name, is_short in zip(named, converted_once(model, torch.bfloat16)) if is_short]


def passed(model: ImageClassifier) -> tuple[Tensor, list[Tensor]]:
    x = torch.randn(3, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(2))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        outputs = model.backbone(x)
    return outputs, list(torch.autograd.grad(outputs.float().square().sum(), trained(model)))


@pytest.mark.parametrize("backbone", [small, Shared, Unconverted])
def test_outputs_and_gradients_are_those_under_autocast(backbone: Any) -> None:
    model, short, _ = made(backbone())
    theirs, gradients = passed(model)
    ours, found = passed(short.module)
    assert torch.equal(ours, theirs)
    assert any(p.dtype == torch.bfloat16 for p in trained(short.module))
    for mine, their, is_short in zip(found, gradients, short.are_short):
        assert mine.dtype == (torch.bfloat16 if is_short else torch.float32)
        assert torch.equal(mine.float(), their)


def test_only_what_autocast_converts_once_is_short() -> None:
    layers = "0.weight", "3.weight", "3.bias", "5.weight", "5.bias"
    assert names_of(network(small())) == [f"backbone.{name}" for name in layers]
    kept = "first.weight", "first.bias", "one.bias", "other.bias", "last.weight", "last.bias"
    assert names_of(network(Shared())) == [f"backbone.{name}" for name in kept]
    converted = "first.weight", "first.bias", "last.weight", "last.bias"
    assert names_of(network(Unconverted())) == [f"backbone.{name}" for name in converted]


def test_short_weights_follow_the_others_and_begin_where_fast_kernels_ask() -> None:
    model, short, layout = made(small())
    own = short.like(copy.deepcopy(model), layout, torch.full_like(short.weights, 3.0))
    own.refresh()
    short.weights.mul_(2)
    short.refresh()
    for used in (short, own):
        for parameter, wide in zip(trained(used.module), layout.views(used.weights)):
            assert torch.equal(parameter, wide.to(parameter.dtype))
            assert parameter.dtype == torch.float32 or parameter.data_ptr() % 16 == 0
    assert bool((own.module.backbone[0].weight == 3).all())  # type: ignore[index]


def test_what_is_not_trained_is_shared_with_the_network() -> None:
    backbone = small()
    frozen = backbone[0].weight.requires_grad_(False)  # type: ignore[index]
    model, short, _ = made(backbone)
    assert short.module is not model
    assert short.module.backbone[0].weight is frozen  # type: ignore[index]
    assert frozen.dtype == torch.float32


def test_without_a_type_the_network_itself_is_used() -> None:
    model = network(small())
    layout = Layout.of(model)
    first = ShortWeights.of(model, layout, layout.gather(model), None)
    first.refresh()
    assert (first.module, first.short) == (model, None)


def test_a_pyramids_coarse_levels_stay_float32() -> None:
    levels = CoarseLevels(8, 8)

    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.levels, self.last = nn.Conv2d(3, 8, 3), levels, nn.Linear(8, 17)

        def forward(self, x: Tensor) -> Tensor:
            maps = [self.first(x)]
            found, _ = self.levels(maps, maps, ["0"])
            out: Tensor = self.last(found[-1].flatten(2).mean(2))
            return out

    model, short, _ = made(Pyramid())
    assert not [name for name in names_of(model) if "levels" in name]
    assert torch.equal(passed(short.module)[0], passed(model)[0])
