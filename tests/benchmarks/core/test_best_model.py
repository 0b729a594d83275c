"""Which model a run keeps: the recorder alone, without training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pfl.metrics import Metrics, MetricValue, Weighted

from benchmarks.core.recorder import Best, Recorder
from benchmarks.core.run_directory import RunDirectory
from benchmarks.flair.config import parse
from pfl_ext.evaluation import LOSS, SCORES
from pfl_ext.tasks.multi_label import MultiLabel


class Scores(MetricValue):
    """Columns that a test chooses."""

    def __init__(self, **columns: float) -> None:
        self.columns = columns

    def summary(self) -> dict[str, float]:
        return self.columns

    @property
    def overall_value(self) -> float:
        return self.columns["C-AP"]

    def __add__(self, other: Any) -> Scores:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scores) and self.columns == other.columns

    def to_vector(self) -> Any:
        raise NotImplementedError

    def from_vector(self, vector: Any) -> Scores:
        raise NotImplementedError


def best_of(scored: Sequence[tuple[float, float]], directory: Path, *argv: str) -> Best:
    """What is kept of steps with these (loss, C-AP); the model of step t has the weight t."""
    run = parse(["--config=fl-r-17", "--runtime.progress=false", f"--run_dir={directory}", *argv])
    recorder = Recorder(RunDirectory(run, directory))
    module = torch.nn.Linear(1, 1, bias=False)
    module.task = MultiLabel()  # type: ignore[assignment]
    model: Any = SimpleNamespace(pytorch_model=module)
    for step, (loss, c_ap) in enumerate(scored):
        with torch.no_grad():
            module.weight.fill_(step)
        metrics = Metrics([(LOSS, Weighted.from_unweighted(loss)), (SCORES, Scores(**{"C-AP": c_ap}))])
        recorder.evaluated(step, metrics, model)
    return recorder.best


LOSSES = (0.9, 0.4, 0.7, 0.4, 1.2)
C_APS = (20.0, 10.0, 30.0, 30.0, 5.0)


@pytest.mark.parametrize("by, step, score", [("loss", 1, 0.4), ("C-AP", 2, -30.0), ("last", 4, -4.0)])
def test_the_best_round_is_kept_and_of_equal_ones_the_earliest(
    by: str, step: int, score: float, tmp_path: Path
) -> None:
    """Neither column is monotone, the best of one is not that of the other, and each has its best twice."""
    best = best_of(list(zip(LOSSES, C_APS)), tmp_path, f"--evaluation.best_by={by}")
    assert (best.step, best.score) == (step, score)
    assert best.val == {"loss": LOSSES[step], "C-AP": C_APS[step]}
    assert best.weights["weight"].tolist() == [[float(step)]], "the weights are a copy of that round's"
