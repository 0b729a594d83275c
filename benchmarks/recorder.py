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
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, get_args

import torch
import yaml
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from tqdm import tqdm

from benchmarks.ledger import Ledger
from benchmarks.secret import Secret, open_secret, public_secret, secret_path
from benchmarks.sections import BestBy
from benchmarks.settings import AnyRun, Tree, digest, read_yaml
from benchmarks.tracking import Tracking
from dataset.signals import Held
from pfl_ext import checkpoint
from pfl_ext.distributed import from_main, is_main, tensors_from_main
from pfl_ext.evaluation import LOSS, SCORES
from pfl_ext.metrics import shown

MODEL, SERVER, BEST, STATE = "model/", "optimizer/", "best/", "algorithm/"


class AlgorithmState(Protocol):
    """What an algorithm goes on from besides the model and the server's optimiser."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """For the checkpoint that is about to be written."""
        ...

    def saved(self) -> None:
        """That checkpoint has taken its name."""
        ...

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on from the tensors of a checkpoint."""
        ...


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


@dataclass
class Best:
    """The best model so far: which step, its score, its val columns, its weights (on the CPU)."""

    step: int = -1
    score: float = math.inf
    val: dict[str, float] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)


class Recorder:
    """Owner of the files of one run: worker 0 writes them, the others keep the same account of it.

    The checkpoint holds all that a run goes on from, the best model with it: files of a step that a kill
    undid are never read.

    :param data_sha256: what the run learns from, see `dataset.flair.hdf5.FlairFile.fingerprint`.
    :raises ValueError: when the directory holds a run of another config or of other data, or a run and
        ``resume="never"``.
    """

    def __init__(
        self, run: AnyRun, directory: Path, num_steps: int, unit: str, data_sha256: str = ""
    ) -> None:
        self.run, self.directory, self.num_steps, self.unit = run, directory, num_steps, unit
        self.best = Best()
        self.followed = "val"
        """What the scores over the rounds are called in ``metrics.jsonl`` and on the screen."""
        self.ledger: Ledger | None = None
        self.algorithm_state: AlgorithmState | None = None
        self.held = Held()
        self.ended = False
        self.data_sha256 = data_sha256
        self.tracking: Tracking | None = None
        self._digest = digest(run.config)
        self._val: dict[str, float] | None = None
        self._last = directory / "checkpoint" / "last.safetensors"
        self._metrics = directory / "metrics.jsonl"
        self._seconds = 0.0
        self._main = is_main()
        if self._main:
            self._claim()
        self._started = time.perf_counter()
        self._round_started = self._started
        self._bar = tqdm(
            total=num_steps,
            unit=unit,
            file=sys.stderr,
            disable=not (run.runtime.progress and self._main),
            mininterval=0.5 if sys.stderr.isatty() else 10,
            dynamic_ncols=True,
        )

    def _claim(self) -> None:
        """Make the directory this run's own, or refuse."""
        resolved = json.loads(json.dumps(asdict(self.run.config)))
        path = self.directory / "config.yaml"
        if path.exists():
            if self.run.resume == "never":
                raise ValueError(
                    f"{self.directory} already holds a run: choose another --run_dir, or --resume auto"
                )
            differences = config_differences(read_yaml(path), resolved)
            if differences:
                raise ValueError(
                    f"{self.directory} holds a run of another config ({'; '.join(differences)}): "
                    "choose another --run_dir"
                )
        data = self.directory / "checkpoint" / "data.json"
        if path.exists() and data.exists():
            learnt = checkpoint.read_json(data).get("sha256")
            if learnt != self.data_sha256:
                raise ValueError(
                    f"{self.directory} holds a run on other data (content {str(learnt)[:12]}, that of "
                    f"--data_path is {self.data_sha256[:12]}): give its file, or choose another --run_dir"
                )
        self.directory.mkdir(parents=True, exist_ok=True)
        checkpoint.write_json(data, {"sha256": self.data_sha256})
        checkpoint.write_bytes(path, yaml.safe_dump(resolved, sort_keys=False).encode())

    @property
    def wall_clock(self) -> float:
        """Seconds of training and evaluation so far, over all resumptions."""
        return self._seconds + time.perf_counter() - self._started

    def finished(self) -> Tree | None:
        """The results of this run, if it has already ended; a secret that a kill left behind is deleted."""
        path = self.directory / "results.json"
        results = from_main(checkpoint.read_json(path) if self._main and path.exists() else None)
        if results is None or results.get("config_sha256") != self._digest:
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
        return open_secret(self.directory, self._digest, self.data_sha256)

    def evaluated(self, step: int, metrics: Metrics, model: PyTorchModel) -> None:
        """Take note of val at ``step``; keep the model if it is the best so far.

        Best is the least loss, or the greatest of any other column. Of steps that score the same, the
        earliest is kept, which is the model of the fewest updates.
        """
        self._val = columns(metrics)
        by = self.run.config.evaluation.best_by
        if by != "last" and by not in self._val:
            scored = ", ".join(name for name in get_args(BestBy) if name == "last" or name in self._val)
            raise ValueError(
                f"evaluation.best_by is {by}, which this task does not score: choose one of {scored}"
            )
        score = -float(step) if by == "last" else self._val["loss"] if by == "loss" else -self._val[by]
        if score < self.best.score:
            weights = model.pytorch_model.state_dict()
            self.best = Best(
                step, score, self._val, {n: t.detach().cpu().clone() for n, t in weights.items()}
            )

    def step_done(self, step: int, values: Mapping[str, Any], model: PyTorchModel) -> None:
        """Write the line of ``step`` (its val is the model's before the step's update) and move on."""
        now = time.perf_counter()
        line: Tree = {self.unit: step, "seconds": round(now - self._round_started, 4), **values}
        self._round_started = now
        self._write_line(line)
        self._bar.update(1)
        self.held.number = from_main(self.held.number)  # all workers stop, or none
        asked = self.held.number is not None
        if self._main and (asked or (step + 1) % self.run.runtime.checkpoint_every == 0):
            self.save(step + 1, model)
        if asked:
            self._bar.close()
        self.held.stop_if_asked(f"{self.unit} {step} is done and {self._last} is written")

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
        with checkpoint.written(self._metrics), self._metrics.open("a") as file:
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
            "config_sha256": self._digest,
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

    def _flushed_metrics(self) -> bytes:
        """All lines so far, which are on the disk before a checkpoint counts on them."""
        if not self._metrics.exists():
            return b""
        with self._metrics.open("rb") as file:
            os.fsync(file.fileno())
            return file.read()

    def _cut_metrics(self, state: Tree) -> None:
        """Leave the lines that a checkpoint knows.

        :raises ValueError: when some of them are gone or changed.
        """
        length = state["metrics_bytes"]
        lines = self._metrics.read_bytes()[:length] if self._metrics.exists() else b""
        if hashlib.sha256(lines).hexdigest() != state["metrics_sha256"]:
            raise ValueError(
                f"{self._metrics} is not the one that the checkpoint was written with: restore it, or choose "
                "another --run_dir"
            )
        if self._metrics.exists():
            os.truncate(self._metrics, length)

    def restore(self, model: PyTorchModel) -> int:
        """Put the model, its optimiser and the files back to the last checkpoint; the step to go on at."""
        if not from_main(self._main and (self._last.exists() or checkpoint.previous(self._last).exists())):
            if self._main:
                self._metrics.unlink(missing_ok=True)
            return 0
        tensors, state, fallen_back = checkpoint.load_newest(self._last) if self._main else (None, None, "")
        if fallen_back:
            print(fallen_back, file=sys.stderr)
        tensors, state = tensors_from_main(tensors), from_main(state)
        if state["config_sha256"] != self._digest:
            raise ValueError(f"{self._last} belongs to a run of another config: choose another --run_dir")
        model.pytorch_model.load_state_dict(part(tensors, MODEL))
        checkpoint.restore_optimizer(model._central_optimizer, part(tensors, SERVER))
        self.best = Best(**state["best"], weights=part(tensors, BEST))
        if self.algorithm_state is not None:
            self.algorithm_state.load(part(tensors, STATE))
        if self._main:
            self._cut_metrics(state)
        self._seconds, self.ended = state["seconds"], state.get("ended", False)
        if self.ledger is not None:
            self.ledger.load_state(state["privacy"])
        if self.tracking is not None:
            for line in self.history():
                self.tracking.tell(line)
        step = int(state["step"])
        self._bar.update(step)
        if self._main:
            print(f"resuming at {self.unit} {step} from {self._last}", file=sys.stderr)
        return step

    def best_weights(self) -> dict[str, torch.Tensor]:
        """The state of the model that scored best on val."""
        return self.best.weights

    def history(self) -> list[Tree]:
        """All lines of ``metrics.jsonl``."""
        return [json.loads(line) for line in self._metrics.read_text().splitlines()]
