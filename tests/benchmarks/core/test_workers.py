"""Real jobs of several workers, by both launchers: they compute what one does, and end when one is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.core.recorder import AVERAGE
from benchmarks.flair.train import main
from dataset.cli import run as run_command
from pfl_ext import checkpoint
from pfl_ext.checkpoint import MODEL
from tests.benchmarks.conftest import Refused
from tests.benchmarks.core.worker_runs import FRESH, LOST_BY, LOST_IN, ROUNDS, RUNS, SMALL
from tests.benchmarks.run_files import last_checkpoint, lines
from tests.benchmarks.sparing import sparingly
from tests.launching import LAUNCHERS, alive, command, environment, needs_horovod, run

Job = tuple[Path, str]
TIMEOUT_S = 8.0
TOLERANCE = {"fl": 1e-6, "pfl": 1e-6, "fl32": 1e-4, "fast": 1e-6, "views": 1e-6}
"""Bounds for parameters after the last round. With float64 sums they agree to the bit; the fast engine groups
a cohort's users in the same way whoever trains them."""


OF_HOROVOD = ("fl", "pfl", "secret")
"""What differs between launchers is how workers send: sums in float64, and noise that worker 0 draws."""


def start_runs(launcher: str, workers: int, data: Path, directory: Path) -> Job:
    """`RUNS` by so many workers, for Horovod's those of `OF_HOROVOD`; where, and what was printed.

    Of torchrun's workers the second is a fresh interpreter: they compute the same although they hash strings
    differently.
    """
    directory.mkdir()
    names = ",".join(OF_HOROVOD if launcher == "horovod" else RUNS)
    words = ("tests.benchmarks.core.worker_runs", str(data), str(directory), names)
    return directory, run(command(launcher, workers, *words), 0, **{FRESH: "1"})


