"""Runs of SCAFFOLD and FedDyn: they are killed and go on, are shared out among workers, or refused.

test_control_runs DATA DIRECTORY          trains them, as one of the workers of a launcher
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pfl_ext as pfl_ext  # before pfl, see there

# isort: split
import pytest
import torch

from benchmarks.core.execute import execute
from benchmarks.flair.config import parse
from benchmarks.flair.train import Flair
from pfl_ext import checkpoint
from pfl_ext.algorithms import feddyn, scaffold
from pfl_ext.algorithms.user_vectors import UserVectors
from pfl_ext.workers.distributed import connected
from tests.benchmarks.conftest import Train, killed_at
from tests.benchmarks.core.worker_runs import SMALL
from tests.benchmarks.run_files import error_line, lines, results, timeless
from tests.benchmarks.sparing import sparingly
from tests.launching import command, run

FEDDYN = ("--federated.algorithm=feddyn", "--federated.options.alpha=0.1")
RUNS = {
    "scaffold": ("--federated.algorithm=scaffold",),
    "feddyn": FEDDYN,
    "feddyn, idle": (*FEDDYN, "--runtime.engine=stock", "--federated.cohort_size=1"),
}
"""In the last one a worker has no user, in pfl's loop."""
FILES = {"scaffold": scaffold.CONTROLS, "feddyn": feddyn.FILE}


def test_feddyn_is_killed_and_goes_on_bit_for_bit(train: Train) -> None:
    """On the engine; by pfl's loop users keep and send the same."""
    argv = (*FEDDYN, "--runtime.engine=fast", "--federated.num_rounds=4", "--runtime.checkpoint_every=1")
    whole = train(*argv, name="whole")
    with killed_at(2):
        directory = train(*argv, code=130)
    assert len(lines(directory)) == 2
    train(*argv)
    assert timeless(directory) == timeless(whole)
    for key in ("model_sha256", "val", "test", "last", "traffic"):
        assert results(directory)[key] == results(whole)[key]
    kept, again = (checkpoint.load(d / "checkpoint" / "last.safetensors")[0] for d in (whole, directory))
    for name in ("algorithm/c", "algorithm/digests"):
        assert torch.equal(kept[name], again[name])
        assert kept[name].any()
    size = sum(w.numel() * 4 for w in checkpoint.part(kept, checkpoint.MODEL).values())
    assert results(whole)["traffic"] == {"down": size, "up": size}


def trained(data: Path, directory: Path, names: Sequence[str] = tuple(RUNS)) -> None:
    """A run of each."""
    for name in names:
        argv = [*SMALL, "--config=fl-r-17", "--runtime.engine=fast", *RUNS[name]]
        with sparingly():
            execute(parse([*argv, f"--run_dir={directory / name}"]), data, Flair)


def held(directory: Path, file: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The last checkpoint, and the vectors of the users who have one, ``[n, P]``."""
    tensors, _ = checkpoint.load(directory / "checkpoint" / "last.safetensors")
    server, rows = tensors["algorithm/c"], tensors["algorithm/rows"]
    users = UserVectors(len(rows), len(server), directory / "checkpoint" / file)
    users.load(checkpoint.part(tensors, "algorithm/"))
    read = (users.read(user) for user in torch.nonzero(rows >= 0).flatten().tolist())
    return tensors, torch.stack([torch.tensor(row) for row in read])


def test_two_workers_hold_what_one_does(mini_file: Path, tmp_path: Path) -> None:
    """One of the runs was begun by one worker."""
    trained(mini_file, tmp_path / "1")
    with killed_at(2), pytest.raises(KeyboardInterrupt):
        trained(mini_file, tmp_path / "2", ["feddyn"])
    words = ("tests.benchmarks.core.test_control_runs", str(mini_file), str(tmp_path / "2"))
    run(command("torchrun", 2, *words))
    for name in RUNS:
        file = FILES[name.partition(",")[0]]
        (one, alone), (other, together) = (held(tmp_path / workers / name, file) for workers in "12")
        assert alone.any()
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
        assert torch.equal(one["algorithm/rows"] >= 0, other["algorithm/rows"] >= 0)
        for key, tensor in one.items():
            if key.startswith("model/") or key == "algorithm/c":
                torch.testing.assert_close(other[key], tensor, rtol=1e-4, atol=1e-5)
        assert len(lines(tmp_path / "2" / name)[2]["worker_seconds"]) == 2


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--federated.options.alpha=0"], "federated.options.alpha is '0': "),
        (["--federated.options.max_state_gb=0.0001"], " GB on disk, above federated.options.max_state_gb"),
        (["--federated.mu=0.1"], "--federated.mu has no effect where federated.algorithm is feddyn"),
        (["--federated.max_state_gb=1"], "--federated.max_state_gb has no effect where"),
        (["--federated.replacement=true"], "FedDyn keeps one vector for each user, so a user must not be"),
        (["--federated.sampling=proportional"], "FedDyn's server keeps the mean over users, so all users"),
        (["--compression.kind=sign"], "compression.kind is sign, but federated.algorithm feddyn does not"),
        (
            ["--aggregation.kind=median"],
            "aggregation.kind is median, but federated.algorithm feddyn does not",
        ),
        (["--attack.kind=boost"], "attack.kind is boost, but federated.algorithm feddyn does not support"),
        (["--config=pfl-r-17"], "privacy refuses federated.algorithm = feddyn"),
        (
            ["--federated.weighting=users", "--local_privacy.epsilon=4"],
            "local_privacy refuses federated.algo",
        ),
        (["--runtime.reduce=bf16"], "--runtime.reduce has no effect where federated.algorithm is feddyn"),
        (["--runtime.tune=true"], "--runtime.tune has no effect where federated.algorithm is feddyn"),
    ],
)
def test_what_feddyn_cannot_do_is_refused_in_one_line(
    argv: list[str], message: str, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--federated.algorithm=feddyn", *argv, code=2)
    assert message in error_line(capsys)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with connected("auto", threads=1, timeout=60):
        trained(Path(sys.argv[1]), Path(sys.argv[2]))
