"""Norms of vectors of features, which have no positions: a network's BatchNorm1d is replaced by these."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pfl_ext.models.classifier import FrozenStatisticsBatchNorm2d
from tests.pfl_ext.engine.setting import LABELS, Setting, distance, drawn, rounding_of


def of_features(frozen: bool) -> nn.Module:
    draw = torch.Generator().manual_seed(0)
    norms = [FrozenStatisticsBatchNorm2d(n) if frozen else nn.GroupNorm(2, n) for n in (6, 16)]
    for norm in norms if frozen else ():
        norm.get_buffer("running_mean").uniform_(-0.3, 0.3, generator=draw)
        norm.get_buffer("running_var").uniform_(0.5, 2.0, generator=draw)
    convolution = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.Flatten(2))  # [B, 6, 16] at 10 pixels
    net = nn.Sequential(
        *(*convolution, norms[0], nn.ReLU(), nn.Flatten()),
        *(nn.Linear(96, 16), norms[1], nn.ReLU(), nn.Linear(16, LABELS)),
    )
    return drawn(net, 0.2, draw)


@pytest.mark.parametrize("frozen", [False, True])
def test_users_with_one_step_are_trained_as_by_pfls_loop(frozen: bool) -> None:
    setting = Setting([1, 4, 2, 6], backbone=lambda: of_features(frozen))
    theirs, ours = setting.run(engine=False)[0], setting.run(engine=True, lanes=1)[0]
    assert distance(ours, theirs) <= rounding_of(setting)
