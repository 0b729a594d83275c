"""The run directory: a line a round, the best model so far, a checkpoint to go on from.

A *step* is a round of federated training or an epoch of centralised training; the model of step t has
had t updates.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from tqdm import tqdm

from benchmarks.core.config.benchmark import AnyRun
from benchmarks.core.config.digests import config_tree, digest, tree_digest
from benchmarks.core.config.trees import Tree, read_yaml
from benchmarks.core.ledger import Ledger
from benchmarks.core.secret import Secret, has_rounds, open_secret, public_secret, secret_path
from benchmarks.core.tracking import Tracking
from dataset.cli import Held
from dataset.files import write_bytes, write_json, written
from pfl_ext import checkpoint
from pfl_ext.algorithms.algorithm import UserState
from pfl_ext.evaluation import LOSS, SCORES
from pfl_ext.tasks.metrics import shown
from pfl_ext.workers.distributed import from_main, is_main, tensors_from_main

MODEL, SERVER, BEST, STATE = "model/", "optimizer/", "best/", "algorithm/"


def part(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of one part of a checkpoint, without its prefix."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def columns(metrics: Metrics) -> dict[str, float]:
    """The paper's columns and the loss of one scored split."""
    return {"loss": float(metrics[LOSS].overall_value), **metrics[SCORES].summary()}


def config_differences(old: Tree, new: Tree, prefix: str = "") -> list[str]:
    """``key: old -> new`` for every field that differs."""
    out = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            out += config_differences(before, after, f"{prefix}{key}.")
        elif before != after:
            out.append(f"{prefix}{key}: {before} -> {after}")
    return out


def run_differences(known: Tree, run: AnyRun) -> list[str]:
    """``key: old -> new`` for every field in which a run is not the one of a ``config.yaml``.

    The file may be of an earlier version of the code, which knew fewer fields and wrote down some that have
    no effect: it is resolved first. What it does not say of the weights file cannot differ.

    Raises:
        ValueError: when the file holds a key that no version had, or a wrong value.
    """
    assert run.benchmark is not None
    old, new = config_tree(run.benchmark.read(known, "config.yaml")), config_tree(run.config)
    if "weights_sha256" not in known.get("model", {}):
        for tree in (old, new):
            tree["model"].pop("weights_sha256", None)
    return config_differences(old, new)


def duration(seconds: float) -> str:
    """``25 min``, ``3.5 h`` or ``2.1 days``."""
    minutes = seconds / 60
    if minutes < 120:
        return f"{minutes:.0f} min"
    return f"{minutes / 60:.1f} h" if minutes < 48 * 60 else f"{minutes / 1440:.1f} days"


@dataclass
class Best:
    """The best model so far: which step, its score, its val columns, its weights (on the CPU)."""

    step: int = -1
    score: float = math.inf
    val: dict[str, float] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)


LONG_S = 600.0
"""A run that will take longer than this says so, in seconds."""


