"""Federated visual classification end to end on a tiny file: every method, both engines, central training."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.core import execute
from benchmarks.core.clients import drawn_partition
from benchmarks.flair.config import parse
from benchmarks.sweep.space import read_sweep
from benchmarks.visual_classification.curves import read_finished
from benchmarks.visual_classification.train import VisualClassification, main
from dataset.store.hdf5 import DataFile
from dataset.store.views import SingleLabelView
from pfl_ext.tasks.single_label import SingleLabel
from tests.benchmarks.conftest import VISION_SMALL, Refused, Train, train_into
from tests.benchmarks.moved import LUCK, inexact
from tests.benchmarks.run_files import lines, results, weights
from tests.benchmarks.sparing import run_into
from tests.pfl_ext.engine.cpu.roundings import rounding

SCORES = {"loss", "accuracy", "C-accuracy", "macro-F1", "ECE", "Brier", "AUROC"}


@pytest.fixture
def train(vision: Train) -> Train:
    return vision


@pytest.fixture(scope="module")
def plain(classes_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `train` without more words."""
    words = ("--config=cifar10-fedavgm", f"--data_path={classes_file}", *VISION_SMALL)
    return run_into(main, tmp_path_factory.mktemp("runs") / "plain", *words)


@pytest.mark.parametrize("mode", ["federated", "centralised"])
def test_a_smoothed_run_has_a_training_loss_with_it_and_scores_without(mode: str, train: Train) -> None:
    """With learning rates too small to move a weight, nothing else differs."""
    still = {
        "federated": ("--local.learning_rate=1e-30", "--federated.num_rounds=1"),
        "centralised": ("--centralised.learning_rate=1e-30", "--centralised.num_epochs=1"),
    }[mode]
    words = {"federated": "cifar10-fedavgm", "centralised": "cifar10-centralised"}[mode], *still
    plain, smoothed = (
        lines(train(*words[1:], f"--augment.label_smoothing={a}", config=words[0], name=f"{a}"))
        for a in (0, 0.5)
    )
    assert [line["tracked"] for line in plain] == [line["tracked"] for line in smoothed]
    assert plain[0]["train_loss"] != smoothed[0]["train_loss"]


def test_a_run_leaves_accuracy_the_partition_and_the_largest_users_steps(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = train(draw=True)
    outcome = results(directory)
    assert outcome["test"]["accuracy"] == outcome["last"]["test"]["accuracy"]
    assert outcome["best_step"] == outcome["rounds"] == 2, "no model is chosen on test"
    shares = [v for v in outcome["per_class_accuracy"].values() if v is not None]
    assert outcome["test"]["C-accuracy"] == pytest.approx(np.mean(shares))
    assert 0 < outcome["partition"]["mean_emd"] < 2
    rounds = lines(directory)
    assert all(line["max_local_steps"] >= 1 for line in rounds[:-1])
    assert [line["tracked"].keys() for line in rounds] == [SCORES] * 3
    matrix = np.array(list(outcome["confusion"].values()))
    assert list(outcome["confusion"]) == outcome["classes"]
    assert 100 * matrix.trace() / matrix.sum() == pytest.approx(outcome["test"]["accuracy"])
    in_rows = {name: row.sum() for name, row in zip(outcome["classes"], matrix)}
    absent = {name for name, share in outcome["per_class_accuracy"].items() if share is None}
    assert absent == {name for name, images in in_rows.items() if not images}
    assert rounds[-1]["tracked"]["accuracy"] == pytest.approx(outcome["test"]["accuracy"], abs=1e-6)
    assert "val" not in outcome
    assert not any("val" in line for line in rounds)
    shown = capsys.readouterr().out
    assert "mean EMD" in shown
    assert "test is scored during training, but picks no model" in shown
    assert "the model of round 2 of 2 is the last;" in shown
    assert "best on val" not in shown
    for name in ("training_curve", "per_class_accuracy", "confusion"):
        assert (directory / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--recipe=vc", "--local.virtual_size=8"],
        ["--recipe=ir"],
        ["--recipe=fednova"],
        ["--recipe=fedprox", "--federated.mu=1"],
        ["--local.momentum=0.5", "--recipe=fednova"],
        ["--local.momentum=0.5", "--local.max_grad_norm=0.5", "--local.clip_by=variable"],
    ],
    ids=["fedavgm", "fedvc", "fedir", "fednova", "fedprox", "fednova-momentum", "clipped-momentum"],
)
def test_both_engines_train_the_same(train: Train, plain: Path, words: list[str]) -> None:
    fast = weights(train(*words, name="fast"))
    stock = weights(train(*words, "--runtime.engine=stock", name="stock"))
    with inexact(1, experiment=VisualClassification, off=lambda terms: rounding(terms, winograd=True)):
        moved = weights(train(*words, "--runtime.engine=stock", name="moved"))
    off = LUCK * np.linalg.norm(moved - stock)
    assert np.linalg.norm(fast - stock) <= off
    if words:
        assert np.linalg.norm(fast - weights(plain)) > 2 * off, "the method does something"


