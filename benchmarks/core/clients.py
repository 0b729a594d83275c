"""The source of images and their users: a data set by its name, and a partition of its file."""

from __future__ import annotations

from pathlib import Path

from benchmarks.core.mini import DataSource, Mini
from benchmarks.core.privacy_statement import ProtectedUnit
from dataset.partitions.drawn import deals_any, drawers, name_for, read_name
from dataset.partitions.of_file import drawn_of
from dataset.store.hdf5 import DataFile
from dataset.store.index import PartitionIndex
from dataset.store.views import PARTITIONED, SingleLabelView


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
