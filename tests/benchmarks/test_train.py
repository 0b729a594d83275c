"""The training command from its arguments to its files, on a data set of a dozen users."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
import yaml

from benchmarks.core.config.trees import Tree
from benchmarks.flair.train import main
from dataset.cli import run
from pfl_ext import checkpoint
from pfl_ext.checkpoint import load
from pfl_ext.engine.cpu.build import Unavailable
from pfl_ext.engine.cpu.check import checked
from pfl_ext.engine.cpu.kernels import CpuKernels
from pfl_ext.tasks.multi_label_scores import COLUMNS
from tests.benchmarks.conftest import ONE_ROUND, RESNET18, SMALL, Refused, Train, killed_at, train_into
from tests.benchmarks.moved import LUCK, Scored, inexact, watched
from tests.benchmarks.run_files import error_line, last_checkpoint, lines, results
from tests.launching import environment, warmly

MODEL = "model.safetensors"
GOLDEN = Path(__file__).parent / "golden_fl.json"


def compiled_kernels() -> CpuKernels | None:
    try:
        return checked()
    except Unavailable:
        return None


@pytest.fixture(scope="module")
def plain(mini_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of `train` without more words."""
    return train_into(tmp_path_factory.mktemp("runs") / "plain", mini_file)


def test_a_federated_run_leaves_what_the_contract_says(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = train(draw=True)
    got = results(directory)
    assert {
        "setting", "dataset", "seed", "rounds", "val", "test", "per_class_ap", "wall_clock_s", "hardware",
        "commit", "config_sha256", "model_sha256",
    } <= set(got)  # fmt: skip
    for split in ("val", "test"):
        assert {*COLUMNS, "C-AP-binned200", "O-AP-binned200", "loss"} <= set(got[split])
        assert all(math.isfinite(value) for value in got[split].values())
    assert len(got["per_class_ap"]) == 17
    assert got["test"]["C-AP"] == pytest.approx(sum(got["per_class_ap"].values()) / 17)
    assert got["model_sha256"] == hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    assert yaml.safe_load((directory / "config.yaml").read_text())["federated"]["num_rounds"] == 3
    for name in ("training_curve", "per_class_ap"):
        assert (directory / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert [line["round"] for line in lines(directory)] == [0, 1, 2, 3]
    assert all("val" in line for line in lines(directory))
    assert [line.get("users") for line in lines(directory)] == [4, 4, 4, None]
    shown = capsys.readouterr().out
    heads, *_ = (line.split("  ") for line in shown.splitlines() if "O-F1" in line)
    assert [head.strip() for head in heads if head.strip()] == ["C-AP exact", "O-AP exact", *COLUMNS]
    (row,) = (line.split() for line in shown.splitlines() if line.startswith("test, best model"))
    assert row[3:6] == [f"{got['test'][key]:.1f}" for key in ("C-AP", "O-AP", "C-AP-binned200")]
    assert "FLAIR paper" not in shown
    assert "not comparable with the paper's FL-R-17: the data set is not FLAIR; config differs: " in shown


def test_the_saved_model_is_the_one_that_scored_best(train: Train) -> None:
    directory = train("--evaluation.best_by=C-AP")
    scored = {line["round"]: line["val"]["C-AP"] for line in lines(directory)}
    got = results(directory)
    assert scored[got["best_step"]] == max(scored.values())
    assert got["val"]["C-AP"] == pytest.approx(max(scored.values()), abs=1e-5)
    last = last_checkpoint(directory)
    saved, _ = load(directory / "model.safetensors")
    if got["best_step"] < got["rounds"]:  # the last checkpoint was written before the last scoring
        assert all(torch.equal(last[f"best/{name}"], saved[name]) for name in saved)


@pytest.mark.parametrize(
    ("algorithm", "whose"),
    [
        ("fedavg", "untrained model's;"),
        ("fedper", "untrained server model's; users of fedper have models of their own"),
    ],
)
def test_a_best_model_that_is_the_untrained_one_is_said(
    algorithm: str, whose: str, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--server.learning_rate=100", "--federated.num_rounds=1")
    directory = train(*words, f"--federated.algorithm={algorithm}")
    assert results(directory)["best_step"] == 0
    said = capsys.readouterr().err
    assert "WARNING: by loss on val, no round improved the model" in said
    assert whose in said


FOLLOWED = 3


def evaluations(train: Train, name: str, *words: str) -> list[Scored]:
    """Evaluations on val before each of `FOLLOWED` rounds of the paper's network, and after the last."""
    rounds = ("--local.learning_rate=0.05", f"--federated.num_rounds={FOLLOWED}")
    with watched() as seen:
        train(*RESNET18, *rounds, "--runtime.checkpoint_every=10", *words, name=name)
    return seen[: FOLLOWED + 1]


def golden_trajectory(train: Train) -> list[Tree]:
    """Losses, logits' means by label and AP in float64, and how far rounding may take them (`moved`)."""

    def run(seed: int) -> list[Scored]:
        with inexact(seed, wide=True):
            return evaluations(train, f"float64 {seed}", "--runtime.engine=stock")

    exact, *others = (run(seed) for seed in range(4))
    lines, off = [], np.zeros(3)
    for right, *moved in zip(exact, *others, strict=True):  # an error that has been made stays
        for other in moved:
            apart = other.logits - right.logits
            found = abs(other.loss - right.loss), np.linalg.norm(apart.mean(0)), np.abs(apart).max()
            off = np.maximum(off, LUCK * np.array(found))
        low, high = right.average_precisions(-off[2]), right.average_precisions(off[2])
        lines.append(
            {
                "loss": [right.loss, off[0]],
                "logits": [right.logits.mean(0).round(9).tolist(), off[1]],
                "C-AP": [low[0], high[0]],
                "O-AP": [low[1], high[1]],
            }
        )
    return lines


@pytest.mark.parametrize("engine", ["stock", "fast"])
def test_rounds_follow_the_golden_trajectory(engine: str, train: Train) -> None:
    """On val before and after each of three rounds, as near to float64 as rounding leaves it (in the file).

    After a deliberate change: delete the file, run, review.
    """
    if not GOLDEN.exists():
        GOLDEN.write_text(json.dumps(golden_trajectory(train), indent=1) + "\n")
        pytest.fail(f"{GOLDEN} was missing and has been written: review and commit it")
    golden = json.loads(GOLDEN.read_text())
    now = evaluations(train, engine, f"--runtime.engine={engine}")
    for step, (expected, got) in enumerate(zip(golden, now, strict=True)):
        loss, loss_off = expected["loss"]
        means, logits_off = expected["logits"]
        assert abs(got.loss - loss) <= loss_off, step
        assert np.linalg.norm(got.logits.mean(0) - means) <= logits_off, step
        for name, value in zip(("C-AP", "O-AP"), got.average_precisions()):
            low, high = expected[name]
            assert low - 1e-6 <= value <= high + 1e-6, (step, name)  # of 100


DROPPING = (
    "--model.arch=simple_cnn --model.dropout=true --augment.cutout=6 --augment.color_jitter=0.4"
    " --augment.rand_augment=9 --augment.random_erasing=0.5 --augment.noise=0.1"
)
MIXING = "--augment.mixup=0.5 --augment.cutmix=1"


@pytest.mark.parametrize(
    "config",
    [f"fl-r-17 {DROPPING} {MIXING}", f"c-r-17 {DROPPING} {MIXING}", "fl-r-17 --federated.algorithm=scaffold"],
)
def test_killed_and_resumed_equals_uninterrupted(config: str, train: Train) -> None:
    """Predecessors 10 and 11: cohorts replayed, the model of one round taken for another's."""
    extra = [*f"--config={config}".split(), "--runtime.checkpoint_every=2"]
    extra += ["--centralised.num_epochs=3"] if config.startswith("c-") else []
    whole = train(*extra, name="whole")
    with killed_at(2, recorded=True):
        train(*extra, name="cut", code=130)
    cut = train(*extra, name="cut")
    assert lines(cut) == lines(whole)
    assert results(cut)["model_sha256"] == results(whole)["model_sha256"]
    assert results(cut)["test"] == results(whole)["test"]


@pytest.mark.parametrize("engine", ["fast", "stock"])
def test_scaffold_killed_between_its_state_and_the_checkpoint_goes_on_from_the_one_before(
    engine: str,
    train: Train,
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All users in every round, so that every row has changed since the checkpoint that counts."""
    extra = (
        "--federated.algorithm=scaffold", "--federated.scaffold_option=I", "--federated.cohort_size=12",
        f"--runtime.engine={engine}",
    )  # fmt: skip
    whole = train(*extra, name="whole")
    real = checkpoint.save

    def die(path: Path, tensors: Any, state: Any, **more: Any) -> None:
        if state.get("step") == 3:
            raise KeyboardInterrupt
        real(path, tensors, state, **more)

    monkeypatch.setattr(checkpoint, "save", die)
    train(*extra, name="cut", code=130)
    monkeypatch.setattr(checkpoint, "save", real)
    cut = train(*extra, name="cut")
    assert "resuming at round 2" in capsys.readouterr().err
    assert lines(cut) == lines(whole)
    assert results(cut)["model_sha256"] == results(whole)["model_sha256"]
    (cut / "results.json").unlink()
    (cut / "checkpoint" / "control_variates.f32").write_bytes(b"")
    refused("control_variates.f32 is not the one that the checkpoint was written with", *extra, name="cut")


def test_how_a_run_is_carried_out_does_not_change_it(train: Train, plain: Path) -> None:
    other = train("--runtime.prefetch=0", "--runtime.reader_threads=1", "--runtime.cache_gb=0")
    assert results(plain)["model_sha256"] == results(other)["model_sha256"]
    assert lines(plain) == lines(other)


def test_the_seed_changes_the_run(train: Train, plain: Path) -> None:
    assert results(plain)["model_sha256"] != results(train("--seed=1"))["model_sha256"]


@pytest.mark.parametrize(
    "argv",
    [
        ["--config=c-r-17"],
        ["--config=fl-r-1628"],
        ["--recipe=pfl", "--server.warmup_rounds=0"],
        ["--federated.algorithm=fedprox", "--federated.mu=0.1"],
        ["--federated.algorithm=scaffold", "--data.partition=iid"],
        ["--data.partition=iid"],
        ["--data.partition=quantity-linear-clients-9-seed-0"],
        ["--server.optimizer=sgd", "--server.momentum=0.9", "--server.learning_rate=1"],
        ["--server.optimizer=yogi", "--server.learning_rate=0.01"],
        ["--runtime.precision=bf16"],
    ],
    ids=lambda argv: argv[0].removeprefix("--"),
)
def test_each_way_of_training_runs_and_changes_the_model(argv: list[str], train: Train) -> None:
    directory = train(*argv, draw="--config=c-r-17" in argv)
    val = [line["val"]["loss"] for line in lines(directory)]
    assert all(math.isfinite(loss) for loss in val)
    assert len(set(val)) == len(val)


def test_fedprox_holds_users_closer(train: Train) -> None:
    """With a large mu the users hardly move; with mu = 0 FedProx is FedAvg."""
    plain = train("--federated.num_rounds=1", name="avg")
    same = train(
        "--federated.num_rounds=1", "--federated.algorithm=fedprox", "--federated.mu=0", name="prox0"
    )
    assert lines(plain)[-1]["val"]["loss"] == pytest.approx(lines(same)[-1]["val"]["loss"], rel=1e-5)
    one_by_one = ("--federated.num_rounds=1", "--local.batch_size=1", "--local.num_epochs=1")
    free = train(*one_by_one, name="free")
    held = train(*one_by_one, "--federated.algorithm=fedprox", "--federated.mu=9", name="held")
    start, _ = load(train("--federated.num_rounds=1", "--server.learning_rate=1e-12", name="start") / MODEL)

    def distance(directory: Path) -> float:
        last = last_checkpoint(directory)
        return math.sqrt(sum(float((last[f"model/{name}"] - start[name]).square().sum()) for name in start))

    assert distance(held) < 0.7 * distance(free)


def test_a_binary_task_has_one_output_and_accuracy(train: Train) -> None:
    got = results(train("--data.binary_label=structure", "--federated.num_rounds=1", draw=True))
    assert list(got["per_class_ap"]) == ["structure"]
    assert 0 <= got["test"]["accuracy"] <= 100


def test_fine_tuning_starts_from_a_local_weights_file_and_freezes_statistics(
    train: Train, tmp_path: Path
) -> None:
    network = torchvision.models.resnet18(weights=None)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.fill_(0.01)  # type: ignore[union-attr]
            module.running_var.fill_(1.5)  # type: ignore[union-attr]
    torch.save(network.state_dict(), tmp_path / "imagenet.pth")
    words = ("--config=fl-f-17", *ONE_ROUND, f"--weights={tmp_path / 'imagenet.pth'}")
    directory = train(*RESNET18, *words)
    saved, _ = load(directory / "model.safetensors")
    means = [tensor for name, tensor in saved.items() if name.endswith("running_mean")]
    assert len(means) == 20
    assert all(bool((mean == 0.01).all()) for mean in means)
    assert not torch.equal(saved["backbone.bn1.weight"], network.bn1.weight)
    assert not torch.equal(saved["backbone.conv1.weight"], network.conv1.weight)


def test_a_finished_run_is_shown_again_and_not_repeated(
    plain: Path, mini_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (plain / "results.json").read_bytes()
    capsys.readouterr()
    train_into(plain, mini_file)
    assert (plain / "results.json").read_bytes() == before
    shown = capsys.readouterr().out
    assert "training FL-R-17" not in shown
    assert f"this run has already finished; its results, from {plain}:" in shown
    assert shown.endswith("to train it again, choose another run directory\n")
    assert "test, best model" in shown


def test_another_config_may_not_take_over_a_run(
    train: Train, plain: Path, refused: Refused, tmp_path: Path
) -> None:
    directory = shutil.copytree(plain, tmp_path / "run")
    rates = "(local.learning_rate: 0.1 -> 0.07; seed: 0 -> 5): choose another --run_dir"
    refused(rates, "--local.learning_rate=0.07", "--seed=5")
    refused(f"run_dir; to train this run for longer, add --extend {directory}", "--federated.num_rounds=9")
    short = train("--runtime.keep_checkpoints=false", name="short") / MODEL
    pretrained = f"add --model.pretrained true --weights {short} --model.keep_head true"
    refused(
        f"run_dir; to start a new run from its model, {pretrained}", "--federated.num_rounds=9", name="short"
    )
    refused("already has a run", "--resume=never")


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--data_path=nowhere.hdf5"], "nowhere.hdf5: no such file"),
        (["--data_path=pyproject.toml"], "pyproject.toml"),
        (["--federated.cohort_size=13"], "there are only 12 training users: give 1 to 12"),
        (["--data.binary_label=unicorn"], "the label 'unicorn' is in neither taxonomy"),
        (["--config=fl-f-17", "--weights=nowhere.pth"], "nowhere.pth"),
        (["--config=fl-f-17", "--weights=pyproject.toml"], "pyproject.toml"),
        (["--weights=pyproject.toml"], "--weights can be used only if pretrained weights are loaded: add"),
        (["--local.batch_sise=3"], "did you mean local.batch_size?"),
        (["--rounds=3"], " or federated.num_rounds or evaluation.every_rounds?"),
        (["--arch=lenet"], "did you mean model.arch?"),
        (
            ["--federated.algorithm=scaffold", "--federated.max_state_gb=0.0001"],
            "above federated.max_state_gb = 0.0001",
        ),
        (["--model.arch=resnet19"], "resnet19"),
        (["--runtime.device=quantum"], "quantum"),
        (["--run_dir=/proc/nowhere"], "/proc/nowhere"),
    ],
    ids=lambda value: value[-1].removeprefix("--") if isinstance(value, list) else "",
)  # fmt: skip
def test_a_mistake_ends_in_one_line_and_code_2(argv: list[str], message: str, refused: Refused) -> None:
    refused(message, *argv)


def test_a_truncated_file_is_refused(
    mini_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.hdf5"
    cut.write_bytes(mini_file.read_bytes()[:-1000])
    assert run(main, [f"--data_path={cut}", f"--run_dir={tmp_path / 'run'}", *SMALL]) == 2
    assert "cut.hdf5" in error_line(capsys)


def test_the_command_exits_with_2_in_a_process_of_its_own() -> None:
    command = warmly("benchmarks.flair.train", "--config=fl-r-71")
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: --config fl-r-71: no such file, and not the name of a config")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "argv",
    [[], ["--federated.algorithm=scaffold", "--federated.scaffold_option=I"]],
    ids=["fedavg", "scaffold"],
)
def test_each_round_has_its_training_loss_whoever_trains(argv: list[str], train: Train) -> None:
    """The mean over the images of the loss at the step that each was in."""
    fast, stock = (
        [line["train_loss"] for line in lines(train(*argv, f"--runtime.engine={name}", name=name))[:-1]]
        for name in ("fast", "stock")
    )
    assert fast == pytest.approx(stock, rel=1e-3)
    assert 0 < fast[2] < fast[0]
