"""A sweep with no server: each trial a process of the training command, some at a time, to be gone on with.

The directory of a sweep holds ``sweep.json`` (its trials), ``trials/NNN-DIGEST`` (a plain run each),
``logs/NNN.log``, ``table.md``, ``table.csv`` and ``plots/``.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.core.config.benchmark import AnyRun
from benchmarks.core.config.command_line import arguments
from benchmarks.core.config.digests import short_digest
from benchmarks.core.config.trees import Tree
from benchmarks.core.run_directory import config_differences
from benchmarks.core.tracking import flat
from benchmarks.reporting.runs import DAMAGE
from benchmarks.sweep.report import Row, markdown, parallel_coordinates, write_tables
from benchmarks.sweep.space import (
    EarlyTerminate,
    Metric,
    Sweep,
    command_words,
    hopeless,
    suggestion,
)
from dataset.files import locked, write_json

POLL_SECONDS, GRACE_SECONDS, MOST_ATTEMPTS = 0.5, 30.0, 50


def asked(tree: Mapping[str, Any], point: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """``(key, wanted, resolved)`` of each dotted key of a point in a resolved config."""
    for key, wanted in point.items():
        node: Any = tree
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        yield key, wanted, node


def resolved(module: str, words: Sequence[str], point: Mapping[str, Any]) -> Tree:
    """The config of a trial of a benchmark; every value must stand in it as the point has it.

    :raises ValueError: for an unknown key, a wrong value, or a value that does not arrive.
    """
    run: AnyRun = importlib.import_module(module).EXPERIMENT.benchmark.parse([*words, *command_words(point)])
    tree = dataclasses.asdict(run.config)
    for key, wanted, got in asked(tree, point):
        if key in ("config", "recipe", "scale"):
            continue
        if str(got).lower() != str(wanted).lower() and not (isinstance(got, float) and got == float(wanted)):
            raise ValueError(f"--{key}={wanted} does not arrive: the trial's config has {got}")
    return {"digest": short_digest(run.config), "config": tree}


@dataclasses.dataclass
class Trial:
    """One point of a local sweep. ``running`` in a file that nobody works on means half-finished."""

    number: int
    point: Tree
    digest: str
    unit: dict[str, float]
    status: str = "running"
    message: str = ""

    @property
    def name(self) -> str:
        """Of its run directory and log."""
        return f"{self.number:03d}-{self.digest[:8]}"


def read_values(path: Path, metric: str) -> list[tuple[int, float]]:
    """``(step, value)`` of a metric in a ``metrics.jsonl`` that may be just being written."""
    out = []
    if path.exists():
        for text in path.read_text().splitlines(keepends=True):
            if text.endswith("\n"):
                line = json.loads(text)
                numbers = flat(line)
                if metric in numbers:
                    out.append((int(line.get("round", line.get("epoch", 0))), numbers[metric]))
    return out


def _die_with_parent() -> None:
    """In a new process: SIGTERM when the sweep dies, however it dies (Linux's PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


class LocalSweep:
    """Makes the trials of a sweep, some at a time, each a process of the training command."""

    def __init__(
        self,
        sweep: Sweep,
        tree: Tree,
        words: Sequence[str],
        directory: Path,
        *,
        seed: int = 0,
        workers: int = 1,
        devices: Sequence[str] = ("auto",),
        num_processes: int = 1,
        count: int | None = None,
    ) -> None:
        self.sweep, self.words, self.directory, self.seed = sweep, list(words), directory, seed
        self._headline: str = importlib.import_module(sweep.program_module).EXPERIMENT.headline[0]
        self.metric = sweep.metric or Metric(f"val/{self._headline}", "maximize")
        self._sign = -1.0 if self.metric.goal == "maximize" else 1.0
        self._workers, self._devices, self._num_processes = workers, list(devices), num_processes
        self._grid = sweep.grid() if sweep.method == "grid" else None
        total = len(self._grid) if self._grid is not None else sweep.run_cap
        assert total is not None
        self.total = min(total, sweep.run_cap or total, count or total)
        self._tree = {key: value for key, value in tree.items() if key != "run_cap"}
        self.trials: list[Trial] = []
        self._running: dict[int, tuple[subprocess.Popen[bytes], int]] = {}
        self._retried: set[int] = set()
        self._load()

    # -- files -------------------------------------------------------------------------------------------

    def _load(self) -> None:
        path = self.directory / "sweep.json"
        if not path.exists():
            return
        new = json.loads(json.dumps({"sweep": self._tree, "words": self.words, "seed": self.seed}))
        try:
            state = json.loads(path.read_text())
            old = {key: state[key] for key in new}
            trials = [Trial(**trial) for trial in state["trials"]]
        except DAMAGE as fault:
            raise ValueError(f"{path} is damaged ({fault}): choose another --sweep_dir") from fault
        if differences := config_differences(old, new):
            raise ValueError(
                f"{self.directory} holds another sweep ({'; '.join(differences)}): choose another --sweep_dir"
            )
        self.trials = trials

    def save(self) -> None:
        """``sweep.json``: what a later call goes on from."""
        trials = [dataclasses.asdict(trial) for trial in self.trials]
        content = {"sweep": self._tree, "words": self.words, "seed": self.seed, "trials": trials}
        write_json(self.directory / "sweep.json", content)

    def run_dir(self, trial: Trial) -> Path:
        """A plain run's directory."""
        return self.directory / "trials" / trial.name

    def log_path(self, trial: Trial) -> Path:
        """What the trial wrote to the screen."""
        return self.directory / "logs" / f"{trial.number:03d}.log"

    def values(self, trial: Trial) -> list[float]:
        """The metric so far, to be minimised."""
        return [
            self._sign * v for _, v in read_values(self.run_dir(trial) / "metrics.jsonl", self.metric.name)
        ]

    # -- points ------------------------------------------------------------------------------------------

    def _draw(self, number: int, attempt: int) -> tuple[dict[str, float], Tree] | None:
        if self._grid is not None:
            place = number + attempt
            return ({}, self._grid[place]) if place < len(self._grid) else None
        if self.sweep.method == "random":
            unit = self.sweep.random_unit(self.seed, number, attempt)
        else:
            told: list[tuple[Mapping[str, float], float | None]] = []
            for trial in self.trials:
                values = self.values(trial)
                if trial.status == "running":
                    told.append((trial.unit, None))
                elif values:
                    told.append((trial.unit, min(values)))
            unit = suggestion(self.sweep, self.seed, number, attempt, told)
        return unit, self.sweep.point(unit)

    def _new_trial(self) -> Trial | None:
        """The next point whose config no trial has yet; None where there is none."""
        known = {trial.digest for trial in self.trials}
        for attempt in range(MOST_ATTEMPTS):
            drawn = self._draw(len(self.trials), attempt)
            if drawn is None:
                return None
            unit, point = drawn
            digest = resolved(self.sweep.program_module, self.words, point)["digest"]
            if digest not in known:
                trial = Trial(len(self.trials), point, digest, unit)
                self.trials.append(trial)
                return trial
        return None

    def _next(self) -> Trial | None:
        for trial in self.trials:  # half-finished or failed in an earlier call
            idle = trial.number not in self._running and trial.number not in self._retried
            if idle and trial.status in ("running", "failed") and trial.number < self._resumed:
                self._retried.add(trial.number)
                return trial
        return self._new_trial() if len(self.trials) < self.total else None

    # -- processes ---------------------------------------------------------------------------------------

    def command(self, trial: Trial, slot: int) -> list[str]:
        """The training command of a trial; its own run directory and the slot's device come last and win."""
        device = self._devices[slot % len(self._devices)]
        words = [*self.words, f"--runtime.device={device}", f"--run_dir={self.run_dir(trial)}"]
        if "runtime.threads" not in arguments(self.words) and not device.startswith("cuda"):
            share = len(os.sched_getaffinity(0)) // (self._workers * self._num_processes)
            words.append(f"--runtime.threads={max(1, share)}")
        launcher = [sys.executable, "-m"]
        if self._num_processes > 1:
            launcher += [
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={self._num_processes}",
                "-m",
            ]
        return [*launcher, self.sweep.program_module, *words, *command_words(trial.point)]

    def _start(self, trial: Trial) -> None:
        slot = min(set(range(self._workers)) - {slot for _, slot in self._running.values()})
        trial.status, trial.message = "running", ""
        self.save()
        self.log_path(trial).parent.mkdir(parents=True, exist_ok=True)
        with self.log_path(trial).open("ab") as log:
            process = subprocess.Popen(
                self.command(trial, slot),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self._running[trial.number] = (process, slot)
        print(f"trial {trial.number:03d} of {self.total} starts: {' '.join(command_words(trial.point))}")

    def _reap(self) -> None:
        for number, (process, _) in list(self._running.items()):
            if process.poll() is None:
                continue
            del self._running[number]
            trial = self.trials[number]
            if trial.status == "running":
                ended = (self.run_dir(trial) / "results.json").exists()
                if ended and not self.values(trial):
                    trial.status, trial.message = "failed", f"no {self.metric.name} in metrics.jsonl"
                elif process.returncode == 0 and ended:
                    trial.status = "finished"
                else:
                    trial.status, trial.message = "failed", self._last_words(trial, process.returncode)
            self._ended(trial)

    def _last_words(self, trial: Trial, code: int) -> str:
        lines = self.log_path(trial).read_text(errors="replace").split("\n")
        errors = [line for line in lines if line.startswith("error: ")]
        return (
            errors[-1].removeprefix("error: ") if errors else f"exit code {code}, see {self.log_path(trial)}"
        )

    def _ended(self, trial: Trial) -> None:
        self.save()
        values = self.values(trial)
        best = f", best {self.metric.name} {self._sign * min(values):.4g}" if values else ""
        print(f"trial {trial.number:03d} {trial.status}{best}{': ' if trial.message else ''}{trial.message}")
        write_tables(self.rows(), self.sweep.varied, self.metric, self._headline, self.directory)

    def _stop(self, number: int) -> None:
        process, _ = self._running[number]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _stop_hopeless(self, rule: EarlyTerminate) -> None:
        histories = {trial.number: self.values(trial) for trial in self.trials}
        histories = {number: values for number, values in histories.items() if values}
        for number in list(self._running):
            trial = self.trials[number]
            unfinished = not (self.run_dir(trial) / "results.json").exists()
            if number in histories and unfinished and hopeless(histories, number, rule):
                self._stop(number)
                trial.status = "stopped"

    # -- the sweep ---------------------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        """The trials as the table has them."""
        out = []
        for trial in self.trials:
            run_dir = self.run_dir(trial)
            values = read_values(run_dir / "metrics.jsonl", self.metric.name)
            step, score = min(values, key=lambda pair: self._sign * pair[1]) if values else (None, None)
            path = run_dir / "results.json"
            results = json.loads(path.read_text()) if path.exists() else {}
            test = results.get("test", {}).get(self._headline)
            seconds = results.get("wall_clock_s") or sum(
                v for _, v in read_values(run_dir / "metrics.jsonl", "seconds")
            )
            where = str(run_dir.relative_to(self.directory))
            out.append(Row(trial.number, trial.point, trial.status, score, step, test, seconds, where))
        return out

    def run(self) -> list[Row]:
        """Make what is missing of the trials; an interruption stops them, and a later call goes on.

        :raises ValueError: at the end, when trials failed; the others are reported all the same.
        """
        self._resumed = len(self.trials)
        try:
            while True:
                self._reap()
                if self.sweep.early_terminate is not None:
                    self._stop_hopeless(self.sweep.early_terminate)
                while len(self._running) < self._workers and (trial := self._next()) is not None:
                    self._start(trial)
                if not self._running:
                    break
                time.sleep(POLL_SECONDS)
        finally:
            for number in list(self._running):
                self._stop(number)
            self.save()
            self.report()
        failed = [trial for trial in self.trials if trial.status == "failed"]
        if failed:
            raise ValueError(
                f"{len(failed)} of {len(self.trials)} trials failed, trial {failed[0].number:03d}: "
                f"{failed[0].message}"
            )
        return self.rows()

    def report(self) -> None:
        """Table and plot of what there is."""
        rows = self.rows()
        write_tables(rows, self.sweep.varied, self.metric, self._headline, self.directory)
        title = self.sweep.name or self.directory.name
        stem = self.directory / "plots" / "parallel_coordinates"
        drawn = parallel_coordinates(rows, self.sweep, self.metric, title, stem)
        print(f"\n{markdown(rows, self.sweep.varied, self.metric, self._headline)}")
        print(
            f"sweep directory: {self.directory} (table.md, table.csv{', plots/' if drawn else ''}, trials/)"
        )


@contextlib.contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Hold a sweep's directory against a second call."""
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory / "lock", f"{directory} is being worked on: wait, or choose another --sweep_dir"):
        yield
