"""How many workers pay on this machine: images a second of real training jobs.

    python -m benchmarks.flair.bench_workers throughput --workers 1 2 --launcher torchrun --repeats 3
    python -m benchmarks.flair.bench_workers throughput --workers 1 2 4 8 --data_path F   # 8 GPUs

The training command runs the same rounds of the same users with each number of workers in turn (so that other
load falls on all alike); the efficiency is beside the first number. Further words go to the training command.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.core.code_version import commit
from benchmarks.core.commands import command_parser
from benchmarks.core.facts import hardware
from benchmarks.reporting.runs import RunRecord
from dataset.cli import run


def train_words(directory: str, more: Sequence[str]) -> list[str]:
    """The training command of one measured job: nothing but rounds."""
    words = [f"--run_dir={directory}", "--runtime.progress=false", "--evaluation.every_rounds=1000000"]
    return ["-m", "benchmarks.flair.train", *words, "--runtime.checkpoint_every=1000000", *more]


def launch(launcher: str, workers: int, words: Sequence[str]) -> list[str]:
    """The command that starts so many workers on this machine."""
    if launcher == "horovod":
        horovodrun = str(Path(sys.executable).parent / "horovodrun")
        return [horovodrun, "--gloo", "-np", str(workers), sys.executable, *words]
    torchrun = f"-m torch.distributed.run --standalone --nproc_per_node {workers}"
    return [sys.executable, *torchrun.split(), *words]


def images_per_second(directory: Path, skip: int) -> float:
    """Images per second in the rounds after the first ``skip``, which warm up."""
    rounds = [line for line in RunRecord(directory).history if "seconds" in line][skip:]
    return float(sum(line["images"] for line in rounds) / sum(line["seconds"] for line in rounds))


def throughput(options: argparse.Namespace, more: Sequence[str]) -> None:
    """Measure, and print the table."""
    speeds: dict[int, list[float]] = {workers: [] for workers in options.workers}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for _ in range(options.repeats):
        for workers in options.workers:
            with tempfile.TemporaryDirectory(prefix="workers-") as directory:
                words = train_words(directory, [f"--data_path={options.data_path}", *more])
                subprocess.run(
                    launch(options.launcher, workers, words), check=True, env={**os.environ, "PATH": path},
                    stdout=subprocess.DEVNULL,
                )  # fmt: skip
                speeds[workers].append(images_per_second(Path(directory), options.skip))
    print(f"{options.launcher}, {hardware()}, commit {commit()}, load {os.getloadavg()[0]:.1f}")
    print(" ".join(more))
    print("workers  images/s (median)   each repeat               speed-up  efficiency")
    base = options.workers[0]
    for workers, found in speeds.items():
        gain = statistics.median(now / then for now, then in zip(found, speeds[base]))
        each = " ".join(f"{speed:.2f}" for speed in found)
        middle = statistics.median(found)
        print(f"{workers:7d}  {middle:17.2f}   {each:25s} {gain:7.2f}x  {100 * gain * base / workers:8.0f} %")


def main(argv: Sequence[str]) -> None:
    """Parse and measure."""
    parser = command_parser("flair.bench_workers", __doc__)
    parser.add_argument("what", choices=["throughput"])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--launcher", choices=["torchrun", "horovod"], default="torchrun")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip", type=int, default=1, help="first rounds that do not count")
    parser.add_argument("--data_path", default="mini")
    throughput(*parser.parse_known_args(argv))


if __name__ == "__main__":
    sys.exit(run(main))
