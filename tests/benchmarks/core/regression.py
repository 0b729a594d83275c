"""Rotation as regression: R2, which is no mean over images, and the mean error, the lower the better."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pfl.metrics import MetricValue
from torch import Tensor

from benchmarks.core.config.benchmark import Benchmark
from benchmarks.core.execute import main as train
from dataset.arrays import FloatArray, IntArray
from dataset.cli import run as run_command
from tests.benchmarks.core import rotation


class Sums(MetricValue):
    """``[5]``: the number of images, and the sums over them of |error|, error^2, target and target^2."""

    def __init__(self, sums: FloatArray) -> None:
        self.sums = sums

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.sums + other.sums)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sums) and np.array_equal(self.sums, other.sums)

    def to_vector(self) -> FloatArray:
        return self.sums

    def from_vector(self, vector: FloatArray) -> Sums:
        return Sums(np.asarray(vector, np.float64))

    @property
    def overall_value(self) -> float:
        """R2."""
        n, _, squares, total, total_of_squares = self.sums
        return float(1 - squares / max(total_of_squares - total**2 / max(n, 1), 1e-12))


class Angle(rotation.Turn):
    """The angle as a share of the largest turn."""

    headline = ("R2", "MAE")
    lower_is_better = ("MAE",)
    units: ClassVar[Mapping[str, str]] = {"R2": "", "MAE": "turns"}

    def scored(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self.image_losses(outputs, targets).double(), outputs[:, 0].float()

    def statistics(
        self, num_rows: int, rows: IntArray, predictions: Sequence[Tensor], annotations: Sequence[Any]
    ) -> Sums:
        y = np.concatenate(annotations)[:, 0].astype(np.float64)
        guesses = torch.cat(list(predictions)).cpu().numpy() if predictions else y
        error = guesses.astype(np.float64) - y
        return Sums(np.array([len(y), abs(error).sum(), (error**2).sum(), y.sum(), (y**2).sum()]))

    def user_columns(self, predictions: Tensor, annotations: Any) -> dict[str, float]:
        columns = super().user_columns(predictions, annotations)
        return columns if len(annotations) > 1 else {**columns, "R2": float("nan")}

    def summarise(self, statistics: Sums) -> dict[str, float]:
        n, absolute = statistics.sums[:2]
        return {"R2": statistics.overall_value, "MAE": float(absolute / max(n, 1))}


class Regression(rotation.Rotation):
    benchmark = Benchmark(rotation.Config, Path(__file__).parent / "regression", "regression")
    headline, scores = Angle.headline, ("loss", *Angle.headline)
    scores_users = True

    @classmethod
    def task_of(cls, config: rotation.Config, num_classes: int) -> Angle:
        return Angle()


def main(argv: Sequence[str]) -> None:
    train(Regression, argv, __doc__, "tests.benchmarks.core.regression")


if __name__ == "__main__":
    sys.exit(run_command(main))
