"""Runs whose engine was arranged by timing (`pfl_ext.engine.tuning`)."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.flair.train import main
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.engine.cpu.build import Unavailable, compiled
from pfl_ext.engine.tuning import AS_BEGUN, Timed, Tuner
from tests.benchmarks.conftest import Refused, Train, killed_at
from tests.benchmarks.core.test_workers import distance
from tests.benchmarks.core.worker_runs import FAST, SMALL
from tests.benchmarks.run_files import results
from tests.benchmarks.sparing import run_into
from tests.launching import command, run

TUNED = ("--runtime.tune=true", "--runtime.threads=1")


@pytest.fixture
def choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for what is timed, with the compiled layers that take ten seconds to make."""
    folder = tmp_path / "cache" / "pfl_ext"
    folder.mkdir(parents=True)
    with contextlib.suppress(Unavailable):
        library = compiled()
        (folder / library.name).symlink_to(library)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))
    return folder


def one_by_one(self: Tuner, engine: CohortEngine, *_: Any) -> Timed:
    """As if users were trained faster one by one, whose sums round in another way."""
    own = engine.arrangement
    return {own: 2.0, replace(own, fuse=False): 1.0}


def test_a_run_goes_on_as_it_began_and_another_takes_over_what_it_timed(
    train: Train, choices: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Tuner, "_times", one_by_one)
    with killed_at(2):
        train(*TUNED, name="cut", code=130)
    assert "engine: 1 lane, users one by one" in capsys.readouterr().err
    monkeypatch.setattr(Tuner, "_times", None)
    whole = results(train(*TUNED, name="whole"))
    assert whole["engine_choice"]["source"] == "as timed before"

    (choice,) = choices.glob("*.json")
    choice.unlink()
    cut = results(train(*TUNED, name="cut"))
    assert cut["engine_choice"] == whole["engine_choice"] | {"source": "as this run began"}
    assert cut["model_sha256"] == whole["model_sha256"]
    assert cut["model_sha256"] != results(train("--runtime.threads=1", name="groups"))["model_sha256"]


def test_a_longer_run_adds_up_as_the_shorter_one_began(
    train: Train, choices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tuner, "_times", one_by_one)
    short = train(*TUNED, "--runtime.keep_checkpoints=true", "--federated.num_rounds=2", name="short")
    whole = results(train(*TUNED, name="whole"))
    monkeypatch.setattr(Tuner, "_times", None)
    (choice,) = choices.glob("*.json")
    choice.unlink()
    longer = results(train(*TUNED, f"--extend={short}", name="longer"))
    assert longer["engine_choice"]["source"] == AS_BEGUN
    assert longer["model_sha256"] == whole["model_sha256"]


def test_nothing_is_timed_on_a_cpu_that_was_not_asked_for(train: Train) -> None:
    directory = train("--federated.num_rounds=1")
    assert "engine_choice" not in results(directory)
    assert not (directory / "engine_choice.json").exists()


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("--config=pfl-r-17", "--privacy.noise_seed=run"), "runtime.tune"),
        (("--config=c-r-17",), "runtime.tune"),
        (("--runtime.engine=stock",), "runtime.engine is stock"),
        (("--runtime.lanes=2", "--runtime.fuse=true"), "runtime.lanes and runtime.fuse are given"),
        (("--runtime.deterministic=true",), "runtime.deterministic is true"),
        (("--federated.algorithm=scaffold",), "federated.algorithm is scaffold"),
        (("--federated.algorithm=qffl",), "federated.algorithm is qffl"),
        (("--compression.kind=sign",), "compression.kind is sign"),
        (("--aggregation.kind=median",), "aggregation.kind is median"),
    ],
)
def test_where_nothing_may_be_timed_it_is_refused(
    words: tuple[str, ...], refusal: str, refused: Refused
) -> None:
    refused(refusal, *words, "--runtime.tune=true")


@pytest.mark.xdist_group("workers")
@pytest.mark.usefixtures("choices")
def test_workers_choose_the_same(mini_file: Path, tmp_path: Path) -> None:
    """The choice decides who shares a pass; two workers that disagreed would train a user twice, or never."""
    words = (*SMALL, *FAST, f"--data_path={mini_file}", "--federated.cohort_size=12")
    output = run(
        command("torchrun", 2, "benchmarks.flair.train", *words, *TUNED, f"--run_dir={tmp_path / 'two'}")
    )
    found: Any = json.loads((tmp_path / "two" / "results.json").read_text())["engine_choice"]
    assert len(found["seconds"]) >= 1
    assert len([line for line in output.splitlines() if line.startswith("engine: ")]) == 1
    assert distance(run_into(main, tmp_path / "one", *words), tmp_path / "two", by_tensor=False) < 1e-4
