"""Every algorithm that can be chosen against its paper's equations in float64, over 40 rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.settings import Tree, merge
from tests.benchmarks.quadratics import ROUNDS, SIZES, Array, Direct, run_of, trajectory

USERS: Tree = {"federated": {"weighting": "users"}}
MOMENTUM: Tree = {"local": {"momentum": 0.6, "weight_decay": 0.02, "learning_rate": 0.05}}


def scaffold(option: str, correction: str = "gradient", weighting: str = "users") -> Tree:
    keys = {"algorithm": "scaffold", "scaffold_option": option, "scaffold_correction": correction}
    return {"federated": {**keys, "weighting": weighting}}


def adaptive(name: str, **more: Any) -> Tree:
    return {"server": {"optimizer": name, "learning_rate": 0.05, "epsilon": 0.05, **more}}


ALGORITHMS: dict[str, Tree] = {
    "fedavg, images": {},
    "fedavg, users": USERS,
    "fedavg, momentum and decay": MOMENTUM,
    "fedprox, mu 0.01": {"federated": {"algorithm": "fedprox"}},
    "fedprox, mu 2": {"federated": {"algorithm": "fedprox", "mu": 2.0}},
    "fednova": {"federated": {"algorithm": "fednova"}},
    "fednova, momentum": merge(MOMENTUM, {"federated": {"algorithm": "fednova"}}),
    "fednova, mu 2": {"federated": {"algorithm": "fednova", "mu": 2.0}},
    "fedavgm": {"server": {"momentum": 0.7, "learning_rate": 0.3}},
    "fedopt, adam as keras": adaptive("adam"),
    "fedopt, adam as torch": adaptive("adam", adam_form="torch"),
    "fedopt, yogi": adaptive("yogi", beta2=0.99),
    "fedopt, adagrad": adaptive("adagrad"),
    "fedvc": merge(USERS, {"local": {"virtual_size": 6}, "federated": {"sampling": "proportional"}}),
    "fedir": {"federated": {"reweight": "fedir"}},
    "fedir, at most 1.5": {"federated": {"reweight": "fedir", "max_importance": 1.5}},
    "scaffold I": scaffold("I"),
    "scaffold II": scaffold("II"),
    "scaffold I, images": scaffold("I", weighting="images"),
    "scaffold II, images": scaffold("II", weighting="images"),
    "scaffold I, after the step": scaffold("I", "step"),
    "scaffold II, momentum": merge(MOMENTUM, scaffold("II")),
    "scaffold II, after the step, momentum": merge(MOMENTUM, scaffold("II", "step")),
}
PARTIAL: Tree = {"federated": {"cohort_size": 3}}
STEPS = 2 * max(SIZES) // 4
TOLERANCE = 2**-24 * 8 * ROUNDS * STEPS
"""Of float32 against float64, relative to the whole vector: no step is expansive here, so that each adds its
own roundings (of the product, the gradient, the update, the sums: fewer than eight) and none grows."""


def distances(ours: Array, theirs: Array) -> Array:
    """Of each round's vectors, relative to the second's norm."""
    return np.asarray(np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1))


@pytest.mark.parametrize("participation", ["full", "partial"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_is_its_papers_equations_in_both_engines(
    name: str, participation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = merge(ALGORITHMS[name], PARTIAL if participation == "partial" else {})
    expected = Direct(run_of(tree)).trajectory()
    assert np.isfinite(expected).all()
    for engine in ("stock", "fast"):
        ours = trajectory(run_of(tree, engine), tmp_path / engine)
        assert distances(ours, expected).max() < TOLERANCE, engine
    assert "pfl's own loop" not in capsys.readouterr().err, "the engine took the work on"


@pytest.mark.parametrize("defect", ["sign", "selected"])
@pytest.mark.parametrize("option", ["I", "II"])
def test_the_comparison_would_notice_a_wrong_scaffold(option: str, defect: str) -> None:
    run = run_of(merge(scaffold(option), PARTIAL))
    assert distances(Direct(run, defect).trajectory(), Direct(run).trajectory()).max() > 100 * TOLERANCE
