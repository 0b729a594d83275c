"""How far rounding may take a run of the training command: as far as weights that are off by as much take it.

A layer's sum of n rounded products is the exact sum for weights that are each off by ``sqrt(n) u`` (as in
`tests.pfl_ext.engine.setting.rounding_of`; u is the unit of rounding of float32). What the rounds of training
make of such an error cannot be said beforehand: where it brings a value to the other side of a ReLU, it is
magnified a hundredfold. It is seen by runs that begin with it. Two computations may each be off by that,
and one draw of errors may be half as unlucky as another, so that `LUCK` times what is seen is allowed.

Letters: N images, K labels.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import nn

from benchmarks.core.experiment import Experiment
from benchmarks.flair.train import Flair
from dataset.arrays import BoolArray, FloatArray
from pfl_ext.evaluation import LOSS, SCORES, CentralEvaluation
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.tasks.multi_label_scores import average_precision
from tests.pfl_ext.engine.cpu.roundings import UNIT
from tests.pfl_ext.engine.setting import in_float64, move_weights

LUCK = 4.0
Array = FloatArray


@dataclass(frozen=True)
class Scored:
    """One evaluation of a run."""

    loss: float
    logits: Array
    """``[N, K]``."""
    targets: BoolArray
    """``[N, K]``."""

    def average_precisions(self, off: float = 0.0) -> Array:
        """``[2]``: C-AP and O-AP in percent, with all positives raised and all others lowered by ``off``."""
        moved = self.logits + off * np.where(self.targets, 1.0, -1.0)
        by_class = average_precision(moved, self.targets)
        overall = average_precision(moved.reshape(-1, 1), self.targets.reshape(-1, 1))
        return 100 * np.array([np.nanmean(by_class), float(overall[0])])


@contextlib.contextmanager
def watched() -> Iterator[list[Scored]]:
    """The evaluations of the runs within, in turn."""
    seen: list[Scored] = []
    real = CentralEvaluation.__call__

    def noted(self: CentralEvaluation, model: PyTorchModel) -> Metrics:
        metrics = real(self, model)
        p = metrics[SCORES].scores().astype(np.float64)
        logits = np.log(p) - np.log1p(-p)
        seen.append(Scored(metrics[LOSS].overall_value, logits, metrics[SCORES].targets() != 0))
        return metrics

    with mock.patch.object(CentralEvaluation, "__call__", noted):
        yield seen


def summed(terms: int) -> float:
    """Rounding of a sum of so many products in float32, relative to the sum."""
    return UNIT * math.sqrt(terms)


@contextlib.contextmanager
def inexact(
    seed: int,
    *,
    wide: bool = False,
    experiment: type[Experiment[Any]] = Flair,
    off: Callable[[int], float] = summed,
) -> Iterator[None]:
    """Runs within begin with weights that are off by what rounding may do; exact ones for the seed 0.

    Args:
        seed: of the errors.
        wide: train in float64, where nothing else is off. The engine must be pfl's loop.
        experiment: what trains.
        off: relative error of a layer's sum, from how many products it has in the widest layer.
    """
    real = experiment.module

    def moved(self: Any) -> ImageClassifier:
        module = real(self)
        layers = [m for m in module.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        error = off(max(layer.weight[0].numel() for layer in layers)) if seed else 0.0
        (in_float64 if wide else move_weights)(module.backbone, error, seed)
        return module

    with mock.patch.object(experiment, "module", moved):
        yield


DRAWS = (1, 2, 3)
"""Seeds of the errors: three, because a ReLU that rounding may cross was crossed by one draw in three."""


def assert_as_near_as_rounding(
    ours: Sequence[Scored], theirs: Sequence[Scored], moved: Sequence[Sequence[Scored]]
) -> None:
    """Each evaluation of ours is as near to theirs as `LUCK` times the runs that began with an error.

    A logit that moves by d moves its loss by at most d; so the mean loss moves by no more than the root of
    the mean square.
    """
    off = 0.0
    for one, right, *others in zip(ours, theirs, *moved, strict=True):
        size = np.sqrt(right.logits.size)
        off = max(off, *(LUCK * distance(other, right) / size for other in others))  # an error stays
        assert distance(one, right) <= off * size
        assert abs(one.loss - right.loss) <= off


def distance(one: Scored, other: Scored) -> float:
    """Frobenius norm of the difference between the logits."""
    return float(np.linalg.norm(one.logits - other.logits))
