"""Download SBD, or take a local copy, and make one HDF5 file of its masks (VOC augmented, FedCV's choice).

    python -m dataset.sbd.download_preprocess --output_file F [--source DIR]

The photographers are not known: draw clients with ``python -m dataset.partitions``, or give ``--users_csv``.
SBD's own train and val are the splits. Its train overlaps VOC 2012's val.
"""

from __future__ import annotations

import sys
from functools import partial

from dataset import preprocess_annotated
from dataset.cli import run
from dataset.fetch.listed import Archive
from dataset.preprocess_annotated import AnnotatedSet
from dataset.sbd.source import SBD

ARCHIVES = (Archive("benchmark.tgz", "82b4d87ceb2ed10f6038a1cba92111cb"),)
SEMANTIC_BOUNDARIES = AnnotatedSet(
    name="sbd",
    title="the Semantic Boundaries Dataset",
    layout=SBD,
    licence="SBD: images of PASCAL VOC, of Flickr under its terms, for research",
    base="https://www2.eecs.berkeley.edu/Research/Projects/CS/vision/grouping/semantic_contours/",
    listing=ARCHIVES,
    images=ARCHIVES,
)

main = partial(preprocess_annotated.main, {"sbd": SEMANTIC_BOUNDARIES})
"""The command line."""

if __name__ == "__main__":
    sys.exit(run(main))
