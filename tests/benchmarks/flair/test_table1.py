"""Running Table 1: order, what is skipped, what fails, what is missing. The runs themselves are made up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.core.mini import MINI_FILE
from benchmarks.flair import figures, paper, table1
from benchmarks.flair.config import parse
from benchmarks.flair.table1 import Job, eta, execute, jobs, main
from benchmarks.flair.train import Flair
from dataset.cli import RESUMABLE, Stopped, raised, run
from tests import warm
from tests.benchmarks.made_runs import make_run
from tests.launching import environment


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Figures are not drawn; the arguments with which they would have been."""
    calls: list[list[str]] = []
    monkeypatch.setattr(figures, "main", calls.append)
    monkeypatch.setattr(Flair, "ready_data", lambda *_: None)
    return calls


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Jobs are "run" by writing a made-up finished run; fl-f-17 fails. The names of those asked for."""
    asked: list[str] = []

    def fake(job: Job, log: Path, tell: str) -> int:
        asked.append(job.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        if job.name.startswith("fl-f-17"):
            log.write_text("working\nerror: the weights do not fit\n")
            return 2
        config = parse(job.argv).config
        make_run(job.directory, config.setting, *job.argv, seed=config.seed)
        return 0

    monkeypatch.setattr(table1, "execute", fake)
    return asked


def test_a_failed_run_does_not_end_the_rest_and_a_second_call_makes_only_what_is_left(
    made: list[str], drawn: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "w.safetensors"
    weights.write_bytes(b"weights")
    argv = [
        "--settings", "fl-r-17", "fl-f-17", "c-r-17", "--seeds", "0", "1", "--data_path", "mini",
        "--weights", str(weights), "--runs_dir", str(tmp_path / "runs"),
    ]  # fmt: skip
    assert run(main, argv) == 2
    assert made == [f"{s} seed {n}" for n in (0, 1) for s in ("fl-r-17", "fl-f-17", "c-r-17")]
    out = capsys.readouterr()
    assert "2 of 6 runs failed" in out.err
    assert "error: the weights do not fit" in out.out
    assert (tmp_path / "runs" / "table1.csv").is_file()
    root = tmp_path / "runs"
    assert drawn == [[str(root), f"--data_path={MINI_FILE}", f"--output_dir={root / 'figures'}"]]
    made.clear()
    assert run(main, argv) == 2
    assert made == ["fl-f-17 seed 0", "fl-f-17 seed 1"]
    assert "2 runs to make of 6" in capsys.readouterr().out


def test_without_weights_and_network_the_fine_tuning_rows_are_missing_and_said_so_once(
    made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> list[str]:
        raise ValueError("the weights cannot be downloaded")

    monkeypatch.setattr(table1, "network_words", refuse)
    argv = [
        "--settings",
        "fl-r-17",
        "fl-f-17",
        "--seeds",
        "0",
        "1",
        "--data_path=mini",
        f"--runs_dir={tmp_path / 'r'}",
    ]
    assert run(main, argv) == 0
    assert made == ["fl-r-17 seed 0", "fl-r-17 seed 1"]
    out = capsys.readouterr().out
    assert out.count("the weights cannot be downloaded") == 1
    assert "Missing, without a finished run as shipped: C-R-17, PFL-R-17, C-F-17, FL-F-17" in out


@pytest.mark.parametrize(
    "begun, expected",
    [
        ((), ["--model.arch=efficientnet_lite0", "--model.normalisation=efficientnet_lite"]),
        (("--model.arch=resnet18",), ["--model.arch=resnet18"]),
    ],
    ids=["fresh", "begun"],
)
def test_without_internet_all_fine_tuning_rows_have_one_network(
    begun: tuple[str, ...],
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """For each seed and row, although the internet may come and go: that of a run which has begun, if any."""
    asked: list[str] = []
    seen: list[Job] = []

    def ask(url: str) -> None:
        asked.append(url)
        raise OSError("no network")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr("pfl_ext.models.download._ask", ask)

    def note(todo: list[Job], logs: Path) -> list[str]:
        seen.extend(todo)
        return []

    monkeypatch.setattr(table1, "make_runs", note)
    root = tmp_path / "runs"
    make_run(root / "c-r-17-seed9", "c-r-17")
    if begun:
        make_run(root / "c-f-17-seed1", "c-f-17", *begun, seed=1, finished=False)
    settings = ["fl-r-17", "fl-f-17", "c-f-17"]
    argv = ["--settings", *settings, "--seeds", "0", "1", "--data_path=mini", f"--runs_dir={root}"]
    assert run(main, argv) == 0
    assert [job.name for job in seen] == [f"{s} seed {n}" for n in (0, 1) for s in settings]
    for job in seen:
        words = [word for word in job.argv if word.startswith("--model.")]
        assert words == ([] if job.name.startswith("fl-r") else expected)
    assert len(asked) == (0 if begun else 1)
    assert capsys.readouterr().out.count("using efficientnet_lite0") == len(asked)


def test_without_a_finished_run_the_report_says_so_and_nothing_is_drawn(
    made: list[str], drawn: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "half", finished=False)
    weights = tmp_path / "w.safetensors"
    weights.write_bytes(b"weights")
    argv = ["--settings", "fl-f-17", "--seeds", "0", "--data_path=mini", f"--weights={weights}"]
    assert run(main, [*argv, f"--runs_dir={tmp_path}"]) == 2
    out = capsys.readouterr()
    assert "No finished run." in out.out
    assert "1 of 1 runs failed" in out.err
    assert drawn == []


def test_results_of_another_config_are_not_taken_for_this_ones(
    made: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--settings", "fl-r-17", "--seeds", "0", "--data_path", "mini", "--runs_dir", str(tmp_path)]
    assert run(main, argv) == 0
    assert run(main, [*argv, "--", "--local.learning_rate=0.3"]) == 2
    assert "holds a run of another config" in capsys.readouterr().err
    assert made == ["fl-r-17 seed 0"]


def test_the_laptop_scale_is_all_twelve_rows_with_two_seeds_on_the_mini_set(
    made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Job] = []

    def note(todo: list[Job], logs: Path) -> list[str]:
        seen.extend(todo)
        return []

    monkeypatch.setattr(table1, "make_runs", note)
    (tmp_path / "x").mkdir()
    make_run(tmp_path / "x" / "one")
    weights = tmp_path / "w.pth"
    weights.write_bytes(b"weights")
    argv = [
        "--scale",
        "mini",
        "--weights",
        str(weights),
        "--runs_dir",
        str(tmp_path / "x"),
        "--",
        "--runtime.threads=1",
    ]
    assert run(main, argv) == 0
    assert len(seen) == 24
    assert {job.name.split()[0].upper() for job in seen} == set(paper.settings())
    assert [job.name.split()[-1] for job in seen] == ["0"] * 12 + ["1"] * 12
    for job in seen:
        asked = parse(job.argv)
        assert str(asked.data_path) == "mini"
        assert (asked.weights is not None) == asked.config.model.pretrained
        federated = asked.config.mode == "federated"
        assert (asked.config.federated.num_rounds <= 20) == federated
        assert (asked.config.centralised.num_epochs == 1) != federated
        assert asked.runtime.threads == 1


def test_other_arguments_go_to_another_directory(
    made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["--settings", "pfl-r-17", "--seeds", "0", "--scale", "mini"]
    for extra in ([], ["--", "--privacy.noise_cohort_size=200", "--runtime.threads=1"]):
        assert run(main, [*argv, *extra]) == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == [
        "table1-mini-tiny", "table1-mini-tiny-privacy.noise_cohort_size=200"]  # fmt: skip


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--settings", "fl-r-71"], "no such file, and not the name of a config"),
        (["--scale", "huge"], "scale is 'huge'"),
        (["--", "--local.learnin_rate=1"], "did you mean local.learning_rate"),
        (["--seeds", "one"], "invalid int value"),
    ],
)
def test_a_mistake_is_named_before_anything_is_run(
    argv: list[str], message: str, made: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(main, argv) == 2
    assert message in capsys.readouterr().err
    assert not made


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_ends_it_as_every_command_that_can_go_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 17.22: SIGTERM ended in 130, the code of an interruption from the keyboard."""

    def stopped(job: Job, log: Path, tell: str) -> int:
        os.kill(os.getpid(), signal.Signals[name])
        return 0

    monkeypatch.setattr(table1, "execute", stopped)
    argv = ["--settings", "fl-r-17", "--seeds", "0", "--data_path=mini", f"--runs_dir={tmp_path}"]
    assert run(main, argv) == RESUMABLE
    assert capsys.readouterr().err == f"stopped by {name}; run the same command again to continue\n"


