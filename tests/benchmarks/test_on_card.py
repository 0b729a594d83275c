"""Whole runs on a GPU, or on one that is not there (`tests.card`), end in the results of the CPU."""

from __future__ import annotations

import pytest

from benchmarks.core.config.trees import Tree
from tests.benchmarks.conftest import Train
from tests.benchmarks.moved import DRAWS, Scored, assert_as_near_as_rounding, inexact, watched
from tests.benchmarks.run_files import results
from tests.card import any_card


@pytest.mark.parametrize(
    "words",
    [
        "lenet --runtime.lanes=2 --local_privacy.noise_seed=run --federated.weighting=users",
        "lenet --runtime.fuse=true --config=pfl-r-17 --privacy.noise_seed=run "
        "--privacy.noise_cohort_size=4 --privacy.noise_population=12 --privacy.epsilon=50",
        "lenet --runtime.engine=stock",
        "lenet --federated.algorithm=fedprox --federated.mu=0.1 --federated.weighting=users "
        "--evaluation.per_user=true --personal.num_epochs=1 --personal.min_images=2",
        "lenet --federated.algorithm=scaffold --federated.scaffold_option=I "
        "--federated.scaffold_correction=step",
        "lenet --config=c-r-17",
        "lenet --config=c-r-17 --runtime.engine=stock --centralised.optimizer=sgd",
    ],
)
def test_a_run_on_a_card_ends_as_on_the_cpu(words: str, train: Train) -> None:
    """Scores of the last and the best model on val and test, within what rounding may do (`moved`)."""
    arch, *argv = words.split()
    stock = "--runtime.engine=stock" in argv
    federated = "--config=c-r-17" not in argv
    short = ["--local.num_epochs=1", "--local.batch_size=2"]  # so that four graphs are recorded a lane
    small = [*short, "--federated.cohort_size=3", "--federated.num_rounds=2"]
    common = small if federated else ["--centralised.num_epochs=1"]
    common = [*common, "--runtime.lanes=1"] if federated and not stock else common

    def run(name: str, *more: str) -> tuple[list[Scored], Tree]:
        with watched() as seen:
            directory = train(*common, f"--model.arch={arch}", *argv, *more, name=name)
        return seen, results(directory)

    by_torch = [] if stock else ["--runtime.cpu_kernels=false"]
    theirs, their_results = run("cpu", *by_torch)
    moved = []
    for seed in DRAWS:
        with inexact(seed):
            moved.append(run(f"moved {seed}", *by_torch)[0])
    with any_card():
        ours, our_results = run("card", "--runtime.device=cuda")
    assert_as_near_as_rounding(ours, theirs, moved)
    for found, seen in ((our_results, ours), (their_results, theirs)):
        columns = [[found[split][name] for name in ("C-AP", "O-AP")] for split in ("val", "test")]
        scored = [evaluation.average_precisions().tolist() for evaluation in seen]
        assert all(any(pytest.approx(pair) == of for of in scored) for pair in columns)
