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
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from pfl.internal.ops.pytorch_ops import get_default_device
from pfl.postprocessor.base import Postprocessor

from benchmarks.core.config.benchmark import AnyRun, Run
from benchmarks.core.config.trees import Tree
from benchmarks.core.facts import commit, hardware
from benchmarks.core.federated import means, setup, training_data
from benchmarks.reporting.plots import bench_bars
from dataset.cli import OneLineParser, output_file
from dataset.files import write_json
from pfl_ext.data.federated_dataset import FederatedImageDataset, ImageStore
from pfl_ext.evaluation import CentralEvaluation
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.privacy.accounting import PrivacyConfig
from pfl_ext.privacy.central import private_mean

Item = TypeVar("Item")
PARTS = ("data", "training", "evaluation", "bookkeeping")
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # bf16, dense; makers' figures
STOCK = ("--runtime.engine=stock", "--runtime.prefetch=0", "--runtime.cache_gb=0")
"""Stock as pfl's users have it: float32, a read for each user when its turn comes."""


class Trainable(Protocol):
    """The part of an `Experiment` that a round needs."""

    def split(self, name: str) -> ImageStore:
        """The store of a split by its name."""

    def module(self) -> ImageClassifier:
        """A network."""


@dataclass(frozen=True)
class Sides:
    """What is compared: two runs that differ in their runtime, and what both train on."""

    stock: AnyRun
    fast: AnyRun
    opened: Callable[[Run[Any]], Trainable]
    """What a run learns."""
    scored: str | None = None
    """A split that is scored every tenth round, a tenth of which is charged to each; None: no evaluation."""
    privacy: PrivacyConfig | None = None
    flops_of_an_image: float | None = None
    """Of a training pass; for the model FLOP utilisation on a card."""


