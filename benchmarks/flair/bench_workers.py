"""How many workers pay: throughput of real jobs, the schedule's balance, and a simulated curve to 64 workers.

    python -m benchmarks.flair.bench_workers throughput --workers 1 2 --launcher torchrun --repeats 3
    python -m benchmarks.flair.bench_workers throughput --workers 1 2 4 8 --data_path F   # 8 GPUs
    python -m benchmarks.flair.bench_workers times --output times.json
    python -m benchmarks.flair.bench_workers simulate --times times.json

``throughput`` runs the training command, the same rounds of the same users, with each number of workers in
turn (so that other load falls on all alike), and reports images a second and the efficiency beside the first.
``times`` trains users of many sizes by stock pfl on one thread. ``simulate`` plays cohorts from FLAIR's
histogram (the mini set at full scale) against those times: the schedule beside round-robin and pfl's greedy
weights, then rounds of 1 to 64 workers. Further words of ``throughput`` go to the training command.

Shape letters: U users of a cohort, W workers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.common_types import Population
from pfl.context import CentralContext
from pfl.hyperparam.base import NNTrainHyperParams

from benchmarks.core.experiment import build_model
from benchmarks.core.facts import commit, hardware
from benchmarks.core.federated import local_sampling, pfl_model
from benchmarks.flair.config import parse
from dataset.cli import OneLineParser, run
from dataset.files import write_json
from dataset.flair.mini import MiniSpec, mini_index
from pfl_ext.data.federated_dataset import LocalSampling, UserImages
from pfl_ext.data.schedule import fit, longest_first, lower_bound, makespan, round_robin
from pfl_ext.randomness import stream

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128)
WORKERS = (1, 2, 4, 8, 16, 32, 64)


def train_words(directory: str, more: Sequence[str]) -> list[str]:
    """The training command of one measured job: nothing but rounds."""
    words = [f"--run_dir={directory}", "--runtime.progress=false", "--evaluation.every_rounds=1000000"]
    return ["-m", "benchmarks.flair.train", *words, "--runtime.checkpoint_every=1000000", *more]


def launch(launcher: str, workers: int, words: Sequence[str]) -> list[str]:
    """The command that starts so many workers on this machine."""
    if launcher == "horovod":
        horovodrun = str(Path(sys.executable).parent / "horovodrun")
        return [horovodrun, "--gloo", "-np", str(workers), sys.executable, *words]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(workers),
    ]
    return [*torchrun, *words]


def images_per_second(directory: Path, skip: int) -> float:
    """Of the rounds after the first ``skip``, which warm up."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rounds = [line for line in lines if "seconds" in line][skip:]
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
        told = " ".join(f"{speed:.2f}" for speed in found)
        middle = statistics.median(found)
        print(f"{workers:7d}  {middle:17.2f}   {told:25s} {gain:7.2f}x  {100 * gain * base / workers:8.0f} %")


def measured_times(repeats: int, more: Sequence[str]) -> dict[str, list[float]]:
    """CPU seconds of pfl's own local training of users of `SIZES`, ``repeats`` each, on one thread."""
    torch.set_num_threads(1)
    task = parse(more)
    config, sampling, side = task.config, local_sampling(task.config), task.config.data.image_size
    module = build_model(config, 17, None)
    model, algorithm, params = pfl_model(task, module), FederatedAveraging(), NNAlgorithmParams(1, 1, 1, 1)
    local = NNTrainHyperParams(
        local_num_epochs=config.local.num_epochs,
        local_learning_rate=config.local.learning_rate,
        local_batch_size=config.local.batch_size,
    )
    context = CentralContext(
        current_central_iteration=0,
        do_evaluation=False,
        cohort_size=1,
        population=Population.TRAIN,
        model_train_params=local,
        model_eval_params=None,
        algorithm_params=params,
        seed=0,
    )
    rng = stream(0, "bench_workers")
    found: dict[str, list[float]] = {str(size): [] for size in SIZES}
    for repeat in range(repeats + 1):
        for size in SIZES if repeat else SIZES[:3]:  # warms up
            images = rng.integers(0, 256, (size, side, side, 3), np.uint8)
            targets = rng.integers(0, 2, (size, 17)).astype(np.uint8)
            began = time.process_time()
            algorithm.simulate_one_user(model, UserImages(images, targets, "user", sampling, rng), context)
            if repeat:
                found[str(size)].append(time.process_time() - began)
    return found


class Times:
    """Measured times of users by size: half of them to fit the cost, the other half as the truth."""

    def __init__(self, found: dict[str, list[float]], sampling: LocalSampling) -> None:
        self._sampling, self.cap = sampling, sampling.max_images or np.inf
        self._sizes = np.array([int(size) for size in found])
        self._truth = np.array([statistics.median(t[1::2]) for t in found.values()])
        fitted = np.array([statistics.median(t[0::2]) for t in found.values()])
        self.cost = fit(sampling.num_steps(self._sizes), sampling.image_passes(self._sizes), fitted)

    def predicted(self, sizes: IntArray) -> FloatArray:
        """``[U]`` seconds by the fitted cost."""
        return self.cost.predict(self._sampling.num_steps(sizes), self._sampling.image_passes(sizes))

    def true(self, sizes: IntArray) -> FloatArray:
        """``[U]`` measured seconds: lines between measured sizes, in proportion beyond the last."""
        n = np.minimum(sizes, self.cap)
        inside = np.interp(n, self._sizes, self._truth)
        beyond = self._truth[-1] * n / self._sizes[-1]
        return np.asarray(np.where(n > self._sizes[-1], beyond, inside), np.float64)


