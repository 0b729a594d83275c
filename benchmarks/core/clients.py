"""The source of images and their users: a data set by its name, and a partition of its file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from benchmarks.core.config.benchmark import Run
from benchmarks.core.config.sections import TrainingConfig
from benchmarks.core.config.trees import Tree
from benchmarks.core.experiment import Experiment
from benchmarks.core.mini import DataSource, Mini
from benchmarks.core.privacy_statement import ProtectedUnit
from dataset.partitions.drawn import deals_any, drawers, name_for, read_name
from dataset.partitions.of_file import drawn_of
from dataset.store.hdf5 import DataFile
from dataset.store.index import PartitionIndex
from dataset.store.views import CARVED, PARTITIONED, SingleLabelView
from pfl_ext.data.federated_dataset import ImageStore

C = TypeVar("C", bound=TrainingConfig)
FEW_USERS, FEW_BARS = 100, 60
"""Up to so many users, the results hold how many images each one has; up to so many bars can be read."""


class OfClients(Experiment[C]):
    """A run on the users of a file, or on the clients of a partition of it.

    The config's data section has ``dataset``, ``partition`` and ``taxonomy``. ``val_share`` of each user's
    training images become val.
    """

    view_of: ClassVar[type[SingleLabelView]]
    target: ClassVar[str]
    """The target of the Makefile that makes the file."""
    mini: ClassVar[Mini]
    without_val: ClassVar[str] = "give data.val_share, as 0.1"
    """What to do about a file without val."""
    view: SingleLabelView

    def __init__(self, run: Run[C], file: DataFile, val_share: float) -> None:
        if self.followed == "val" and CARVED not in file.splits and not val_share:
            raise ValueError(f"{file.path} has no val split, and data.val_share is 0: {self.without_val}")
        super().__init__(run, file)
        data: Any = run.config.data
        cache = int(run.runtime.cache_gb * 1e9)
        partition = partition_of(file, data.partition, run.config.seed)
        dealt = drawn_partition(file, partition, data.taxonomy)
        test_users = () if data.test_users is None else tuple(map(str.strip, data.test_users.split(",")))
        self.view = self.view_of(
            file, partition, data.taxonomy, data.image_size, cache, val_share, test_users, dealt
        )

    @classmethod
    def source(cls, config: C) -> DataSource:
        """The file of ``data.dataset``."""
        data: Any = config.data
        return data_source(data.dataset, cls.target, cls.mini)

    def split(self, name: str) -> ImageStore:
        """Images with their targets; val is what is followed over the rounds."""
        return self.view.split(self.name_in_file(name))

    def split_of_file(self, name: str) -> ImageStore:
        """Images with their targets."""
        return self.view.split(name)

    def name_in_file(self, split: str) -> str:
        """The name of a split in the file: test is followed as val."""
        return "test" if (split, self.followed) == ("val", "tracked") else split

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes."""
        return self.view.label_names

    def protected(self) -> ProtectedUnit:
        """See `protected_unit`."""
        return protected_unit(self.view)


def by_class(view: SingleLabelView, values: Iterable[Any]) -> Tree:
    """Fractions ``[C]`` in percent by the classes' names, None where one has no score."""
    pairs = zip(view.label_names, values)
    return {name: None if np.isnan(value) else 100 * float(value) for name, value in pairs}


def draw_classes(results: Tree, key: str, label: str, title: str, folder: Path) -> None:
    """A bar for each class, where they can be read: ``KEY.png`` of what results hold as ``key``."""
    from benchmarks.reporting import plots  # here, as matplotlib takes 0.3 s that most commands can spare

    found = {name: value for name, value in results[key].items() if value is not None}
    if 0 < len(found) <= FEW_BARS:
        plots.bars(found, label, title, folder / f"{key}.png")


def data_source(name: str, target: str, mini: Mini) -> DataSource:
    """The file of the data set ``name``, which ``make TARGET DATASET=NAME`` makes, and what takes its place.

    Args:
        name: of a folder below ``dataset``.
        target: of the Makefile.
        mini: the mini data set.
    """
    return DataSource(
        path=Path(f"data/{name}.hdf5"),
        maker=f"python -m dataset.{name}.download_preprocess --output_file FILE",
        missing=f"no data/{name}.hdf5 (make {target} DATASET={name} makes it)",
        mini=mini,
    )


def protected_unit(task: SingleLabelView) -> ProtectedUnit:
    """Real users, or the clients that a partition was drawn for.

    Users are the file's own, unless one owns everything, and those of partitions named ``user...``, as
    iNaturalist's. Dirichlet's, geographic and other partitions have clients.
    """
    if task.partition is None:
        owns_all = len(task.split("train").user_ids) == 1
        return ProtectedUnit("of the file" if owns_all else None)
    return ProtectedUnit(None if task.partition.startswith("user") else task.partition)


def partition_of(file: DataFile, name: str | None, seed: int) -> str | None:
    """The name of the partition that a run of this seed trains on, see `name_for`."""
    held = file.split(PARTITIONED).partitions if PARTITIONED in file.splits else ()
    return name if name is None or name in held else name_for(name, seed)


def drawn_partition(file: DataFile, name: str | None, taxonomy: str) -> PartitionIndex | None:
    """The partition with such a name as ``lda-0.5-clients-10-seed-42``; None for any other name, and for one
    that the file holds.

    Raises:
        ValueError: when it cannot be drawn of these images.
    """
    held = SingleLabelView(file, taxonomy=taxonomy).partition_names
    recipe = None if name is None or name in held else read_name(name)
    return None if recipe is None else drawn_of(file, recipe, taxonomy)


def dealt_sets(file: DataFile, name: str, taxonomy: str) -> PartitionIndex:
    """The partition of that name of images with any number of labels each, as rows of the file.

    Raises:
        ValueError: where the file holds none of this name, and none can be drawn.
    """
    held = file.split(PARTITIONED).partitions
    if name in held:
        return held[name]
    recipe = read_name(name)
    if recipe is None or not deals_any(recipe.kind):
        kinds = ", ".join(kind for kind in drawers() if deals_any(kind))
        raise ValueError(
            f"data.partition is {name!r}: give {', '.join(['user', 'iid', *held])}, or a name such as "
            f"iid-clients-10-seed-0 of a kind that does not need labels: {kinds}"
        )
    return drawn_of(file, recipe, taxonomy, several=True)
