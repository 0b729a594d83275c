"""Train and evaluate one setting of federated segmentation.

    python -m benchmarks.fedcv.segmentation.train --config camvid-fl --data_path data/camvid.hdf5

A file of images with masks by user: those of dataset.camvid, voc, sbd and coco. Without one, the embedded
mini data set is drawn with the outlines of its shapes, and used at a scale for a laptop. Any field of
`benchmarks.fedcv.segmentation.config` can be set by ``--section.field value``; the command line wins over
the YAML file.

A signal ends the run after its round with exit code 75 (`dataset.cli`); the same command resumes it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from benchmarks.core.clients import draw_classes
from benchmarks.core.config.trees import Tree
from benchmarks.core.execute import main as train
from benchmarks.core.mini import Mini, mini_file
from benchmarks.fedcv.experiment import MINI, OfAnnotatedImages
from benchmarks.fedcv.segmentation import results as mask_results
from benchmarks.fedcv.segmentation.config import SEGMENTATION, Config
from dataset.cli import run as run_command
from dataset.flair.mini_outlines import write_masked
from dataset.store.annotations import is_background
from dataset.store.mask_view import MaskView
from pfl_ext.tasks.segmentation import Segmentation
from pfl_ext.tasks.task import Task
from pfl_ext.workers.distributed import is_main

SMALLER = replace(MINI, image_size=48)


class FederatedSegmentation(OfAnnotatedImages[Config]):
    """This benchmark's side of a run: a class for each pixel, a partition of the file, mean IoU."""

    benchmark = SEGMENTATION
    view: MaskView
    headline = Segmentation.headline
    scores: ClassVar[tuple[str, ...]] = (
        *("loss", "mIoU", "Dice", "Dice per image"),
        *("fwIoU", "pixel accuracy", "class accuracy"),
    )
    view_of, mini = MaskView, Mini(SMALLER, mini_file(SMALLER, "-masks"), write_masked)

    @classmethod
    def task_of(cls, config: Config, num_classes: int) -> Segmentation:
        """A class for each pixel."""
        return Segmentation(num_classes)

    def learnt(self) -> Task:
        """The task, which knows whether the data have a background."""
        task = super().learnt()
        if isinstance(task, Segmentation):
            task.background = is_background(self.class_names[0])
        return task

    def check(self) -> None:
        """Refuse training masks of a single class: a network that always predicts it would have 100 %."""
        super().check()
        if (name := self.view.only_class("train")) is not None:
            raise ValueError(
                f"all pixels of train of {self.file.path} that have a class are {name}, so nothing can be "
                "learnt: make the file again; masks with the values 0 and 255 need --mask_values 0,255"
            )

    def final_results(self, directory: Path, model: PyTorchModel, metrics: Mapping[str, Metrics]) -> Tree:
        """Scores of each class and of each test user, the partition; and a picture of some masks."""
        title = f"{self.config.setting}, seed {self.config.seed}"
        mask_results.draw_masks(self.view, model, title, directory)
        users: Tree = {}
        if self.config.evaluation.per_user and is_main():
            columns = mask_results.user_columns(self.split("test"), model)
            users = self.user_scores("test", columns, "mean IoU", directory, title)
        return {**mask_results.class_scores(self.view, metrics), **users}

    def draw(self, results: Tree, title: str, folder: Path) -> None:
        """IoU and Dice score of each class."""
        draw_classes(results, "per_class_iou", "intersection over union on test (%)", title, folder)
        draw_classes(results, "per_class_dice", "Dice score on test (%)", title, folder)


EXPERIMENT = FederatedSegmentation


def main(argv: Sequence[str]) -> None:
    """Parse, build, train, report."""
    train(FederatedSegmentation, argv, __doc__, "benchmarks.fedcv.segmentation.train")


if __name__ == "__main__":
    sys.exit(run_command(main))
