"""What training reports to: each step becomes a line, a checkpoint now and then, and the best model is kept.
The file that a run goes on from holds the state of training, and the best model so far.

A *step* is a round of federated training or an epoch of centralised training; the model of step t has
had t updates. Lines are written by `RunDirectory`, and `Progress` has the screen.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from benchmarks.core.config.benchmark import AnyRun
from benchmarks.core.config.trees import Tree
from benchmarks.core.ledger import Ledger
from benchmarks.core.progress import Progress
from benchmarks.core.run_directory import RunDirectory
from benchmarks.core.tracking import Tracking
from dataset.cli import Held, Stopped
from dataset.files import written
from pfl_ext import checkpoint
from pfl_ext.algorithms.algorithm import Algorithm
from pfl_ext.algorithms.channel import FILE as ERRORS_FILE
from pfl_ext.algorithms.server_model import ModelState
from pfl_ext.averaging import ModelAverage
from pfl_ext.evaluation import LOSS, SCORES
from pfl_ext.tasks.ranking import Diverged
from pfl_ext.tasks.task import Task
from pfl_ext.workers.distributed import barrier, from_any, from_main, is_main, tensors_from_main

BEST, AVERAGE = "best/", "average/"
"""What the names of the best model's tensors begin with, and those of the average over rounds."""


@dataclass
class Best:
    """The best model so far: which step, its score, its val columns, its weights (on the CPU)."""

    step: int = -1
    score: float = math.inf
    val: dict[str, float] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)


class Checkpoints:
    """``checkpoint/last.safetensors`` of a run directory, and the one before it. Worker 0 reads and writes.

    A checkpoint holds all that a run goes on from, the best model with it: files of a step that a kill undid
    are never read.
    """

    def __init__(self, directory: Path, run: AnyRun) -> None:
        self.last = self.read = directory / "checkpoint" / "last.safetensors"
        self.algorithm: Algorithm[Any] | ModelState = ModelState()
        """How the state of training becomes the tensors of a checkpoint."""
        self.average: ModelAverage | None = None
        """The average of the models that is scored and saved; None before training."""
        self._run, self._saved_at = run, time.perf_counter()

    def due(self, step: int) -> bool:
        """Whether one is due after ``step`` steps: by their number, or by the time since the last."""
        runtime, minutes = self._run.runtime, (time.perf_counter() - self._saved_at) / 60
        return step % runtime.checkpoint_every == 0 or minutes >= runtime.checkpoint_minutes

    def save(self, state: Any, best: Best, account: Tree) -> None:
        """Write a checkpoint; the one before it is kept."""
        kept_best = {BEST + name: tensor for name, tensor in best.weights.items()}
        tensors = self.algorithm.tensors(state) | kept_best
        if self.average is not None:
            tensors |= {AVERAGE + name: tensor for name, tensor in self.average.tensors().items()}
        whole = {**account, "best": {"step": best.step, "score": best.score, "val": best.val}}
        checkpoint.save(self.last, tensors, whole, keep_previous=True)
        self.algorithm.saved()
        self._saved_at = time.perf_counter()

    def load(self, config_sha256: str, state: Any) -> tuple[Best, Tree, Any] | None:
        """Read the newest whole checkpoint; ``state`` is that of training before the first step.

        One is whole if the files of users' states that it names are. Where that is the one before the last,
        the last is removed: the next save would put it in the place of the only good one.

        Returns:
            The best model, the run's account and the state of training; None where there is no checkpoint.

        Raises:
            ValueError: when it belongs to a run of another config, or none is whole.
        """
        before = checkpoint.previous(self.last)
        if not from_main(is_main() and (self.last.exists() or before.exists())):
            return None
        fault, fallen_back = None, None
        while True:
            tensors, account = None, None
            if is_main():
                tensors, account, fallen_back = checkpoint.load_newest(self.last, fault)
            tensors, account = tensors_from_main(tensors), from_main(account)
            if account["config_sha256"] != config_sha256:
                raise ValueError(f"{self.last} belongs to a run of another config: choose another --run_dir")
            state, fault = self._restored(state, tensors)
            if fault is None:
                break
            if from_main(fallen_back is not None or not before.exists()):
                raise ValueError(f"{fault}: restore it, or choose another --run_dir")
        if fallen_back:
            print(fallen_back, file=sys.stderr)
            self.read = before
            with written(self.last):
                self.last.unlink(missing_ok=True)
        if self.average is not None:
            self.average.load(checkpoint.part(tensors, AVERAGE))
        return Best(**account["best"], weights=checkpoint.part(tensors, BEST)), account, state

    def _restored(self, state: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, str | None]:
        """The state of training in a checkpoint, and why worker 0, which has the files, cannot restore it."""
        fault = None
        if is_main():
            try:
                state = self.algorithm.load(state, tensors)
            except ValueError as damage:
                fault = str(damage)
        fault = from_main(fault)
        if fault is None and not is_main():
            state = self.algorithm.load(state, tensors)
        return state, fault

    @property
    def of_users(self) -> list[Path]:
        """The files of users' states, each of which there may be."""
        names = (*self._run.config.federated.chosen.files, ERRORS_FILE)
        return [self.last.with_name(name) for name in names]

    def remove(self) -> None:
        """Remove what only a run that goes on needs."""
        for path in (self.last, checkpoint.previous(self.last), *self.of_users):
            path.unlink(missing_ok=True)


