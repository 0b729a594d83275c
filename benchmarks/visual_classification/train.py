"""Train and evaluate one setting of federated visual classification.

    python -m benchmarks.visual_classification.train --config cifar10-fedavgm --data.partition alpha-0.10

A file of single-label images by user: those of dataset.cifar10, cifar100, inaturalist and landmarks, or a
FLAIR file, of which the images with exactly one label take part. Without one, the embedded mini data set is
drawn and used at a scale for a laptop. Any field of `benchmarks.visual_classification.config` can be given
as ``--section.field value``; the command line wins over the YAML file.

Signals, resumption and exit codes are those of `benchmarks.flair.train`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.core.experiment import Experiment, build_model, execute, started
from benchmarks.core.mini import CLASSES, CLASSES_FILE, draw_mini, resolve
from benchmarks.core.privacy_statement import ProtectedUnit
from benchmarks.visual_classification import results
from benchmarks.visual_classification.config import VISION, Run, parse
from dataset.cli import run as run_command
from dataset.store.hdf5 import DataFile
from dataset.store.single_label import CARVED, SingleLabelView
from pfl_ext.workers.distributed import barrier, is_main

HEADLINE = ("accuracy",)
"""The score by which runs of this benchmark are judged."""
SCORES = ("loss", "accuracy", "C-accuracy")
"""The scores of val."""


def resolve_data(argv: Sequence[str]) -> tuple[list[str], Path]:
    """The arguments and the file to train on; the mini data set, with its scale, where there is no other.

    Raises:
        ValueError: when a ``--data_path`` is given that does not exist.
    """
    run = parse(argv)
    dataset = run.config.data.dataset
    maker = f"python -m dataset.{dataset}.download_preprocess"
    return resolve(argv, run.data_path, Path(f"data/{dataset}.hdf5"), CLASSES_FILE, maker)


def ready_data(run: Run, data_path: Path) -> None:
    """Draw the mini data set where `resolve_data` chose it for this run, and say so."""
    if data_path == CLASSES_FILE != run.data_path:
        if is_main():
            dataset = run.config.data.dataset
            missing = f"no data/{dataset}.hdf5 (make vision-data DATASET={dataset} makes it)"
            draw_mini(run.data_path, missing, CLASSES_FILE, CLASSES)
        barrier()


def single_label_task(run: Run, file: DataFile) -> SingleLabelView:
    """The file as the images and classes that a run asks for."""
    data = run.config.data
    cache = int(run.runtime.cache_gb * 1e9)
    share = data.val_share if data.scored == "val" and CARVED not in file.splits else 0.0
    return SingleLabelView(file, data.partition, data.taxonomy, data.image_size, cache, share)


def protected_unit(task: SingleLabelView) -> ProtectedUnit:
    """Real users, or the clients that a partition was drawn for.

    Users are the file's own, unless one owns everything, and those of partitions named ``user...``, as
    iNaturalist's. Dirichlet's, geographic and other partitions have clients.
    """
    if task.partition is None:
        one = len(task.split("train").user_ids) == 1
        return ProtectedUnit("of the file" if one else None)
    return ProtectedUnit(None if task.partition.startswith("user") else task.partition)


def experiment(run: Run, file: DataFile) -> Experiment:
    """This benchmark's side of a run on this file."""
    task, scored = single_label_task(run, file), run.config.data.scored
    return Experiment(
        task=f"{len(task.label_names)} classes, {results.partition_text(task)}; "
        + results.followed_text(task, scored),
        split=lambda name: task.split(scored if name == "val" else name),
        module=lambda: build_model(run.config, len(task.label_names), run.weights, objective="single_label"),
        partition=None,
        protected=protected_unit(task),
        final_splits=("test",) if scored == "test" else ("val", "test"),
        headline=HEADLINE,
        results=partial(results.class_scores, task),
        draw=results.draw,
        rows=results.final_rows,
        show=partial(results.show, run.config),
        followed="tracked" if scored == "test" else "val",
    )


def main(argv: Sequence[str]) -> None:
    """Parse, build, train, report."""
    if {"--help", "-h"} & set(argv):
        print(VISION.help(__doc__, "python -m benchmarks.visual_classification.train"))
        return
    argv, data_path = resolve_data(argv)
    run = parse(argv)
    with started(run.runtime):
        ready_data(run, data_path)
        execute(run, data_path, partial(experiment, run))


if __name__ == "__main__":
    sys.exit(run_command(main))
