"""A benchmark that is new to the house, with ``rotation.yaml``: how far has an image been turned?"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pfl.metrics import Weighted
from PIL import Image
from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from benchmarks.core.config.benchmark import Benchmark
from benchmarks.core.config.privacy_rules import OF_THE_DATA, Rule
from benchmarks.core.config.sections import ImageConfig, TrainingConfig
from benchmarks.core.execute import main as train
from benchmarks.core.experiment import Experiment
from dataset.arrays import ByteArray, IntArray
from dataset.cli import run as run_command
from dataset.store.views import LabelSetView, SplitImages
from pfl_ext.configs import STRICT
from pfl_ext.data.transforms import Framing
from pfl_ext.data.user_images import Annotations
from pfl_ext.randomness import stream
from pfl_ext.tasks.task import Task


class Turn(Task):
    """Squared error of one output; targets ``[B, 1]`` are shares of the largest turn, -1 to 1."""

    headline: tuple[str, ...] = ("within a tenth",)

    def augment(
        self, images: Tensor, targets: Tensor, crops: Tensor | None, framing: Framing
    ) -> tuple[Tensor, Tensor]:
        mirrored = 1 if crops is None else (1 - 2 * crops[:, 4:]).prod(1, keepdim=True)
        return self.pixels(images, crops, framing), targets * mirrored

    def image_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.float() - targets).square().sum(1)

    def scored(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        losses = self.image_losses(outputs, targets).double()
        return losses, losses.sqrt() < 0.1

    def statistics(
        self, num_rows: int, rows: IntArray, predictions: Sequence[Tensor], annotations: Sequence[Any]
    ) -> Weighted:
        return Weighted(float(sum(part.sum() for part in predictions)), len(rows))

    def summarise(self, statistics: Weighted) -> dict[str, float]:
        return {"within a tenth": 100 * statistics.overall_value}


class TurnedImages:
    """Users' images, each turned by an angle of its own."""

    def __init__(self, images: SplitImages, split: str, most_degrees: float) -> None:
        self.user_ids, self.user_offsets = images.user_ids, images.user_offsets
        self._images, self._most_degrees = images, most_degrees
        self._turns = stream(0, "turns", split).uniform(-1, 1, (images.num_images, 1)).astype(np.float32)

    def targets(self, rows: IntArray) -> Annotations:
        return self._turns[rows]

    def read(self, rows: IntArray) -> tuple[ByteArray, Annotations]:
        images, turns = self._images.read(rows)[0], self.targets(rows)
        for image, turn in zip(images, turns[:, 0]):
            image[:] = Image.fromarray(image).rotate(self._most_degrees * turn)
        return images, turns


@dataclass(frozen=True, config=STRICT)
class DataConfig(ImageConfig):
    most_degrees: PositiveFloat = 45
    """The largest turn, in degrees."""


@dataclass(frozen=True, config=STRICT)
class Config(TrainingConfig):
    privacy_rules: ClassVar[Mapping[str, Rule]] = {"data.most_degrees": Rule(OF_THE_DATA)}
    data: DataConfig = field(default_factory=DataConfig)


class Rotation(Experiment[Config]):
    benchmark = Benchmark(Config, Path(__file__).parent, "rotation")
    headline, scores, class_names = Turn.headline, ("loss", *Turn.headline), ("turn",)

    def description(self) -> str:
        return f"turns of up to {self.config.data.most_degrees:g} degrees"

    def split(self, name: str) -> TurnedImages:
        images = LabelSetView(self.file, image_size=self.config.data.image_size).split(name)
        return TurnedImages(images, name, self.config.data.most_degrees)

    @classmethod
    def task_of(cls, config: Config, num_classes: int) -> Turn:
        return Turn()


def main(argv: Sequence[str]) -> None:
    train(Rotation, argv, __doc__, "tests.benchmarks.core.rotation")


if __name__ == "__main__":
    sys.exit(run_command(main))
