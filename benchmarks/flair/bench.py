"""How fast a round is: pfl's own loop and the fast engine side by side, round by round, in one run.

    python -m benchmarks.flair.bench --output bench.json [--cases cpu|gpu|all] [--rounds 3] [--only NAME]

Users have FLAIR's own histogram of sizes (the mini set at FLAIR's shape), two local epochs, batches of 16 and
the cap of 512 images, as in the paper. Both engines train the same cohorts from the same model and read the
same HDF5 file, stock as pfl's users have it: float32, a read for each user when its turn comes. Rounds
alternate between the two; the first is not counted. Where a time goes: ``data``
is waiting for images, ``training`` local steps, ``evaluation`` scoring val, ``bookkeeping`` the rest, with
lanes that wait for others; of the fast engine on several lanes, the mean over lanes.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pfl.algorithm.algorithm_utils import run_train_eval
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.pytorch_ops import get_default_device
from pfl.model.pytorch import PyTorchModel

from benchmarks.experiment import build_model
from benchmarks.facts import commit, hardware
from benchmarks.federated import algorithm_and_params, cohort_engine, pfl_model, training_data
from benchmarks.flair.config import Run, parse
from benchmarks.flair.train import flair_task
from benchmarks.plots import bench_bars
from dataset.command_line import run as run_command
from dataset.flair.hdf5 import FlairFile
from dataset.flair.mini import MiniSpec, write_mini
from dataset.flair.task import FlairTask
from pfl_ext.backend import CentrallyEvaluatedBackend
from pfl_ext.checkpoint import write_json
from pfl_ext.engine import cohort
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.evaluation import CentralEvaluation
from pfl_ext.federated_dataset import FederatedImageDataset
from pfl_ext.privacy import private_mean
from pfl_ext.privacy_accounting import PrivacyConfig

PARTS = ("data", "training", "evaluation", "bookkeeping")
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # bf16, dense; makers' figures
RESNET18_FLOPS = 3 * 2 * 1.82e9 / 224**2  # of a training pass, per pixel of the input


@dataclass(frozen=True)
class Case:
    """One measurement: what is trained."""

    name: str
    pixels: int
    labels: int = 17
    cohort: int = 20
    users: int = 2000
    val_users: int = 0
    """0: no evaluation; otherwise val is scored every tenth round, a tenth of which is charged to each."""
    precision: str = "fp32"
    """Of the fast engine; stock is always fp32, as pfl's users run it."""
    private: bool = False


CPU = [
    Case("32 px, 17 labels", 32, cohort=100),
    Case("32 px, 1,628 labels, with evaluation", 32, labels=1628, cohort=100, val_users=100),
    Case("32 px, private", 32, cohort=100, private=True),
    Case("64 px", 64, cohort=50),
    Case("64 px, bf16", 64, cohort=50, precision="bf16"),
    Case("224 px", 224, cohort=10, users=300),
    Case("224 px, bf16", 224, cohort=10, users=300, precision="bf16"),
]
CURVES = [
    *(Case(f"cohort of {n}", 32, cohort=n) for n in (10, 100, 1000)),
    *(Case(f"{p} pixels", p, cohort=10, users=300) for p in (32, 64, 128, 224)),
    *(Case(f"{k} labels", 32, labels=k) for k in (17, 1628)),
]
GPU = [
    Case("224 px, cohort of 200, fp32", 224, cohort=200),
    Case("224 px, cohort of 200, bf16, with evaluation", 224, cohort=200, val_users=500, precision="bf16"),
    Case("224 px, cohort of 200, bf16, private", 224, cohort=200, precision="bf16", private=True),
    Case("224 px, 1,628 labels, bf16", 224, labels=1628, cohort=200, precision="bf16"),
]
SETS = {"cpu": CPU, "curves": CURVES, "gpu": GPU, "all": CPU + CURVES + GPU}


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

    def iterator(self, part: str, items: Iterator[Any]) -> Iterator[Any]:
        """The same items, waiting for them charged."""
        while True:
            with self.charge(part):
                item = next(items, StopIteration)
            if item is StopIteration:
                return
            yield item


