"""How fast a round of visual classification is, by stock pfl and the fast engine: `benchmarks.bench.rounds`.

    python -m benchmarks.visual_classification.bench [--output F] [--cases cpu|gpu] [--rounds 3] [--only CASE]
                                                     [--data_path F]

CIFAR's shape: the paper's network, 500 images a user, batches of 64, ten users a round, weight decay. Images
are drawn at random unless a file is given, since their content changes no time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.bench.rounds import STOCK, AlikeUsers, Sides, measure, report_cases
from benchmarks.core.config.trees import Tree
from benchmarks.core.experiment import build_model
from benchmarks.core.features import Inputs, inputs_of
from benchmarks.visual_classification.config import Run, parse
from benchmarks.visual_classification.train import VisualClassification
from dataset.cli import run as run_command
from dataset.store.hdf5 import DataFile
from pfl_ext.randomness import stream
from pfl_ext.tasks.single_label import SingleLabel


@dataclass(frozen=True)
class Case:
    """One measurement: what is trained."""

    name: str
    words: tuple[str, ...] = ()
    precision: str = "fp32"
    scored: bool = False
    pixels: int = 32
    classes: int = 10
    users: int = 30
    user_images: int = 500
    cohort: int = 10


MOBILENET = ("--config=inat-user-120k-fedavgm-vc-k10", "--model.pretrained=false", "--data.partition=none")
NIID = ("--recipe=niid-bench+fedavg", "--local.num_epochs=1")
SCAFFOLD = ("--federated.algorithm=scaffold", "--federated.scaffold_correction=step")
CPU = [
    Case("CIFAR-10, FedAvgM"),
    Case("CIFAR-10, FedAvgM, bf16", precision="bf16"),
    Case("CIFAR-10, FedAvgM, with evaluation", scored=True),
    Case("CIFAR-100, FedVC and FedIR", ("--recipe=cifar100+fedavgm+vc+ir",), classes=100),
    Case("CIFAR-10, FedNova", ("--recipe=fednova",)),
    Case("NIID-Bench, FedAvg", NIID, users=10, user_images=640),
    Case("NIID-Bench, FedNova", (*NIID, "--federated.algorithm=fednova"), users=10, user_images=640),
    Case("NIID-Bench, SCAFFOLD", (*NIID, *SCAFFOLD), users=10, user_images=640),
    Case("pfl's CIFAR-10", ("--recipe=pfl-cifar10+fedavg",), cohort=50, users=1000, user_images=50),
]
GPU = [
    *CPU,
    Case("iNaturalist, 299 px, FedVC, bf16", MOBILENET, "bf16", pixels=299, classes=1203, user_images=256),
]
SETS = {"cpu": CPU, "gpu": GPU, "all": GPU}


def random_users(case: Case, pixels: int, users: int) -> AlikeUsers:
    """Random pixels, and a class for each image, one-hot ``[n, K]``."""
    images = stream(0, "bench").integers(0, 256, (case.user_images, pixels, pixels, 3), np.uint8)
    return AlikeUsers(users, images, np.eye(case.classes, dtype=np.uint8))


def measured(case: Case, rounds: int, options: argparse.Namespace) -> Tree:
    """The numbers of both engines on one case."""
    if options.data_path is None:
        return {"case": asdict(case), **measure(compared(case), rounds)}
    with DataFile(options.data_path) as file:

        def opened(run: Run) -> Inputs:
            experiment = VisualClassification(run, file)
            return inputs_of(experiment, experiment.module(), options.data_path)

        return {"case": asdict(case), **measure(compared(case, opened), rounds)}


@dataclass(frozen=True)
class Drawn:
    """A run on random images."""

    run: Run
    case: Case

    def split(self, name: str) -> AlikeUsers:
        """More users in train than elsewhere."""
        users = self.case.users if name == "train" else 10
        return random_users(self.case, self.run.config.data.image_size, users)

    def inputs(self) -> Inputs:
        """The random images, and the network of the case's config."""
        module = build_model(self.run.config, self.case.classes, None, SingleLabel(), self.split)
        return Inputs(module, self.split)


def compared(case: Case, opened: Callable[[Run], Inputs] | None = None) -> Sides:
    """The two engines on one case; by default on random images."""
    common = [*case.words, f"--federated.cohort_size={case.cohort}"]
    return Sides(
        parse([*common, *STOCK]),
        parse([*common, f"--runtime.precision={case.precision}"]),
        opened or (lambda run: Drawn(run, case).inputs()),
        "test" if case.scored else None,
    )


def main(argv: Sequence[str]) -> None:
    """Measure and report."""

    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--data_path", type=Path, help="a file of dataset.cifar10, instead of noise")

    report_cases(argv, "benchmarks.visual_classification.bench", __doc__, SETS, measured, options)


if __name__ == "__main__":
    sys.exit(run_command(main))
