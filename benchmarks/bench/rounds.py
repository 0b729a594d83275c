"""How fast a round is: pfl's own loop and the fast engine side by side, round by round, in one process.

Both train the same cohorts from the same model and read the same file. Rounds alternate between the two; the
first is not counted. Where a time goes: ``data`` is waiting for images, ``training`` local steps,
``evaluation`` scoring a split, ``bookkeeping`` the rest, with lanes that wait for others; of the fast engine
on several lanes, the mean over lanes. A benchmark gives its cases.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from pfl.internal.ops.pytorch_ops import get_default_device
from pfl.postprocessor.base import Postprocessor

from benchmarks.core.code_version import commit
from benchmarks.core.config.benchmark import AnyRun, Run
from benchmarks.core.config.trees import Tree
from benchmarks.core.facts import hardware
from benchmarks.core.features import Inputs
from benchmarks.core.federated import run_context, setup, training_data
from benchmarks.reporting.plots import bench_bars
from dataset.arrays import ByteArray, IntArray
from dataset.cli import OneLineParser, output_file
from dataset.files import write_json
from pfl_ext.data.federated_dataset import ImageStore
from pfl_ext.data.user_images import Annotations
from pfl_ext.engine.watch import Watch
from pfl_ext.evaluation import CentralEvaluation
from pfl_ext.privacy.accounting import PrivacyConfig
from pfl_ext.privacy.central import private_mean

Item = TypeVar("Item")
PARTS = ("data", "training", "evaluation", "bookkeeping")
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # bf16, dense; makers' figures
STOCK = ("--runtime.engine=stock", "--runtime.prefetch=0", "--runtime.cache_gb=0")
"""Stock as pfl's users have it: float32, a read for each user when its turn comes."""


class AlikeUsers:
    """A store of users who all have the same images, so that reading them costs little.

    Args:
        users: U.
        images: of each user, ``[n, S, S, 3]``.
        annotations: ``[m, ...]``; the images of all users have them in turn.
    """

    def __init__(self, users: int, images: ByteArray, annotations: Annotations) -> None:
        self._images, self._annotations = images, annotations
        self.user_ids = [f"user-{u}" for u in range(users)]
        self.user_offsets: IntArray = np.arange(users + 1, dtype=np.int64) * len(images)

    @property
    def num_images(self) -> int:
        """The number of images of all users."""
        return int(self.user_offsets[-1])

    def read(self, rows: IntArray) -> tuple[ByteArray, Annotations]:
        """Images and annotations of these rows."""
        return self._images[np.asarray(rows) % len(self._images)], self.targets(rows)

    def targets(self, rows: IntArray) -> Annotations:
        """Annotations of these rows."""
        return self._annotations[np.asarray(rows) % len(self._annotations)]


@dataclass(frozen=True)
class Sides:
    """What is compared: two runs that differ in their runtime, and what both train on."""

    stock: AnyRun
    fast: AnyRun
    opened: Callable[[Run[Any]], Inputs]
    """The network that a run trains, and what it is fed with."""
    scored: str | None = None
    """A split that is scored every tenth round, a tenth of which is charged to each; None: no evaluation."""
    privacy: PrivacyConfig | None = None
    flops_of_an_image: float | None = None
    """FLOPs of a training pass on one image; for the model FLOP utilisation on a GPU."""


@dataclass
class Clock(Watch):
    """Seconds by part, added up over threads."""

    lanes: int = 1
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @contextmanager
    def charge(self, part: str) -> Iterator[None]:
        """Charge time to ``part``: the host's, which on a GPU runs ahead of the device's; also decorates."""
        begin = time.perf_counter()
        yield
        alone = threading.current_thread() is threading.main_thread()  # then no lane works beside it
        self.seconds[part] += (time.perf_counter() - begin) * (self.lanes if alone else 1)

    def iterator(self, part: str, items: Iterator[Item]) -> Iterator[Item]:
        """The same items; the time waited for each is charged to ``part``."""
        while True:
            with self.charge(part):
                found = list(islice(items, 1))
            if not found:
                return
            yield found[0]


