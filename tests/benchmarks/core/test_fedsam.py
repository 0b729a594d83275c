"""FedSAM beside its equations in float64 and beside FedAvg, in compiled layers, and killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.core.config.trees import Tree, merge
from tests.benchmarks.conftest import Refused, Train, killed_and_resumed
from tests.benchmarks.core import quadratics
from tests.benchmarks.core.quadratics import MOMENTUM, Array, Batch, Direct, distances, run_of, trajectory
from tests.benchmarks.run_files import lines, results, weights

RUN = ("--federated.algorithm=fedsam", "--federated.cohort_size=4")


def tree_of(rho: float, *more: Tree) -> Tree:
    tree: Tree = {"federated": {"algorithm": "fedsam", "options": {"rho": rho}, "cohort_size": 3}}
    for other in more:
        tree = merge(tree, other)
    return tree


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"federated": {"reweight": "fedir"}}], ids=str)
def test_users_descend_along_the_gradient_at_the_perturbed_weights(
    more: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, rho = Batch.gradient, 0.2

    def sharp(batch: Batch, w: Array) -> Array:
        gradient = plain(batch, w)
        return plain(batch, w + rho * gradient / np.linalg.norm(gradient))

    run = run_of(tree_of(rho, more))
    fedavg = Direct(run).trajectory()
    monkeypatch.setattr(Batch, "gradient", sharp)
    expected = Direct(run).trajectory()
    assert distances(trajectory(run, tmp_path), expected).max() < quadratics.TOLERANCE
    assert distances(fedavg, expected).max() > 1000 * quadratics.TOLERANCE


def test_without_a_perturbation_it_is_fedavg(tmp_path: Path) -> None:
    ours = trajectory(run_of(tree_of(0.0)), tmp_path / "ours")
    fedavg = trajectory(run_of({"federated": {"cohort_size": 3}}), tmp_path / "fedavg")
    assert distances(ours, fedavg).max() < quadratics.TOLERANCE


def test_the_training_loss_is_the_one_before_the_perturbation(train: Train) -> None:
    words = ("--federated.num_rounds=1", "--local.learning_rate=1e-9")
    ours = train(*RUN, *words, "--federated.options.rho=1", name="ours")
    fedavg = train("--federated.cohort_size=4", *words, name="fedavg")
    found, expected = (lines(run)[0] for run in (ours, fedavg))
    assert found["images"] == expected["images"]
    assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-5)


def test_compiled_layers_change_it_by_rounding_alone(train: Train) -> None:
    words = (*RUN, "--federated.num_rounds=1", "--local.learning_rate=0.02", "--federated.options.rho=0.2")
    runs = [train(*words, f"--runtime.cpu_kernels={on}", name=on) for on in ("true", "false")]
    ours, theirs = (torch.from_numpy(weights(run)) for run in runs)
    assert float((ours - theirs).norm()) < 1e-5 * float(theirs.norm())
    assert "compiled" in results(runs[0])["arithmetic"]
    assert results(runs[1])["arithmetic"] == "float32, pfl's own loop"


def test_a_killed_run_goes_on_to_the_bit(train: Train) -> None:
    killed_and_resumed(train, 1, *RUN, "--federated.num_rounds=3", "--runtime.checkpoint_every=1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--federated.options.rho=-1",), "federated.options.rho is '-1': "),
        (("--runtime.lanes=2",), "--runtime.lanes has no effect where federated.algorithm is fedsam"),
        (("--config=pfl-r-17",), "privacy refuses federated.algorithm = fedsam"),
    ],
)
def test_what_it_cannot_do_is_one_line(words: tuple[str, ...], message: str, refused: Refused) -> None:
    refused(message, *RUN, *words)
