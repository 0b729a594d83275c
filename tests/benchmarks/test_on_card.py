"""Whole runs on a GPU that is not there (`tests.card`) end in the results of the CPU."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.benchmarks.conftest import Train
from tests.card import card


@pytest.mark.parametrize(
    "words",
    [
        "resnet18 --runtime.lanes=2",
        "resnet18 --runtime.fuse=true --config=pfl-r-17 --privacy.noise_seed=run "
        "--privacy.noise_cohort_size=4 --privacy.noise_population=12 --privacy.epsilon=50",
        "cifar_cnn --runtime.engine=stock",
        "cifar_cnn --federated.algorithm=fedprox --federated.mu=0.1 --federated.weighting=users",
        "cifar_cnn --federated.algorithm=scaffold --federated.weighting=users",
        "resnet18 --federated.algorithm=scaffold --federated.scaffold_option=I --local.momentum=0.5 "
        "--federated.scaffold_correction=step",
        "cifar_cnn --evaluation.per_user=true --personal.num_epochs=1 --personal.min_images=2",
        "cifar_cnn --local_privacy.noise_seed=run --federated.weighting=users",
        "resnet18 --config=c-r-17",
        "cifar_cnn --config=c-r-17 --runtime.engine=stock --centralised.optimizer=sgd",
    ],
)
def test_a_run_on_a_card_ends_as_on_the_cpu(words: str, train: Train) -> None:
    arch, *argv = words.split()
    stock = "--runtime.engine=stock" in argv
    federated = "--config=c-r-17" not in argv
    common = ["--local.batch_size=4"] if federated else []
    common += ["--runtime.lanes=1"] if federated and not stock else []

    def scores(name: str, *more: str) -> dict[str, Any]:
        found = json.loads(
            (train(*common, f"--model.arch={arch}", *argv, *more, name=name) / "results.json").read_text()
        )
        return {split: found[split] for split in ("val", "test")}

    theirs = scores("cpu", *([] if stock else ["--runtime.cpu_kernels=false"]))
    with card():
        ours = scores("card", "--runtime.device=cuda")
    for split in ("val", "test"):
        for key in ("loss", "C-AP", "O-AP"):
            assert ours[split][key] == pytest.approx(theirs[split][key], rel=5e-3)
