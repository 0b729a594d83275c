"""Train and evaluate one setting of federated segmentation.

    python -m benchmarks.fedcv.segmentation.train --config camvid-fl --data_path data/camvid.hdf5

A file of images with masks by user: those of dataset.camvid, voc, sbd and coco. Without one, the embedded
mini data set is drawn with the outlines of its shapes, and used at a scale for a laptop. Any field of
`benchmarks.fedcv.segmentation.config` can be set by ``--section.field value``; the command line wins over
the YAML file.

A signal ends the run after its round with exit code 75 (`dataset.cli`); the same command goes on.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from benchmarks.core.clients import data_source, drawn_partition, protected_unit
from benchmarks.core.config.trees import Tree
from benchmarks.core.execute import main as train
from benchmarks.core.experiment import Experiment, build_model
from benchmarks.core.mini import DataSource
from benchmarks.core.privacy_statement import ProtectedUnit
from benchmarks.fedcv.segmentation import results as mask_results
from benchmarks.fedcv.segmentation.config import SEGMENTATION, Config, Run
from dataset.cli import run as run_command
from dataset.flair.mini import VERSION, MiniSpec
from dataset.flair.mini_masks import write_masked
from dataset.store.hdf5 import DataFile
from dataset.store.mask_view import MaskView
from dataset.store.views import CARVED
from pfl_ext.data.federated_dataset import ImageStore
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.tasks.segmentation import Segmentation

MINI = MiniSpec(
    train_users=40,
    val_users=12,
    test_users=20,
    image_size=48,
    num_fine_labels=17,
    difficulty=0.25,
    coarse_labels=2,
)
MINI_FILE = Path(f"data/flair-mini-masks-{zlib.crc32(f'{VERSION} {MINI}'.encode()):08x}.hdf5")


class FederatedSegmentation(Experiment[Config]):
    """This benchmark's side of a run: a class for each pixel, a partition of the file, mean IoU."""

    benchmark = SEGMENTATION
    headline = Segmentation.headline
    scores = ("loss", "mIoU", "fwIoU", "pixel accuracy", "class accuracy")

    def __init__(self, run: Run, file: DataFile) -> None:
        super().__init__(run, file)
        data, cache = run.config.data, int(run.runtime.cache_gb * 1e9)
        if CARVED not in file.splits and not data.val_share:
            raise ValueError(
                f"{file.path} has no val split, and data.val_share is 0: give data.val_share, as 0.1"
            )
        dealt = drawn_partition(file, data.partition, data.taxonomy)
        self.view = MaskView(
            file, data.partition, data.taxonomy, data.image_size, cache, data.val_share, dealt
        )

    @classmethod
    def source(cls, config: Config) -> DataSource:
        """The file of ``data.dataset``."""
        return data_source(config.data.dataset, "fedcv-data", MINI_FILE, MINI, write_masked)

    def description(self) -> str:
        """Classes and partition."""
        return f"{len(self.view.label_names)} classes, partition {self.view.partition or 'of the file'}"

    def split(self, name: str) -> ImageStore:
        """Images with their masks."""
        return self.view.split(name)

    def module(self) -> ImageClassifier:
        """A network with an output for each class and pixel."""
        num_classes = len(self.view.label_names)
        return build_model(self.config, num_classes, self.run.weights, Segmentation(num_classes), self.split)

    def protected(self) -> ProtectedUnit:
        """The file's users, or the clients of a partition."""
        return protected_unit(self.view)

    def final_results(self, directory: Path, model: PyTorchModel, metrics: Mapping[str, Metrics]) -> Tree:
        """IoU of each class, scores of each test user, the partition; and a picture of some masks."""
        title = f"{self.config.setting}, seed {self.config.seed}"
        mask_results.draw_masks(self.view, model, title, directory)
        users: Tree = {}
        if self.config.evaluation.per_user:
            users["per_user"] = mask_results.user_scores(self.view, model, directory, title)
        return {**mask_results.class_scores(self.view, metrics), **users}

    def rows(self, results: Tree) -> Mapping[str, Mapping[str, float]]:
        """Below the splits' scores, the mean of those of test users."""
        if "per_user" not in results:
            return super().rows(results)
        found = results["per_user"]["quantiles"]
        mean = {name: values["mean"] for name, values in found.items() if values["n"]}
        return {**super().rows(results), f"mean of {results['per_user']['users']} test users": mean}

    def draw(self, results: Tree, title: str, folder: Path) -> None:
        """IoU of each class."""
        mask_results.draw_classes(results, title, folder)


EXPERIMENT = FederatedSegmentation


def main(argv: Sequence[str]) -> None:
    """Parse, build, train, report."""
    train(FederatedSegmentation, argv, __doc__, "benchmarks.fedcv.segmentation.train")


if __name__ == "__main__":
    sys.exit(run_command(main))
