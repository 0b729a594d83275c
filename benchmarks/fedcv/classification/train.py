"""Train and evaluate one setting of FedCV's federated classification.

    python -m benchmarks.fedcv.classification.train --config cifar100-efficientnet-ft-a0.1

A file of single-label images by user: those of dataset.cifar10, cifar100 and landmarks. Without one, the
embedded mini data set is drawn and used at a scale for a laptop. Any field of
`benchmarks.visual_classification.config` can be set by ``--section.field value``; the command line wins over
the YAML file.

A signal ends the run after its round with exit code 75 (`dataset.cli`); the same command resumes it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.core.config.trees import Tree
from benchmarks.core.execute import main as train
from benchmarks.core.experiment import Experiment
from benchmarks.fedcv.classification.config import CLASSIFICATION
from benchmarks.visual_classification.train import VisualClassification
from dataset.cli import run as run_command


class FederatedClassification(VisualClassification):
    """Hsu, Qi and Brown's benchmark with FedCV's protocol."""

    benchmark, target = CLASSIFICATION, "fedcv-data"

    def show(self, results: Tree) -> None:
        """The rows; those of the paper stand in the settings' files."""
        Experiment.show(self, results)


EXPERIMENT = FederatedClassification


def main(argv: Sequence[str]) -> None:
    """Parse, build, train, report."""
    train(FederatedClassification, argv, __doc__, "benchmarks.fedcv.classification.train")


if __name__ == "__main__":
    sys.exit(run_command(main))
