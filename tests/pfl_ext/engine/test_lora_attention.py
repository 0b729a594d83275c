"""Adapters of attention are trained by the engine as by pfl's loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision.models as zoo
from torch import nn

from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.lora import adapters_of
from pfl_ext.models.trained import choose_trained, head_of
from pfl_ext.tasks.multi_label import MultiLabel
from tests.pfl_ext.engine.setting import BFLOAT16, LABELS, Setting, distance, private, rounding_of

SIZES = [1, 2, 5]
RATE: dict[str, Any] = {"learning_rate": 0.02}


def vit() -> nn.Module:
    net: nn.Module = zoo.VisionTransformer(10, 5, 1, 2, hidden_dim=8, mlp_dim=16, num_classes=LABELS)
    return net


def swin() -> nn.Module:
    net: nn.Module = zoo.SwinTransformer(
        [2, 2], 8, [2], [2], [3, 3], stochastic_depth_prob=0.0, num_classes=LABELS
    )
    return net


def adapted(whole: Callable[[], nn.Module] = vit, **options: Any) -> nn.Module:
    """A network that has been trained for a while: neither A nor B is zero."""
    torch.manual_seed(0)
    backbone, draw = whole(), torch.Generator().manual_seed(6)
    nn.init.normal_(head_of(backbone)[1].weight, generator=draw)  # torchvision's ViT has zeros
    config = ModelConfig("small", input_size=10, trained="lora", lora_rank=3, **options)
    choose_trained(backbone, config, draw)
    for layer in adapters_of(backbone).values():
        nn.init.normal_(layer.lora_b.weight, std=0.2, generator=draw)
    return backbone


CASES: dict[str, Callable[[], nn.Module]] = {
    "vit": adapted,
    "b": lambda: adapted(lora_trained="b"),
    "query and value": lambda: adapted(lora_targets="*.query,*.value"),
    "swin": lambda: adapted(swin),
}


@pytest.mark.parametrize(
    "case, clipping",
    [("vit", "private"), ("b", "none"), ("query and value", "variable"), ("swin", "none")],
)
def test_a_cohorts_sum_is_that_of_pfls_loop(case: str, clipping: str) -> None:
    def setting() -> Setting:
        more = [private(len(SIZES), "gaussian", "flat", noisy=False)] if clipping == "private" else []
        by_norm = "none" if more else clipping
        return Setting(SIZES, by_images=not more, more=more, backbone=CASES[case], clipping=by_norm, **RATE)

    theirs, ours = setting().run(False)[0], setting().run(True, lanes=2)[0]
    trained = [f"backbone.{name}" for name, p in CASES[case]().named_parameters() if p.requires_grad]
    assert list(ours) == trained
    assert all(bool(t.any()) for name, t in ours.items() if "lora" in name)
    assert distance(ours, theirs) <= rounding_of(setting()) < 1e-3


def test_a_cohort_in_half_precision_is_that_of_pfls_loop_up_to_its_rounding() -> None:
    setting = Setting(SIZES, backbone=adapted, clipping="none", **RATE)
    theirs = setting.run(False)[0]
    setting.amp = torch.bfloat16
    assert 0 < distance(setting.run(True, lanes=2)[0], theirs) <= rounding_of(setting, *BFLOAT16)


@pytest.mark.parametrize("case", CASES)
def test_users_share_a_pass_unless_weights_are_read(case: str) -> None:
    """Only a layer that is called has each user's own gradient."""
    module = ImageClassifier(CASES[case](), task=MultiLabel(), input_size=10)
    assert CohortEngine(module, lanes=1)._fusable == (case != "swin")
