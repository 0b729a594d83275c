"""The embedded mini data set with masks or with boxes, from the outlines of the drawn shapes.

Shape letters: N images of a split, M marks of some images, S side in pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dataset.arrays import Float32Array, IntArray
from dataset.flair.mini import MiniSpec, mini_index, scene_of, write_mini
from dataset.flair.mini_draw import COARSE_LABELS, Scene, outlines, shown
from dataset.store.annotations import BACKGROUND, Annotation, Boxes, Masks, encoded_mask, offsets_of
from dataset.store.index import DatasetIndex

MASK, OBJECTS = "mask", "objects"
"""The names of the annotations, which are those of other data sets."""
CLASSES = (BACKGROUND, *COARSE_LABELS)
"""Classes of the masks."""
_BATCH = 1024


def masked_index(spec: MiniSpec) -> DatasetIndex:
    """`dataset.flair.mini.mini_index` with the masks of all images."""

    def masks(index: DatasetIndex, split: str) -> Masks:
        drawn = (outlines(scene, spec.image_size) for scene in _scenes(spec, index, split))
        return Masks.of([encoded_mask(mask) for part in drawn for mask in part], len(CLASSES))

    return _annotated(spec, MASK, CLASSES, masks)


def boxed_index(spec: MiniSpec) -> DatasetIndex:
    """`mini_index` with a box around the visible part of each mark; a hidden mark has no box."""

    def boxes(index: DatasetIndex, split: str) -> Boxes:
        found = [boxes_of(scene, spec.image_size) for scene in _scenes(spec, index, split)]
        counts, corners, classes = (np.concatenate(each) for each in zip(*found))
        flags = np.zeros(len(classes), np.uint8)
        return Boxes(offsets_of(counts), corners, classes, flags, len(COARSE_LABELS))

    return _annotated(spec, OBJECTS, COARSE_LABELS, boxes)


def boxes_of(scene: Scene, size: int) -> tuple[IntArray, Float32Array, npt.NDArray[np.uint16]]:
    """How many boxes each image has, ``[N]``, and their corners ``[M, 4]`` and coarse labels ``[M]``."""
    image, row, column = np.nonzero((marks := shown(scene, size)) >= 0)
    at = marks[image, row, column]
    low = np.full((len(scene.mark_image), 2), size)
    high = np.zeros_like(low)
    for axis, place in enumerate((column, row)):
        np.minimum.at(low[:, axis], at, place)
        np.maximum.at(high[:, axis], at, place + 1)
    shows = (low < high).all(1)
    counts = np.bincount(scene.mark_image[shows], minlength=len(scene.image_keys))
    corners = np.concatenate([low, high], 1)[shows].astype(np.float32)
    return counts, corners, scene.mark_coarse[shows].astype(np.uint16)


def _annotated(
    spec: MiniSpec, name: str, classes: Sequence[str], found: Callable[[DatasetIndex, str], Annotation]
) -> DatasetIndex:
    """The index with one more annotation of each split."""
    index = mini_index(spec)
    splits = {}
    for key, split in index.splits.items():
        sizes = np.full((split.num_images, 2), spec.image_size, np.int32)
        annotations = {**split.annotations, name: found(index, key)}
        splits[key] = replace(split, annotations=annotations, image_sizes=sizes)
    names = {**index.label_mappings, name: {label: number for number, label in enumerate(classes)}}
    return replace(index, splits=splits, label_mappings=names)


def _scenes(spec: MiniSpec, index: DatasetIndex, split: str) -> Iterator[Scene]:
    """What the images of a split show, some at a time, in the order of the rows."""
    count = index.splits[split].num_images
    for start in range(0, count, _BATCH):
        yield scene_of(spec, index, split, np.arange(start, min(start + _BATCH, count)))


def write_masked(path: Path, spec: MiniSpec) -> None:
    """Draw images and masks into one HDF5 file.

    Raises:
        OSError: if the disk is full.
    """
    write_mini(path, spec, index=masked_index(spec))


def write_boxed(path: Path, spec: MiniSpec) -> None:
    """Draw images and boxes into one HDF5 file.

    Raises:
        OSError: if the disk is full.
    """
    write_mini(path, spec, index=boxed_index(spec))
