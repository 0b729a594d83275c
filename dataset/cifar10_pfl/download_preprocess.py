"""CIFAR-10 with its pixels in the order in which pfl-research's benchmark has them.

    python -m dataset.cifar10_pfl.download_preprocess --output_file F [--source URL-or-DIR] --splits none

CIFAR's files hold an image as three planes of 32 x 32, one for each colour. The benchmark's script (apple/
pfl-research, benchmarks/dataset/cifar10/download_preprocess.py) reads those bytes as 32 x 32 pixels of three
colours, so its network does not see real pictures (`dataset.cifar10.source.planes_as_rows`). This file is
only for comparisons with that benchmark. For the options, see `dataset.cifar10.download_preprocess`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

from dataset.cifar10 import preprocess as cifar_preprocess
from dataset.cifar10.download_preprocess import CIFAR10
from dataset.cli import run

CIFAR10_PFL = replace(CIFAR10, name="cifar10_pfl", planes_as_rows=True)


main = partial(cifar_preprocess.main, CIFAR10_PFL)
"""The command line."""

if __name__ == "__main__":
    sys.exit(run(main))