def test_the_run_in_progress_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is stopped writes its checkpoint before the signal ends table1."""
    job = Job("x", ("-c",), tmp_path / "x", 3, True)
    script = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(print('kept', flush=True)));"
    script += "print('begun', flush=True); time.sleep(60)"
    log, real = tmp_path / "x.log", subprocess.Popen

    def started(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return real([sys.executable, "-c", script], **options)

    def ask() -> None:
        while "begun" not in (log.read_text() if log.exists() else ""):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", started)
    threading.Thread(target=ask).start()
    with raised(), pytest.raises(Stopped):
        execute(job, log, "x")
    assert log.read_text() == "begun\nkept\n"


def test_the_directory_says_the_data_and_the_scale_that_are_used(
    made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 17.39: without a file the runs were those of the mini set under FLAIR's name."""
    monkeypatch.chdir(tmp_path)
    argv = ["--settings", "fl-r-17", "--seeds", "0"]
    assert run(main, argv) == 0
    assert run(main, argv) == 0
    assert made == ["fl-r-17 seed 0"]
    assert [path.name for path in Path("runs").iterdir()] == ["table1-mini-mini"]
    assert run(main, [*argv, "--data_path=nowhere.hdf5"]) == 2
    assert "--data_path nowhere.hdf5: no such file" in capsys.readouterr().err


