"""The average of a module over rounds, held to its equations in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from pfl_ext.averaging import AveragingConfig, ModelAverage
from pfl_ext.models.classifier import build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.lora import adapters_of, merged
from tests.closeness import assert_close_as_vector
from tests.pfl_ext.models.test_lora_attention import pair


def weights_of_models(config: AveragingConfig, count: int) -> Sequence[float]:
    """The weight of each of ``count`` models in their average, from the definition alone."""
    if config.average == "swa":
        return [1 / count] * count
    kept = [min(config.average_decay, (1 + t) / (10 + t)) for t in range(count - 1)]  # as De et al. count
    return [math.prod(kept[k:]) * (1 - kept[k - 1] if k else 1.0) for k in range(count)]


def moved(module: nn.Module, seed: int) -> None:
    """Set what is trained to other values."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=draw))


@pytest.mark.parametrize(("start", "every"), [(0, 1), (3, 1), (2, 4)])
@pytest.mark.parametrize(
    "config",
    [AveragingConfig("swa"), AveragingConfig("ema", 0.5), AveragingConfig("ema", 0.999)],
    ids=["plain", "decay 0.5", "warm-up"],
)
def test_it_is_the_weighted_mean_of_its_definition(config: AveragingConfig, start: int, every: int) -> None:
    """Decay 0.5 is reached at once after the ninth model; 0.999 never, so the first model has no weight."""
    config = AveragingConfig(config.average, config.average_decay, start, every)
    module, models = nn.Linear(3, 2).double(), list[Tensor]()
    module.bias.requires_grad_(False)
    frozen, average = module.bias.clone(), ModelAverage(config, module)
    for step in range(30):
        moved(module, step)
        models.append(module.weight.detach().clone())
        average.add(step)
        with average.in_place():
            averaged = models[start::every] or models[-1:]
            weights = weights_of_models(config, len(averaged))
            expected = sum(w * x for w, x in zip(weights, averaged, strict=True))
            assert isinstance(expected, Tensor)
            assert_close_as_vector(module.weight, expected, roundings=4 * 30)
            assert module.bias.equal(frozen)
        assert module.weight.equal(models[-1]), "bit for bit"
    assert sum(weights) == pytest.approx(1)
    assert weights[0] < 1e-6 or config.average == "swa" or every > 1


def test_no_average_changes_and_keeps_nothing() -> None:
    module = nn.Linear(3, 2)
    average = ModelAverage(AveragingConfig(), module)
    for step in range(3):
        moved(module, step)
        average.add(step)
    last = module.weight.detach().clone()
    average.put()
    assert not average.tensors()
    assert module.weight.equal(last)


def test_one_that_was_stored_goes_on_bit_for_bit_in_any_memory_format() -> None:
    config, module = AveragingConfig("ema", 0.9), nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    whole, until = ModelAverage(config, module), ModelAverage(config, module)
    for step in range(8):
        moved(module, step)
        whole.add(step)
        if step == 4:
            stored = {name: t.contiguous() for name, t in whole.tensors().items()}
            until.load(stored)
            assert until.tensors()["weight"].is_contiguous(memory_format=torch.channels_last)
        if step > 4:
            until.add(step)
    assert all(t.equal(until.tensors()[name]) for name, t in whole.tensors().items())


@pytest.mark.parametrize("kind", ["both", "b"])
@pytest.mark.parametrize("attention", [False, True], ids=["lenet", "vit"])
def test_adapters_are_averaged_as_what_they_add_to_their_layer(attention: bool, kind: str) -> None:
    """The mean of the products differs from the product of the means, unless A is the same in all models."""
    config = ModelConfig("lenet", input_size=18, trained="lora", lora_rank=2, lora_trained=kind)  # type: ignore[arg-type]
    module = build_backbone(config, 3, torch.Generator().manual_seed(0))
    if attention:
        module = pair("vit", lora_trained=kind)[1].float()
    average, each, steps = ModelAverage(AveragingConfig("swa"), module), list[dict[str, Tensor]](), 4
    for step in range(steps):
        moved(module, step)
        average.add(step)
        each.append({name: t.double() for name, t in merged(module).state_dict().items()})
    expected = {name: torch.stack([one[name] for one in each]).mean(0) for name in each[0]}
    before = {name: t.clone() for name, t in module.state_dict().items()}
    with average.in_place():
        plain = merged(module).state_dict()
        assert_close_as_vector(plain, expected, roundings=8 * steps)
        alone = [layer.lora_b.weight.abs().max() for layer in adapters_of(module).values()]
        assert all((b == 0) == (kind == "both") for b in alone)
    assert all(t.equal(before[name]) for name, t in module.state_dict().items())