class Side:
    """One engine with a model of its own, a round at a time."""

    def __init__(self, sides: Sides, run: AnyRun) -> None:
        inputs = sides.opened(run)
        store, module = inputs.split("train"), inputs.module
        self.data = training_data(run, store, module.task)
        evaluation = CentralEvaluation(
            inputs.split(sides.scored or "train"), threads=run.runtime.reader_threads
        )
        training = run_context(
            run, setup(run.config, module, self.data), evaluation, _mechanism(sides, run, store)
        )
        training = replace(training, tuner=None)  # what is compared is arranged in the same way
        self.engine, self.model = training.engine, training.model
        self.clock = Clock(1 if self.engine is None else len(self.engine.lanes))
        if self.engine is not None:
            self.engine.watch = self.clock
        self.times: list[float] = []
        """Seconds of each counted round."""
        self.peak_bytes = 0
        """Most bytes that tensors took on a GPU in a counted round; those of the other side lie there too."""
        self.cpu_times: list[float] = []
        """Seconds of all cores together for each counted round, which other work does not lengthen."""
        self._evaluate, self._algorithm = evaluation, run.config.federated.chosen.start(training)
        self._watch()

    def _watch(self) -> None:
        """Charge what the clock is to tell apart; reading on other threads is free unless waited for."""
        clock = self.clock
        self.model.do_multiple_epochs_of = clock.charge("training")(self.model.do_multiple_epochs_of)
        get_cohort = self.data.get_cohort
        self.data.get_cohort = lambda size: clock.iterator("data", get_cohort(size))  # type: ignore[method-assign, assignment]

    def round(self, number: int) -> None:
        """One round, as pfl's training loop goes about it; the first, which has number 0, is not counted."""
        on_gpu = get_default_device().type == "cuda"
        _synchronise()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        begin, cpu = time.perf_counter(), time.process_time()
        self._algorithm.round(self.model, number)
        _synchronise()
        if number:
            self.times.append(time.perf_counter() - begin)
            self.cpu_times.append(time.process_time() - cpu)
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated() if on_gpu else 0)
        else:
            self.clock.seconds = dict.fromkeys(PARTS, 0.0)

    def evaluation(self) -> float:
        """Seconds of scoring the split once."""
        begin = time.perf_counter()
        self._evaluate(self.model)
        _synchronise()
        return time.perf_counter() - begin

    def close(self) -> None:
        """Stop the engine's threads, if it has an engine."""
        if self.engine is not None:
            self.engine.close()

    def weights(self) -> torch.Tensor:
        """The trained parameters as one vector, in float32."""
        return torch.cat([p.detach().reshape(-1).float().cpu() for p in self.model.variable_map.values()])

    def summary(self, cohort: int, images: float, scoring: float) -> Tree:
        """A mean round with a part ``scoring`` of an evaluation: its seconds, speeds, and shares of time."""
        whole = float(np.mean(self.times)) + scoring
        lanes = {"data": self.clock.lanes, "training": self.clock.lanes}
        parts = {
            part: seconds / len(self.times) / lanes.get(part, 1)
            for part, seconds in self.clock.seconds.items()
        }
        parts["evaluation"] = scoring
        parts["bookkeeping"] = max(0.0, whole - sum(parts[p] for p in PARTS[:3]))
        return {
            "round_s": whole,
            "rounds_s": [round(s, 4) for s in self.times],
            "rounds_cpu_s": [round(s, 4) for s in self.cpu_times],
            "rounds_per_s": 1 / whole,
            "users_per_s": cohort / whole,
            "image_passes_per_s": images / whole,
            "share": {part: s / whole for part, s in parts.items()},
        }


def _mechanism(sides: Sides, run: AnyRun, store: ImageStore) -> Postprocessor | None:
    if sides.privacy is None:
        return None
    calibration = sides.privacy.calibrate(len(store.user_ids), run.config.federated.cohort_size, 1000)
    return private_mean(calibration, noise_seed=1, threads=os.cpu_count() or 1)


def _synchronise() -> None:
    if get_default_device().type == "cuda":
        torch.cuda.synchronize()