@dataclass
class Clock:
    """Seconds by part, added up over threads."""

    lanes: int = 1
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @contextmanager
    def charge(self, part: str) -> Iterator[None]:
        """To ``part``: the host's time, which on a GPU runs ahead of the device's."""
        begin = time.perf_counter()
        yield
        alone = threading.current_thread() is threading.main_thread()  # then no lane works beside it
        self.seconds[part] += (time.perf_counter() - begin) * (self.lanes if alone else 1)

    def around(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, charged."""

        def charged(*args: Any, **kwargs: Any) -> Any:
            with self.charge(part):
                return work(*args, **kwargs)

        return charged

    def iterator(self, part: str, items: Iterator[Item]) -> Iterator[Item]:
        """The same items, waiting for them charged."""
        while True:
            with self.charge(part):
                found = list(islice(items, 1))
            if not found:
                return
            yield found[0]


class Side:
    """One engine with a model of its own, a round at a time."""

    def __init__(self, sides: Sides, run: AnyRun, clock: Clock) -> None:
        self._scored, self._clock = sides.scored is not None, clock
        trainable = sides.opened(run)
        store, module = trainable.split("train"), trainable.module()
        self.data = training_data(run, store, module.task)
        evaluation = CentralEvaluation(
            trainable.split(sides.scored or "train"), threads=run.runtime.reader_threads
        )
        self._evaluate = clock.around("evaluation", evaluation)
        training = means(run, setup(run.config, module, self.data), evaluation, _mechanism(sides, run, store))
        self.engine, self.model = training.engine, training.model
        self._algorithm = run.config.federated.algorithm_class.start(training)
        self._watch()

    def _watch(self) -> None:
        """Charge what the clock is to tell apart; reading on other threads is free unless waited for."""
        clock = self._clock
        self.model.do_multiple_epochs_of = clock.around("training", self.model.do_multiple_epochs_of)
        get_cohort = self.data.get_cohort
        self.data.get_cohort = lambda size: clock.iterator("data", get_cohort(size))  # type: ignore[method-assign, assignment]

    def round(self, number: int) -> float:
        """Seconds of one round, as pfl's training loop goes about it."""
        _synchronise()
        begin = time.perf_counter()
        self._algorithm.round(self.model, number)
        _synchronise()
        return time.perf_counter() - begin

    def evaluation(self) -> float:
        """Seconds of scoring the split once."""
        if not self._scored:
            return 0.0
        begin = time.perf_counter()
        self._evaluate(self.model)
        _synchronise()
        return time.perf_counter() - begin

    def weights(self) -> torch.Tensor:
        """All trained parameters, in one vector."""
        return torch.cat([p.detach().reshape(-1).float().cpu() for p in self.model.variable_map.values()])


def _mechanism(sides: Sides, run: AnyRun, store: ImageStore) -> Postprocessor | None:
    if sides.privacy is None:
        return None
    calibration = sides.privacy.calibrate(len(store.user_ids), run.config.federated.cohort_size, 1000)
    return private_mean(calibration, noise_seed=1, threads=os.cpu_count() or 1)


def _synchronise() -> None:
    if get_default_device().type == "cuda":
        torch.cuda.synchronize()


def measure(sides: Sides, rounds: int) -> Tree:
    """Both engines on one case; seconds, shares of them, and the ratio."""
    clocks = {"stock": Clock(), "fast": Clock()}
    times: dict[str, list[float]] = {"stock": [], "fast": []}
    scoring: dict[str, list[float]] = {"stock": [], "fast": []}
    pair = {
        "stock": Side(sides, sides.stock, clocks["stock"]),
        "fast": Side(sides, sides.fast, clocks["fast"]),
    }
    size, engine = sides.fast.config.federated.cohort_size, pair["fast"].engine
    assert engine is not None
    images = steps = 0
    deviation = 0.0
    engine.watch, clocks["fast"].lanes = clocks["fast"], len(engine.lanes)
    for number in range(rounds + 1):
        before = pair["stock"].weights()
        for name, side in pair.items():
            seconds, scored = side.round(number), side.evaluation() if number <= 1 else 0.0
            if number == 0:
                clocks[name].seconds = dict.fromkeys(PARTS, 0.0)
                continue
            times[name].append(seconds)
            scoring[name] += [scored] if number == 1 else []
        if number == 0:
            moved = pair["stock"].weights() - before
            gap = pair["fast"].weights() - pair["stock"].weights()
            deviation = float(gap.norm() / moved.norm())
        else:
            members = _members(pair["fast"].data, number, size)
            images += sum(m.num_passes for m in members)
            steps += sum(m.num_steps for m in members)
    engine.close()
    work: Tree = {"image_passes_a_round": images / rounds, "steps_a_round": steps / rounds}
    if sides.privacy is not None:
        work["private_over_plain"] = cost_of_privacy(sides, rounds)
    # after the server's optimiser, which magnifies it
    return {
        **work,
        "deviation_of_the_models_first_move": deviation,
        **_summary(sides, times, scoring, clocks, images / rounds, len(engine.lanes)),
    }


def cost_of_privacy(sides: Sides, rounds: int) -> Tree:
    """Rounds of the fast engine for the same cohorts, plain and private in turn: seconds, and their ratio."""
    kinds = {"plain": replace(sides, privacy=None), "private": sides}
    pair = {name: Side(kind, kind.fast, Clock()) for name, kind in kinds.items()}
    times: dict[str, list[float]] = {name: [] for name in pair}
    for number in range(rounds + 1):
        for name, side in pair.items():
            times[name].append(side.round(number))
    for side in pair.values():
        if side.engine is not None:
            side.engine.close()
    counted = {name: [round(s, 4) for s in seconds[1:]] for name, seconds in times.items()}
    return {**counted, "ratio": sum(counted["private"]) / sum(counted["plain"])}


def _members(data: FederatedImageDataset, number: int, cohort: int) -> list[Any]:
    data.set_round(number)
    return data.members(cohort)


def _summary(
    sides: Sides,
    times: Mapping[str, list[float]],
    scoring: Mapping[str, list[float]],
    clocks: Mapping[str, Clock],
    images: float,
    lanes: int,
) -> Tree:
    out: Tree = {}
    for name in ("stock", "fast"):
        seconds = times[name]
        a_tenth = float(np.mean(scoring[name])) / 10
        whole = float(np.mean(seconds)) + a_tenth
        parts = {part: s / len(seconds) for part, s in clocks[name].seconds.items()}
        if name == "fast":
            parts = {part: s / (lanes if part in ("data", "training") else 1) for part, s in parts.items()}
        parts["evaluation"] = a_tenth
        parts["bookkeeping"] = max(0.0, whole - sum(parts[p] for p in PARTS[:3]))
        out[name] = {
            "round_s": whole,
            "rounds_s": [round(s, 4) for s in seconds],
            "rounds_per_s": 1 / whole,
            "users_per_s": sides.fast.config.federated.cohort_size / whole,
            "image_passes_per_s": images / whole,
            "share": {part: s / whole for part, s in parts.items()},
        }
        if get_default_device().type == "cuda" and sides.flops_of_an_image is not None:
            card = torch.cuda.get_device_name()
            peak = next((flops for key, flops in PEAK_FLOPS.items() if key in card), None)
            if peak is not None:
                out[name]["model_flop_utilisation"] = images * sides.flops_of_an_image / whole / peak
    out["ratio"] = out["stock"]["round_s"] / out["fast"]["round_s"]
    out["ratio_of_each_round"] = [round(a / b, 3) for a, b in zip(times["stock"], times["fast"])]
    out["peak_memory_gb"] = (
        torch.cuda.max_memory_allocated() / 1e9
        if get_default_device().type == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    )
    return out


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
    parser.add_argument("--output", type=Path, default=Path("bench/bench.json"))
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
        stock, fast = result["stock"], result["fast"]
        print(
            f"{case.name}: stock {stock['round_s']:.3f} s, fast {fast['round_s']:.3f} s a round, "
            f"ratio {result['ratio']:.2f}, data {fast['share']['data']:.1%} of the fast round",
            flush=True,
        )
        if "private_over_plain" in result:
            print(f"{case.name}: {result['private_over_plain']['ratio']:.2f} times a plain round", flush=True)
        report = {"hardware": hardware(), "commit": commit(), "torch": torch.__version__, "results": results}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.output, report)
    bench_bars(results, args.output.with_suffix(".png"))
    print(f"{args.output} and {args.output.with_suffix('.png')}")
