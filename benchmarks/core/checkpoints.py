"""The file that a run goes on from: the state of training, and the best model so far."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pfl.model.pytorch import PyTorchModel

from benchmarks.core.config.benchmark import AnyRun
from benchmarks.core.config.trees import Tree
from pfl_ext import checkpoint
from pfl_ext.algorithms.algorithm import Algorithm
from pfl_ext.workers.distributed import from_main, is_main, tensors_from_main

BEST = "best/"
"""What the names of the best model's tensors begin with."""


class ModelState:
    """For training whose state is a model and its optimiser."""

    def tensors(self, state: PyTorchModel) -> dict[str, torch.Tensor]:
        """Of both."""
        return checkpoint.model_tensors(state)

    def saved(self) -> None:
        """Nothing else has to know."""

    def load(self, state: PyTorchModel, tensors: Mapping[str, torch.Tensor]) -> PyTorchModel:
        """Put both back."""
        checkpoint.restore_model(state, tensors)
        return state


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
        self.last = directory / "checkpoint" / "last.safetensors"
        self.algorithm: Algorithm[Any] | ModelState = ModelState()
        """How the state of training becomes the tensors of a checkpoint."""
        self._run, self._saved_at = run, time.perf_counter()

    def due(self, step: int) -> bool:
        """Whether one is due after ``step`` steps: by their number, or by the time since the last."""
        runtime, minutes = self._run.runtime, (time.perf_counter() - self._saved_at) / 60
        return step % runtime.checkpoint_every == 0 or minutes >= runtime.checkpoint_minutes

    def save(self, state: Any, best: Best, account: Tree) -> None:
        """Write a checkpoint; the one before it is kept."""
        kept_best = {BEST + name: tensor for name, tensor in best.weights.items()}
        tensors = self.algorithm.tensors(state) | kept_best
        whole = {**account, "best": {"step": best.step, "score": best.score, "val": best.val}}
        checkpoint.save(self.last, tensors, whole, keep_previous=True)
        self.algorithm.saved()
        self._saved_at = time.perf_counter()

    def load(self, config_sha256: str, state: Any) -> tuple[Best, Tree, Any] | None:
        """Read the newest whole checkpoint; ``state`` is that of training before the first step.

        Returns:
            The best model, the run's account and the state of training; None where there is no checkpoint.

        Raises:
            ValueError: when it belongs to a run of another config, or none is whole.
        """
        if not from_main(is_main() and (self.last.exists() or checkpoint.previous(self.last).exists())):
            return None
        tensors, account, fallen_back = checkpoint.load_newest(self.last) if is_main() else (None, None, "")
        if fallen_back:
            print(fallen_back, file=sys.stderr)
        tensors, account = tensors_from_main(tensors), from_main(account)
        if account["config_sha256"] != config_sha256:
            raise ValueError(f"{self.last} belongs to a run of another config: choose another --run_dir")
        best = Best(**account["best"], weights=checkpoint.part(tensors, BEST))
        return best, account, self.algorithm.load(state, tensors)

    def remove(self) -> None:
        """Remove what only a run that goes on needs."""
        users = [self.last.with_name(name) for name in self._run.config.federated.algorithm_class.files]
        for path in (self.last, checkpoint.previous(self.last), *users):
            path.unlink(missing_ok=True)
