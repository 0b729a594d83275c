"""The audit of a private last layer convicts its defects and nothing without one; see `heads`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pfl_ext.auditing.audit import ClippedAfterAveraging, LessNoise, SameNoise, audit, small_claim
from pfl_ext.auditing.canaries import IntArray
from pfl_ext.auditing.heads import BiasNotClipped, ClippedTogether, HeadGame, audit_bias
from pfl_ext.privacy.accounting import PrivacyConfig
from pfl_ext.privacy.central import private_mean
from pfl_ext.randomness import stream

CANARIES, OTHERS, WIDTH, LABELS, ROUNDS = 4000, 12000, 16, 10, 8

pytestmark = pytest.mark.xdist_group("audit")


class Clusters:
    """Features of ten classes, a user each; 16 long on average."""

    def targets(self, rows: IntArray) -> Any:
        return np.eye(LABELS, dtype=np.uint8)[rows % LABELS]

    def read(self, rows: IntArray) -> tuple[Any, Any]:
        draw = stream(1, "features").standard_normal((OTHERS, WIDTH)).astype(np.float32)
        return draw[rows] + self.targets(rows) @ np.eye(LABELS, WIDTH, dtype=np.float32), self.targets(rows)


@cache
def game() -> HeadGame:
    users = CANARIES + OTHERS
    config = PrivacyConfig(
        epsilon=1.0, delta=1e-5, mechanism="gaussian", sampler="poisson", clipping_bound=1.0
    )
    calibration = config.calibrate(users, users // 10, ROUNDS)
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, LABELS)
    store: Any = Clusters()
    return HeadGame(calibration, others=OTHERS, head=head, real=store, rates=(1.0, 2.0))
