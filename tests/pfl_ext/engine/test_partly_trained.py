"""Where part of a network is trained, the engine returns what pfl's loop returns, of that part alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import nn

from pfl_ext.algorithms.algorithm import trained_bytes
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.lora import adapters_of
from pfl_ext.models.trained import choose_trained
from pfl_ext.privacy.mechanisms import Clipping
from pfl_ext.tasks.multi_label import MultiLabel
from tests.pfl_ext.engine.setting import (
    BFLOAT16,
    Setting,
    convolutions_sum_in_float32,
    distance,
    private,
    rounding_of,
    small_backbone,
    wide_backbone,
)

SIZES = [1, 2, 5, 1]
CASES: dict[str, dict[str, Any]] = {
    "lora": {"trained": "lora", "lora_rank": 3, "lora_alpha": 2.0},
    "lora_b": {"trained": "lora", "lora_rank": 3, "lora_trained": "b"},
    "last_blocks": {"trained": "last_blocks", "last_blocks": 2},
    "names": {"trained": "names", "trained_names": "0.weight,4,13"},
    "bias": {"trained": "bias"},
    "norms": {"trained": "norms"},
    "head": {"trained": "head"},
}
NAMES = {
    "lora": [
        f"{place}.lora_{part}.weight" for place in (0, 7, 10) for part in "ab"
    ],  # 3 has as many groups as channels
    "lora_b": [f"{place}.lora_b.weight" for place in (0, 7, 10)],
    "names": ["0.weight", "4.weight", "4.bias"],
    "last_blocks": ["7.weight", "8.weight", "8.bias", "10.weight", "10.bias"],
    "bias": ["0.bias", "1.bias", "4.bias", "8.bias", "10.bias"],
    "norms": ["1.weight", "1.bias", "4.weight", "4.bias", "8.weight", "8.bias"],
    "head": [],
}
MEANINGFUL = 1e-4
"""Most that rounding may change: what is not trained as it should be changes the sum by a multiple."""


def partly(case: str, whole: Callable[[], nn.Module] = small_backbone) -> nn.Module:
    """A network that has been trained for a while: neither A nor B is zero."""
    backbone, draw = whole(), torch.Generator().manual_seed(6)
    config = ModelConfig("small", input_size=10, **CASES[case])
    choose_trained(backbone, config, draw)
    for layer in adapters_of(backbone).values():
        nn.init.normal_(layer.lora_b.weight, std=0.2, generator=draw)
    return backbone


def engine_of(backbone: nn.Module) -> CohortEngine:
    return CohortEngine(ImageClassifier(backbone, task=MultiLabel(), input_size=10), lanes=1)


@pytest.mark.parametrize(
    ("case", "clipping"),
    [
        *product(["lora"], ["none", "global", "variable"]),
        *zip([case for case in CASES if case != "lora"], cycle(["variable", "none", "global"])),
    ],
)
def test_a_cohorts_sum_is_that_of_pfls_loop_and_of_what_is_trained_alone(case: str, clipping: str) -> None:
    setting = Setting(SIZES, backbone=lambda: partly(case), clipping=clipping, max_norm=0.2)
    theirs, ours = setting.run(False)[0], setting.run(True, lanes=2)[0]
    assert list(ours) == [f"backbone.{name}" for name in (*NAMES[case], "13.weight", "13.bias")]
    assert distance(ours, theirs) <= rounding_of(setting) < MEANINGFUL
    module = ImageClassifier(partly(case), task=MultiLabel(), input_size=10)
    assert trained_bytes(module) == 4 * sum(t.numel() for t in ours.values())


@pytest.mark.parametrize(("case", "clipping"), [("lora", "flat"), *zip(CASES, cycle(["per_layer", "flat"]))])
def test_a_private_cohort_is_clipped_as_by_pfls_loop(case: str, clipping: Clipping) -> None:
    def setting() -> Setting:
        more = [private(len(SIZES), "gaussian", clipping, noisy=False)]
        return Setting(SIZES, by_images=False, more=more, backbone=lambda: partly(case))

    theirs, ours = setting().run(False)[0], setting().run(True, lanes=2)[0]
    assert distance(ours, theirs) <= rounding_of(setting()) < MEANINGFUL


OTHER: list[dict[str, Any]] = [
    {"mu": 0.3},
    {"nova": True, "momentum": 0.6},
    {"weight_decay": 0.05},
    {"scaffold": ("II", "gradient"), "rounds": 2},
    {"dynamic": 0.3, "rounds": 2},
    {"adam": "adamw", "weight_decay": 0.5},
]


@pytest.mark.parametrize(
    ("case", "options"),
    [*product(["lora"], OTHER), *zip(["last_blocks", "bias", "names"], OTHER[3:])],
    ids=str,
)
def test_other_algorithms_train_the_same_part(case: str, options: dict[str, Any]) -> None:
    setting = Setting(
        [1, 5, 3], backbone=lambda: partly(case), clipping="none", learning_rate=0.05, **options
    )
    theirs, ours = setting.run(False)[0], setting.run(True, lanes=2)[0]
    assert distance(ours, theirs) <= rounding_of(setting) < 10 * MEANINGFUL


@pytest.mark.parametrize("case", ["lora", "lora_b", "last_blocks", "bias", "norms"])
def test_compiled_layers_train_the_same_part(case: str) -> None:
    setting = Setting(SIZES, backbone=lambda: partly(case, wide_backbone))
    theirs, ours = setting.run(False)[0], setting.run(True, lanes=2)[0]
    assert distance(ours, theirs) <= rounding_of(setting) < MEANINGFUL
    setting.amp = torch.bfloat16
    if convolutions_sum_in_float32():
        assert distance(setting.run(True)[0], theirs) <= rounding_of(setting, *BFLOAT16)


@pytest.mark.parametrize("case", CASES)
def test_users_go_through_the_network_together_and_frozen_layers_leave_no_tape(case: str) -> None:
    engine = engine_of(partly(case))
    assert engine._fusable
    net = engine.lanes[0].net.backbone
    taped = {name for name, layer in net.named_modules() if hasattr(layer, "tape_name")}
    assert taped == {name.rpartition(".")[0] for name in (*NAMES[case], "13.weight")}


@pytest.mark.parametrize("case, first", [("last_blocks", 7), ("head", 13)])
def test_nothing_is_kept_for_backward_before_the_first_trained_layer(case: str, first: int) -> None:
    engine = engine_of(partly(case))
    lane, module = engine.lanes[0], engine.lanes[0]._module
    needs: dict[int, bool] = {}
    for net in (lane.net.backbone, module.backbone):
        for name, layer in net.named_children():
            layer.register_forward_hook(
                lambda *given, place=int(name): needs.update({place: given[2].requires_grad})
            )
    images = torch.rand(3, 3, 10, 10)
    for run in (module.backbone, lane.net.backbone):
        needs.clear()
        run(images)
        assert [place for place, needed in needs.items() if not needed] == list(range(first))
