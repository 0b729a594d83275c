"""Train and evaluate one setting of federated object detection.

    python -m benchmarks.fedcv.detection.train --config street-fl --data_path data/street.hdf5

A file of images with boxes by user: those of dataset.street, voc and coco. Without one, the embedded mini
data set is drawn with a box around each of its shapes, and used at a scale for a laptop. Any field of
`benchmarks.fedcv.detection.config` can be set by ``--section.field value``; the command line wins over the
YAML file.

A signal ends the run after its round with exit code 75 (`dataset.cli`); the same command resumes it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from benchmarks.core.clients import draw_classes
from benchmarks.core.config.trees import Tree
from benchmarks.core.execute import main as train
from benchmarks.core.mini import Mini, mini_file
from benchmarks.fedcv.detection import results as box_results
from benchmarks.fedcv.detection.config import DETECTION, Config, Run
from benchmarks.fedcv.experiment import MINI, OfAnnotatedImages
from dataset.cli import run as run_command
from dataset.flair.mini_outlines import write_boxed
from dataset.store.box_view import BoxView
from dataset.store.hdf5 import DataFile
from pfl_ext.evaluation import SCORES
from pfl_ext.models.decoders import task_of
from pfl_ext.tasks.detection import Detection
from pfl_ext.tasks.task import Task
from pfl_ext.workers.distributed import is_main


class FederatedDetection(OfAnnotatedImages[Config]):
    """This benchmark's side of a run: a box for each object, a partition of the file, COCO's mAP."""

    benchmark = DETECTION
    headline = Detection.headline
    scores = ("loss", "mAP", "mAP50")
    view_of, mini = BoxView, Mini(MINI, mini_file(MINI, "-boxes"), write_boxed)
    without_val = "give data.val_share, as 0.1, or set data.scored to test and evaluation.best_by to last"

    def __init__(self, run: Run, file: DataFile) -> None:
        if run.config.data.scored == "test":
            self.final_splits, self.followed = ("test",), "tracked"
        super().__init__(run, file)

    @classmethod
    def task_of(cls, config: Config, num_classes: int) -> Task:
        """A box for each object, by the losses of the network's detector."""
        return task_of(config.model.arch, Detection)(num_classes)

    def final_results(self, directory: Path, model: PyTorchModel, metrics: Mapping[str, Metrics]) -> Tree:
        """AP of each class, scores of each user, the partition; and a picture of some boxes.

        Users are those of test, or of val where test belongs to one.
        """
        title = f"{self.config.setting}, seed {self.config.seed}"
        box_results.draw_boxes(self.view, model, title, directory)
        users: Tree = {}
        if self.config.evaluation.per_user and is_main():
            stores = {name: self.split(name) for name in ("test", "val") if name in metrics}
            split = next((name for name, store in stores.items() if len(store.user_ids) > 1), "test")
            task, scores = model.pytorch_model.task, metrics[split][SCORES]
            columns = box_results.user_columns(stores[split], task, scores)
            users = self.user_scores(split, columns, "mAP", directory, title)
        return {**box_results.class_scores(self.view, metrics), **users}

    def draw(self, results: Tree, title: str, folder: Path) -> None:
        """AP of each class."""
        draw_classes(results, "per_class_ap", "average precision on test (%)", title, folder)


EXPERIMENT = FederatedDetection


def main(argv: Sequence[str]) -> None:
    """Parse, build, train, report."""
    train(FederatedDetection, argv, __doc__, "benchmarks.fedcv.detection.train")


if __name__ == "__main__":
    sys.exit(run_command(main))
