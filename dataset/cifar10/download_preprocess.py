"""Download CIFAR-10 and its federated splits, or take local copies, and make one HDF5 file of them.

    python -m dataset.cifar10.download_preprocess --output_file F [--source URL-or-DIR] [--splits DIR]

``--alphas 0.3,1 --seed 0`` adds partitions by our own sampler (`dataset.dirichlet`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dataset import cifar_preprocess
from dataset.cifar import Cifar
from dataset.command_line import run

CIFAR10 = Cifar(
    name="cifar10",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    archive="cifar-10-binary.tar.gz",
    md5="c32a1d4ab5d03f1284b67883e8d87530",
    members={"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]},
    label_bytes=1,
    label_column="label",
    splits_archive="cifar10_v1.1.zip",
    old_splits="cifar10.zip",
)


def main(argv: Sequence[str]) -> None:
    """The command line."""
    cifar_preprocess.main(CIFAR10, argv)


if __name__ == "__main__":
    sys.exit(run(main))