def test_the_time_left_is_that_of_like_runs() -> None:
    todo = jobs(["fl-r-17", "c-r-17", "c-f-17"], [0], Path("x"), [])
    assert eta(todo, {True: [], False: []}) == "time left not known yet"
    assert eta(todo, {True: [600.0, 1800.0], False: [300.0]}) == "about 30 min left"  # 20 + 5 + 5
    assert eta(todo, {True: [7200.0], False: []}) == "about 6.0 h left"


def test_a_run_is_a_process_of_its_own_whose_words_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, variables = subprocess.Popen, environment()

    def started(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        assert command[:2] == [sys.executable, "-m"]
        return real([sys.executable, warm.__file__, *command[2:]], env=variables, **options)

    monkeypatch.setattr(subprocess, "Popen", started)
    job = Job("x", ("--config", "nowhere.yaml"), tmp_path / "x", 3, True)
    assert execute(job, tmp_path / "logs" / "x.log", "x") == 2
    assert (tmp_path / "logs" / "x.log").read_text().startswith("error: --config nowhere.yaml")


def test_an_argument_goes_to_the_rows_in_whose_mode_it_means_something(tmp_path: Path) -> None:
    common = ["--federated.num_rounds=9", "--centralised.num_epochs=2", "--evaluation.per_user=true"]
    federated, central = jobs(["fl-r-17", "c-r-17"], [0], tmp_path, common)
    assert (federated.steps, central.steps) == (9, 2)
    assert "--centralised.num_epochs=2" not in federated.argv
    assert "--federated.num_rounds=9" not in central.argv
