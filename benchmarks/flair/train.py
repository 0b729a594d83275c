"""Train and evaluate one setting of the FLAIR benchmark.

    python -m benchmarks.flair.train --config fl-r-17 --data_path data/flair.hdf5

Without ``--data_path`` and without a file at data/flair.hdf5, the embedded mini data set is drawn and used
at a scale for a laptop. Any field of `benchmarks.flair.config` can be given as ``--section.field value``
or ``--section.field=value``; the command line wins over the YAML file.

SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 finish the round (epoch, when centralised), write a checkpoint and exit
with 75. The same command resumes the run. A second signal abandons the round; then the run resumes from the
checkpoint before. Exit codes: 0 done, 2 a mistake in the input, in one line, 75 stopped by a signal.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from benchmarks.core.clients import dealt_sets, partition_of
from benchmarks.core.config.trees import Tree
from benchmarks.core.execute import main as train
from benchmarks.core.experiment import Experiment
from benchmarks.core.mini import DataSource
from benchmarks.core.privacy_statement import ProtectedUnit
from benchmarks.core.single_users import trained_users
from benchmarks.flair import results as flair_results
from benchmarks.flair.config import FLAIR, Config, Run
from benchmarks.flair.results import SPLIT
from dataset.cli import run as run_command
from dataset.store.hdf5 import DataFile
from dataset.store.views import LabelSetView, SplitImages
from pfl_ext.algorithms.per_user import users_with
from pfl_ext.data.federated_dataset import Partition, iid_partition
from pfl_ext.tasks.multi_label import MultiLabel
from pfl_ext.tasks.multi_label_scores import BINNED, COLUMNS

OWN_PARTITIONS = ("user", "iid")
"""What ``data.partition`` means without any partition of the file."""
SOURCE = DataSource(
    path=Path("data/flair.hdf5"),
    maker="python -m dataset.flair.download_preprocess --output_file FILE",
    missing="no FLAIR file (make flair-data gets it)",
)


class Flair(Experiment[Config]):
    """FLAIR's side of a run: its labels, its users or the same images dealt at random, the paper's rows."""

    benchmark = FLAIR
    headline = MultiLabel.headline
    scores = ("loss", *COLUMNS, *BINNED.values(), "accuracy")  # accuracy is of binary tasks only

    def __init__(self, run: Run, file: DataFile) -> None:
        super().__init__(run, file)
        data, cache = run.config.data, int(run.runtime.cache_gb * 1e9)
        self.task = LabelSetView(file, data.taxonomy, data.image_size, data.binary_label, cache)

    @classmethod
    def source(cls, config: Config) -> DataSource:
        """data/flair.hdf5."""
        return SOURCE

    def description(self) -> str:
        """``17 labels``."""
        return f"{len(self.task.label_names)} labels"

    def split(self, name: str) -> SplitImages:
        """Images with their label sets."""
        return self.task.split(name)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The labels."""
        return self.task.label_names

    @classmethod
    def task_of(cls, config: Config, num_classes: int) -> MultiLabel:
        """Any number of labels an image."""
        return MultiLabel()

    def partition(self) -> Partition | None:
        """The images dealt at random, with ``data.partition: iid``, or by another partition."""
        return self._dealt

    @property
    def _name(self) -> str:
        return partition_of(self.file, self.config.data.partition, self.config.seed) or ""

    @cached_property
    def _dealt(self) -> Partition | None:
        data, train = self.config.data, self.task.split("train")
        if data.partition == "user":
            return None
        if data.partition == "iid":
            return iid_partition(train, self.config.seed)
        dealt = dealt_sets(self.file, self._name, data.taxonomy)
        return Partition(dealt.user_ids, dealt.rows, dealt.offsets)

    def protected(self) -> ProtectedUnit:
        """Real users, or the clients of a partition."""
        name = self._name
        return ProtectedUnit(None if name.startswith("user") else name)

    def check(self) -> None:
        """Refuse a partition that is none, and fine-tuning where no user has enough images for it."""
        name, train = self.config.data.partition, self.file.split("train")
        if name in OWN_PARTITIONS and name in train.partitions:
            raise ValueError(
                f"data.partition is {name}, and the file holds another partition of that name: write it "
                "under another one (python -m dataset.partitions)"
            )
        if name == "iid" and train.num_users == 1:
            raise ValueError(
                "data.partition iid deals the images among as many users as there are, and one user has all: "
                "give iid-clients-10-seed-0 or the like"
            )
        if self.config.personal.num_epochs:
            users_with(self.split(SPLIT), self.config.personal.min_images)

    def final_results(self, directory: Path, model: PyTorchModel, metrics: Mapping[str, Metrics]) -> Tree:
        """AP of each class, and of each user if asked for."""
        trained = trained_users(self, SPLIT)
        return flair_results.class_scores(self.config, self.task, directory, model, metrics, trained)

    def draw(self, results: Tree, title: str, folder: Path) -> None:
        """AP of each class."""
        flair_results.draw(self.config, results, title, folder)

    def rows(self, results: Tree) -> Mapping[str, Mapping[str, float]]:
        """The final table, with the paper's row where the run can be compared with it."""
        return flair_results.final_rows(self.config, results)

    def show(self, results: Tree) -> None:
        """The rows, or why the paper's is not among them."""
        flair_results.show(self.config, results)


EXPERIMENT = Flair


def main(argv: Sequence[str]) -> None:
    """Parse, build, train, report."""
    train(Flair, argv, __doc__, "benchmarks.flair.train")


if __name__ == "__main__":
    sys.exit(run_command(main))
