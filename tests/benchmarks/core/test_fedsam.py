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
    ],
)
def test_what_it_cannot_do_is_one_line(words: tuple[str, ...], message: str, refused: Refused) -> None:
    refused(message, *RUN, *words)


PRIVATE = ("--federated.weighting=users", "--seed=3", "--privacy.noise_seed=run")
CENTRAL = ("--privacy.epsilon=100", "--privacy.delta=0.01", "--privacy.clipping_bound=0.01")
TAKEN = {
    "central": (*PRIVATE, *CENTRAL, "--privacy.mechanism=gaussian"),
    "adaptive": (*PRIVATE, *CENTRAL),
    "local": (*PRIVATE[:2], *(word.replace("privacy", "local_privacy") for word in CENTRAL)),
    "compression": ("--compression.kind=random_k",),  # rounding has no say in what it keeps
    "attack": ("--attack.kind=boost", "--attack.share=0.3", "--aggregation.kind=median"),
    "devices": ("--devices.stragglers=0.5", "--devices.late=partial", "--local.num_epochs=3"),
}


@pytest.mark.parametrize("words", TAKEN.values(), ids=TAKEN)
def test_what_is_done_to_updates_is_done_to_its_own(words: tuple[str, ...], train: Train) -> None:
    """Without a perturbation it is FedAvg under each of them; with one it is not."""
    words = ("--federated.cohort_size=4", "--federated.num_rounds=2", *words)
    fedsam = ("--federated.algorithm=fedsam", "--federated.options.rho")
    runs = [
        train(*words, name="fedavg"),
        train(*words, fedsam[0], f"{fedsam[1]}=0", name="flat"),
        train(*words, fedsam[0], f"{fedsam[1]}=1", name="sharp"),
    ]
    fedavg, flat, sharp = (torch.from_numpy(weights(run)) for run in runs)
    whole = float(fedavg.norm())
    assert float((flat - fedavg).norm()) < 1e-6 * whole
    assert float((sharp - fedavg).norm()) > 1e-5 * whole
    for ours, theirs in zip(lines(runs[1]), lines(runs[0]), strict=True):
        for key in ("privacy", "left_out", "reported", "bytes_up"):
            assert ours.get(key) == pytest.approx(theirs.get(key), rel=1e-4), key
