"""How fast a round of segmentation and of detection is, by stock pfl and the fast engine.

    python -m benchmarks.fedcv.bench [--output F] [--rounds 3] [--only CASE]

The networks and local steps are those of camvid-fl and street-fl; masks and boxes are drawn at random for few
users, since their content changes little of the time. ``make bench`` measures these cases, too.
`benchmarks.bench.rounds` says how.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.bench.rounds import STOCK, AlikeUsers, Sides, measure, report_cases
from benchmarks.core.config.benchmark import AnyRun
from benchmarks.core.config.trees import Tree
from benchmarks.core.experiment import build_model
from benchmarks.core.features import Inputs
from benchmarks.fedcv.detection.config import parse as parse_detection
from benchmarks.fedcv.segmentation.config import parse as parse_segmentation
from dataset.arrays import ByteArray
from dataset.cli import run as run_command
from dataset.store.annotations import VOID
from pfl_ext.data.user_images import Annotations
from pfl_ext.models.decoders import task_of
from pfl_ext.randomness import stream
from pfl_ext.tasks.detection import Detection
from pfl_ext.tasks.segmentation import Segmentation
from pfl_ext.tasks.task import Task

DEEPLAB, UNET = "deeplabv3plus_efficientnet_lite0", "unet_efficientnet_lite0"
BOXES = 4
"""Rows for the boxes of an image, of which each image has one to all."""


@dataclass(frozen=True)
class Case:
    """One measurement: what is trained."""

    name: str
    arch: str
    pixels: int
    user_images: int
    batch_size: int
    is_detection: bool = False
    users: int = 4
    cohort: int = 2
    classes: int = 11
    words: tuple[str, ...] = ()
    """Further ones for both engines."""

    @property
    def task(self) -> Task:
        """What is learnt."""
        usual: Callable[[int], Task] = Detection if self.is_detection else Segmentation
        return task_of(self.arch, usual)(self.classes)

    def parse(self, words: Sequence[str]) -> AnyRun:
        """A run of the benchmark, with few images."""
        read = parse_detection if self.is_detection else parse_segmentation
        own = (
            f"--model.arch={self.arch} --model.input_size={self.pixels} --data.image_size={self.pixels} "
            f"--local.batch_size={self.batch_size} --federated.cohort_size={self.cohort}"
        )
        return read([*own.split(), *self.words, *words])


CPU = [
    Case("segmentation, DeepLabV3+, 224 px", DEEPLAB, 224, user_images=2, batch_size=2),
    Case("segmentation, DeepLabV3+, 32 px", DEEPLAB, 32, user_images=20, batch_size=10),
    Case("segmentation, UNet, 224 px", UNET, 224, user_images=2, batch_size=2),
    *(
        Case(f"detection, {name}, 128 px", f"{arch}_efficientnet_lite0", 128, 8, 8, True, classes=7)
        for name, arch in (("FCOS", "fcos"), ("SSDLite", "ssdlite"), ("Faster R-CNN", "fasterrcnn"))
    ),
]
SETS = {"cpu": CPU, "gpu": CPU, "all": CPU}


def random_users(case: Case) -> AlikeUsers:
    """Random pixels, and masks in blocks or boxes."""
    rng = stream(0, "bench")
    images = rng.integers(0, 256, (case.user_images, case.pixels, case.pixels, 3), np.uint8)
    return AlikeUsers(case.users, images, _boxes(case, rng) if case.is_detection else _masks(case, rng))


def _masks(case: Case, rng: np.random.Generator) -> ByteArray:
    blocks = rng.integers(0, case.classes + 1, (case.user_images, 8, 8), np.uint8)
    blocks[blocks == case.classes] = VOID
    side = case.pixels // 8
    return np.asarray(blocks.repeat(side, 1).repeat(side, 2))


def _boxes(case: Case, rng: np.random.Generator) -> Annotations:
    low = rng.uniform(0, case.pixels / 2, (case.user_images, BOXES, 2))
    high = low + rng.uniform(case.pixels / 16, case.pixels / 2, low.shape)
    classes = rng.integers(0, case.classes, (case.user_images, BOXES, 1))
    classes[np.arange(BOXES) > rng.integers(0, BOXES, (case.user_images, 1))] = -1
    return np.concatenate([low, high, classes, np.zeros_like(classes)], 2).astype(np.float32)


def compared(case: Case) -> Sides:
    """The two engines on one case."""

    def opened(run: Any) -> Inputs:
        def split(name: str) -> AlikeUsers:
            return random_users(case)

        return Inputs(build_model(run.config, case.classes, None, case.task, split), split)

    return Sides(case.parse(STOCK), case.parse(()), opened)


def measured(case: Case, rounds: int, options: argparse.Namespace) -> Tree:
    """The numbers of both engines on one case."""
    return {"case": asdict(case), **measure(compared(case), rounds)}


def main(argv: Sequence[str]) -> None:
    """Measure and report."""
    report_cases(argv, "benchmarks.fedcv.bench", __doc__, SETS, measured)


if __name__ == "__main__":
    sys.exit(run_command(main))
