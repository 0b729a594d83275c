"""A run survives damaged files, changed data and hurried users, or says in one line why not."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

from benchmarks.core import recorder
from benchmarks.core.config.trees import Tree
from benchmarks.core.recorder import Best
from benchmarks.core.run_directory import RunDirectory
from dataset.flair.mini import write_mini
from pfl_ext import checkpoint
from pfl_ext.algorithms.on_pfl import PflLoop
from tests import launching
from tests.benchmarks.conftest import SMALL, TINY, Refused, Train, killed_at, train_into
from tests.benchmarks.core.small_disk import NO_MOUNTS
from tests.benchmarks.run_files import error_line, lines, results, said

pytestmark = pytest.mark.xdist_group("faults")
"""One process runs them all: `whole`, `cut_once` and `short` are made once."""

PASSING = ("wall_clock_s",)


def lasting(directory: Path) -> Tree:
    """``results.json`` without the times."""
    return {key: value for key, value in results(directory).items() if key not in PASSING}


@pytest.fixture
def cut(train: Train) -> Train:
    """A run that dies in the round after ``dies_in``, checkpointed every second round."""

    def call(*argv: str, dies_in: int, name: str = "run") -> Path:
        with killed_at(dies_in, recorded=True):
            return train(*LONG, *argv, name=name, code=130)

    return call


SHORT = ("--federated.num_rounds=1",)
LONG = ("--federated.num_rounds=6", "--runtime.checkpoint_every=2")


@pytest.fixture(scope="module")
def whole(mini_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A long run that nothing happened to."""
    return train_into(tmp_path_factory.mktemp("runs") / "whole", mini_file, *LONG)


