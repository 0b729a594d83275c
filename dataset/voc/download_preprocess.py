"""Download PASCAL VOC, or take a local copy, and make one HDF5 file of its masks or boxes.

    python -m dataset.voc.download_preprocess --output_file F [--subset 2012|2007] [--annotation mask|boxes]

VOC 2007 names the photographer of each image: they are its users. Of VOC 2012 nobody is known.
``--source DIR`` takes the archives, or any folder in their layout (`dataset.fetch.voc`).
"""

from __future__ import annotations

import sys
from functools import partial

from dataset import preprocess_annotated
from dataset.cli import run
from dataset.fetch.listed import Archive
from dataset.fetch.voc import CLASSES, VOC
from dataset.preprocess_annotated import AnnotatedSet

LICENCE = "PASCAL VOC: images of Flickr under its terms, for research"
OF_2012 = (Archive("voc2012/VOCtrainval_11-May-2012.tar", "6cd6e144f989b92b3379bac3b3de84fd"),)
OF_2007 = (
    Archive("voc2007/VOCtrainval_06-Nov-2007.tar", "c52e279531787c972589f7e41ab4ae64"),
    Archive("voc2007/VOCtest_06-Nov-2007.tar", "b6e924de25625d8de591ea690078ad9f"),
)
SUBSETS = {
    year: AnnotatedSet(
        name="voc",
        title="PASCAL VOC, or of any folder in its layout",
        layout=VOC,
        licence=LICENCE,
        classes=frozenset(CLASSES),
        base="https://thor.robots.ox.ac.uk/pascal/VOC/",
        listing=archives,
        images=archives,
    )
    for year, archives in (("2012", OF_2012), ("2007", OF_2007))
}

main = partial(preprocess_annotated.main, SUBSETS)
"""The command line."""

if __name__ == "__main__":
    sys.exit(run(main))
