"""Download COCO 2017, or take a local copy, and make one HDF5 file of its boxes, or of masks of its outlines.

    python -m dataset.coco.download_preprocess --output_file F [--source DIR] [--annotation boxes|mask]

The photographers are not known: draw clients with ``python -m dataset.partitions``, or give ``--users_csv``.
``--source DIR`` takes the archives, or any folder in their layout (`dataset.fetch.coco`).
The test images have no published annotations and are left out; ``--val_as test`` makes val the file's test.
"""

from __future__ import annotations

import sys
from functools import partial

from dataset import preprocess_annotated
from dataset.cli import run
from dataset.fetch.coco import COCO
from dataset.fetch.listed import Archive
from dataset.preprocess_annotated import AnnotatedSet

CLASSES = (
    "person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, "
    "stop sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, "
    "giraffe, backpack, umbrella, handbag, tie, suitcase, frisbee, skis, snowboard, sports ball, kite, "
    "baseball bat, baseball glove, skateboard, surfboard, tennis racket, bottle, wine glass, cup, fork, "
    "knife, spoon, bowl, banana, apple, sandwich, orange, broccoli, carrot, hot dog, pizza, donut, "
    "cake, chair, couch, potted plant, bed, dining table, toilet, tv, laptop, mouse, remote, keyboard, "
    "cell phone, microwave, oven, toaster, sink, refrigerator, book, clock, vase, scissors, teddy bear, "
    "hair drier, toothbrush"
)
"""By which COCO is known."""

COCO_2017 = AnnotatedSet(
    name="coco",
    title="COCO 2017, or of any folder in its layout",
    layout=COCO,
    licence="COCO: annotations CC BY 4.0, each image under its licence at Flickr",
    classes=frozenset(CLASSES.split(", ")),
    base="http://images.cocodataset.org/",
    listing=(Archive("annotations/annotations_trainval2017.zip", "f4bbac642086de4f52a3fdda2de5fa2c"),),
    images=(
        Archive("zips/train2017.zip", "cced6f7f71b7629ddf16f17bbcfab6b2"),
        Archive("zips/val2017.zip", "442b8da7639aecaf257c1dceb8ba8c80"),
    ),
    mean_image_bytes=163_000,
    bad_boxes="cut",  # a few are empty
)

main = partial(preprocess_annotated.main, {"coco": COCO_2017})
"""The command line."""

if __name__ == "__main__":
    sys.exit(run(main))
