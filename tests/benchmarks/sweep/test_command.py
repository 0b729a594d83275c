"""The command of sweeps: what it refuses, and what wandb's own agent makes of one."""

from __future__ import annotations

import json
import os
import queue
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import wandb
import yaml

from benchmarks.core.config.digests import short_digest
from benchmarks.core.config.trees import Tree
from benchmarks.flair.config import parse
from benchmarks.sweep.command import main
from benchmarks.sweep.local import LocalSweep
from benchmarks.sweep.space import command_words
from dataset.cli import run
from tests import warm
from tests.benchmarks.sweep.conftest import RATES, SHORT
from tests.benchmarks.sweep.test_space import COMMAND, written
from tests.launching import environment


@pytest.mark.parametrize(
    "argv, message",
    [
        (["nowhere", "--local=true"], "no such file and no shipped sweep; the shipped ones are bayes, clip-"),
        (["learning-rates", "--local=true", "--workers=0"], "--workers is '0'"),
        (
            ["learning-rates", "--local=true", "--run_dir=x"],
            "--run_dir is set by the sweep itself: remove it from the arg",
        ),
        (
            ["learning-rates", "--local=true", "--program=benchmarks.sweep.command"],
            "--program is 'benchmarks.sweep.command': choose",
        ),
        (
            ["learning-rates", "--local=true", "--program=benchmarks.visual_classification.train"],
            "is a sweep of benchmarks.flair.train, but --program is",
        ),
        (
            ["learning-rates", "--local=true", "--local.learning_rate=1"],
            "--local.learning_rate is a parameter of the sweep",
        ),
        (
            ["learning-rates", "--local=true", "--locl.batch_size=1"],
            "there is no config key locl.batch_size; did you mean local.batch_size?",
        ),
        (["learning-rates", "--workers=2"], "--workers can be used only for local sweeps: add --local true"),
        (["learning-rates"], "no wandb key was found"),
        (["me/flair/abc123", "--server.beta1=0.5"], "stand in its command at wandb"),
        (["--local=true"], "give the sweep first: python -m benchmarks.sweep NAME_OR_YAML"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_mistake_ends_in_one_line_and_code_2(
    argv: list[str],
    message: str,
    mini_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    where = [] if "/" in argv[0] else [f"--data_path={mini_file}"]
    assert run(main, [*argv, *where] if not argv[0].startswith("--") else argv) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(errors) == 1
    assert message in errors[0]


def test_wandbs_own_agent_runs_what_was_asked_for(
    mini_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb's Agent itself; only its server's answers are written here."""
    # Here, as it takes three seconds that only one of xdist's workers need spend.
    from wandb.apis.public import sweeps as wandb_sweeps
    from wandb.wandb_agent import Agent

    fixed = [f"--data_path={mini_file}", "--run_dir=sweep/{digest}", *SHORT, "--federated.num_rounds=1"]
    fixed.append("--runtime.threads=1")
    command = [*COMMAND[:-1], *fixed, "--runtime.track=wandb", "--runtime.progress=false", "${args}"]
    args = {"local.learning_rate": {"value": 0.3}}
    answers = [[{"type": "run", "run_id": "r1", "program": "", "args": args}]]
    monkeypatch.setattr(
        wandb_sweeps, "_sweep_with_runs", lambda *_: {"config": yaml.safe_dump({"command": command})}
    )
    monkeypatch.setattr(wandb_sweeps, "_register_agent", lambda *_, **__: {"id": "agent"})

    def heartbeat(api: Any, agent_id: str, metrics: Any, running: dict[str, bool]) -> list[Any]:
        return answers.pop(0) if not running and answers else []

    monkeypatch.setattr(wandb_sweeps, "_agent_heartbeat", heartbeat)
    monkeypatch.setattr(wandb, "Api", lambda: None)
    monkeypatch.setattr(Agent, "POLL_INTERVAL", 0.1)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nshift  # -m\nexec {sys.executable} {warm.__file__} "$@"\n')
    python.chmod(0o755)
    variables = environment(WANDB_MODE="offline", WANDB_SWEEP_ID="sweep1", WANDB_DIR=str(tmp_path))
    variables["PATH"] = f"{python.parent}:{variables['PATH']}"
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(os.environ, variables, clear=True):
        Agent(None, queue.Queue(), sweep_id="sweep1", count=1).run()  # type: ignore[no-untyped-call]
    words = ["--config=fl-r-17", *fixed, *command_words({"local.learning_rate": 0.3})]
    directory = tmp_path / "sweep" / short_digest(parse(words).config)
    assert yaml.safe_load((directory / "config.yaml").read_text())["local"]["learning_rate"] == 0.3
    assert json.loads((directory / "results.json").read_text())["model_sha256"]
    assert [path.stem for path in tmp_path.glob("sweep/*/wandb/offline-run-*/*.wandb")] == ["run-r1"]


def test_a_local_sweep_needs_no_command(
    doubled: Callable[..., LocalSweep], mini_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 17.46: it failed after a while, with a dump of an object."""
    doubled(RATES, command=None)  # trials take no time from here on
    argv = [
        str(tmp_path / "sweep.yaml"),
        "--local=true",
        f"--data_path={mini_file}",
        f"--sweep_dir={tmp_path / 's'}",
    ]
    assert run(main, argv) == 0
    assert "| finished |" in (tmp_path / "s" / "table.md").read_text()


def test_a_device_without_a_name_is_refused(doubled: Callable[..., LocalSweep]) -> None:
    with pytest.raises(ValueError, match=r"--devices is 'cuda:0,': name devices with a comma between them"):
        doubled(RATES, devices="cuda:0,")


def test_a_sweep_by_val_of_runs_that_follow_test_is_refused_before_any_trial(
    mini_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every trial would fail at its end, as there is no val in its metrics.jsonl."""
    argv = [written(tmp_path, RATES, command=None, metric=None), "--local=true", f"--data_path={mini_file}"]
    argv += ["--program=benchmarks.visual_classification.train"]
    assert run(main, argv) == 2
    assert "add --data.scored=val" in capsys.readouterr().err


def test_the_run_dir_of_a_sweeps_file_is_refused_not_ignored(
    mini_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 17.46."""
    for word in (["--run_dir=mine/{digest}"], ["--run_dir", "mine"], ["--runtime.device=cuda:1"]):
        file = written(tmp_path, RATES, command=[*COMMAND[:-1], *word, COMMAND[-1]])
        assert run(main, [file, "--local=true", f"--data_path={mini_file}"]) == 2
        key = word[0].split("=")[0]
        assert (
            f"{key} is set by the sweep itself: remove it from the command of {file}"
            in capsys.readouterr().err
        )


def test_wandb_gives_each_trial_a_directory_of_its_own(
    mini_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[Tree] = []
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setattr(wandb, "sweep", lambda tree, **_: registered.append(tree))
    monkeypatch.setattr(wandb, "agent", lambda *_, **__: None)
    command = [*COMMAND[:-1], "--run_dir=mine/{digest}", COMMAND[-1]]
    for options, place in (
        ({"command": None}, "runs/sweeps/sweep/{digest}"),
        ({"command": command}, "mine/{digest}"),
    ):
        assert run(main, [written(tmp_path, RATES, **options), f"--data_path={mini_file}"]) == 0
        words = registered[-1]["command"]
        assert [word for word in words if word.startswith("--run_dir")] == [f"--run_dir={place}"]
        assert words[:4] == ["${env}", "${interpreter}", "-m", "benchmarks.flair.train"]
        assert words[-1] == "${args}"
