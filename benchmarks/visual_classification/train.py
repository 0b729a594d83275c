"""Train and evaluate one setting of federated visual classification.

    python -m benchmarks.visual_classification.train --config cifar10-fedavgm --data.partition alpha-0.10

A file of single-label images by user: those of dataset.cifar10, cifar100, inaturalist and landmarks, or a
file with label sets, of which the images with exactly one label take part. Without one, the embedded mini
data set is drawn and used at a scale for a laptop. Any field of `benchmarks.visual_classification.config` can
be set by ``--section.field value``; the command line wins over the YAML file.

A signal ends the run after its round with exit code 75 (`dataset.cli`); the same command resumes it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from benchmarks.core.clients import OfClients, draw_classes
from benchmarks.core.config.trees import Tree
from benchmarks.core.execute import main as train
from benchmarks.core.mini import CLASSES
from benchmarks.visual_classification import results as vision_results
from benchmarks.visual_classification.config import VISION, Config, Run
from dataset.cli import run as run_command
from dataset.store.hdf5 import DataFile
from dataset.store.views import CARVED, SingleLabelView
from pfl_ext.tasks.single_label import SingleLabel
from pfl_ext.tasks.single_label_scores import FEW_CLASSES


class VisualClassification(OfClients[Config]):
    """This benchmark's side of a run: one class an image, a partition of the file, accuracy."""

    benchmark = VISION
    view_of, target, mini = SingleLabelView, "vision-data", CLASSES
    headline = SingleLabel.headline
    scores_users = True
    scores = ("loss", "accuracy", "C-accuracy", "macro-F1", "AUROC", "ECE", "Brier")
    without_val = "give data.val_share, as 0.1, or set data.scored to test and evaluation.best_by to last"

    def __init__(self, run: Run, file: DataFile) -> None:
        data = run.config.data
        share = data.val_share if data.scored == "val" else 0.0
        if CARVED in file.splits and share == type(data).val_share:
            share = 0.0  # the default is for files without val; another share is refused
        if data.scored == "test":
            self.final_splits, self.followed = ("test",), "tracked"
        super().__init__(run, file, share)

    def description(self) -> str:
        """Classes, partition, and what is scored over the rounds."""
        scored = vision_results.followed_text(self.view, self.config.data.scored)
        return f"{len(self.view.label_names)} classes, {vision_results.partition_text(self.view)}; {scored}"

    @classmethod
    def task_of(cls, config: Config, num_classes: int) -> SingleLabel:
        """One class an image."""
        return SingleLabel()

    def check(self) -> None:
        """Refuse to choose the model by a score that runs with many classes do not have."""
        if self.config.evaluation.best_by == "AUROC" and len(self.class_names) > FEW_CLASSES:
            raise ValueError(
                f"evaluation.best_by is AUROC, which is computed for at most {FEW_CLASSES} classes, not for "
                f"{len(self.class_names):,}: choose another score, such as macro-F1"
            )

    def final_results(self, directory: Path, model: PyTorchModel, metrics: Mapping[str, Metrics]) -> Tree:
        """Accuracy of each class, the confusion matrix, and the partition."""
        return vision_results.class_scores(self.view, metrics)

    def draw(self, results: Tree, title: str, folder: Path) -> None:
        """Accuracy of each class, and the confusion matrix."""
        draw_classes(results, "per_class_accuracy", "accuracy on test (%)", title, folder)
        vision_results.draw_confusion(results, title, folder)

    def rows(self, results: Tree) -> Mapping[str, Mapping[str, float]]:
        """Test, of the last model and of the best."""
        return vision_results.final_rows(results)

    def show(self, results: Tree) -> None:
        """The rows, and the paper's of centralised training where the run can be compared with it."""
        vision_results.show(self.config, results)


EXPERIMENT = VisualClassification


def main(argv: Sequence[str]) -> None:
    """Parse, build, train, report."""
    train(VisualClassification, argv, __doc__, "benchmarks.visual_classification.train")


if __name__ == "__main__":
    sys.exit(run_command(main))