def measure(sides: Sides, rounds: int) -> Tree:
    """What both engines measure on one case; seconds, shares of them, and the ratio."""
    pair = {"stock": Side(sides, sides.stock), "fast": Side(sides, sides.fast)}
    stock, fast = pair.values()
    cohort, scoring = sides.fast.config.federated.cohort_size, dict.fromkeys(pair, 0.0)
    images, steps, before, deviation = 0, 0, stock.weights(), 0.0
    for number in range(rounds + 1):
        for name, side in pair.items():
            side.round(number)
            if sides.scored is not None and number <= 1:
                scoring[name] = side.evaluation() / 10
        if number == 0:
            gap, moved = fast.weights() - stock.weights(), stock.weights() - before
            deviation = float(gap.norm() / moved.norm())
            continue
        fast.data.set_round(number)
        members = fast.data.members(cohort)
        images += sum(m.num_passes for m in members)
        steps += sum(m.num_steps for m in members)
    fast.close()
    out: Tree = {
        "image_passes_a_round": images / rounds,
        "steps_a_round": steps / rounds,
        **({} if sides.privacy is None else {"private_over_plain": cost_of_privacy(sides, rounds)}),
        "deviation_of_the_models_first_move": deviation,  # after the server's optimiser, which magnifies it
        **{name: side.summary(cohort, images / rounds, scoring[name]) for name, side in pair.items()},
        "ratio_of_each_round": [round(a / b, 3) for a, b in zip(stock.times, fast.times)],
        "cpu_ratio_of_each_round": [round(a / b, 3) for a, b in zip(stock.cpu_times, fast.cpu_times)],
        "peak_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }
    out["ratio"] = out["stock"]["round_s"] / out["fast"]["round_s"]
    if get_default_device().type == "cuda":
        _measure_card(out, pair, sides.flops_of_an_image)
    return out


def _measure_card(out: Tree, pair: Mapping[str, Side], flops_of_an_image: float | None) -> None:
    """Add the memory of a card that both engines used, and the share of its arithmetic."""
    out["peak_memory_gb"] = max(side.peak_bytes for side in pair.values()) / 1e9
    out["reserved_memory_gb"] = torch.cuda.max_memory_reserved() / 1e9
    card = torch.cuda.get_device_name()
    peak = next((flops for key, flops in PEAK_FLOPS.items() if key in card), None)
    for name, side in pair.items():
        out[name]["peak_memory_gb"] = side.peak_bytes / 1e9
        if peak is not None and flops_of_an_image is not None:
            flops = out[name]["image_passes_per_s"] * flops_of_an_image
            out[name]["model_flop_utilisation"] = flops / peak


def cost_of_privacy(sides: Sides, rounds: int) -> Tree:
    """Rounds of the fast engine for the same cohorts, plain and private in turn: seconds, and their ratio."""
    kinds = {"plain": replace(sides, privacy=None), "private": sides}
    pair = {name: Side(kind, kind.fast) for name, kind in kinds.items()}
    for number in range(rounds + 1):
        for side in pair.values():
            side.round(number)
    for side in pair.values():
        side.close()
    counted = {name: [round(s, 4) for s in side.times] for name, side in pair.items()}
    return {**counted, "ratio": sum(counted["private"]) / sum(counted["plain"])}


Cases = Mapping[str, Sequence[Any]]


def report_cases(
    argv: Sequence[str],
    module: str,
    doc: str | None,
    sets: Cases,
    measured: Callable[[Any, int, argparse.Namespace], Tree],
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """The command line of a benchmark's bench: measure the cases asked for, print, write JSON and a picture.

    Raises:
        ValueError: when no case is meant, or no round is to be counted.
    """
    parser = OneLineParser(prog=f"python -m {module}", description=doc, allow_abbrev=False)
    parser.add_argument("--output", "--output_file", type=Path, default=Path("bench/bench.json"))
    parser.add_argument("--cases", choices=sorted(sets), default=None, help="default: gpu on a GPU, else cpu")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds of each engine")
    options(parser)
    args = parser.parse_args(argv)
    if args.rounds < 1:
        raise ValueError(f"--rounds is {args.rounds}: at least 1 round must be counted")
    chosen = sets[args.cases or ("gpu" if get_default_device().type == "cuda" else "cpu")]
    cases = [case for case in chosen if args.only in case.name]
    if not cases:
        raise ValueError(f"--only {args.only!r} is in no case's name: {', '.join(c.name for c in chosen)}")
    output_file("--output", args.output)
    results: list[Tree] = []
    for i, case in enumerate(cases):
        print(f"[{i + 1}/{len(cases)}] {case.name}", file=sys.stderr, flush=True)
        result = measured(case, args.rounds, args)
        results.append(result)
        stock, fast, cpu = result["stock"], result["fast"], sorted(result["cpu_ratio_of_each_round"])
        print(
            f"{case.name}: stock {stock['round_s']:.3f} s, fast {fast['round_s']:.3f} s a round, "
            f"ratio {result['ratio']:.2f}, of the cores' time {median(cpu):.2f} "
            f"({cpu[0]:.2f} to {cpu[-1]:.2f}), "
            f"data {fast['share']['data']:.1%} of the fast round",
            flush=True,
        )
        if "private_over_plain" in result:
            print(f"{case.name}: {result['private_over_plain']['ratio']:.2f} times a plain round", flush=True)
        report = {"hardware": hardware(), "commit": commit(), "torch": torch.__version__, "results": results}
        write_json(args.output, report)
    bench_bars(results, args.output.with_suffix(".png"))
    print(f"{args.output} and {args.output.with_suffix('.png')}")