def cohorts(cohort_size: int, rounds: int) -> list[IntArray]:
    """Images of each user, of cohorts drawn from FLAIR's training users."""
    sizes = np.diff(mini_index(MiniSpec()).splits["train"].user_offsets)
    drawn = (stream(0, "bench_workers cohort", r) for r in range(rounds))
    return [sizes[rng.choice(len(sizes), cohort_size, replace=False)] for rng in drawn]


def balance(times: Times, drawn: Sequence[IntArray], workers: int) -> dict[str, list[float]]:
    """For each way to assign, the slowest worker over the best that any assignment can do, by round."""
    ways: dict[str, Callable[[IntArray], list[list[int]]]] = {
        "round-robin": lambda sizes: round_robin(sizes.astype(float), workers),
        "pfl's greedy": lambda sizes: longest_first(np.minimum(sizes, times.cap), workers),
        "ours": lambda sizes: longest_first(times.predicted(sizes), workers),
    }
    out: dict[str, list[float]] = {name: [] for name in ways}
    for sizes in drawn:
        true = times.true(sizes)
        for name, way in ways.items():
            out[name].append(makespan(way(sizes), true) / lower_bound(true, workers))
    return out


def reduction_seconds(workers: int, values: float, gigabytes_per_s: float, latency_us: float) -> float:
    """A ring's all-reduce of float32: 2 (W - 1) / W of the bytes over the slowest link, 2 (W - 1) hops."""
    hops = 2 * (workers - 1)
    return hops / workers * values * 4 / (gigabytes_per_s * 1e9) + hops * latency_us * 1e-6


def simulate(options: argparse.Namespace, more: Sequence[str]) -> None:
    """Print both tables."""
    stored = json.loads(options.times.read_text())
    times = Times(stored["seconds"], local_sampling(parse(more).config))
    drawn = cohorts(options.cohort_size, options.rounds)
    print(f"times: {stored['hardware']}; {stored['words']}; fitted: {times.cost}")
    print(
        f"slowest worker over the best that can be, {options.rounds} cohorts of {options.cohort_size} users:"
    )
    print("workers   round-robin         pfl's greedy         ours            (mean, largest)")
    for workers in WORKERS[1:]:
        cells = (f"{np.mean(r):6.3f} {max(r):6.3f}" for r in balance(times, drawn, workers).values())
        print(f"{workers:7d}   {'       '.join(cells)}")
    words = (options.speedup, options.values, options.gigabytes_per_s, options.latency_us, options.server_s)
    print(
        "\nsimulated rounds; assumed: users {:g} times as fast as measured, a ring's all-reduce of {:.3g} "
        "float32 at {:g} GB/s and {:g} us a hop, {:g} s a round on every worker for noise and the server; "
        "reading hidden by prefetch, evaluation left out".format(*words)
    )
    print("workers  round s   of which waiting   reduction   speed-up  efficiency")
    alone = 0.0
    for workers in WORKERS:
        slowest, mean = [], []
        for sizes in drawn:
            true = times.true(sizes) / options.speedup
            slowest.append(makespan(longest_first(times.predicted(sizes), workers), true))
            mean.append(float(true.sum()) / workers)
        reduction = reduction_seconds(workers, options.values, options.gigabytes_per_s, options.latency_us)
        total = float(np.mean(slowest)) + reduction + options.server_s
        alone = alone or total
        waiting, gain = float(np.mean(slowest)) - float(np.mean(mean)), alone / total
        told = f"{workers:7d}  {total:7.3f}   {100 * waiting / total:14.1f} %   {1e3 * reduction:6.1f} ms"
        print(f"{told}   {gain:7.2f}x  {100 * gain / workers:8.0f} %")


def main(argv: Sequence[str]) -> None:
    """One of the three."""
    parser = OneLineParser(prog="python -m benchmarks.flair.bench_workers", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="what", required=True)
    real = commands.add_parser("throughput")
    real.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    real.add_argument("--launcher", choices=["torchrun", "horovod"], default="torchrun")
    real.add_argument("--repeats", type=int, default=3)
    real.add_argument("--skip", type=int, default=1, help="first rounds that do not count")
    real.add_argument("--data_path", default="mini")
    measure = commands.add_parser("times")
    measure.add_argument("--repeats", type=int, default=4)
    measure.add_argument("--output", type=Path, required=True)
    play = commands.add_parser("simulate")
    play.add_argument("--times", type=Path, required=True)
    play.add_argument("--cohort_size", type=int, default=200)
    play.add_argument("--rounds", type=int, default=500)
    play.add_argument("--speedup", type=float, default=1.0)
    play.add_argument("--values", type=float, default=11.19e6)
    play.add_argument("--gigabytes_per_s", type=float, default=10.0)
    play.add_argument("--latency_us", type=float, default=20.0)
    play.add_argument("--server_s", type=float, default=0.0)
    options, more = parser.parse_known_args(argv)
    if options.what == "throughput":
        throughput(options, more)
    elif options.what == "times":
        found = measured_times(options.repeats, more)
        write_json(options.output, {"seconds": found, "hardware": hardware(), "words": " ".join(more)})
    else:
        simulate(options, more)


if __name__ == "__main__":
    sys.exit(run(main))
