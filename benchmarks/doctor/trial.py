"""A few users of the mini data set, trained by pfl's loop and by the engine, through what a run is made of.

The engine's own check (`pfl_ext.engine.selfcheck`, `pfl_ext.engine_trial`) compares them, and the round ends
with it. Nothing of it is kept: the folder in which outcomes lie is this process's own.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pfl.internal.ops.pytorch_ops import get_default_device
from pfl.metrics import Metrics

from benchmarks.core.execute import started
from benchmarks.core.federated import run_context, setup, training_data
from benchmarks.core.mini import MINI
from benchmarks.flair.config import Run, parse
from benchmarks.flair.train import Flair
from dataset.flair.mini import write_mini
from dataset.store.hdf5 import DataFile
from pfl_ext.algorithms.algorithm import RunContext
from pfl_ext.engine.cpu.build import Unavailable
from pfl_ext.engine.cpu.check import checked
from pfl_ext.engine.selfcheck import PATHS, CheckOnCpu, SelfCheck
from pfl_ext.privacy.accounting import PrivacyConfig
from pfl_ext.privacy.central import private_mean

CONFIG = "fl-r-17"
SMALL = ("--scale=mini", "--federated.num_rounds=1", "--federated.cohort_size=6")
WORDS = (f"--config={CONFIG}", *SMALL, "--runtime.tune=false")
USERS = 12
LAST_START = 0.6
"""Share of the time after which no further comparison is begun."""


@dataclass(frozen=True)
class Case:
    """One comparison."""

    name: str
    words: tuple[str, ...] = ()
    private: bool = False


PLAIN = Case("float32")
PRIVATE = Case("float32, each update clipped as in private training", ("--federated.weighting=users",), True)
BF16 = Case("bfloat16", ("--runtime.precision=bf16",))
BY_TORCH = Case("float32, without compiled layers", ("--runtime.cpu_kernels=false",))


@contextmanager
def data_file() -> Iterator[DataFile]:
    """A few users of the embedded mini data set, drawn for this."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mini.hdf5"
        write_mini(path, replace(MINI, train_users=USERS, val_users=1, test_users=1))
        with DataFile(path) as file:
            yield file


@contextmanager
def prepared(case: Case, file: DataFile) -> Iterator[RunContext]:
    """What trains a run of this case, on its device."""
    run: Run = parse([*WORDS, *case.words])
    with started(run.runtime):
        experiment = Flair(run, file)
        module, store = experiment.module(), experiment.split("train")
        users = training_data(run, store, module.task)
        mechanism = None
        if case.private:
            budget = PrivacyConfig(2.0, delta=1e-5, clipping_bound=0.1)
            mechanism = private_mean(budget.calibrate(41131, 200, 100), noise_seed=1)
        training = run_context(run, setup(run.config, module, users), _no_score, mechanism)
        try:
            yield training
        finally:
            if training.engine is not None:
                training.engine.close()


def _no_score(model: Any) -> Metrics:
    raise AssertionError("nothing is scored here")


def path_taken() -> dict[str, Any]:
    """How a run would be computed, by what a run makes of it on this machine."""
    found: dict[str, Any] = {"config": CONFIG, "compiled": None}
    with data_file() as file, prepared(PLAIN, file) as training:
        engine, device = training.engine, get_default_device()
        assert engine is not None, "the default"
        if device.type == "cpu":
            try:
                found["feature"] = checked().feature
                found["compiled"] = True
            except Unavailable as reason:
                found |= {"compiled": False, "why": str(reason)}
        return {
            **found,
            "device": str(device),
            "on_gpu": engine.on_gpu,
            "threads": torch.get_num_threads(),
            "lanes": len(engine.lanes),
            "readers": parse(list(WORDS)).runtime.reader_threads,
            "float32": engine.arithmetic(None),
            "bf16": engine.arithmetic(torch.bfloat16),
        }


class _Checked(Exception):
    """Ends a round after the engine's check: no more is asked here than what the check compares."""


class _OnCard(SelfCheck):
    def path(self, *words: Any, **named: Any) -> int:
        """Compare, and end the round."""
        super().path(*words, **named)
        raise _Checked


class _OnCpu(_OnCard, CheckOnCpu):
    pass


def compared(case: Case, file: DataFile, seconds: float) -> dict[str, Any]:
    """What the engine's check finds before the first cohort of a case."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, prepared(case, file) as training:
        engine = training.engine
        assert engine is not None
        if engine.on_gpu:
            check = _OnCard(Path(folder), kept=Path(folder), seconds=seconds)
        else:
            check = _OnCpu()
        training = replace(training, check=check)
        algorithm = parse(list(WORDS)).config.federated.chosen.start(training)
        with suppress(_Checked):
            algorithm.round(algorithm.init(0), 0)
        outcome = check.outcome
        assert outcome is not None, "it knows this training"
        report = Path(folder) / "engine_check.json"
        number = outcome["path"]
        return {
            "case": case.name,
            **outcome,
            "path": number,
            "by": PATHS[number] if engine.on_gpu and number < len(PATHS) else None,
            "holds": number < len(PATHS),
            "seconds": round(time.monotonic() - begin, 1),
            **({"engine_check": report.read_text(encoding="utf-8")} if report.exists() else {}),
        }


def comparisons(seconds: float) -> Iterator[dict[str, Any]]:
    """The comparisons that tell something here, one after another, as far as the time allows."""
    begin = time.monotonic()
    with data_file() as file:
        cases = [PLAIN, PRIVATE]
        with prepared(PLAIN, file) as training:
            engine = training.engine
            assert engine is not None
            if engine.on_gpu or engine.arithmetic(torch.bfloat16) != engine.arithmetic(None):
                cases.append(BF16)
        while cases:
            case = cases.pop(0)
            if time.monotonic() - begin > LAST_START * seconds:
                yield {"case": case.name, "left_out": True}
                continue
            yield {"case": case.name, "begun": True}
            outcome = compared(case, file, seconds)
            if case is PLAIN and not outcome["holds"] and outcome["device"] == "CPU":
                cases.insert(0, BY_TORCH)
            yield outcome