@pytest.fixture(scope="module")
def cut_once(mini_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A long run that died in its sixth round, to be copied."""
    with killed_at(4, recorded=True):
        return train_into(tmp_path_factory.mktemp("runs") / "cut", mini_file, *LONG, code=130)


@pytest.fixture
def cut_off(cut_once: Path, tmp_path: Path) -> Path:
    """The directory of `train`, with a copy of the run that died."""
    return Path(shutil.copytree(cut_once, tmp_path / "run"))


@pytest.fixture(scope="module")
def short(mini_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished short run, to be copied."""
    return train_into(tmp_path_factory.mktemp("runs") / "short", mini_file, *SHORT)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()  # the bytes of the previous checkpoint are another file
    path.write_bytes(content)


def test_a_damaged_checkpoint_costs_the_rounds_since_the_one_before(
    whole: Path, train: Train, cut_off: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(cut_off / "checkpoint" / "last.safetensors")
    capsys.readouterr()
    train(*LONG)
    said = capsys.readouterr().err
    assert "going on from the one before it" in said
    assert f"resuming at round 2 from {cut_off}/checkpoint/last.previous.safetensors: rounds 2" in said
    assert lines(cut_off) == lines(whole)
    assert lasting(cut_off) == lasting(whole)


def test_a_damaged_checkpoint_never_takes_the_place_of_the_good_one(
    whole: Path, train: Train, cut_off: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill within the first save after a fall-back would leave no whole checkpoint."""
    last = cut_off / "checkpoint" / "last.safetensors"
    damage(last)
    real = os.replace

    def killed(source: Path, target: Path) -> None:
        if target == last:
            raise KeyboardInterrupt
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        train(*LONG, code=130)
    train(*LONG)
    assert lasting(cut_off) == lasting(whole)


USER_STATES = {
    "control_variates.f32": ["--federated.algorithm=scaffold", "--local.straddle=false"],
    "linear_terms.f32": ["--federated.algorithm=feddyn", "--local.straddle=false"],
    "personal.f32": ["--federated.algorithm=ditto"],
    "compression_errors.f32": ["--compression.kind=top_k", "--compression.options.error_feedback=true"],
}


@pytest.mark.parametrize("name", USER_STATES)
def test_a_damaged_state_of_a_user_costs_the_rounds_since_the_checkpoint_before(
    name: str, train: Train, cut: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row that the last checkpoint alone names. One that both name is refused, and both are kept."""
    argv = USER_STATES[name]
    undisturbed = train(*LONG, *argv, name="undisturbed")
    directory = cut(*argv, dies_in=4)
    file, last = (directory / "checkpoint" / each for each in (name, "last.safetensors"))
    rows, before = (
        next(t for key, t in checkpoint.load(path)[0].items() if key.endswith("rows"))
        for path in (last, checkpoint.previous(last))
    )
    content, length = file.read_bytes(), file.stat().st_size // (int(max(rows.max(), before.max())) + 1)

    def damage_row(row: int) -> None:
        at = row * length
        file.write_bytes(
            content[:at] + bytes(255 - byte for byte in content[at : at + 4]) + content[at + 4 :]
        )

    capsys.readouterr()
    damage_row(next(row for row in rows.tolist() if row >= 0 and row in before))
    train(*LONG, *argv, code=2)
    assert f"{name} is not the one" in (said := error_line(capsys))
    assert said.endswith("differs): restore it, or choose another --run_dir")
    assert last.exists()
    damage_row(next(row for row in rows.tolist() if row >= 0 and row not in before))
    train(*LONG, *argv)
    said = capsys.readouterr().err
    assert f"{name} is not the one" in said
    assert "resuming at round 2 from" in said
    assert lines(directory) == lines(undisturbed)
    assert lasting(directory) == lasting(undisturbed)


def test_two_damaged_checkpoints_are_refused(refused: Refused, cut_off: Path) -> None:
    for name in ("last", "last.previous"):
        damage(cut_off / "checkpoint" / f"{name}.safetensors")
    refused("nor is there one before it", *LONG)


def test_a_best_model_found_after_the_checkpoint_does_not_reach_the_resumed_run(
    whole: Path, train: Train, cut: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round that was lost had scored best; done again it does not (as on another device, say)."""
    real = recorder.Recorder.evaluated

    def flattered(self: recorder.Recorder, step: int, metrics: Any, model: Any) -> None:
        real(self, step, metrics, model)
        if step == 2:
            zeros = {name: torch.zeros_like(tensor) for name, tensor in self.best.weights.items()}
            self.best = Best(2, -1.0, self.best.val, zeros)

    with monkeypatch.context() as patch:
        patch.setattr(recorder.Recorder, "evaluated", flattered)
        directory = cut(dies_in=2)  # after the checkpoint of step 2 and the scoring that follows it
    train(*LONG)
    assert lasting(directory) == lasting(whole)


def test_another_data_file_is_refused_and_a_copy_is_not(
    train: Train,
    refused: Refused,
    cut_off: Path,
    mini_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = tmp_path / "other.hdf5"
    write_mini(other, replace(TINY, seed=1))
    refused("has a run on other data", *LONG, f"--data_path={other}")
    copy = Path(shutil.copy(mini_file, tmp_path / "copy.hdf5"))
    train(*LONG, f"--data_path={copy}")
    assert "resuming at round 4" in capsys.readouterr().err
    train(*LONG, f"--data_path={other}", code=2)  # nor are its results shown as those of other data
    assert len(results(cut_off)["data_sha256"]) == 64


def test_a_data_file_that_was_changed_in_place_is_refused(
    train: Train, cut: Train, mini_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It still states the fingerprint that the run began with."""
    copy = Path(shutil.copy(mini_file, tmp_path / "copy.hdf5"))
    cut(f"--data_path={copy}", dies_in=2)
    for column in (
        "labels_indices",
        "fine_grained_labels_indptr",
        "user_ids",
        "user_offsets",
        "image_crc32",
    ):
        shutil.copy(mini_file, copy)
        with h5py.File(copy, "r+") as file:
            data = file[f"train/{column}"]
            data[:2] = data[:2][::-1]
        capsys.readouterr()
        train(*LONG, f"--data_path={copy}", code=2)
        assert error_line(capsys) == (
            f"error: {copy} is damaged: train/{column} does not match its checksum; make it again with the "
            "command that made it (download_preprocess or dataset.convert), or check it with "
            f"python -m dataset.store {copy}"
        )


def test_metrics_that_were_changed_under_a_checkpoint_are_refused(
    train: Train, refused: Refused, cut_off: Path
) -> None:
    metrics = cut_off / "metrics.jsonl"
    content = metrics.read_bytes()
    for changed in (content[:20], content.replace(b'"round": 1', b'"round": 7'), b""):
        metrics.write_bytes(changed)
        refused("metrics.jsonl does not belong to", *LONG)
    metrics.write_bytes(content + b'{"round": 5, "sec')  # a line that a kill cut off
    train(*LONG)
    assert [line["round"] for line in lines(cut_off)] == list(range(7))


@pytest.mark.parametrize("name", ["config.yaml", "results.json", "checkpoint/data.json"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[1, 2", b"- 1", b"{}"], ids=repr)
def test_a_damaged_small_file_is_named_in_one_line(
    name: str, content: bytes, short: Path, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(shutil.copytree(short, tmp_path / "run"))
    (directory / name).write_bytes(content)
    capsys.readouterr()
    if (name, content) == ("results.json", b"{}"):  # no results of this config: they are made again
        train(*SHORT)
        assert results(directory)["model_sha256"]
        return
    train(*SHORT, code=2)
    said = error_line(capsys)
    assert str(directory) in said


def test_the_run_directory_is_left_when_two_want_it(
    refused: Refused, cut_off: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (cut_off / "metrics.jsonl").read_bytes()

    def taken(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "taken")

    monkeypatch.setattr(fcntl, "flock", taken)
    refused("is in use by another process", *LONG)
    assert (cut_off / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda n: n.name)
def test_a_signal_finishes_the_round_and_the_run_goes_on_as_if_nothing_had_been(
    number: signal.Signals,
    whole: Path,
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Slurm's pre-emption; in a round after which no checkpoint was due."""
    argv = (*LONG, "--runtime.checkpoint_every=100")
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(PflLoop, "round", signalled(number, 1, times=1))
        directory = train(*argv, code=75)
    assert said(capsys) == [
        f"{number.name}: stopping after this round; a second signal stops at once",
        f"stopped by {number.name}, 2 of 6 rounds are done and {directory}/checkpoint/last.safetensors was "
        "saved; run the same command again to continue",
    ]
    assert [line["round"] for line in lines(directory)] == [0, 1]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    train(*argv)
    assert "resuming at round 2" in capsys.readouterr().err
    assert lines(directory) == lines(whole)
    assert lasting(directory) == lasting(whole)


def signalled(number: int, in_round: int, times: int) -> Callable[..., Any]:
    """Rounds of training, in one of which signals come."""
    real = PflLoop.round

    def call(self: PflLoop, state: Any, round_number: int) -> Any:
        done = real(self, state, round_number)
        if round_number == in_round:
            for _ in range(times):
                os.kill(os.getpid(), number)
        return done

    return call


def test_a_signal_to_another_worker_alone_stops_this_one_too(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where only the machine of some workers is taken away."""
    monkeypatch.setattr("benchmarks.core.recorder.from_any", lambda mine: mine or signal.SIGTERM)
    directory = train("--runtime.checkpoint_every=100", code=75)
    assert "stopped by SIGTERM, 1 of 3 rounds are done and" in capsys.readouterr().err
    assert checkpoint.load(directory / "checkpoint" / "last.safetensors")[1]["step"] == 1


def test_a_second_signal_abandons_the_round(
    whole: Path, train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(PflLoop, "round", signalled(signal.SIGTERM, 3, times=2))
        directory = train(*LONG, code=75)
    assert "the current round is lost" in capsys.readouterr().err
    assert [line["round"] for line in lines(directory)] == [0, 1, 2]
    train(*LONG)
    assert lasting(directory) == lasting(whole)


def test_a_signal_before_the_first_round_stops_at_once(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def early(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "finished", early)
        train(*SHORT, code=75)
    assert capsys.readouterr().err == "stopped by SIGTERM; run the same command again to continue\n"
    train(*SHORT)


def test_a_full_disk_is_named_and_the_checkpoints_are_whole(
    whole: Path, train: Train, mini_file: Path, tmp_path: Path
) -> None:
    """On a real small disk: a third checkpoint does not fit beside two."""
    disk, saved = tmp_path / "disk", tmp_path / "run"
    disk.mkdir()
    argv = [*SMALL, *LONG, "--runtime.checkpoint_every=1", "--config=fl-r-17", f"--data_path={mini_file}"]
    argv.append("--runtime.threads=1")  # as in this process: other numbers of threads round otherwise
    room = 5 * (whole / "checkpoint" / "last.safetensors").stat().st_size // 2
    words = ("tests.benchmarks.core.small_disk", str(disk), str(room), str(saved), *argv)
    process = launching.start(launching.warmly(*words))
    output = launching.finish(process)
    if process.returncode == NO_MOUNTS:
        pytest.skip("this machine allows no private mounts of a tmpfs")
    assert process.returncode == 2, output
    (line,) = [line for line in output.splitlines() if "error: " in line]
    assert "checkpoint/last.safetensors cannot be written" in line
    assert "No space left on device" in line
    assert checkpoint.load(saved / "checkpoint" / "last.safetensors")[1]["step"] == 2
    assert checkpoint.load(saved / "checkpoint" / "last.previous.safetensors")[1]["step"] == 1
    assert not list(saved.rglob("*.partial"))
    assert lasting(train(*LONG)) == lasting(whole)  # room was made: it goes on
