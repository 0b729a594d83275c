"""The file that a run goes on from: the model, both optimisers' state, the best model so far."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pfl.model.pytorch import PyTorchModel

from benchmarks.core.config.benchmark import AnyRun
from benchmarks.core.config.trees import Tree
from pfl_ext import checkpoint
from pfl_ext.algorithms.algorithm import UserState
from pfl_ext.workers.distributed import from_main, is_main, tensors_from_main

MODEL, SERVER, BEST, STATE = "model/", "optimizer/", "best/", "algorithm/"
"""The parts of a checkpoint's tensors, by the beginning of their names."""


@dataclass
class Best:
    """The best model so far: which step, its score, its val columns, its weights (on the CPU)."""

    step: int = -1
    score: float = math.inf
    val: dict[str, float] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)


def part(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of one part of a checkpoint, without its prefix."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


class Checkpoints:
    """``checkpoint/last.safetensors`` of a run directory, and the one before it. Worker 0 reads and writes.

    A checkpoint holds all that a run goes on from, the best model with it: files of a step that a kill undid
    are never read.
    """

    def __init__(self, directory: Path, run: AnyRun) -> None:
        self.last = directory / "checkpoint" / "last.safetensors"
        self.algorithm: UserState | None = None
        self._run, self._saved_at = run, time.perf_counter()

    def due(self, step: int) -> bool:
        """Whether one is due after ``step`` steps: by their number, or by the time since the last."""
        runtime, minutes = self._run.runtime, (time.perf_counter() - self._saved_at) / 60
        return step % runtime.checkpoint_every == 0 or minutes >= runtime.checkpoint_minutes

    def save(self, model: PyTorchModel, best: Best, state: Tree) -> None:
        """Write a checkpoint; the one before it is kept."""
        optimizer = checkpoint.optimizer_tensors(model._central_optimizer)
        parts = {MODEL: model.pytorch_model.state_dict(), SERVER: optimizer, BEST: best.weights}
        if self.algorithm is not None:
            parts[STATE] = self.algorithm.tensors()
        tensors = {prefix + name: tensor for prefix, named in parts.items() for name, tensor in named.items()}
        whole = {**state, "best": {"step": best.step, "score": best.score, "val": best.val}}
        checkpoint.save(self.last, tensors, whole, keep_previous=True)
        if self.algorithm is not None:
            self.algorithm.saved()
        self._saved_at = time.perf_counter()

    def load(self, config_sha256: str, model: PyTorchModel) -> tuple[Best, Tree] | None:
        """Put the model, its optimiser and the algorithm back to the newest whole checkpoint.

        Returns:
            The best model and the state that were saved with it; None where there is no checkpoint.

        Raises:
            ValueError: when it belongs to a run of another config, or none is whole.
        """
        if not from_main(is_main() and (self.last.exists() or checkpoint.previous(self.last).exists())):
            return None
        tensors, state, fallen_back = checkpoint.load_newest(self.last) if is_main() else (None, None, "")
        if fallen_back:
            print(fallen_back, file=sys.stderr)
        tensors, state = tensors_from_main(tensors), from_main(state)
        if state["config_sha256"] != config_sha256:
            raise ValueError(f"{self.last} belongs to a run of another config: choose another --run_dir")
        model.pytorch_model.load_state_dict(part(tensors, MODEL))
        checkpoint.restore_optimizer(model._central_optimizer, part(tensors, SERVER))
        if self.algorithm is not None:
            self.algorithm.load(part(tensors, STATE))
        return Best(**state["best"], weights=part(tensors, BEST)), state

    def remove(self) -> None:
        """Remove what only a run that goes on needs."""
        users = [self.last.with_name(name) for name in self._run.config.federated.algorithm_class.files]
        for path in (self.last, checkpoint.previous(self.last), *users):
            path.unlink(missing_ok=True)
