"""Sums over groups of users have the precision of ``runtime.accumulate``, as sums over users have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pfl_ext.algorithms.clients import Weights
from pfl_ext.algorithms.fedbuff import Buffered, FedBuff, FedBuffOptions
from pfl_ext.algorithms.hierarchical import Hierarchical, HierarchicalOptions
from pfl_ext.devices.arrivals import Job, ServerStep

GROUPS = 3
PARTS = [1.0, 4e-8, 4e-8]
"""Updates of the groups, whose mean in float32 misses the small ones: each is less than half a rounding."""


class Fixed:
    """In the place of `Clients`: the groups' updates are `PARTS`."""

    def __init__(self) -> None:
        self.parts, self.mean = iter(PARTS), torch.empty(0)

    def weights(self) -> Weights:
        return {"w": torch.zeros(1)}

    def cohort(self, number: int) -> Any:
        return np.arange(GROUPS)

    def mean_update(self, weights: Weights, users: Any, number: int, draws: int) -> tuple[Weights, Any]:
        return {"w": torch.tensor([next(self.parts)])}, {"users": len(users), "images": 1}

    def server_step(self, weights: Weights, mean: Weights, number: int) -> float:
        self.mean = mean["w"]
        return 1.0


def hierarchical(context: Any, fixed: Fixed) -> None:
    context.options = HierarchicalOptions(groups=GROUPS, inner_rounds=1)
    algorithm = Hierarchical.__new__(Hierarchical)
    vars(algorithm).update(context=context, clients=fixed, group=np.arange(GROUPS))
    algorithm.round(SimpleNamespace(), 0)


def fedbuff(context: Any, fixed: Fixed) -> None:
    context.options = FedBuffOptions(staleness_weight="constant")
    newest = GROUPS - 1
    step = ServerStep(tuple(Job(user, user) for user in range(GROUPS)), 0, 0, 1.0)
    algorithm = FedBuff.__new__(FedBuff)
    vars(algorithm).update(
        context=context,
        clients=fixed,
        steps=[step] * GROUPS,
        sent=SimpleNamespace(down=0, up=0),
        _last_use={},
        _groups_before=[0] * GROUPS,
        _weights=np.ones(GROUPS),
    )
    versions = {version: fixed.weights() for version in range(GROUPS)}
    algorithm.round(Buffered(SimpleNamespace(), versions), newest)


@pytest.mark.parametrize("algorithm", [hierarchical, fedbuff])
def test_small_groups_count_where_sums_are_in_float64(algorithm: Any) -> None:
    found = {}
    for dtype in (torch.float32, torch.float64):
        fixed = Fixed()
        algorithm(SimpleNamespace(accumulate=dtype, by_images=False), fixed)
        found[dtype] = float(fixed.mean.float())
    exact = float(torch.tensor(PARTS).double().mean().float())
    assert found[torch.float64] == exact
    assert found[torch.float32] != exact