def columns(task: Task, metrics: Metrics) -> dict[str, float]:
    """The loss and the task's columns of one scored split; Diverged where one is not finite."""
    found = {"loss": float(metrics[LOSS].overall_value), **task.summarise(metrics[SCORES])}
    for name, value in found.items():
        if not math.isfinite(value):
            raise Diverged(f"{name} of a scored split is {value:g}")
    return found


def finite_part(values: Mapping[str, Any]) -> Tree:
    """What JSON can hold of the values of a line: without numbers that are not finite, at any depth."""
    inner = {
        key: finite_part(value) if isinstance(value, Mapping) else value for key, value in values.items()
    }
    return {
        key: value for key, value in inner.items() if not isinstance(value, float) or math.isfinite(value)
    }


class Recorder:
    """Keeps the account of one run under way. Worker 0 writes it, the others keep the same one.

    Args:
        files: of the run, which have been begun.
        followed: what the scores over the steps are called in ``metrics.jsonl`` and on the screen.
    """

    def __init__(self, files: RunDirectory, followed: str = "val") -> None:
        self.files, self.run, self.followed = files, files.run, followed
        self.checkpoints, self.progress = Checkpoints(files.path, files.run), Progress(files.run)
        self.unit, self.num_steps = files.run.config.unit, files.run.config.num_steps
        self.best = Best()
        self.arithmetic: str | None = None
        """How training was computed, see `pfl_ext.engine.cpu.choice.described`."""
        self.findings: Tree = {}
        """What federated training has found besides a model, by keys of ``results.json``: ``engine_check``
        of `pfl_ext.engine.selfcheck`, ``engine_choice`` of `pfl_ext.engine.tuning`, ``traffic`` in bytes
        between the server and each user of a round, and the algorithm's own keys."""
        self.ledger: Ledger | None = None
        self.tracking: Tracking | None = None
        self.held = Held()
        self.ended = False
        self._val: dict[str, float] | None = None

    def evaluated(self, step: int, metrics: Metrics, model: PyTorchModel) -> None:
        """Take note of val at ``step``; keep the model if it is the best so far.

        Best is the lowest loss or other column of which the task declares that lower is better, and the
        highest of any other. Of steps that score the same, the earliest is kept, which is the model of the
        fewest updates.
        """
        task: Task = model.pytorch_model.task
        self._val = columns(task, metrics)
        by = self.run.config.evaluation.best_by
        first = task.headline[0] if by in ("loss", "last") else by
        kinds, value = task.score_kinds, self._val[first]
        digits = kinds.decimals(first, [value], 2)
        text = f"{task.shown(first)} {value:.{digits}f} loss {self._val['loss']:.4f}"
        self.progress.show(f"{self.followed} {text}")
        if by == "last":
            score = -float(step)
        else:
            score = self._val[by] if kinds.is_lower_better(by) else -self._val[by]
        if score < self.best.score:
            weights = {n: t.detach().cpu().clone() for n, t in model.pytorch_model.state_dict().items()}
            self.best = Best(step, score, self._val, weights)

    def step_done(self, step: int, values: Mapping[str, Any], state: Any) -> None:
        """Write the line of ``step`` (its val is the model's before the step's update) and move on.

        Raises:
            Diverged: after the line, and before a checkpoint, when the step left numbers that are not finite.
        """
        seconds, scored = self.progress.lap(), self._val is not None
        whole, values = values, finite_part(values)
        if is_main() and self.ledger is not None:
            self.ledger.cover(step + 1, self.files.history)
        self._write_line({self.unit: step, "seconds": round(seconds, 4), **values})
        if values != whole or not self.checkpoints.algorithm.is_finite(state):
            self.progress.close()
            raise Diverged(f"{self.unit} {step} ended with numbers that are not finite", self._remedy())
        self.progress.step_done(step + 1, seconds, scored)
        asked = from_any(self.held.number)  # all stop, or none; a later signal is for the next step
        if is_main() and (asked is not None or self.checkpoints.due(step + 1)):
            self.save(step + 1, state)
        if asked is not None:
            self.progress.close()
            barrier()  # a launcher may end those that are left when the first leaves; the main one is saving
            done = f"{step + 1} of {self.num_steps} {self.unit}s are done"
            raise Stopped(asked, f"{done} and {self.checkpoints.last} was saved")

    def _remedy(self) -> str:
        """What to do about training that diverges, by the keys of this run."""
        config, federated = self.run.config, self.run.config.federated
        if config.mode == "centralised":
            return "lower centralised.learning_rate or set centralised.max_grad_norm"
        keys = ["local.learning_rate"]
        if config.local.effective_learning_rate is not None:
            keys = ["local.effective_learning_rate"]
        if "server." not in federated.chosen.idle.split():
            keys.append("server.learning_rate")
        options = [each.name for each in fields(federated.chosen.options)]
        keys += [f"federated.options.{name}" for name in options if name.endswith("learning_rate")]
        read = [key for key in keys if key not in federated.chosen.idle.split()]
        return f"lower {' or '.join(read)}, or set local.max_grad_norm" if read else "check the data"

    def end(self, state: Any) -> None:
        """Write the last line, which holds nothing but the val of the last model, and the last checkpoint.

        From that checkpoint no round is trained again, whatever happens before ``results.json`` is written.
        """
        self._write_line({self.unit: self.num_steps})
        self.progress.close()
        self.ended = True
        if is_main():
            self.save(self.num_steps, state)

    def _write_line(self, line: Tree) -> None:
        if self._val is not None:
            line[self.followed] = {key: round(value, 6) for key, value in self._val.items()}
            self._val = None
        if not is_main():
            return
        if self.ledger is not None:
            if self.followed in line:
                line |= self.ledger.epsilons(line[self.unit])
            line = self.ledger.line(self.unit, line)
        self.files.append(line)
        if self.tracking is not None:
            self.tracking.tell(line)

    def save(self, step: int, state: Any) -> None:
        """Checkpoint: the run can go on at ``step`` from this state of training."""
        account = {
            "step": step,
            "config_sha256": self.files.config_sha256,
            **self.files.flushed(),
            "seconds": self.progress.wall_clock,
            "ended": self.ended,
            "arithmetic": self.arithmetic,
        }
        if self.ledger is not None:
            account["privacy"] = self.ledger.state()
            self.ledger.write(step, self.files.history())
        self.checkpoints.save(state, self.best, account)

    def restore(self, state: Any) -> tuple[int, Any]:
        """Put the files back to the last checkpoint; the step to go on at, and the state of training there.

        ``state`` is the one before the first step, which is also what comes back without a checkpoint.
        """
        loaded = self.checkpoints.load(self.files.config_sha256, state)
        step = 0
        if loaded is not None:
            self.best, account, state = loaded
            step = self._resumed(account)
        elif is_main() and (lines := self.files.remove_lines()):
            again = self._again(0, min(lines, self.num_steps))
            print(f"there is no checkpoint: starting from the beginning: {again}", file=sys.stderr)
        self.progress.open(step)
        return step, state

    def trained_in(self, arithmetic: str, step: int) -> None:
        """Note in which arithmetic steps from this one on are computed; that of earlier ones stays."""
        before = self.arithmetic or arithmetic
        changed = not before.endswith(arithmetic)
        self.arithmetic = f"{before}; from {self.unit} {step} on {arithmetic}" if changed else before

    def _resumed(self, account: Tree) -> int:
        """Take up the account that a checkpoint holds; the step to go on at."""
        step = int(account["step"])
        lines = self.files.cut(account) if is_main() else 0
        self.progress.earlier_s, self.ended = account["seconds"], account.get("ended", False)
        self.arithmetic = self.arithmetic or account.get("arithmetic")
        if self.ledger is not None:
            self.ledger.load_state(account["privacy"])
        if self.tracking is not None:
            for line in self.files.history():
                self.tracking.tell(line)
        if is_main():
            lost = min(lines, self.num_steps) - step  # the last line is no step's
            again = self._again(step, lost)
            print(f"resuming at {self.unit} {step} from {self.checkpoints.read}: {again}", file=sys.stderr)
        return step

    def _again(self, first: int, count: int) -> str:
        """Which steps are done a second time, in words."""
        if count < 1:
            return f"no {self.unit} is done again"
        if count == 1:
            return f"{self.unit} {first} is done again"
        return f"{self.unit}s {first} to {first + count - 1} are done again ({count} in all)"