class Recorder:
    """Owner of the files of one run: worker 0 writes them, the others keep the same account of it.

    Nothing is written before `begin`. The checkpoint holds all that a run goes on from, the best model with
    it: files of a step that a kill undid are never read.

    Args:
        data_sha256: what the run learns from, see `dataset.store.hdf5.DataFile.fingerprint`.

    Raises:
        ValueError: when the directory holds a run of another config or of other data, or a run and
            ``resume="never"``.
    """

    def __init__(
        self, run: AnyRun, directory: Path, num_steps: int, unit: str, data_sha256: str = ""
    ) -> None:
        self.run, self.directory, self.num_steps, self.unit = run, directory, num_steps, unit
        self.best = Best()
        self.followed = "val"
        """What the scores over the rounds are called in ``metrics.jsonl`` and on the screen."""
        self.arithmetic: str | None = None
        """How training was computed, see `pfl_ext.engine.cpu.choice.described`."""
        self.ledger: Ledger | None = None
        self.algorithm_state: UserState | None = None
        self.held = Held()
        self.ended = False
        self.data_sha256 = data_sha256
        self.content_sha256: Callable[[], str] | None = None
        """Of every byte that a private run learns from, where ``data_sha256`` leaves out pixels."""
        self.tracking: Tracking | None = None
        self._val: dict[str, float] | None = None
        self._last = directory / "checkpoint" / "last.safetensors"
        self._metrics = directory / "metrics.jsonl"
        self._seconds, self._scoring_s, self._steps_here = 0.0, 0.0, 0
        self._main = is_main()
        self.config_sha256: str = from_main(self._config_sha256() if self._main else None)
        """Of the directory's config.yaml, or of the one that it will get."""
        self._started = self._round_started = self._saved_at = time.perf_counter()
        self._bar = tqdm(disable=True)

    def _config_sha256(self) -> str:
        """The digest of the config that the directory holds, if it is this run's; else refuse."""
        if not self._has_begun():
            return digest(self.run.config)
        if self.run.resume == "never":
            raise ValueError(
                f"{self.directory} already holds a run: choose another --run_dir, or --resume auto"
            )
        path = self.directory / "config.yaml"
        known = read_yaml(path)
        try:
            differences = run_differences(known, self.run)
        except ValueError as fault:
            raise ValueError(f"{path} is damaged or of another version: {fault}") from fault
        if differences:
            raise ValueError(
                f"{self.directory} holds a run of another config ({'; '.join(differences)}): "
                "choose another --run_dir"
            )
        data = self.directory / "checkpoint" / "data.json"
        learnt = checkpoint.read_json(data).get("sha256") if data.exists() else self.data_sha256
        if learnt != self.data_sha256:
            raise ValueError(
                f"{self.directory} holds a run on other data (content {str(learnt)[:12]}, that of "
                f"--data_path is {self.data_sha256[:12]}): give its file, or choose another --run_dir"
            )
        return tree_digest(known)

    def _has_begun(self) -> bool:
        """Whether a run has left a step in the directory; a directory without one is free."""
        begun = (self.directory / "results.json").exists() or has_rounds(self.directory)
        return begun and (self.directory / "config.yaml").exists()

    def begin(self) -> None:
        """Make the directory this run's own; the caller holds its lock."""
        if self._main:
            self.config_sha256 = self._config_sha256()  # another process may have begun here meanwhile
            begun = self._has_begun()
            self.directory.mkdir(parents=True, exist_ok=True)
            write_json(self.directory / "checkpoint" / "data.json", {"sha256": self.data_sha256})
            if not begun:
                text = yaml.safe_dump(config_tree(self.run.config), sort_keys=False)
                write_bytes(self.directory / "config.yaml", text.encode())
        self._started = self._round_started = self._saved_at = time.perf_counter()

    def _show_progress(self, step: int) -> None:
        self._bar = tqdm(
            total=self.num_steps,
            initial=step,
            unit=self.unit,
            file=sys.stderr,
            disable=not (self.run.runtime.progress and self._main),
            mininterval=0.5 if sys.stderr.isatty() else 10,
            dynamic_ncols=True,
        )

    def close(self) -> None:
        """Leave the screen to what comes next, an error line perhaps."""
        self._bar.close()

    def tidy(self) -> None:
        """After ``results.json``: remove what only a run that goes on needs, unless it is to be kept."""
        if self._main and not self.run.runtime.keep_checkpoints:
            users = [self._last.with_name(name) for name in self.run.config.federated.algorithm_class.files]
            for path in (self._last, checkpoint.previous(self._last), *users):
                path.unlink(missing_ok=True)

    @property
    def wall_clock(self) -> float:
        """Seconds of training and evaluation so far, over all resumptions."""
        return self._seconds + time.perf_counter() - self._started

    def finished(self) -> Tree | None:
        """The results of this run, if it has already ended; a secret that a kill left behind is deleted."""
        path = self.directory / "results.json"
        results = from_main(checkpoint.read_json(path) if self._main and path.exists() else None)
        if results is None or results.get("config_sha256") != self.config_sha256:
            return None
        if self._main:
            secret_path(self.directory).unlink(missing_ok=True)
        return dict(results)

    def secret(self) -> Secret | None:
        """What a private run's noise is drawn from; None without privacy.

        Raises:
            ValueError: when a round might be released a second time with other noise.
        """
        config = self.run.config
        privacy = config.privacy or config.local_privacy
        if privacy is None:
            return None
        if privacy.noise_seed == "run":
            return public_secret(self.directory, config.seed)
        precision = self.run.runtime.precision
        data = self.data_sha256 if self.content_sha256 is None else self.content_sha256()
        return open_secret(self.directory, self.config_sha256, data, precision)

    def score(self, evaluation: Callable[[PyTorchModel], Metrics], model: PyTorchModel) -> Metrics:
        """The model's scores; how long it took is remembered, for `_foretell`."""
        begin = time.perf_counter()
        metrics = evaluation(model)
        self._scoring_s = time.perf_counter() - begin
        return metrics

    def evaluated(self, step: int, metrics: Metrics, model: PyTorchModel) -> None:
        """Take note of val at ``step``; keep the model if it is the best so far.

        Best is the least loss, or the greatest of any other column. Of steps that score the same, the
        earliest is kept, which is the model of the fewest updates.
        """
        self._val = columns(metrics)
        by = self.run.config.evaluation.best_by
        score = -float(step) if by == "last" else self._val["loss"] if by == "loss" else -self._val[by]
        if score < self.best.score:
            weights = model.pytorch_model.state_dict()
            self.best = Best(
                step, score, self._val, {n: t.detach().cpu().clone() for n, t in weights.items()}
            )

    def step_done(self, step: int, values: Mapping[str, Any], model: PyTorchModel) -> None:
        """Write the line of ``step`` (its val is the model's before the step's update) and move on."""
        now = time.perf_counter()
        seconds, self._round_started = now - self._round_started, now
        line: Tree = {self.unit: step, "seconds": round(seconds, 4), **values}
        scored = self._val is not None
        if self._main and self.ledger is not None:
            self.ledger.cover(step + 1, self.history)
        self._write_line(line)
        self._bar.update(1)
        self._steps_here += 1
        if self._steps_here == 1:
            self._foretell(step + 1, seconds - (self._scoring_s if scored else 0.0))
        self.held.number = from_main(self.held.number)  # all workers stop, or none
        asked = self.held.number is not None
        if self._main and (asked or self._checkpoint_is_due(step + 1)):
            self.save(step + 1, model)
        if asked:
            self._bar.close()
        self.held.stop_if_asked(f"{self.unit} {step} is done and {self._last} is written")

    def _checkpoint_is_due(self, step: int) -> bool:
        runtime = self.run.runtime
        minutes = (time.perf_counter() - self._saved_at) / 60
        return step % runtime.checkpoint_every == 0 or minutes >= runtime.checkpoint_minutes

    def _foretell(self, done: int, seconds: float) -> None:
        """Say how long the rest will take at the pace of this process's first step, if it is long."""
        config = self.run.config
        every = config.evaluation.every_rounds if self.unit == "round" else config.evaluation.every_epochs
        steps = self.num_steps - done
        evaluations = -(-steps // every) + 1
        total = steps * seconds + evaluations * self._scoring_s
        if self._main and total > LONG_S:
            parts = f"{steps:,} {self.unit}s of {seconds:.2g} s and {evaluations:,} evaluations of "
            pace = f"at the pace of the first {self.unit}: {parts}{self._scoring_s:.2g} s"
            tqdm.write(f"about {duration(total)} to go {pace}", file=sys.stderr)

    def end(self, model: PyTorchModel) -> None:
        """Write the last line, which holds nothing but the val of the last model, and the last checkpoint.

        From that checkpoint no round is trained again, whatever happens before ``results.json`` is written.
        """
        self._write_line({self.unit: self.num_steps})
        self._bar.close()
        self.ended = True
        if self._main:
            self.save(self.num_steps, model)

    def _write_line(self, line: Tree) -> None:
        if self._val is not None:
            line[self.followed] = {key: round(value, 6) for key, value in self._val.items()}
            first = next(name for name in self._val if name != "loss")
            self._bar.set_postfix_str(
                f"{self.followed} {shown(first)} {self._val[first]:.2f} loss {self._val['loss']:.4f}",
                refresh=False,
            )
            self._val = None
        if not self._main:
            return
        if self.ledger is not None:
            line = self.ledger.line(self.unit, line)
        with written(self._metrics), self._metrics.open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        if self.tracking is not None:
            self.tracking.tell(line)

    def save(self, step: int, model: PyTorchModel) -> None:
        """Checkpoint: the run can go on at ``step``."""
        tensors = {MODEL + name: tensor for name, tensor in model.pytorch_model.state_dict().items()}
        optimizer = checkpoint.optimizer_tensors(model._central_optimizer)
        tensors |= {SERVER + name: tensor for name, tensor in optimizer.items()}
        tensors |= {BEST + name: tensor for name, tensor in self.best.weights.items()}
        if self.algorithm_state is not None:
            tensors |= {STATE + name: tensor for name, tensor in self.algorithm_state.tensors().items()}
        lines = self._flushed_metrics()
        state = {
            "step": step,
            "config_sha256": self.config_sha256,
            "best": {"step": self.best.step, "score": self.best.score, "val": self.best.val},
            "metrics_bytes": len(lines),
            "metrics_sha256": hashlib.sha256(lines).hexdigest(),
            "seconds": self.wall_clock,
            "ended": self.ended,
        }
        if self.ledger is not None:
            state["privacy"] = self.ledger.state()
            self.ledger.write(step, self.history())
        checkpoint.save(self._last, tensors, state, keep_previous=True)
        if self.algorithm_state is not None:
            self.algorithm_state.saved()
        self._saved_at = time.perf_counter()

    def _flushed_metrics(self) -> bytes:
        """All lines so far, which are on the disk before a checkpoint counts on them."""
        if not self._metrics.exists():
            return b""
        with self._metrics.open("rb") as file:
            os.fsync(file.fileno())
            return file.read()

    def _cut_metrics(self, state: Tree) -> int:
        """Leave the lines that a checkpoint knows; how many steps are lost with the others.

        Raises:
            ValueError: when some of them are gone or changed.
        """
        length = state["metrics_bytes"]
        content = self._metrics.read_bytes() if self._metrics.exists() else b""
        lines = content[:length]
        if hashlib.sha256(lines).hexdigest() != state["metrics_sha256"]:
            raise ValueError(
                f"{self._metrics} is not the one that the checkpoint was written with: restore it, or choose "
                "another --run_dir"
            )
        if self._metrics.exists():
            os.truncate(self._metrics, length)
        steps = lines.count(b"\n") + content[length:].count(b"\n")
        return min(steps, self.num_steps) - int(state["step"])  # the last line is no step's

    def restore(self, model: PyTorchModel) -> int:
        """Put the model, its optimiser and the files back to the last checkpoint; the step to go on at."""
        step = self._restored(model)
        self._show_progress(step)
        return step

    def _restored(self, model: PyTorchModel) -> int:
        if not from_main(self._main and (self._last.exists() or checkpoint.previous(self._last).exists())):
            if self._main and self._metrics.exists():
                lost = min(self._metrics.read_bytes().count(b"\n"), self.num_steps)
                self._metrics.unlink()
                print(f"there is no checkpoint: starting again: {self._again(0, lost)}", file=sys.stderr)
            return 0
        tensors, state, fallen_back = checkpoint.load_newest(self._last) if self._main else (None, None, "")
        if fallen_back:
            print(fallen_back, file=sys.stderr)
        tensors, state = tensors_from_main(tensors), from_main(state)
        if state["config_sha256"] != self.config_sha256:
            raise ValueError(f"{self._last} belongs to a run of another config: choose another --run_dir")
        model.pytorch_model.load_state_dict(part(tensors, MODEL))
        checkpoint.restore_optimizer(model._central_optimizer, part(tensors, SERVER))
        self.best = Best(**state["best"], weights=part(tensors, BEST))
        if self.algorithm_state is not None:
            self.algorithm_state.load(part(tensors, STATE))
        step = int(state["step"])
        lost = self._cut_metrics(state) if self._main else 0
        self._seconds, self.ended = state["seconds"], state.get("ended", False)
        if self.ledger is not None:
            self.ledger.load_state(state["privacy"])
        if self.tracking is not None:
            for line in self.history():
                self.tracking.tell(line)
        if self._main:
            print(
                f"resuming at {self.unit} {step} from {self._last}: {self._again(step, lost)}",
                file=sys.stderr,
            )
        return step

    def _again(self, first: int, count: int) -> str:
        """Which steps are done a second time, in words."""
        if count < 1:
            return f"no {self.unit} is done again"
        if count == 1:
            return f"{self.unit} {first} is done again"
        return f"{self.unit}s {first} to {first + count - 1} are done again ({count} in all)"

    def best_weights(self) -> dict[str, torch.Tensor]:
        """The state of the model that scored best on val."""
        return self.best.weights

    def history(self) -> list[Tree]:
        """All lines of ``metrics.jsonl``."""
        if not self._metrics.exists():
            return []
        return [json.loads(line) for line in self._metrics.read_text().splitlines()]
