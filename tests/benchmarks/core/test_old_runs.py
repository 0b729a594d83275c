"""Run directories that commit 59d7e39 left are reported, and a run that it did not end is resumed.

``run_of_59d7e39`` is what a SIGKILL in round 5 of 6 left of a run on the mini data set of `TINY`, but for the
numbers of the checkpoint's tensors, which are 11 MB: ``last.json`` has their names, types and shapes, and the
state beside them. ``results_of_the_whole.json`` is of the same run where nothing happened to it.
``small.safetensors`` is a checkpoint file of that commit.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.flair.config import FLAIR
from benchmarks.flair.paper import SCORES
from benchmarks.flair.report import collect
from benchmarks.reporting.runs import read_run
from pfl_ext import checkpoint
from tests.benchmarks.conftest import Train
from tests.benchmarks.run_files import results

OLD = Path(__file__).parent / "run_of_59d7e39"
WORDS = (
    "--model.arch=squeezenet1_1",
    "--data.image_size=20",
    "--model.input_size=18",
    "--runtime.checkpoint_every=2",
    "--federated.num_rounds=6",
    "--federated.cohort_size=4",
    "--evaluation.every_rounds=2",
)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The directory, with a checkpoint whose tensors are zeros."""
    directory = tmp_path / "run"
    (directory / "checkpoint").mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl", "checkpoint/data.json"):
        shutil.copy(OLD / name, directory / name)
    kept = json.loads((OLD / "checkpoint" / "last.json").read_text())
    tensors = {
        name: torch.zeros(shape, dtype=getattr(torch, kind))
        for name, (kind, shape) in kept["tensors"].items()
    }
    checkpoint.save(directory / "checkpoint" / "last.safetensors", tensors, kept["state"])
    return directory


def test_a_checkpoint_file_of_then_is_read() -> None:
    tensors, state = checkpoint.load(OLD / "small.safetensors")
    assert tensors["model/w"].tolist() == [0, 1, 2]
    assert state == {"step": 2, "config_sha256": "ab"}


def test_an_unfinished_run_of_then_is_reported_and_resumed_to_its_end(
    old: Path, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_run(old, FLAIR).progress == "at round 4 of 6"
    config, lines = ((old / name).read_bytes() for name in ("config.yaml", "metrics.jsonl"))
    train(*WORDS)
    assert "resuming at round 4 from" in capsys.readouterr().err
    assert (old / "config.yaml").read_bytes() == config
    known = b"".join(lines.splitlines(keepends=True)[:4])
    assert (old / "metrics.jsonl").read_bytes().startswith(known)
    assert [line["round"] for line in read_run(old, FLAIR).history] == list(range(7))
    ended = results(old)
    assert ended["best_step"] in (4, 6), "of the checkpoint, or found later"
    (row,) = collect([old]).rows
    assert row.seeds == (0,)


def test_a_finished_run_of_then_is_reported_and_shown_again(
    old: Path, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(OLD / "results_of_the_whole.json", old / "results.json")
    record = read_run(old, FLAIR, SCORES)
    assert record.finished
    assert record.outcome["test"]["C-AP"] == pytest.approx(27.3, abs=0.05)
    (row,) = collect([old]).rows
    assert "the data set is not FLAIR" in row.reasons
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    train(*WORDS)
    assert "this run has already finished; its results, from" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before
