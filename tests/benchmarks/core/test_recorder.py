"""What a run leaves in its directory and on the screen, from before its first step to its end."""

from __future__ import annotations

import hashlib
import json
import math
import re
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from pfl.metrics import Metrics, Weighted

from benchmarks.core import progress, recorder
from benchmarks.core.config.digests import tree_digest
from benchmarks.core.progress import duration
from benchmarks.core.recorder import Recorder, columns, finite_part
from dataset.cli import Stopped
from pfl_ext import checkpoint
from pfl_ext.evaluation import LOSS, SCORES
from pfl_ext.tasks.ranking import Diverged
from tests.benchmarks.conftest import Refused, Train, killed_at
from tests.benchmarks.core.test_faults import LONG
from tests.benchmarks.run_files import error_line, lines, results

SHORT = ("--federated.num_rounds=2",)
KEEP = "--runtime.keep_checkpoints=true"


def files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def dies(train: Train, *argv: str, step: int) -> Path:
    """A run that dies after a step; its directory."""
    with killed_at(step, recorded=True):
        return train(*argv, code=130)


@pytest.mark.parametrize(
    "argv",
    [
        ["--model.arch=resnet19"],
        ["--federated.cohort_size=13"],
        ["--evaluation.best_by=accuracy"],
        ["--data.binary_label=unicorn"],
        ["--personal.num_epochs=1", "--personal.min_images=9999"],
        ["--config=pfl-r-17", "--privacy.noise_cohort_size=none", "--privacy.noise_population=9"],
        [
            "--federated.algorithm=scaffold",
            "--local.straddle=false",
            "--federated.weighting=users",
            "--federated.max_state_gb=0.0001",
        ],
    ],
    ids=lambda argv: argv[0].removeprefix("--"),
)
def test_what_can_be_refused_is_refused_before_anything_is_written(
    argv: list[str], train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = train(*SHORT, *argv, "--runtime.progress=true", code=2)
    assert not directory.exists()
    error_line(capsys)  # the only line: no bar was opened


@pytest.mark.parametrize("asked", [None, 15])
def test_workers_that_stop_leave_when_the_main_one_has_saved(
    asked: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that sees the first worker leave may end the others."""
    order, state = mock.Mock(), object()
    writer = mock.Mock(held=order.held, save=order.save, _val=None, unit="round")
    writer.progress.lap.return_value = 1.0
    writer.checkpoints.due.return_value = False
    order.held.number = asked
    monkeypatch.setattr(recorder, "barrier", order.barrier)
    with nullcontext() if asked is None else pytest.raises(Stopped, match="by SIGTERM, 4 of "):
        Recorder.step_done(writer, 3, {}, state)
    assert order.mock_calls == ([] if asked is None else [mock.call.save(4, state), mock.call.barrier()])


def test_a_signal_while_workers_agree_is_for_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was lost, and the run went on to its end, or stopped one worker that had not been saved."""
    writer = mock.Mock(_val=None, unit="round")
    writer.progress.lap.return_value = 1.0
    writer.checkpoints.due.return_value = False
    writer.held.number = None

    def agreed(number: int | None) -> int | None:
        writer.held.number = 15
        return number

    monkeypatch.setattr(recorder, "from_any", agreed)
    monkeypatch.setattr(recorder, "barrier", lambda: None)
    Recorder.step_done(writer, 3, {}, object())
    assert not writer.save.called
    with pytest.raises(Stopped, match="5 of "):
        Recorder.step_done(writer, 4, {}, object())
    assert writer.save.called


def test_a_signal_that_another_worker_got_after_the_last_round_stops_all(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that went on waited for it while they computed the final scores."""
    with monkeypatch.context() as patch:
        patch.setattr("benchmarks.core.execute.from_any", lambda own: signal.SIGTERM)
        directory = train(code=75)
    assert "stopped by SIGTERM; run the same command again" in capsys.readouterr().err
    assert not (directory / "results.json").exists()
    train()
    assert "no round is done again" in capsys.readouterr().err


def test_a_directory_without_a_round_is_reused(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "restore", stop)
        directory = train(*SHORT, "--seed=5", code=130)
    assert yaml.safe_load((directory / "config.yaml").read_text())["seed"] == 5
    train(*SHORT, "--resume=never")
    assert results(directory)["seed"] == 0
    assert yaml.safe_load((directory / "config.yaml").read_text())["seed"] == 0


def test_the_bar_is_closed_before_the_error_line(
    train: Train, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no luck")

    monkeypatch.setattr(Recorder, "step_done", fail)
    train(*SHORT, "--runtime.progress=true", code=2)
    shown = capfd.readouterr().err
    assert re.search(r"0/2 \[.*\]", shown), "there was a bar"
    assert shown.endswith("\nerror: no luck\n")


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--runtime.engine=stock"], "lower local.learning_rate or server.learning_rate, or set local.max_"),
        (["--federated.algorithm=split"], "lower local.learning_rate, or set local.max_grad_norm"),
        (["--config=c-r-17", "--centralised.learning_rate=1e30"], "lower centralised.learning_rate or set"),
    ],
)
def test_training_that_diverges_ends_before_a_checkpoint_holds_it(
    argv: list[str], message: str, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    rate = [] if "--config=c-r-17" in argv else ["--local.learning_rate=1e20", "--evaluation.every_rounds=9"]
    directory = train(*argv, *rate, code=2)
    error, last = error_line(capsys), directory / "checkpoint" / "last.safetensors"
    step = lines(directory)[-1]["epoch" if "epoch" in error else "round"]
    assert f"{step} ended with numbers that are not finite: the model has diverged, " in error
    assert message in error
    if last.exists():
        tensors, state = checkpoint.load(last)
        assert state["step"] == step
        model = checkpoint.part(tensors, checkpoint.MODEL)
        assert all(bool(tensor.isfinite().all()) for tensor in model.values())


def test_what_is_not_finite_is_no_score_and_stands_in_no_line() -> None:
    task, metrics = mock.Mock(), {LOSS: Weighted(math.inf, 1.0), SCORES: None}
    task.summarise.return_value = {"accuracy": 50.0}
    with pytest.raises(Diverged, match="loss of a scored split is inf: the model has diverged"):
        columns(task, Metrics(list(metrics.items())))
    assert finite_part({"a": math.nan, "b": {"c": math.inf, "d": 1.0}, "e": "x"}) == {
        "b": {"d": 1.0},
        "e": "x",
    }


def test_a_run_that_goes_on_after_its_last_round_says_how_it_was_trained(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = (*SHORT, "--local.momentum=0.9", "--local.weight_decay=0.01")
    whole = train(*argv, name="whole")
    assert results(whole)["arithmetic"]
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "end", mock.Mock(side_effect=KeyboardInterrupt))
        train(*argv, code=130)
    directory = train(*argv)
    assert results(directory)["arithmetic"] == results(whole)["arithmetic"]


def test_a_finished_run_keeps_no_checkpoint_unless_asked(train: Train) -> None:
    kept = files(train(*SHORT, name="kept"))
    tidy = files(train(*SHORT, "--runtime.keep_checkpoints=false", name="tidy"))
    assert kept - tidy == {"checkpoint/last.safetensors", "checkpoint/last.previous.safetensors"}
    assert tidy <= kept
    train(*SHORT, name="tidy")  # its results are shown


def test_what_a_kill_left_half_written_is_removed(train: Train, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    dead = [directory / "checkpoint" / ".tmpAb3dE9", directory / ".tmp123456"]
    for path in dead:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    train(*SHORT)
    assert not any(path.exists() for path in dead)


def test_a_checkpoint_is_written_by_rounds_or_by_minutes(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    real = Recorder.save

    def noted(self: Recorder, step: int, *rest: Any) -> None:
        saved.append(step)
        real(self, step, *rest)

    monkeypatch.setattr(Recorder, "save", noted)
    four = ("--federated.num_rounds=4", "--runtime.checkpoint_every=3")
    train(*four, name="rounds")
    assert saved == [3, 4], "every third round, and at the end"
    saved.clear()
    train(*four, "--runtime.checkpoint_minutes=1e-9", name="minutes")
    assert saved == [1, 2, 3, 4, 4]


def test_a_long_run_says_so_after_its_first_step(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(*SHORT, name="short")
    assert "to go" not in capsys.readouterr().err
    monkeypatch.setattr(progress, "LONG_S", 1e-6)
    train("--federated.num_rounds=4", "--evaluation.every_rounds=2", name="long")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "to go" in line]
    assert "at the pace of the first round: 3 rounds of" in line
    assert "and 3 evaluations of" in line  # before rounds 2 and 4, with one to spare


def test_a_duration_is_said_in_the_unit_that_fits() -> None:
    assert [duration(s) for s in (1500, 4 * 3600, 72 * 3600)] == ["25 min", "4.0 h", "3.0 days"]


@pytest.mark.parametrize(
    "step, said",
    [
        (0, "there is no checkpoint: starting from the beginning: round 0 is done again"),
        (1, "last.safetensors: no round is done again"),
        (2, "last.safetensors: round 2 is done again"),
        (4, "last.safetensors: round 4 is done again"),
    ],
)
def test_resuming_says_what_is_done_again(
    step: int, said: str, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    dies(train, *LONG, step=step)
    capsys.readouterr()
    train(*LONG)
    assert said in capsys.readouterr().err


def test_several_rounds_that_are_done_again_are_counted(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--federated.num_rounds=6", "--runtime.checkpoint_every=10")
    dies(train, *argv, step=2)
    capsys.readouterr()
    train(*argv)
    assert "rounds 0 to 2 are done again (3 in all)" in capsys.readouterr().err


def test_a_run_is_not_resumed_from_other_weights(train: Train, refused: Refused, tmp_path: Path) -> None:
    from torchvision.models import squeezenet1_1

    paths = [tmp_path / "one.pth", tmp_path / "other.pth"]
    for path in paths:
        torch.save(squeezenet1_1(weights=None).state_dict(), path)
    fine = (*LONG, "--config=fl-f-17", "--model.arch=squeezenet1_1")
    directory = dies(train, *fine, f"--weights={paths[0]}", step=2)
    found = hashlib.sha256(paths[0].read_bytes()).hexdigest()
    assert yaml.safe_load((directory / "config.yaml").read_text())["model"]["weights_sha256"] == found
    refused(f"model.weights_sha256: {found} -> ", *fine, f"--weights={paths[1]}")
    train(*fine, f"--weights={paths[0]}")
    assert results(directory)["weights"]["sha256"] == found


def test_an_old_run_directory_is_resumed_and_its_config_is_left_as_it_was(
    train: Train, refused: Refused
) -> None:
    """It lacks the hash of the weights, holds a field without effect, and a value that is filled in today."""
    argv = (*LONG, "--federated.algorithm=fedprox")
    whole = train(*argv, name="whole")
    directory = dies(train, *argv, step=2)
    path, last = directory / "config.yaml", directory / "checkpoint" / "last.safetensors"
    tree = yaml.safe_load(path.read_text())
    tree["centralised"]["num_epochs"], tree["federated"]["mu"] = 8, None
    path.write_text(yaml.safe_dump(tree))
    tensors, state = checkpoint.load(last)
    checkpoint.save(last, tensors, {**state, "config_sha256": tree_digest(tree)})
    before = path.read_bytes()
    train(*argv)
    assert path.read_bytes() == before
    assert results(directory)["config_sha256"] == tree_digest(tree)
    assert results(directory)["model_probe"] == results(whole)["model_probe"]
    assert lines(directory) == lines(whole)
    train(*argv)  # its results are shown
    refused("federated.mu: 0.01 -> 0.5", *argv, "--federated.mu=0.5")
    assert json.loads((directory / "results.json").read_text())["rounds"] == 6