class Side:
    """One engine with a model of its own, a round at a time."""

    def __init__(self, case: Case, run: Run, task: FlairTask, clock: Clock) -> None:
        self._case, self._clock = case, clock
        store = task.split("train")
        module = build_model(run.config, len(task.label_names), None)
        self.model: PyTorchModel = pfl_model(run, module)
        self.data = training_data(run, store)
        self._algorithm, self._params = algorithm_and_params(run.config, module, len(store.user_ids))
        self.engine = cohort_engine(run, module, torch.float32)
        weighting, private = _postprocessors(case, len(store.user_ids))
        evaluation = CentralEvaluation(task.split("val"), threads=run.runtime.reader_threads)
        self._evaluate = clock.around("evaluation", evaluation)
        self._backend = CentrallyEvaluatedBackend(
            self.data, evaluation, seed=0, postprocessors=[weighting, *private], engine=self.engine
        )
        local = run.config.local
        self._train = NNTrainHyperParams(
            local_num_epochs=local.num_epochs,
            local_learning_rate=local.learning_rate,
            local_batch_size=local.batch_size,
        )
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
        contexts, model, _ = self._algorithm.get_next_central_contexts(
            self.model, number, self._params, self._train, NNEvalHyperParams(local_batch_size=None)
        )
        training = [c for c in contexts if c.population.name == "TRAIN"]
        results = run_train_eval(self._algorithm, self._backend, model, training)
        pairs = tuple((c, stats) for c, (stats, _) in zip(training, results))
        metrics = results[0][1]
        self._algorithm.process_aggregated_statistics_from_all_contexts(pairs, metrics, model)
        _synchronise()
        return time.perf_counter() - begin

    def evaluation(self) -> float:
        """Seconds of scoring val once."""
        if not self._case.val_users:
            return 0.0
        begin = time.perf_counter()
        self._evaluate(self.model)
        _synchronise()
        return time.perf_counter() - begin

    def weights(self) -> torch.Tensor:
        """All trained parameters, in one vector."""
        return torch.cat([p.detach().reshape(-1).float().cpu() for p in self.model.variable_map.values()])


def _postprocessors(case: Case, population: int) -> tuple[Any, list[Any]]:
    from pfl.aggregate.weighting import WeightByDatapoints, WeightByUser

    if not case.private:
        return WeightByDatapoints(), []
    config = PrivacyConfig(noise_cohort_size=5000, noise_population=41131, mechanism="gaussian")
    made = config.calibrate(population, case.cohort, 1000)
    return WeightByUser(), [private_mean(made, noise_seed=1, threads=os.cpu_count() or 1)]


def _synchronise() -> None:
    if get_default_device().type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def watched(engine: CohortEngine, clock: Clock) -> Iterator[None]:
    """Within, the lanes' waiting and training are charged."""
    module: Any = cohort
    prefetched, train_one_step = module.prefetched, module.train_one_step
    module.prefetched = lambda *a, **k: clock.iterator("data", iter(prefetched(*a, **k)))
    module.train_one_step = clock.around("training", train_one_step)
    clock.lanes = len(engine.lanes)
    for lane in engine.lanes:
        lane.train = clock.around("training", lane.train)  # type: ignore[method-assign]
    try:
        yield
    finally:
        module.prefetched, module.train_one_step = prefetched, train_one_step


def data_file(case: Case, folder: Path) -> Path:
    """The mini set with FLAIR's histogram at this size, drawn once."""
    path = folder / f"bench-{case.pixels}-{case.users}-{max(case.val_users, 1)}.hdf5"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        spec = MiniSpec(
            train_users=case.users,
            val_users=max(case.val_users, 1),
            test_users=1,
            image_size=case.pixels + case.pixels // 8,
        )
        write_mini(path, spec)
    return path


