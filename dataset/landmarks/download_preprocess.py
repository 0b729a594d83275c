"""Download Google Landmarks' images by author, or take local copies, and make one HDF5 file.

    python -m dataset.landmarks.download_preprocess --output_file F [--subset 160k|23k] [--source PLACE]

``160k`` is Landmarks-User-160k (2,028 landmarks, 1,262 users), ``23k`` TensorFlow's gld23k (203, 233).
The file's own users are the authors. Both lie scattered in the 500 archives of GLD-v2's training set, about
500 GB; one lies on the disk at a time, beside the images that are kept.
"""

from __future__ import annotations

import dataclasses
import sys
from functools import partial

from dataset import preprocess_listed as listed_preprocess
from dataset.cli import run
from dataset.fetch.listed import Archive, ListedSet

ARCHIVES = tuple(
    Archive(f"train/images_{number:03d}.tar", md5_path=f"md5sum/train/md5.images_{number:03d}.txt")
    for number in range(500)
)
LICENCE = "Google Landmarks v2: CC licences and public domain, each image its own (train_attribution.csv)"
USER_160K = ListedSet(
    name="landmarks",
    title="Landmarks-User-160k or gld23k",
    splits_base="https://storage.googleapis.com/gresearch/federated-vision-datasets/",
    splits=(Archive("landmarks-user-160k.zip", "53c36bd7d5fc12f927af2820b7e4a57c"),),
    images_base="https://s3.amazonaws.com/google-landmark/",
    archives=ARCHIVES,
    natural="users",
    mean_image_bytes=130_000,
    licence=LICENCE,
)
GLD_23K = dataclasses.replace(
    USER_160K,
    splits_base="https://storage.googleapis.com/tff-datasets-public/",
    splits=(
        Archive("mini_gld_train_split.csv", "9fd62cf79a67046fdd673d3a0ac52841"),
        Archive("mini_gld_test.csv", "298e9d19d66357236f66fe8e22920933"),
    ),
)
LANDMARKS = {"160k": USER_160K, "23k": GLD_23K}


main = partial(listed_preprocess.main, LANDMARKS)
"""The command line."""

if __name__ == "__main__":
    sys.exit(run(main))