def test_virtual_clients_are_all_of_one_size(train: Train) -> None:
    rounds = lines(train("--recipe=vc", "--local.virtual_size=8"))[:-1]
    assert [(line["images"], line["max_local_steps"]) for line in rounds] == [(4 * 8, 2)] * 2


def test_without_momentum_fedavgm_is_fedavg(train: Train, plain: Path) -> None:
    fedavg = weights(train(config="cifar10-fedavg"))
    assert np.array_equal(fedavg, weights(train("--server.momentum=0", name="zero")))
    assert not np.array_equal(fedavg, weights(plain))


def test_centralised_training_is_scored_alike(train: Train) -> None:
    outcome = results(train(config="cifar10-centralised"))
    assert outcome["unit"] == "epoch"
    assert set(outcome["test"]) == SCORES


def test_an_unknown_partition_is_refused_in_one_line(refused: Refused) -> None:
    refused("alpha-9", "--data.partition=alpha-9")


def test_fedir_trains_flairs_many_labels_too(mini_file: Path, tmp_path: Path) -> None:
    """Our form of FedIR for several labels an image, in both engines."""
    found = {}
    common = ("--local.batch_size=4", "--local.learning_rate=0.05", "--federated.num_rounds=2")
    server = ("--server.optimizer=sgd", "--server.learning_rate=1")
    for name, words in {
        "plain": [],
        "fast": ["--federated.reweight=fedir", "--federated.max_importance=10"],
        "stock": ["--federated.reweight=fedir", "--federated.max_importance=10", "--runtime.engine=stock"],
    }.items():
        found[name] = weights(train_into(tmp_path / name, mini_file, *common, *server, *words))
    moved = np.linalg.norm(found["fast"] - found["plain"])
    assert np.linalg.norm(found["fast"] - found["stock"]) <= 0.01 * moved


