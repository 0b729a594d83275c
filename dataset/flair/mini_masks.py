"""The embedded mini data set with a mask for each image: the shapes that are drawn know their outlines.

Shape letters: N images of a split, S side in pixels.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from dataset.flair.mini import MiniSpec, mini_index, scene_of, write_mini
from dataset.flair.mini_draw import COARSE_LABELS, outlines
from dataset.store.annotations import BACKGROUND, Masks
from dataset.store.index import DatasetIndex

MASK = "mask"
"""The name of the annotation, which is that of the data sets with masks."""
CLASSES = (BACKGROUND, *COARSE_LABELS)
_BATCH = 1024


def masked_index(spec: MiniSpec) -> DatasetIndex:
    """`dataset.flair.mini.mini_index` with the masks of all images."""
    index = mini_index(spec)
    splits = {}
    for name, split in index.splits.items():
        masks = Masks.of(list(_encoded(spec, index, name)), len(CLASSES))
        sizes = np.full((split.num_images, 2), spec.image_size, np.int32)
        splits[name] = replace(split, annotations={**split.annotations, MASK: masks}, image_sizes=sizes)
    names = {**index.label_mappings, MASK: {label: number for number, label in enumerate(CLASSES)}}
    return replace(index, splits=splits, label_mappings=names)


def _encoded(spec: MiniSpec, index: DatasetIndex, split: str) -> Iterator[bytes]:
    """The PNG of each mask, in the order of the rows."""
    count = index.splits[split].num_images
    for start in range(0, count, _BATCH):
        rows = np.arange(start, min(start + _BATCH, count))
        for mask in outlines(scene_of(spec, index, split, rows), spec.image_size):
            buffer = io.BytesIO()
            Image.fromarray(mask).save(buffer, "PNG")
            yield buffer.getvalue()


def write_masked(path: Path, spec: MiniSpec) -> None:
    """Draw images and masks into one HDF5 file.

    Raises:
        OSError: if the disk is full.
    """
    write_mini(path, spec, index=masked_index(spec))
