"""Make one HDF5 file of CamVid from a local folder in PASCAL VOC's layout, with the drives as users.

    python -m dataset.camvid.download_preprocess --source DIR --output_file F

`dataset.fetch.voc` describes the folder. With the masks of SegNet's tutorial there are 11 classes, and 255 is
no class. Another folder's licence is its own, unless ``--licence`` names it.
"""

from __future__ import annotations

import sys
from functools import partial

from dataset import preprocess_annotated
from dataset.cli import run
from dataset.fetch.voc import VOC
from dataset.preprocess_annotated import AnnotatedSet

CLASSES = "sky, building, pole, road, pavement, tree, sign, fence, car, pedestrian, bicyclist"
"""By which CamVid is known."""

CAMVID = AnnotatedSet(
    name="camvid",
    title="CamVid, or of any folder in PASCAL VOC's layout with a classes.txt",
    layout=VOC,
    licence="CamVid: for research; masks of SegNet's tutorial: CC BY-NC 4.0",
    classes=frozenset(CLASSES.split(", ")),
)

main = partial(preprocess_annotated.main, {"camvid": CAMVID})
"""The command line."""

if __name__ == "__main__":
    sys.exit(run(main))