@pytest.mark.parametrize(
    "words, message",
    [
        (["--federated.algorithm=fednova"], "set federated.algorithm to fed3r or fedavg"),
        (["--federated.sampling=proportional"], "set federated.sampling to uniform"),
    ],
)
def test_private_training_refuses_what_its_accounting_does_not_cover(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(["--config=pfl-r-17", *words])


def test_a_val_carved_from_train_chooses_the_model(
    train: Train, file_without_val: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What sweeps rank by is not test: its images are training images, which are not trained on."""
    words = [f"--data_path={file_without_val}", "--data.scored=val", "--data.val_share=0.3"]
    directory = train(*words, "--evaluation.best_by=accuracy")
    outcome, rounds = results(directory), lines(directory)
    assert not any("tracked" in line for line in rounds)
    best = max(line["val"]["accuracy"] for line in rounds)
    assert outcome["val"]["accuracy"] == pytest.approx(best, abs=1e-6)
    with DataFile(file_without_val) as file:
        images = file.split("train").num_images
    assert 0.5 * images < outcome["partition"]["images"] < images
    shown = capsys.readouterr().out
    assert "val is 0.3 of each user's training images" in shown
    assert "was best on val by accuracy;" in shown


def test_a_file_without_val_needs_a_share(file_without_val: Path, refused: Refused) -> None:
    words = (f"--data_path={file_without_val}", "--data.scored=val", "--data.val_share=0")
    refused("has no val split, and data.val_share is 0: give data.val_share, as 0.1, or set data.sc", *words)


def test_a_share_is_not_silently_ignored_where_the_file_has_a_val(refused: Refused) -> None:
    """The default is, as it is for files without val."""
    refused("already has a split 'val': set data.val_share to 0", "--data.scored=val", "--data.val_share=0.3")


@pytest.mark.parametrize(
    "words, said",
    [
        (["--evaluation.best_by=accuracy"], "which would choose a model by its test score: set data.scored"),
        (["--data.val_share=0.2"], "data.val_share has no effect if data.scored is test: set data.scored to"),
        (
            ["--data.scored=val", "--data.val_share=1"],
            "data.val_share is 1: give a number of at least 0 and below 1",
        ),
        (["--data.scored=train"], "data.scored"),
    ],
)
def test_what_would_choose_by_test_is_refused(refused: Refused, words: list[str], said: str) -> None:
    assert not refused(said, *words).exists()


def test_the_shipped_sweep_ranks_by_val_and_a_sweep_by_test_is_refused(tmp_path: Path) -> None:
    sweep, _, path = read_sweep("effective-learning-rate")
    assert sweep.metric is not None
    assert sweep.metric.name == "val/accuracy"
    assert "--data.scored=val" in sweep.command
    for name in ("tracked/accuracy", "test/accuracy"):
        other = tmp_path / "sweep.yaml"
        other.write_text(path.read_text().replace("name: val/accuracy", f"name: {name}"))
        with pytest.raises(ValueError, match=f"metric.name is {name}, a test score"):
            read_sweep(str(other))


def test_the_best_is_not_chosen_by_what_is_not_scored(refused: Refused) -> None:
    message = "evaluation.best_by is 'C-AP': input should be 'loss', 'accuracy', 'C-accuracy'"
    refused(message, "--evaluation.best_by=C-AP", "--data.scored=val")


@pytest.mark.parametrize("score, sign", [("macro-F1", 1), ("AUROC", 1), ("ECE", -1)])
def test_the_best_may_be_chosen_by_scores_for_unbalanced_classes(score: str, sign: int, train: Train) -> None:
    words = ("--data.scored=val", "--data.val_share=0", f"--evaluation.best_by={score}")
    outcome, rounds = results(train(*words)), lines(train(*words))
    best = max(sign * line["val"][score] for line in rounds)
    assert sign * outcome["val"][score] == pytest.approx(best, abs=1e-6)
    assert outcome["score_kinds"] == {"lower_is_better": ["ECE", "Brier"], "units": {"Brier": ""}}


def test_a_benchmark_of_ones_own_need_not_list_all_scores_of_its_task() -> None:
    """One written before the task had them is not refused; its own class is held to what it declares."""
    own: Any = SimpleNamespace(scores=("loss", "accuracy"), headline=("accuracy",))

    class Ours(SingleLabel):
        units = MappingProxyType({"angle": "degrees"})

    execute._check_score_kinds(own, SingleLabel())
    with pytest.raises(ValueError, match=r"^Ours\.units has 'angle', which is not one of the scores"):
        execute._check_score_kinds(own, Ours())


def test_no_model_is_chosen_by_a_score_that_many_classes_do_not_have(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.visual_classification.train.FEW_CLASSES", 3)
    words = ("--data.scored=val", "--data.val_share=0", "--evaluation.best_by=AUROC")
    refused("evaluation.best_by is AUROC, which is computed for at most 3 classes, not for 17", *words)


def test_a_public_private_run_tells_no_facts_of_its_partition(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--federated.weighting=users", "--privacy.epsilon=100", "--privacy.delta=0.01")
    directory = train(*words, "--privacy.mechanism=gaussian", "--privacy.release=public")
    assert "partition" not in results(directory)
    assert 0 <= results(directory)["test"]["accuracy"] <= 100
    assert results(directory)["per_class_accuracy"]
    assert "Training was differentially private" in capsys.readouterr().out
    assert read_finished(directory).experiment[1].endswith("classes.hdf5")  # no checksum of the data


def test_a_partition_that_the_file_does_not_hold_is_drawn_from_its_images(
    classes_file: Path, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "lda-1-clients-4-seed-0"
    with DataFile(classes_file) as file:
        plain = SingleLabelView(file).split("train")
        dealt = drawn_partition(file, name, "labels")
        assert dealt is not None
        mine = SingleLabelView(file, name, dealt=dealt).split("train")
        assert sorted(mine.file_rows.tolist()) == sorted(plain.file_rows.tolist())
        assert len(mine.user_ids) == 4
        by_row = dict(zip(plain.file_rows.tolist(), plain.classes.tolist()))
        assert [by_row[row] for row in mine.file_rows.tolist()] == mine.classes.tolist()
        assert drawn_partition(file, None, "labels") is drawn_partition(file, "alpha-0.10", "labels") is None
    directory = train(f"--data.partition={name}")
    facts = json.loads((directory / "results.json").read_text())["partition"]
    assert (facts["name"], facts["users"], sum(facts["sizes"])) == (name, 4, plain.num_images)
    assert "with 1 for each client" in facts["convention"]
    assert f"partition {name} instead of the file's 12 users; each class" in capsys.readouterr().out
    train("--data.partition=lda-0-clients-4-seed-0", name="wrong", code=2)
    assert "give a number above 0" in capsys.readouterr().err
    assert not (directory.parent / "wrong").exists()
