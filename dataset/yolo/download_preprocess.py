"""Make one HDF5 file of a local folder in YOLO's layout, with boxes, or masks of its outlines.

    python -m dataset.yolo.download_preprocess --source DIR --output_file F [--annotation boxes|mask]

`dataset.fetch.yolo` describes the folder. A ``users.csv`` in it, or ``--users_csv``, says whose each image
is; without one draw clients with ``python -m dataset.partitions``, or in training.
"""

from __future__ import annotations

import sys
from functools import partial

from dataset import preprocess_annotated
from dataset.cli import run
from dataset.fetch.yolo import YOLO
from dataset.preprocess_annotated import AnnotatedSet

FOLDER = AnnotatedSet(
    name="yolo",
    title="a folder in YOLO's layout",
    layout=YOLO,
    licence="the folder's own",
)

main = partial(preprocess_annotated.main, {"yolo": FOLDER})
"""The command line."""

if __name__ == "__main__":
    sys.exit(run(main))
