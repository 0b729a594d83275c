"""A sweep with no server: some trials at a time, to be gone on with however it ends.

The directory of a sweep holds ``study.journal`` (optuna's), a plain run for each trial in
``trials/NNN-DIGEST``, ``logs/NNN.log``, ``table.md``, ``table.csv``, ``over_seeds.csv`` where ``seed`` is
swept, and ``plots/``.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args, get_type_hints

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial
from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from benchmarks.core.config.digests import short_digest
from benchmarks.core.config.trees import Tree
from benchmarks.core.own_code import own_code
from benchmarks.core.tracking import flat
from benchmarks.sweep.process import POLL_SECONDS, TrialProcess
from benchmarks.sweep.report import (
    DIVERGED,
    Row,
    best_row,
    draw_trials,
    other_models,
    over_seeds,
    table,
    write_tables,
)
from benchmarks.sweep.space import Sweep, command_words
from benchmarks.sweep.study import open_study, telling
from dataset.cli import cores
from dataset.files import OWN
from pfl_ext.configs import STRICT
from pfl_ext.tasks.ranking import Diverged

STATUS = {TrialState.COMPLETE: "finished", TrialState.PRUNED: "stopped", TrialState.FAIL: "failed"}
GIVEN_UP = "given_up"
"""Says of a trial that it was compared with others and asked to stop."""
RUNG = "completed_rung_"
"""What optuna's successive halving calls the values that trials are compared by."""
optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True, config=STRICT)
class Options:
    """The options of a sweep's command line, apart from the training's."""

    local: bool = False
    workers: PositiveInt | None = None
    devices: str | None = None
    sweep_dir: Path | None = None
    count: PositiveInt | None = None
    sweep_seed: NonNegativeInt = 0
    np: PositiveInt = 1
    program: str | None = None


def status_of(trial: FrozenTrial) -> str:
    """How a trial ended, in a word."""
    return DIVERGED if trial.user_attrs.get(DIVERGED) else STATUS.get(trial.state, "running")


def number_of(trial: FrozenTrial | Trial) -> str:
    """A trial's number in three digits, or more from 1,000 on: the first part of its name."""
    return str(trial.user_attrs["name"]).partition("-")[0]


def read_values(path: Path, metric: str) -> list[tuple[int, float]]:
    """``(step, value)`` of a metric in a ``metrics.jsonl``, whose last line may be only half there.

    Few lines of a long run have scores of val, and only those are parsed.
    """
    out, key = [], f'"{metric.partition("/")[0]}"'
    for text in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else ():
        line = json.loads(text) if key in text and text.endswith("\n") else {}
        if math.isfinite(value := flat(line).get(metric, math.nan)):
            out.append((int(line.get("round", line.get("epoch", 0))), value))
    return out


