"""Runs whose average over rounds is scored and saved: which model that is, resumed, extended and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from safetensors.torch import load_file

from benchmarks.core.config.digests import config_tree
from benchmarks.core.config.trees import Tree, merge
from benchmarks.flair.config import parse
from benchmarks.flair.per_user import main as score_users
from dataset.cli import run
from pfl_ext import checkpoint
from pfl_ext.algorithms.algorithm import ALGORITHMS
from tests.benchmarks.conftest import Refused, Train, killed_and_resumed
from tests.benchmarks.core.quadratics import ROUNDS, Array, Trace, run_of, traced, vector
from tests.benchmarks.core.test_device_runs import SPEEDS
from tests.benchmarks.run_files import last_checkpoint, lines, results, saved, timeless

WITH_SERVER_MODEL = {
    *("fedavg", "fedbuff", "feddyn", "fednova", "fedprox", "fedsam", "hierarchical", "moon", "qffl"),
    *("scaffold", "secure_aggregation", "tilted", "turbo_aggregate"),
}
WITHOUT = {
    *("ditto", "dsgd", "fed3r", "fedbn", "fedcof", "fedgkt", "fedma", "fednas", "fedncm", "fedper", "fedrep"),
    *("ifca", "pfedme", "pushsum", "split", "vertical"),
}
TREES: dict[str, Tree] = {
    "fedavg": {"server": {"momentum": 0.7, "learning_rate": 0.3}},
    "fedbuff": {
        "federated": {"options": {"concurrency": 4, "buffer_size": 2}},
        "devices": {"classes": SPEEDS},
    },
    "scaffold": {"federated": {"scaffold_option": "II"}},
    "qffl": {},
}
"""One of each loop."""
SWA = ("--evaluation.average=swa", "--evaluation.average_from_round=1", "--evaluation.best_by=last")


class Scored(Trace):
    """Also keeps each model that is scored."""

    def evaluated(self, step: int, metrics: Metrics, model: PyTorchModel) -> None:
        self.scored = [*getattr(self, "scored", []), vector(model.pytorch_model)]
        super().evaluated(step, metrics, model)


@pytest.mark.parametrize(("name", "every"), [*((name, 1) for name in TREES), ("fedavg", 2)])
def test_each_round_scores_the_average_and_trains_as_without_it(
    name: str, every: int, tmp_path: Path
) -> None:
    """From its second model on, each or each other."""
    tree = merge({"federated": {"algorithm": name}, "evaluation": {"every_rounds": 1}}, TREES[name])
    swa = {"average": "swa", "average_from_round": 2, "average_every": every}
    averaged = merge(tree, {"evaluation": swa})
    plain = traced(run_of(tree, "fast"), tmp_path / "plain", Scored)
    found = traced(run_of(averaged, "fast"), tmp_path / "averaged", Scored)
    assert np.array_equal(found.seen, plain.seen), "users start from the server's own model"
    models: list[Array] = plain.scored
    assert len(models) == len(found.scored) == ROUNDS + 1
    for step, (scored, own) in enumerate(zip(found.scored, models)):
        expected = own if step < 2 else np.mean(models[2 : step + 1 : every], axis=0)
        assert np.linalg.norm(scored - expected) <= 2**-24 * 4 * step * np.linalg.norm(expected), step
    assert not np.array_equal(found.scored[-1], models[-1])


def test_algorithms_without_a_model_of_the_server_refuse_it(refused: Refused) -> None:
    """All built-in ones are in one of the two lists; other tests may have registered more."""
    built_in = [name for name in ALGORITHMS.names() if ALGORITHMS[name].__module__.startswith("pfl_ext.")]
    assert set(built_in) == WITH_SERVER_MODEL | WITHOUT
    assert {name for name in built_in if ALGORITHMS[name].has_server_model} == WITH_SERVER_MODEL
    for name in sorted(WITHOUT):
        tree = {"federated": {"algorithm": name}, "evaluation": {"average": "ema"}}
        with pytest.raises(ValueError, match=f"is ema, but federated.algorithm {name} has no model"):
            run_of(merge({"evaluation": {"best_by": "last"}}, tree))
    refused("no model of the server that could be averaged", "--federated.algorithm=fedper", *SWA)


@pytest.mark.parametrize(
    "words, message",
    [
        (("--evaluation.average=swa", "--evaluation.average_decay=0.9"), "set evaluation.average to ema"),
        (("--evaluation.average_from_round=2",), "average is none: remove it, or set evaluation.average to"),
        (("--evaluation.average=ema", "--evaluation.average_from_round=3"), "must be below federated.num"),
        ((*SWA, "--evaluation.average_every=3"), "must be at most 2, federated.num_rounds minus evaluation"),
        (
            ("--config=c-r-17", "--centralised.num_epochs=3", *SWA, "--evaluation.average_from_round=3"),
            "must be below centralised.num_epochs = 3",
        ),
        (("--evaluation.average=ema", "--evaluation.average_decay=1"), "evaluation.average_decay"),
        (
            ("--evaluation.average=ema", "--federated.algorithm=moon", "--federated.options.held_out=0.2"),
            "moon scores the server's own model on users' images, and not the average",
        ),
    ],
)
def test_what_has_no_effect_or_cannot_be_is_one_line(
    words: tuple[str, ...], message: str, refused: Refused
) -> None:
    refused(message, *words)


def test_it_is_killed_and_resumed_and_extended_bit_for_bit_and_all_results_are_the_averages(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--evaluation.average=ema", "--evaluation.best_by=last")
    whole, _ = killed_and_resumed(train, 2, *words)
    said = capsys.readouterr().out
    assert "is the exponential moving average (decay 0.99) of the models after each round" in said
    assert "test, last model, not averaged" in said
    short = train(*words, "--federated.num_rounds=2", name="short")
    longer = train(*words, f"--extend={short}", name="longer")
    assert timeless(longer) == timeless(whole)
    assert results(longer)["model_sha256"] == results(whole)["model_sha256"]

    plain, found = train("--evaluation.best_by=last", name="plain"), results(whole)
    assert results(plain)["last"] == found["unaveraged"] != found["last"]
    assert "unaveraged" not in results(plain)
    tensors = last_checkpoint(whole)
    average, model = (checkpoint.part(tensors, part) for part in ("average/", "model/"))
    assert all(t.equal(last_checkpoint(plain)[f"model/{name}"]) for name, t in model.items())
    assert all(t.equal(average[name]) for name, t in saved(whole).items())
    assert lines(whole)[-1]["val"] == {key: round(value, 6) for key, value in found["val"].items()}
    assert lines(whole)[1]["val"] != lines(plain)[1]["val"]


def test_centralised_training_averages_its_epochs_and_is_resumed_bit_for_bit(train: Train) -> None:
    words = ("--config=c-r-17", "--centralised.num_epochs=3", "--evaluation.best_by=last")
    plain = train(*words, name="plain")
    whole, _ = killed_and_resumed(train, 2, *words, "--evaluation.average=swa")
    assert results(whole)["unaveraged"] == results(plain)["last"] != results(whole)["last"]
    tensors = last_checkpoint(whole)
    for name, tensor in checkpoint.part(tensors, "average/").items():
        assert tensor.equal(saved(whole)[name]), name
    assert all(
        t.equal(last_checkpoint(plain)[f"model/{n}"]) for n, t in checkpoint.part(tensors, "model/").items()
    )


def test_a_run_with_adapters_saves_the_average_of_its_merged_weights(
    train: Train, mini_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Users can be scored with it, although no adapter has its rank."""
    directory = train("--model.trained=lora", *SWA)
    average = checkpoint.part(last_checkpoint(directory), "average/")
    for name, tensor in saved(directory).items():
        layer, _, part = name.rpartition(".")
        kept = average.get(f"{layer}.base.{part}", average.get(name))
        assert kept is None or kept.equal(tensor), name
    assert {name for name in average if "lora" in name} == set()
    adapters = load_file(directory / "adapters.safetensors")
    assert not any(t.any() for name, t in adapters.items() if "lora_b" in name)
    capsys.readouterr()
    words = [str(directory), f"--data_path={mini_file}", "--personal.num_epochs=1"]
    assert run(score_users, words) == 0


def test_runs_without_it_have_the_digest_that_they_had() -> None:
    tree: Any = config_tree(parse(["--config=fl-r-17"]).config)
    assert not [key for key in tree["evaluation"] if "average" in key]
    tree = config_tree(parse(["--config=fl-r-17", "--evaluation.average=ema"]).config)
    assert "average" in tree["evaluation"]
