"""Make one HDF5 file of Cityscapes from a local folder, with the cities, or the drives' sequences, as users.

    python -m dataset.cityscapes.download_preprocess --source DIR --output_file F [--users sequence]

DIR holds ``gtFine`` and ``leftImg8bit`` (`dataset.cityscapes.source`), or their two archives, which
cityscapes-dataset.com offers after a login. The other way to deal the images becomes a partition; most
sequences have a single annotated frame. The published val becomes the file's test, since the masks of test
are not published (``--val_as val`` keeps its name).
"""

from __future__ import annotations

import sys
from functools import partial

from dataset import preprocess_annotated
from dataset.cityscapes.source import CITYSCAPES
from dataset.cli import run
from dataset.fetch.listed import Archive
from dataset.preprocess_annotated import AnnotatedSet

SCENES = AnnotatedSet(
    name="cityscapes",
    title="Cityscapes",
    layout=CITYSCAPES,
    licence="Cityscapes: for research, under the terms of cityscapes-dataset.com",
    listing=(Archive("gtFine_trainvaltest.zip"),),
    images=(Archive("leftImg8bit_trainvaltest.zip"),),
    in_archives=(".png",),
    by_hand="cityscapes-dataset.com gives its archives out after a login",
    val_as="test",
    mean_image_bytes=2_300_000,
)

main = partial(preprocess_annotated.main, {"cityscapes": SCENES})
"""The command line."""

if __name__ == "__main__":
    sys.exit(run(main))
