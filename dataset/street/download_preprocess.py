"""Make one HDF5 file of FedVision's street scenes from a local folder in COCO's layout, by camera.

    python -m dataset.street.download_preprocess --source DIR --output_file F [--users user_5]

`dataset.fetch.coco` describes the folder. A ``users.csv`` with 20 and with 5 cameras gives the file's users
by the first column of users (or ``--users``), and a partition by the other. Another folder's licence is
its own, unless ``--licence`` names it.
"""

from __future__ import annotations

import sys
from functools import partial

from dataset import preprocess_annotated
from dataset.cli import run
from dataset.fetch.coco import COCO
from dataset.preprocess_annotated import AnnotatedSet

STREET = AnnotatedSet(
    name="street",
    title="FedVision's street scenes, or of any folder in COCO's layout",
    layout=COCO,
    licence="FedVision Street: Apache-2.0; people are visible: do not publish images",
    classes=frozenset(("electrombile", "chair", "sunshade", "carton", "basket", "gastank", "table")),
)

main = partial(preprocess_annotated.main, {"street": STREET})
"""The command line."""

if __name__ == "__main__":
    sys.exit(run(main))
