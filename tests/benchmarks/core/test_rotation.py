"""A benchmark that is new to the house (`tests.benchmarks.core.rotation`) gets all that the others have.

test_rotation DATA DIRECTORY...          trains it into each, as one of the workers of a launcher
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.core.execute import execute
from benchmarks.core.recorder import Recorder
from dataset.flair.mini import MiniSpec, write_mini
from dataset.store.hdf5 import DataFile
from pfl_ext import checkpoint
from pfl_ext.workers.distributed import connected, is_main
from tests.benchmarks.core import rotation
from tests.benchmarks.core.rotation import Rotation, Turn
from tests.benchmarks.run_files import error_line, last_checkpoint, lines, results
from tests.benchmarks.sparing import run_into, sparingly
from tests.closeness import assert_close_as_vector
from tests.launching import command, finish, run, start
from tests.pfl_ext.engine.setting import NoisyStore, Setting, distance, rounding_of
from tests.pfl_ext.samplings import local_sampling

SPEC = MiniSpec(train_users=16, val_users=16, test_users=16, image_size=20, num_fine_labels=40)
DIES_AT = "ROTATION_DIES_AT"
"""Environment variable: the round of the last run after which worker 0 kills itself."""
QUIET = ("--runtime.progress=false", "--runtime.threads=1")
SHORT = (
    *QUIET,
    "--model.arch=lenet",  # which does not learn the task, in a quarter of the time
    "--runtime.checkpoint_every=1",
    "--runtime.keep_checkpoints=true",
    "--federated.num_rounds=3",
    "--federated.cohort_size=4",
    "--evaluation.every_rounds=2",
)
PRIVATE = (
    "--seed=1",
    "--federated.weighting=users",
    "--privacy.epsilon=50",
    "--privacy.delta=0.01",
    "--privacy.mechanism=gaussian",
    "--privacy.clipping_bound=0.5",
)


BY_TWO = (*SHORT, *PRIVATE, "--runtime.accumulate=fp64")


def main(data: Path, directories: Sequence[str]) -> None:
    """The runs of two workers, one after the other; in the last, worker 0 may kill itself by SIGKILL."""
    real, last = Recorder.step_done, int(os.environ.get(DIES_AT, -1))

    def dying(self: Recorder, step: int, values: Mapping[str, Any], state: Any) -> None:
        real(self, step, values, state)
        if step == last and is_main() and str(self.files.path) == directories[-1]:
            os.kill(os.getpid(), signal.SIGKILL)

    Recorder.step_done = dying  # type: ignore[method-assign]
    with connected("auto", threads=1, timeout=60), sparingly():
        for directory in directories:
            execute(Rotation.benchmark.parse([*BY_TWO, f"--run_dir={directory}"]), data, Rotation)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rotation") / "images.hdf5"
    write_mini(path, SPEC)
    return path


def train(file: Path, directory: Path, *argv: str, code: int = 0, draw: bool = False) -> Path:
    """In this process, `sparingly`; the run directory."""
    return run_into(rotation.main, directory, f"--data_path={file}", *argv, code=code, draw=draw)


def train_by_two(file: Path, *directories: Path) -> list[str]:
    """The command that trains it by two workers, into each of these."""
    return command("torchrun", 2, "tests.benchmarks.core.test_rotation", str(file), *map(str, directories))


def last_weights(directory: Path) -> dict[str, torch.Tensor]:
    tensors = last_checkpoint(directory)
    return {name: tensor for name, tensor in tensors.items() if name.startswith(checkpoint.MODEL)}


def test_all_of_it_is_under_120_lines() -> None:
    code = Path(rotation.__file__)
    assert sum(len(path.read_text().splitlines()) for path in (code, code.with_suffix(".yaml"))) < 120


def test_fedavg_learns_it_on_the_fast_engine(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = train(file, tmp_path / "run", *QUIET, draw=True)
    assert "pfl's own loop" not in results(directory)["arithmetic"]
    run_of = Rotation.benchmark.parse([])
    with DataFile(file) as data:
        turns = {
            name: Rotation(run_of, data).split(name).targets(np.arange(SPEC.users(name)))
            for name in ("train", "test")
        }
    by_the_mean = float(((turns["test"] - turns["train"].mean()) ** 2).mean())
    assert 0.2 < by_the_mean < 0.5
    assert results(directory)["test"]["loss"] < by_the_mean / 2
    assert results(directory)["test"]["within a tenth"] > 20  # 10 % by the mean
    assert "within a tenth" in capsys.readouterr().out


class Angles(NoisyStore):
    def read(self, rows: Any) -> tuple[Any, Any]:
        return super().read(rows)[0], np.sin(rows)[:, None].astype(np.float32)


def backbone() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(512, 1))
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(number))
    return net


def test_the_engine_trains_its_task_as_pfls_loop_does() -> None:
    sizes = [1, 3, 9, 2]
    sampling = local_sampling(num_epochs=2, batch_size=4, input_size=10)
    setting = Setting(sizes, sampling, task=Turn(), store=Angles(sizes), backbone=backbone)
    assert distance(setting.run(True)[0], setting.run(False)[0]) <= rounding_of(setting)


def test_pfls_loop_trains_it_too(file: Path, tmp_path: Path) -> None:
    directory = train(file, tmp_path / "run", *SHORT, "--runtime.engine=stock")
    assert "pfl's own loop" in results(directory)["arithmetic"]


def test_two_private_workers_are_killed_and_go_on_to_the_bit(file: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = start(train_by_two(file, whole, killed), **{DIES_AT: "1"})
    output = finish(process)
    assert process.returncode != 0
    assert len(lines(whole)[0]["worker_seconds"]) == 2, output
    assert len(lines(killed)) == 2
    assert "resuming at round 2" in run(train_by_two(file, killed))
    for key in ("model_sha256", "val", "test", "last"):
        assert results(killed)[key] == results(whole)[key]
    timed = ("worker_seconds",)
    assert [{k: v for k, v in line.items() if k not in timed} for line in lines(killed)] == [
        {k: v for k, v in line.items() if k not in timed} for line in lines(whole)
    ]
    statement = checkpoint.read_json(killed / "privacy.json")
    assert statement["rounds_done"] == 3
    assert statement["seeded_for_research_only"]
    alone = train(file, tmp_path / "alone", *BY_TWO)
    assert_close_as_vector(
        last_weights(whole), last_weights(alone), 16
    )  # a sum in float64 is rounded once a round


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--data.most_degrees=-3"], "data.most_degrees is '-3': input should be greater than 0"),
        (["--evaluation.best_by=accuracy"], "choose one of loss, within a tenth, last"),
        ([*PRIVATE, "--federated.algorithm=fednova"], "privacy refuses federated.algorithm = fednova"),
        (
            ["--federated.algorithm=fedma", "--federated.num_rounds=5", "--evaluation.best_by=last"],
            "fedma averages the last layer by how many images of each class a user has, and these",
        ),
        (
            ["--federated.algorithm=fed3r", "--model.trained=head", "--evaluation.best_by=last"],
            "Fed3R computes a head for labels, and these annotations are other numbers: choose another",
        ),
    ],
)
def test_what_means_nothing_is_refused_in_one_line(
    argv: list[str], message: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(file, tmp_path / "run", *argv, code=2)
    assert message in error_line(capsys)
    assert not (tmp_path / "run").exists()


def test_its_own_key_is_refused_in_private_runs_unless_argued(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation.Config, "privacy_rules", {})
    train(file, tmp_path / "run", *PRIVATE, code=2)
    assert "privacy refuses data.most_degrees: nobody has argued" in error_line(capsys)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