class LocalSweep:
    """The trials of a sweep, in a directory that belongs to this process.

    Args:
        sweep: what is tried.
        tree: its file.
        words: the training's arguments that all trials share.
        directory: of the sweep.
        options: of its command.
        content: what the files behind ``words`` hold, by which a later call knows that it is the same sweep.

    Raises:
        ValueError: for a directory of another sweep, or one that cannot be read.
    """

    def __init__(
        self,
        sweep: Sweep,
        tree: Tree,
        words: Sequence[str],
        directory: Path,
        options: Options,
        content: Tree | None = None,
    ) -> None:
        self.sweep, self.words, self.directory, self.options = sweep, list(words), directory, options
        self._devices = [name.strip() for name in (options.devices or "auto").split(",")]
        if "" in self._devices:
            raise ValueError(f"--devices is {options.devices!r}: name devices with a comma between them")
        self._num_workers = options.workers or len(self._devices)
        most = sweep.grid_size() if sweep.method == "grid" else sys.maxsize
        self.total = min(most, sweep.run_cap or most, options.count or most)
        self._best = max if sweep.ranking.goal == "maximize" else min
        kept = {key: value for key, value in tree.items() if key != "run_cap"}  # it may be raised later
        identity = {"sweep": kept, "words": telling(words), "seed": options.sweep_seed, **(content or {})}
        benchmark = sweep.experiment.benchmark
        identity |= {"own_code": found} if (found := own_code(benchmark.kind, benchmark.own)) else {}
        self.study = open_study(directory, sweep, json.loads(json.dumps(identity)))
        self._active: dict[int, tuple[Trial, TrialProcess]] = {}
        """The trials that are being trained, by their worker."""
        self._half_finished: list[FrozenTrial] = []
        """The trials that an earlier call has begun and that are to go on."""
        self._ended: dict[int, Row] = {}
        """The rows of trials that have ended, by optuna's number."""

    def trials(self) -> list[FrozenTrial]:
        """The last attempt at each trial, in the order of their numbers."""
        attempts = self.study.get_trials(deepcopy=False)
        return list({trial.user_attrs["name"]: trial for trial in attempts}.values())

    def run_dir(self, trial: FrozenTrial | Trial) -> Path:
        """A plain run's directory."""
        return self.directory / "trials" / str(trial.user_attrs["name"])

    def values(self, trial: Trial) -> list[float]:
        """Those of the metric so far."""
        path = self.run_dir(trial) / "metrics.jsonl"
        return [value for _, value in read_values(path, self.sweep.ranking.name)]

    def training_words(self, trial: Trial, worker: int) -> list[str]:
        """The arguments of a trial; the worker's device comes last and wins."""
        device = self._devices[worker % len(self._devices)]
        words = [*self.words, f"--runtime.device={device}"]
        fixed = self.sweep.experiment.benchmark.words(self.words)
        if "runtime.threads" not in fixed and not device.startswith("cuda"):
            share = cores() // (self._num_workers * self.options.np)
            words.append(f"--runtime.threads={max(1, share)}")
        return [*words, *command_words(trial.user_attrs["point"])]

    def _add(self, params: Tree, attributes: Tree) -> None:
        """Have optuna's queue hold a trial, whole: there is no moment at which a kill loses a part of it."""
        space = self.sweep.space
        self.study.add_trial(
            create_trial(state=TrialState.WAITING, params=params, distributions=space, user_attrs=attributes)
        )

    def _add_new(self) -> None:
        """Queue the next point whose config no trial has, if there is one."""
        trials = self.trials()
        known = {trial.user_attrs["digest"] for trial in trials}
        for params, point in self.sweep.candidates(self.options.sweep_seed, len(trials), trials):
            run = self.sweep.experiment.benchmark.parse([*self.words, *command_words(point)])
            digest = short_digest(run.config)
            if digest not in known:
                name = f"{len(trials):03d}-{digest[:8]}"
                self._add(params, {"point": point, "digest": digest, "name": name})
                return

    def _next(self) -> Trial | None:
        """A trial to start: half-finished or failed in an earlier call, or else new."""
        if self._half_finished:
            return Trial(self.study, self._half_finished.pop(0)._trial_id)
        if not self._waiting() and len(self.trials()) < self.total:
            self._add_new()
        return self.study.ask() if self._waiting() else None

    def _waiting(self) -> bool:
        return bool(self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    def _start(self, trial: Trial) -> None:
        worker = min(set(range(self._num_workers)) - self._active.keys())
        words, number = self.training_words(trial, worker), number_of(trial)
        log = self.directory / "logs" / f"{number}.log"
        print(f"trial {number} of {self.total} starts: {' '.join(command_words(trial.user_attrs['point']))}")
        process = TrialProcess(self.sweep.program_module, words, self.run_dir(trial), log, self.options.np)
        self._active[worker] = trial, process

    def _watch(self, trial: Trial, process: TrialProcess) -> bool:
        """Compare a trial with the others by its new values, if the sweep does; whether it has ended."""
        alive, rule = process.is_alive(), self.sweep.early_terminate
        if rule is not None and process.has_news():
            known = self.study.get_trials(deepcopy=False)[trial.number].intermediate_values
            for step, best in enumerate(itertools.accumulate(self.values(trial), self._best), 1):
                if step not in known:
                    trial.report(best, step)
                    if alive and rule.compares(step) and trial.should_prune():
                        trial.set_user_attr(GIVEN_UP, True)  # also after an interruption
                        process.stop()
        return not alive

    def _end(self, trial: Trial, process: TrialProcess) -> None:
        """Keep how a trial ended."""
        values, fault = self.values(trial), process.fault()
        if fault is None and not values:
            fault = f"no {self.sweep.ranking.name} in metrics.jsonl"
        if fault is None:
            self.study.tell(trial, self._best(values))
        elif Diverged.SAYS in fault:
            self._diverged(trial)
        elif process.stopping:
            self.study.tell(trial, state=TrialState.PRUNED)
        else:
            trial.set_user_attr("message", fault)
            self.study.tell(trial, state=TrialState.FAIL)
        status = status_of(self.study.get_trials(deepcopy=False)[trial.number])
        best = f", best {self.sweep.ranking.name} {self._best(values):.4g}" if values else ""
        why = f": {fault}" if status in ("failed", DIVERGED) else ""
        print(f"trial {number_of(trial)} {status}{best}{why}", flush=True)
        self._write(self.rows())

    def _diverged(self, trial: Trial) -> None:
        """Keep a trial as the worst of all, also for those that are compared with what it reached before."""
        worst = self.sweep.ranking.sign * math.inf
        storage = self.study._storage
        for name in self.study.get_trials(deepcopy=False)[trial.number].system_attrs:
            if name.startswith(RUNG):
                storage.set_trial_system_attr(trial._trial_id, name, worst)
        trial.set_user_attr(DIVERGED, True)
        self.study.tell(trial, worst)

    def run(self) -> list[Row]:
        """Make what is missing of the trials; an interruption stops them, and a later call goes on.

        Raises:
            ValueError: at the end, when trials failed, or none has finished; they are reported all the same.
        """
        self._take_up()
        try:
            self._train()
        finally:
            processes = [process for _, process in self._active.values()]
            for process in processes:
                process.stop()
            while sum(process.is_alive() for process in processes):
                time.sleep(POLL_SECONDS)
            self.report()
        rows = self.rows()
        self._refuse_fruitless(rows)
        return rows

    def _take_up(self) -> None:
        """Have the trials of an earlier call that were being trained or that failed go on."""
        for trial in self.trials():
            if trial.state == TrialState.RUNNING:
                if trial.user_attrs.get(GIVEN_UP) and not (self.run_dir(trial) / "results.json").exists():
                    self.study.tell(trial.number, state=TrialState.PRUNED)
                else:
                    self._half_finished.append(trial)
        for trial in self.trials():
            if trial.state == TrialState.FAIL:
                self._add(trial.params, {**trial.user_attrs, "message": ""})

    def _train(self) -> None:
        """Start and watch trials until there are no more."""
        more = True  # a worker that found no trial asks again when another trial has ended
        while True:
            for worker, active in list(self._active.items()):
                if self._watch(*active):
                    del self._active[worker]
                    self._end(*active)
                    more = True
            while more and len(self._active) < self._num_workers:
                if more := (new := self._next()) is not None:
                    self._start(new)
            if not self._active:
                return
            time.sleep(POLL_SECONDS)

    def _refuse_fruitless(self, rows: Sequence[Row]) -> None:
        """Raise ValueError when trials failed, or all of them diverged."""
        failed = [trial for trial in self.trials() if trial.state == TrialState.FAIL]
        if failed:
            number, message = number_of(failed[0]), failed[0].user_attrs["message"]
            raise ValueError(
                f"{len(failed)} of {len(self.trials())} trials failed, trial {number}: {message}"
            )
        diverged = sum(row.status == DIVERGED for row in rows)
        if diverged and not any(row.status == "finished" for row in rows):
            raise ValueError(
                f"no trial has finished: the model diverged in {diverged} of {len(rows)} trials: use "
                "lower learning rates in the sweep"
            )

    def rows(self) -> list[Row]:
        """The trials as the table has them; the files of one that has ended are read once."""
        return [self._row(trial) for trial in self.trials()]

    def _row(self, trial: FrozenTrial) -> Row:
        if trial.number in self._ended:
            return self._ended[trial.number]
        run_dir = self.run_dir(trial)
        values, seconds = (
            read_values(run_dir / "metrics.jsonl", name) for name in (self.sweep.ranking.name, "seconds")
        )
        scored = values and status_of(trial) != DIVERGED
        step, score = self._best(values, key=lambda pair: pair[1]) if scored else (None, None)
        path = run_dir / "results.json"
        results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        row = Row(
            int(number_of(trial)),
            trial.user_attrs["point"],
            status_of(trial),
            score,
            step,
            results.get("test", {}).get(self.sweep.on_test),
            results.get("wall_clock_s") or sum(value for _, value in seconds) or None,
            str(run_dir.relative_to(self.directory)),
            results.get("best_step"),
        )
        if trial.state.is_finished():
            self._ended[trial.number] = row
        return row

    def _write(self, rows: Sequence[Row]) -> str:
        """Write the tables; the text of ``table.md``."""
        trained, ranking = self.sweep.experiment, self.sweep.ranking
        columns = rows, list(self.sweep.space), ranking, self.sweep.on_test, self.sweep.kinds
        best_by = get_type_hints(type(trained.benchmark.parse(self.words).config.evaluation))["best_by"]
        note = other_models(rows, ranking, get_args(best_by))
        return write_tables(table(*columns), over_seeds(*columns), note, self.directory)

    def report(self) -> None:
        """Table and plot of what there is."""
        rows = self.rows()
        text, title = self._write(rows), self.sweep.name or self.directory.name
        drawn = draw_trials(rows, self.sweep, title, self.directory / "plots")
        print(f"\n{text}\n")
        if (again := self._again(rows)) is not None:
            print(f"to train the best trial again, with another seed and scored on test:\n  {again}\n")
        print(
            f"sweep directory: {self.directory} (table.md, table.csv{', plots/' if drawn else ''}, trials/)"
        )

    def _again(self, rows: Sequence[Row]) -> str | None:
        """The command that trains with the config of the best trial that has finished, if there is one."""
        best = best_row(rows, self.sweep.ranking, whole=self.sweep.method == "grid")
        if best is None:
            return None
        benchmark = self.sweep.experiment.benchmark
        path = self.directory / best.run_dir / "config.yaml"
        if not path.exists():
            return None
        words = ["--config", str(path)]
        config = benchmark.parse(words).config
        if config.is_private:  # a given seed would publish the noise
            return None
        if getattr(config.data, "scored", "test") == "val":  # of the images of val that are training images
            default = benchmark.default_config
            words += ["--data.scored", "test"]
            if config.data.val_share != default.data.val_share:
                words += ["--data.val_share", f"{default.data.val_share:g}"]
            if config.evaluation.best_by != "last":
                words += ["--evaluation.best_by", "last"]
        given = benchmark.words(self.words)
        for name in ("weights", *(key for key in given if key.startswith("runtime."))):
            words += [f"--{name}", given[name]] if name in given else []
        words += ["--seed", str(1 + max(int(row.point.get("seed", config.seed)) for row in rows))]
        benchmark.parse(words)
        own = f"{OWN}={shlex.quote(os.environ[OWN])} " if config.own_code else ""
        return own + shlex.join(["python", "-m", self.sweep.program_module, *words])
