"""Train a setting several times as one of the workers of a launcher, noting what each worker did.

    worker_runs DATA DIRECTORY NAMES
    worker_runs ARGUMENTS...

One launch for several runs, ``NAMES`` of `RUNS` with commas between: FL by pfl's loop with float64 sums (and
an average over rounds) and with float32 sums, FL with dropout, changed and mixed images by the
fast engine, FL on features of augmented views, PFL, and PFL with secret noise. ``DIRECTORY/<run>/`` are the
run directories. ``DIRECTORY/<run>-<rank>.json`` hold what each did: ``{"round user": checksum of the pixels,
labels, order and crops that trained it}`` where pfl's loop trains, the checksums of the noise that was added,
and how this interpreter hashes a word. With `FRESH` in the environment worker 1 begins again as an
interpreter of its own, which hashes otherwise than worker 0.

With `LOST_BY` in the environment it is the training command with these arguments, whose worker 1 sends that
signal to itself in the round `LOST_IN`, after the checkpoint of the round before.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dataset import process

if __name__ == "__main__":
    process.begin()

import pfl_ext as pfl_ext  # before pfl, see there

# isort: split
import torch

from benchmarks.core.execute import execute
from benchmarks.core.recorder import Recorder
from benchmarks.flair.config import parse
from benchmarks.flair.train import Flair
from benchmarks.flair.train import main as train
from dataset.cli import run as run_command
from pfl_ext.data import federated_dataset, user_images
from pfl_ext.privacy import banded, mechanisms
from pfl_ext.workers.distributed import connected, current
from tests.benchmarks.sparing import sparingly

ROUNDS, LOST_IN = 3, 1
LOST_BY, FRESH = "WORKER_LOST_BY", "WORKER_FRESH"
SMALL = (
    "--data.image_size=20",
    "--model.input_size=16",
    "--model.arch=lenet",
    "--local.learning_rate=0.05",
    f"--federated.num_rounds={ROUNDS}",
    "--federated.cohort_size=5",
    "--evaluation.every_rounds=3",
    "--runtime.checkpoint_every=1",
    "--runtime.keep_checkpoints=true",
    "--runtime.progress=false",
    "--runtime.threads=1",
    "--runtime.accumulate=fp64",
    "--runtime.engine=stock",
)
PRIVATE = (
    "--config=pfl-r-17",
    "--privacy.epsilon=50",
    "--privacy.delta=0.01",
    "--privacy.noise_cohort_size=10",
    "--privacy.indicator_std_fraction=0.5",
)
KEYED = (
    *("--augment.cutout=8", "--augment.color_jitter=0.4"),
    *("--augment.rand_augment=9", "--augment.random_erasing=0.5"),
    *("--augment.noise=0.1", "--augment.noise_by_user=true"),
)
MIXING = ("--augment.mixup=0.5", "--augment.cutmix=1")
FAST = ("--config=fl-r-17", "--runtime.engine=fast")
RUNS = {
    "fl": ("--config=fl-r-17", "--evaluation.average=swa"),
    "fl32": ("--config=fl-r-17", "--runtime.accumulate=fp32"),
    "fast": (*FAST, "--model.arch=simple_cnn", "--model.dropout=true", *KEYED, *MIXING),
    "views": ("--config=fl-r-17", "--runtime.engine=fast", "--model.trained=head", "--augment.views=2"),
    "pfl": (*PRIVATE, "--seed=1"),
    "secret": PRIVATE,
}


class Notes:
    """Wrapped around what feeds local training and around what draws noise."""

    def __init__(self) -> None:
        self.users: dict[str, int] = {}
        self.noise: list[int] = []
        self._round = -1

    def install(self) -> None:
        """Once a process."""
        noise, batches = mechanisms.gaussian_noise, user_images.UserImages.iter
        set_round = federated_dataset.FederatedImageDataset.set_round

        def noted_noise(*words: Any, **more: Any) -> torch.Tensor:
            drawn = noise(*words, **more)
            self.noise.append(zlib.crc32(drawn.numpy().tobytes()))
            return drawn

        def noted_round(data: Any, number: int) -> None:
            self._round = number
            set_round(data, number)

        def noted_batches(user: Any, batch_size: int | None) -> Iterator[Any]:
            for batch in batches(user, batch_size):
                key = f"{self._round} {user.user_id}"
                for tensor in batch:
                    self.users[key] = zlib.crc32(tensor.numpy().tobytes(), self.users.get(key, 0))
                yield batch

        banded.gaussian_noise = noted_noise  # type: ignore[attr-defined]
        federated_dataset.FederatedImageDataset.set_round = noted_round  # type: ignore
        user_images.UserImages.iter = noted_batches  # type: ignore


def main(data: Path, directory: Path, names: Sequence[str]) -> None:
    """These of `RUNS`, one after the other."""
    notes = Notes()
    notes.install()
    torch.set_num_threads(1)
    with connected("auto", threads=1, timeout=60):
        workers = current()
        rank = 0 if workers is None else workers.global_rank
        for name in names:
            notes.users, notes.noise = {}, []
            run = parse([*SMALL, *RUNS[name], f"--run_dir={directory / name}"])
            with sparingly():
                execute(run, data, Flair)
            text = json.dumps({"users": notes.users, "noise": notes.noise, "hash": hash("word")})
            (directory / f"{name}-{rank}.json").write_text(text)


def lose_worker_1(sent: int) -> None:
    """Have this process, if it is worker 1, send itself this signal in the round `LOST_IN`."""
    real = Recorder.step_done

    def losing(self: Recorder, step: int, values: Mapping[str, Any], state: Any) -> None:
        workers = current()
        if step == LOST_IN and workers is not None and workers.global_rank == 1:
            os.kill(os.getpid(), sent)
        real(self, step, values, state)

    Recorder.step_done = losing  # type: ignore[method-assign]


if __name__ == "__main__":
    if LOST_BY in os.environ:
        lose_worker_1(int(os.environ[LOST_BY]))
        sys.exit(run_command(train, sys.argv[1:]))
    if os.environ.get("RANK") == "1" and os.environ.pop(FRESH, ""):
        os.execv(sys.executable, [sys.executable, "-m", "tests.benchmarks.core.worker_runs", *sys.argv[1:]])
    process.imported()
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(","))
    process.ends(0)
