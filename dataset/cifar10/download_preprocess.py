"""Download CIFAR-10 and its federated splits, or take local copies, and make one HDF5 file of them.

    python -m dataset.cifar10.download_preprocess --output_file F [--source URL-or-DIR] \
        [--splits none|official|DIR]

Where Google's splits cannot be downloaded, ``--splits none`` makes the file without them.
``--dirichlet_total 0.3,1`` and ``--dirichlet_per_class 0.03,0.1`` add partitions by our own sampler
(`dataset.partitions.dirichlet`).
"""

from __future__ import annotations

import sys
from functools import partial

from dataset.cifar10 import preprocess as cifar_preprocess
from dataset.cifar10.source import Cifar
from dataset.cli import run

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
    official={
        "alpha-0.00": "bb4edfb168d0af3d6887bd0907c1fd0ff9133646bd7ff92deec10fb9b43096a9",
        "alpha-0.05": "c21dbfc279f85b505e664be76784f5e9ca3bf61c29a47003e5627969c3b37084",
        "alpha-0.10": "576f56ceaf87f20d944244c637eca0580eaff9801ac77e08348ee7ac5ed5b0c9",
        "alpha-0.20": "3d639aa47c2f3f7762224f28eb877110e5afbc6b9989bb0029907605c501ef81",
        "alpha-0.50": "e2845d3420e1d3d05197018b3b6afcfaeccef331bc4cf85d5d52fc32c460ad7e",
        "alpha-1.00": "e21283d470cd3c2312a5f9fbfd679d0d25b65fdb885e2efdc2502b18191a8342",
        "alpha-10.00": "9c658885f4665105aabe1cf3880811e60ec0018c7102ca88b69d631520330167",
        "alpha-100.00": "4b8da03abf1272468ce63b0afd06d474fd088446d589d25b2af28361425b200d",
    },
)


main = partial(cifar_preprocess.main, CIFAR10)
"""The command line."""

if __name__ == "__main__":
    sys.exit(run(main))
