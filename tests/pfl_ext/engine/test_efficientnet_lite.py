"""EfficientNet-Lite0 in the engine: depthwise convolutions, ReLU6, one-sided padding, dropout."""

from __future__ import annotations

import contextlib
import copy
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from pfl_ext.data.sampling import LocalSampling
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.engine.gradients import Gradient, Users
from pfl_ext.engine.tape import TapedNetwork
from pfl_ext.models.classifier import ImageClassifier, build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.weights import IMAGENET
from pfl_ext.tasks.multi_label import MultiLabel
from tests.closeness import assert_close_as_vector
from tests.pfl_ext.engine.setting import BFLOAT16, LABELS, Setting, distance, private, rounding_of
from tests.pfl_ext.engine.shortened import short_classifier

SIZES = [1, 3]
STEP: dict[str, Any] = {"clipping": "global", "max_norm": 0.3, "learning_rate": 0.02}
CASES: dict[str, dict[str, Any]] = {
    "frozen": {"pretrained": True},
    "dropout": {"pretrained": True, "dropout": True},
    "two_layers": {"pretrained": True, "trained": "two_layers", "bottleneck": 8},
    "group_norm": {"init": "keras", "groups": 8},
}
MEANINGFUL = 0.05
"""Most that rounding may change, through the layers and some steps; a wrong layer changes the sum by 1."""


def lite(*, short: bool = True, **options: Any) -> nn.Module:
    """Frozen statistics and the package's weights, or GroupNorm and drawn ones; a copy at each call."""
    return copy.deepcopy(_lite(short, **options))


@cache
def _lite(short: bool, **options: Any) -> nn.Module:
    config = ModelConfig("efficientnet_lite0", input_size=33, **options)
    weights = IMAGENET if config.pretrained else None
    network = build_backbone(config, LABELS, torch.Generator().manual_seed(4), weights)
    return short_classifier(network) if short else network


@pytest.mark.parametrize(
    "case, side, short",
    [("frozen", 33, False), ("frozen", 64, True), ("two_layers", 33, True), ("group_norm", 33, True)],
)
def test_users_gradients_come_out_of_one_pass(case: str, side: int, short: bool) -> None:
    """The pass is in float64; the loss and the users' sums, over three images' positions, are not."""
    backbone = lite(**CASES[case], short=short).double()
    images = torch.randn(6, 3, side, side, generator=torch.Generator().manual_seed(2)).double()
    targets = (torch.arange(6 * LABELS).view(6, LABELS) % 3 == 0).float()
    users, found = Users((0, 1, 3, 6), torch.device("cpu")), dict[str, Gradient]()
    means = torch.tensor([1, 1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3])
    losses = partial(MultiLabel().image_losses, targets=targets)
    TapedNetwork(backbone).run(images, losses, users, means, found.__setitem__, contextlib.nullcontext())
    trained = {name: p for name, p in backbone.named_parameters() if p.requires_grad}
    of_users = [
        torch.autograd.grad(MultiLabel().loss(backbone(images[span]), targets[span]), list(trained.values()))
        for span in users.spans
    ]
    assert found.keys() == trained.keys()
    coefficients = torch.tensor([0.5, -2.0, 1.0], dtype=torch.float64)
    ours, theirs = {}, {}
    for i, name in enumerate(trained):
        theirs[name] = sum(c * user[i] for c, user in zip(coefficients, of_users))
        ours[name] = torch.zeros_like(theirs[name], dtype=torch.float32)
        found[name].add_to(ours[name], coefficients)
    assert_close_as_vector(ours, theirs, 2 * 4 + (3 * (side // 2 + 1) ** 2) ** 0.5)


@pytest.mark.parametrize("case", ["dropout", "two_layers", "group_norm"])
def test_a_cohorts_sum_is_that_of_pfls_loop(case: str) -> None:
    sampling = LocalSampling(
        num_epochs=2, batch_size=2, straddle=True, flip="both", input_size=10, keys=case == "dropout"
    )
    setting = Setting(SIZES, sampling, backbone=lambda: lite(**CASES[case]), **STEP)
    theirs, ours = setting.run(False)[0], setting.run(True, lanes=2)[0]
    assert distance(ours, theirs) <= rounding_of(setting) < MEANINGFUL
    module = ImageClassifier(lite(**CASES[case]), task=MultiLabel(), input_size=10, exact_crops=True)
    assert CohortEngine(module)._fusable, "users go through the network together"


def test_a_private_cohorts_sum_is_that_of_pfls_loop() -> None:
    """The layers' own norms; the norm of all, which is their root of squares, is `test_engine`'s."""

    def setting() -> Setting:
        more = [private(len(SIZES), "gaussian", "per_layer", noisy=False)]
        return Setting(SIZES, by_images=False, more=more, backbone=lambda: lite(pretrained=True), **STEP)

    theirs, ours = setting().run(False)[0], setting().run(True, lanes=2)[0]
    assert distance(ours, theirs) <= rounding_of(setting()) < MEANINGFUL


def test_bf16_deviates_by_no_more_than_its_own_rounding() -> None:
    setting = Setting(SIZES, backbone=lambda: lite(pretrained=True), **STEP)
    exact = setting.run(False)[0]
    setting.amp = torch.bfloat16
    assert 2**-14 < distance(setting.run(True)[0], exact) <= rounding_of(setting, *BFLOAT16)
