"""IFCA: two known clusters are found, choices by hand, kills, workers, compression, attackers, refusals.

test_ifca DATA DIRECTORY          trains it, as one of the workers of a launcher
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.core.config.trees import Tree, merge
from benchmarks.core.federated import training_data
from tests.benchmarks.core import quadratics
from tests.benchmarks.core.quadratics import ROUNDS, SIZES, Direct, Trace, Users, run_of, server, vector
from tests.benchmarks.core.test_by_loss import loss, own


def tree(**options: Any) -> Tree:
    return {"federated": {"algorithm": "ifca", "options": {"held_out": 0.0, **options}}}


class Models(Trace):
    """Keeps all models after each round, ``[k, P]``, and the line."""

    def step_done(self, step: int, values: Any, state: Any) -> None:
        algorithm: Any = self.checkpoints.algorithm
        super().step_done(step, values, state)
        if step == 0:
            self.models, self.lines = [], []
        models = [vector(algorithm.clients.model(state.weights(c)).pytorch_model) for c in range(len(state.own))]
        self.models.append(np.stack(models))
        self.lines.append(dict(values))
