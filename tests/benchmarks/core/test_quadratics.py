"""Every algorithm that can be chosen against its paper's equations in float64, after each of four rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.core.config.trees import Tree, merge
from dataset.arrays import FloatArray
from tests.benchmarks.core.quadratics import (
    ALGORITHMS,
    CLASSES,
    PARTICIPATION,
    SIDE,
    SIZES,
    TOLERANCE,
    Batch,
    Direct,
    Users,
    distances,
    feddyn,
    run_of,
    trajectory,
)

FULLY = ("fedavg, images", "fednova", "scaffold I", "scaffold II, images")
"""One of each kind of mean; that a part of the users takes part is the general case."""


@pytest.mark.parametrize(
    ("name", "participation"), [*((n, "partial") for n in ALGORITHMS), *((n, "full") for n in FULLY)]
)
def test_an_algorithm_is_its_papers_equations_in_both_engines(
    name: str, participation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = merge(ALGORITHMS[name], PARTICIPATION[participation])
    expected = Direct(run_of(tree)).trajectory()
    assert np.isfinite(expected).all()
    for engine in ("stock", "fast"):
        ours = trajectory(run_of(tree, engine), tmp_path / engine)
        assert distances(ours, expected).max() < TOLERANCE, engine
    assert "pfl's own loop" not in capsys.readouterr().err, "the engine took the work on"


@pytest.mark.parametrize("defect", ["sign", "selected"])
@pytest.mark.parametrize("name", ["scaffold I", "scaffold II", "feddyn"])
def test_the_comparison_would_notice_a_wrong_correction(name: str, defect: str) -> None:
    run = run_of(merge(ALGORITHMS[name], PARTICIPATION["partial"]))
    assert distances(Direct(run, defect).trajectory(), Direct(run).trajectory()).max() > 100 * TOLERANCE


WHOLE: Tree = {
    "augment": {"flip": "none"},
    "local": {"batch_size": max(SIZES), "straddle": False, "num_epochs": 5, "weight_decay": 0.3},
    "federated": {"num_rounds": 40},
}
"""Every step is on all images of a user. With weight decay no direction is too flat for 40 rounds."""


def optimum(by_images: bool) -> FloatArray:
    """Where the weighted mean of the users' losses is least, ``[P]``, from the normal equations."""
    store, width = Users(), 3 * SIDE * SIDE + 1
    squares, products = np.zeros((width, width)), np.zeros((width, CLASSES))
    for user, size in enumerate(SIZES):
        rows = np.arange(store.user_offsets[user], store.user_offsets[user + 1])
        pixels, targets = map(torch.from_numpy, store.read(rows))
        batch = Batch.of(pixels, targets, torch.tensor([[0, 0, SIDE, SIDE, 0, 0]] * size))
        weight = (size / sum(SIZES) if by_images else 1 / len(SIZES)) / size
        squares = squares + weight * batch.x.T @ batch.x
        products = products + weight * batch.x.T @ batch.t
    decay = WHOLE["local"]["weight_decay"] * np.eye(width)
    solution = np.linalg.solve(squares + decay, products).T  # [K, D + 1]
    return np.concatenate([solution[:, :-1].ravel(), solution[:, -1]])


@pytest.mark.parametrize("weighting", ["users", "images"])
def test_feddyn_ends_at_the_optimum_of_all_users_and_fedavg_does_not(weighting: str, tmp_path: Path) -> None:
    aim, plain = optimum(weighting == "images"), {"federated": {"weighting": weighting}}
    apart = {}
    for name, tree in (("fedavg", plain), ("feddyn", feddyn(1.0, weighting))):
        end = trajectory(run_of(merge(WHOLE, tree), "fast"), tmp_path / name)[-1]
        apart[name] = np.linalg.norm(end - aim) / np.linalg.norm(aim)
    assert apart["feddyn"] < 1e-4 < 1e-2 < apart["fedavg"]
