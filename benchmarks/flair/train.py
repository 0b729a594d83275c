"""Train and evaluate one setting of the FLAIR benchmark.

    python -m benchmarks.flair.train --config fl-r-17 --data_path data/flair.hdf5

Without ``--data_path`` and without a file at data/flair.hdf5, the embedded mini data set is drawn and used
at a scale for a laptop. Any field of `benchmarks.flair.config` can be given as ``--section.field value``
or ``--section.field=value``; the command line wins over the YAML file.

SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 finish the round (epoch, when centralised), write a checkpoint and exit
with 75; a second signal abandons the round, and the run goes on from the checkpoint before. The same command
goes on. Exit codes: 0 done, 2 a mistake of the user's in one line, 75 stopped by a signal.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.core.experiment import Experiment, build_model, execute, started
from benchmarks.core.mini import MINI_FILE, draw_mini, resolve
from benchmarks.core.privacy_statement import ProtectedUnit
from benchmarks.flair import results
from benchmarks.flair.config import FLAIR, Run, parse
from benchmarks.flair.users import SPLIT
from dataset.cli import run as run_command
from dataset.store.hdf5 import DataFile
from dataset.store.label_sets import LabelSetView
from pfl_ext.algorithms.fedir import weighted_objective
from pfl_ext.algorithms.per_user import users_with
from pfl_ext.data.federated_dataset import iid_partition
from pfl_ext.tasks.metrics import BINNED, COLUMNS
from pfl_ext.workers.distributed import barrier, is_main

FLAIR_FILE = Path("data/flair.hdf5")
HEADLINE = ("C-AP", "O-AP")
"""The scores by which runs of this benchmark are judged, the first above all."""
SCORES = ("loss", *COLUMNS, *BINNED.values(), "accuracy")
"""The scores of val; ``accuracy`` is of binary tasks only."""


def resolve_data(argv: Sequence[str]) -> tuple[list[str], Path]:
    """The arguments and the file to train on; the mini data set, with its scale, where there is no other.

    Raises:
        ValueError: when a ``--data_path`` is given that does not exist.
    """
    maker = "python -m dataset.flair.download_preprocess"
    return resolve(argv, parse(argv).data_path, FLAIR_FILE, MINI_FILE, maker)


def ready_data(run: Run, data_path: Path) -> None:
    """Draw the mini data set where `resolve_data` chose it for this run, and say so."""
    if data_path == MINI_FILE != run.data_path:
        if is_main():
            draw_mini(run.data_path, "no FLAIR file (make flair-data gets it)")
        barrier()


def flair_task(run: Run, file: DataFile) -> LabelSetView:
    """The file as the images and targets that a run asks for."""
    data = run.config.data
    cache = int(run.runtime.cache_gb * 1e9)
    return LabelSetView(file, data.taxonomy, data.image_size, data.binary_label, cache)


def experiment(run: Run, file: DataFile) -> Experiment:
    """FLAIR's side of a run on this file."""
    config, task = run.config, flair_task(run, file)
    if config.personal.num_epochs:
        users_with(task.split(SPLIT), config.personal.min_images)  # refuses now what would fail at the end
    iid, objective = config.data.partition == "iid", weighted_objective(config.federated, "multi_label")
    return Experiment(
        task=f"{len(task.label_names)} labels",
        split=task.split,
        module=lambda: build_model(config, len(task.label_names), run.weights, objective),
        partition=iid_partition(task.split("train"), config.seed) if iid else None,
        protected=ProtectedUnit("iid" if iid else None),
        final_splits=("val", "test"),
        headline=HEADLINE,
        results=partial(results.class_scores, config, task),
        draw=partial(results.draw, config),
        rows=partial(results.final_rows, config),
        show=partial(results.show, config),
    )


def main(argv: Sequence[str]) -> None:
    """Parse, build, train, report."""
    if {"--help", "-h"} & set(argv):
        print(FLAIR.help(__doc__, "python -m benchmarks.flair.train"))
        return
    logging.getLogger("absl").setLevel(logging.ERROR)  # dp-accounting tells of each RDP order that it skips
    argv, data_path = resolve_data(argv)
    run = parse(argv)
    with started(run.runtime):
        ready_data(run, data_path)
        execute(run, data_path, partial(experiment, run))


if __name__ == "__main__":
    sys.exit(run_command(main))
