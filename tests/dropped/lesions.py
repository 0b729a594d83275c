"""Segmentation with one more score: the balanced accuracy of the last class."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.core.execute import main as train
from benchmarks.fedcv.segmentation.config import Config
from benchmarks.fedcv.segmentation.train import FederatedSegmentation
from dataset.cli import run
from pfl_ext.tasks.segmentation import Confusion, Segmentation


class WithBalance(Segmentation):
    """The task with this score."""

    def summarise(self, statistics: Confusion) -> dict[str, float]:
        """The usual columns, and the mean of sensitivity and specificity of the last class, in percent."""
        last = 50 * (statistics.recall[-1] + statistics.specificity[-1])
        return {**super().summarise(statistics), "balanced": float(last)}


class Lesions(FederatedSegmentation):
    """The benchmark with this task."""

    scores = (*FederatedSegmentation.scores, "balanced")

    @classmethod
    def task_of(cls, config: Config, num_classes: int) -> Segmentation:
        """Ours."""
        return WithBalance(num_classes)


EXPERIMENT = Lesions


def main(argv: Sequence[str]) -> None:
    """As every benchmark's."""
    train(Lesions, argv, __doc__, "lesions")


if __name__ == "__main__":
    sys.exit(run(main))
