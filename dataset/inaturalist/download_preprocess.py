"""Download iNaturalist 2017 with its federated splits, or take local copies, and make one HDF5 file.

    python -m dataset.inaturalist.download_preprocess --output_file F [--source URL-or-DIR] [--splits DIR]

The public lists are TensorFlow Federated's: one CSV for User-120k and Geo-{100, 300, 1k, 3k, 10k, 30k}, which
become the partitions ``user-120k``, ``geo-100``, ...; the file's own users are the authors of User-120k.
Google's CSVs (``federated_train_user_120k.csv``, ...) are read as well, as ``--splits`` folder or zip file.
The archives have over 200 GB; one lies on the disk at a time, beside the 156,000 images that are kept.
``--coordinates`` adds the partitions ``s2-N`` by S2 cells (`dataset.partitions.geo`).
"""

from __future__ import annotations

import sys
from functools import partial

from dataset import preprocess_listed as listed_preprocess
from dataset.cli import run
from dataset.fetch.listed import Archive, ListedSet

INATURALIST = ListedSet(
    name="inaturalist",
    title="iNaturalist 2017 (1,203 balanced species)",
    splits_base="https://storage.googleapis.com/tff-datasets-public/",
    splits=(
        Archive("iNaturalist_train.csv", "63d5a41699434bc2b13f5853f3764c18"),
        Archive("iNaturalist_test.csv", "bcf08a5a740ee76dac4e5af668081891"),
    ),
    images_base="https://ml-inat-competition-datasets.s3.amazonaws.com/2017/",
    archives=(
        Archive("train_val_images.tar.gz", "7c784ea5e424efaec655bd392f87301f"),
        Archive("test2017.tar.gz", "7d9b096fa1cd94d67a0fa779ea301234"),
    ),
    natural="user-120k",
    mean_image_bytes=300_000,
    licence="iNaturalist 2017: each image under its author's licence; non-commercial research only",
)


main = partial(listed_preprocess.main, {"inaturalist": INATURALIST})
"""The command line."""

if __name__ == "__main__":
    sys.exit(run(main))