def measure(case: Case, rounds: int, folder: Path) -> dict[str, Any]:
    """Both engines on one case."""
    stored = case.pixels + case.pixels // 8
    common = (
        f"--config fl-r-{1628 if case.labels > 17 else 17} --data.image_size {stored} "
        f"--model.input_size {case.pixels} --federated.cohort_size {case.cohort} "
        f"--federated.weighting {'users' if case.private else 'images'}"
    ).split()
    as_pfl_is_run = ["--runtime.engine=stock", "--runtime.prefetch=0", "--runtime.cache_gb=0"]
    stock_run = parse([*common, *as_pfl_is_run])
    fast_run = parse([*common, "--runtime.engine", "fast", "--runtime.precision", case.precision])
    clocks = {"stock": Clock(), "fast": Clock()}
    times: dict[str, list[float]] = {"stock": [], "fast": []}
    scoring: dict[str, list[float]] = {"stock": [], "fast": []}
    with FlairFile(data_file(case, folder)) as file:
        sides = {
            name: Side(case, run, flair_task(run, file), clocks[name])
            for name, run in (("stock", stock_run), ("fast", fast_run))
        }
        engine = sides["fast"].engine
        assert engine is not None
        images = steps = 0
        deviation = 0.0
        with watched(engine, clocks["fast"]):
            for number in range(rounds + 1):
                before = sides["stock"].weights()
                for name, side in sides.items():
                    seconds, scored = side.round(number), side.evaluation() if number <= 1 else 0.0
                    if number == 0:
                        clocks[name].seconds = dict.fromkeys(PARTS, 0.0)
                        continue
                    times[name].append(seconds)
                    scoring[name] += [scored] if number == 1 else []
                if number == 0:
                    moved = sides["stock"].weights() - before
                    gap = sides["fast"].weights() - sides["stock"].weights()
                    deviation = float(gap.norm() / moved.norm())
                else:
                    members = _members(sides["fast"].data, number, case.cohort)
                    images += sum(m.num_passes for m in members)
                    steps += sum(m.num_steps for m in members)
        engine.close()
    return _summary(
        case, times, scoring, clocks, images / rounds, steps / rounds, deviation, len(engine.lanes)
    )


def _members(data: FederatedImageDataset, number: int, cohort: int) -> list[Any]:
    data.set_round(number)
    return data.members(cohort)


def _summary(
    case: Case,
    times: dict[str, list[float]],
    scoring: dict[str, list[float]],
    clocks: dict[str, Clock],
    images: float,
    steps: float,
    deviation: float,
    lanes: int,
) -> dict[str, Any]:
    out: dict[str, Any] = {"case": asdict(case), "image_passes_a_round": images, "steps_a_round": steps}
    out["deviation_of_the_models_first_move"] = deviation  # after the server's optimiser, which magnifies it
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
            "users_per_s": case.cohort / whole,
            "image_passes_per_s": images / whole,
            "share": {part: s / whole for part, s in parts.items()},
        }
        if get_default_device().type == "cuda":
            card = torch.cuda.get_device_name()
            peak = next((flops for key, flops in PEAK_FLOPS.items() if key in card), None)
            if peak is not None:
                flops = images * RESNET18_FLOPS * case.pixels**2
                out[name]["model_flop_utilisation"] = flops / whole / peak
    out["ratio"] = out["stock"]["round_s"] / out["fast"]["round_s"]
    out["ratio_of_each_round"] = [round(a / b, 3) for a, b in zip(times["stock"], times["fast"])]
    out["peak_memory_gb"] = (
        torch.cuda.max_memory_allocated() / 1e9
        if get_default_device().type == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    )
    return out


def main(argv: Sequence[str]) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flair.bench", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("bench/bench.json"))
    parser.add_argument("--cases", choices=sorted(SETS), default=None, help="default: gpu on a GPU, else cpu")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds of each engine")
    parser.add_argument("--data_dir", type=Path, default=Path("data"))
    options = parser.parse_args(argv)
    if options.rounds < 1:
        raise ValueError(f"--rounds is {options.rounds}: at least 1 round must be counted")
    chosen = SETS[options.cases or ("gpu" if get_default_device().type == "cuda" else "cpu")]
    cases = [case for case in chosen if options.only in case.name]
    if not cases:
        raise ValueError(f"--only {options.only!r} is in no case's name: {', '.join(c.name for c in chosen)}")
    results = []
    for i, case in enumerate(cases):
        print(f"[{i + 1}/{len(cases)}] {case.name}", file=sys.stderr, flush=True)
        result = measure(case, options.rounds, options.data_dir)
        results.append(result)
        stock, fast = result["stock"], result["fast"]
        print(
            f"{case.name}: stock {stock['round_s']:.3f} s, fast {fast['round_s']:.3f} s a round, "
            f"ratio {result['ratio']:.2f}, data {fast['share']['data']:.1%} of the fast round",
            flush=True,
        )
        report = {"hardware": hardware(), "commit": commit(), "torch": torch.__version__, "results": results}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.output, report)
    bench_bars(results, options.output.with_suffix(".png"))
    print(f"{options.output} and {options.output.with_suffix('.png')}")


if __name__ == "__main__":
    sys.exit(run_command(main))
