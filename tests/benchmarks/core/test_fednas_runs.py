"""Runs of FedNAS: what they read and write, killed and resumed, and the second stage."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.core.config.trees import read_yaml
from benchmarks.fedcv.classification.config import CLASSIFICATION
from benchmarks.fedcv.classification.train import FederatedClassification
from dataset.store.views import PixelCache
from pfl_ext.algorithms.fednas import FedNAS, FedNASOptions
from tests.benchmarks.conftest import Refused, Train, killed_and_resumed
from tests.benchmarks.core.test_fednas_search import small_cells
from tests.benchmarks.run_files import last_checkpoint, lines, results

NETWORK = ("--model.cells=3", "--model.cell_channels=2", "--model.groups=1", "--model.input_size=8")
SEARCH = (
    *NETWORK,
    "--model.arch=darts_search",
    "--federated.algorithm=fednas",
    "--federated.options.alpha_learning_rate=0.01",
    "--federated.cohort_size=2",
    "--local.num_epochs=1",
    "--local.batch_size=64",
    "--evaluation.every_rounds=10",
)
TWO = ("--federated.num_rounds=2",)


@small_cells()
def test_a_search_is_killed_and_goes_on_reads_no_test_image_and_its_genotype_is_trained(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inside, splits = [False], set()
    search, read = FedNAS.round, PixelCache.read

    def round_(self: FedNAS, state: Any, number: int) -> Any:
        inside[0] = True
        found = search(self, state, number)
        inside[0] = False
        return found

    def noted(self: PixelCache, split: str, rows: Any) -> Any:
        splits.add((split, inside[0]))
        return read(self, split, rows)

    monkeypatch.setattr(FedNAS, "round", round_)
    monkeypatch.setattr(PixelCache, "read", noted)
    whole, directory = killed_and_resumed(train, 1, *SEARCH, *TWO, "--federated.cohort_size=1")
    assert splits == {("train", True), ("val", False), ("test", False)}
    last = results(directory)
    assert last["genotype"] == lines(whole)[1]["genotype"]
    tensors = last_checkpoint(directory)
    held = [t for name, t in tensors.items() if not name.startswith("best/")]
    size = 4 * sum(t.numel() for t in held)
    assert results(whole)["traffic"] == {"down": size, "up": size}
    assert {"backbone.alpha_normal", "backbone.alpha_reduce"} <= set(tensors), "alpha goes both ways"

    file = f"--model.genotype={directory / 'results.json'}"
    derived = train(*NETWORK, "--model.arch=darts", file, "--federated.num_rounds=1", name="derived")
    assert read_yaml(derived / "config.yaml")["model"]["genotype"] == last["genotype"]
    assert "pfl's own loop" not in capsys.readouterr().err, "the engine trains it"


def test_the_mini_set_comes_with_a_search_of_its_size_and_the_recipe_is_the_papers() -> None:
    argv = ["--config=fednas"]
    words, _ = FederatedClassification.resolve_data([*argv, "--data_path=mini"])
    words.remove("--data_path=mini")
    model = CLASSIFICATION.parse(words).config.model
    assert (model.arch, model.input_size, model.cells, model.groups) == ("darts_search", 16, 3, 2)
    config = CLASSIFICATION.parse(argv).config
    assert config.federated.options == asdict(FedNASOptions())
    assert (config.local_rate(0), config.local_rate(49)) == pytest.approx((0.025, 0.001), rel=0.05)
    assert (config.local.momentum, config.local.weight_decay, config.local.max_grad_norm) == (0.9, 3e-4, 5)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--federated.options.alpha_beta1=1"], "federated.options.alpha_beta1 is '1': "),
        (["--federated.options.alpha_learning_rate=0"], "federated.options.alpha_learning_rate is '0': "),
        (
            ["--federated.options.lambda=1"],
            "federated.options.lambda is not an option of fednas, which has alpha_",
        ),
        (["--server.learning_rate=2"], "--server.learning_rate has no effect where federated.algorithm is f"),
        (
            ["--federated.weighting=users", "--local.virtual_size=5"],
            "--local.virtual_size has no effect where federated.algorithm is fedna",
        ),
        (["--runtime.lanes=2"], "--runtime.lanes has no effect where federated.algorithm is fednas"),
        (
            ["--model.arch=lenet"],
            "--model.cells has no effect where model.arch is lenet: remove it, or set mo",
        ),
        (["--model.genotype=x"], "model.genotype is 'x', from which no genotype can be read (["),
        (["--model.arch=darts"], "model.arch is darts, and model.genotype is none: give the results.json"),
        (["--model.cells=2"], "model.cells is '2': "),
        (["--model.groups=2"], "model.groups is 2, and a norm of 2 channels, model.cell_channels, would"),
        (["--model.trained=head"], "fednas trains all weights together with the architecture: set"),
        (["--config=pfl-r-17"], "privacy refuses federated.algorithm = fednas"),
        (["--federated.weighting=users", "--local_privacy.epsilon=4"], "local_privacy refuses federated.al"),
    ],
)
def test_what_it_cannot_do_is_one_line(argv: list[str], message: str, refused: Refused) -> None:
    refused(message, *SEARCH, *argv)