@pytest.fixture(scope="session")
def alone(mini_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The runs of one worker, under torchrun."""
    return start_runs("torchrun", 1, mini_file, tmp_path_factory.mktemp("workers") / "alone")


def parameters(directory: Path) -> dict[str, torch.Tensor]:
    """The model after the last round, and the average over rounds of a run that has one."""
    tensors = last_checkpoint(directory)
    return {name: tensor for name, tensor in tensors.items() if name.startswith((MODEL, AVERAGE))}


def distance(one: Path, other: Path, by_tensor: bool = True) -> float:
    """Relative difference of two last checkpoints, by norm: of the worst tensor, or of all as one vector."""
    a, b = parameters(one), parameters(other)
    assert a.keys() == b.keys()
    apart = torch.stack([(a[name].double() - b[name].double()).norm() for name in a])
    size = torch.stack([a[name].double().norm() for name in a])
    return float((apart / size.clamp(min=1e-12)).max() if by_tensor else apart.norm() / size.norm())


def notes(directory: Path, name: str, workers: int) -> list[Any]:
    """What each worker wrote of a run."""
    return [json.loads((directory / f"{name}-{rank}.json").read_text()) for rank in range(workers)]


@pytest.mark.xdist_group("workers")
@pytest.mark.parametrize(
    ("launcher", "workers"),
    [("torchrun", 1), ("torchrun", 2), pytest.param("horovod", 4, marks=needs_horovod)],
)
def test_any_number_of_workers_computes_the_same(
    launcher: str, workers: int, alone: Job, mini_file: Path, tmp_path: Path
) -> None:
    """Cohorts, crops and noise to the bit, parameters after the last round within `TOLERANCE`."""
    first, _ = alone
    if (launcher, workers) == ("torchrun", 1):
        directory, output = alone
    else:
        directory, output = start_runs(launcher, workers, mini_file, tmp_path / "job")
    names = OF_HOROVOD if launcher == "horovod" else tuple(RUNS)
    for name in names:
        noted = notes(directory, name, workers)
        trained = Counter(user for worker in noted for user in worker["users"])
        assert set(trained.values()) == {1}, "a user was trained by two workers in one round"
        assert all(worker["noise"] == noted[0]["noise"] for worker in noted)
        if name != "secret":
            (reference,) = notes(first, name, 1)
            assert {u: crc for worker in noted for u, crc in worker["users"].items()} == reference["users"]
            assert noted[0]["noise"] == reference["noise"]
            assert distance(first / name, directory / name, name != "fl32") < TOLERANCE[name]
            for got, expected in zip(lines(directory / name), lines(first / name), strict=True):
                assert (got.get("users"), got.get("images")) == (
                    expected.get("users"),
                    expected.get("images"),
                )
                if "val" in expected:
                    assert got["val"]["loss"] == pytest.approx(expected["val"]["loss"], rel=1e-3)
        if (launcher, workers) == ("torchrun", 2):
            assert noted[0]["hash"] != noted[1]["hash"], "they are no fresh interpreters"
    assert len(notes(directory, "pfl", 1)[0]["noise"]) == ROUNDS
    if directory != first:
        assert notes(directory, "secret", 1)[0]["noise"] != notes(first, "secret", 1)[0]["noise"]
    assert output.count("run directory:") == len(names), "one worker prints, once"
    if workers > 1:
        assert output.count("process ") == workers, "the map of workers and devices"
        assert all(len(line["worker_seconds"]) == workers for line in lines(directory / "fl")[:ROUNDS])


class Running:
    """A job of two workers whose output goes to a file."""

    def __init__(self, launcher: str, words: tuple[str, ...], log: Path, sent: signal.Signals) -> None:
        self._log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command(launcher, 2, "tests.benchmarks.core.worker_runs", *words),
                env=environment(**{LOST_BY: str(int(sent))}),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """So far."""
        return self._log.read_text()

    def pids(self) -> list[int]:
        """The process ids of the two workers, which they printed at the start."""
        found = dict(re.findall(r"worker (\d): .* process (\d+)", self.output))
        return [int(found["0"]), int(found["1"])]


@pytest.fixture
def running(launcher: str, sent: signal.Signals, mini_file: Path, tmp_path: Path) -> Iterator[Running]:
    """The run "fl" of two workers, one of which is lost by this signal; what is left of it is killed."""
    words = (*SMALL, *RUNS["fl"], f"--data_path={mini_file}", f"--run_dir={tmp_path / 'run'}")
    words = (*words, f"--runtime.worker_timeout_s={TIMEOUT_S}")
    job = Running(launcher, words, tmp_path / "log", sent)
    yield job
    if job.process.poll() is None:
        os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()


@pytest.mark.xdist_group("workers")
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_lost_worker_ends_the_job_and_the_run_is_taken_up_again(
    running: Running, sent: signal.Signals, alone: Job, mini_file: Path, tmp_path: Path
) -> None:
    last = tmp_path / "run" / "checkpoint" / "last.safetensors"
    assert running.process.wait(300) != 0  # torchrun gives a worker that does not end 30 s more
    pids, output = running.pids(), running.output
    if sent == signal.SIGSTOP:
        assert (
            f"error: worker 1 ({os.uname().nodename}, process {pids[1]}) has not been heard of for 8 s"
            in output
        )
    else:
        assert re.search(r"error: worker 1 \(|rank +: 1 |Process 1 exit with status code 137", output)
    deadline = time.monotonic() + 40
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, pids)), "a worker outlives its job"
    _, state = checkpoint.load(last)
    assert state["step"] in (LOST_IN, LOST_IN + 1)
    words = [*SMALL, *RUNS["fl"], f"--data_path={mini_file}", f"--run_dir={tmp_path / 'run'}"]
    with sparingly():
        assert run_command(main, words) == 0
    assert distance(alone[0] / "fl", tmp_path / "run") < 1e-6
    assert [line["round"] for line in lines(tmp_path / "run")] == list(range(ROUNDS + 1))


def test_what_several_workers_cannot_do_is_refused(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.core.execute.current", lambda: "others")
    refused("centralised training runs in a single process", "--config=c-r-17")
    monkeypatch.undo()
    monkeypatch.setattr("benchmarks.core.federated.current", lambda: "others")
    refused(
        "fedgkt has one server, which trains in one process", "--federated.algorithm=fedgkt", name="fedgkt"
    )
