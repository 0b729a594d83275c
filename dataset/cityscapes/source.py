"""Cityscapes' layout: an image and a mask of label ids for each scene, by split and city.

    leftImg8bit/train/aachen/aachen_000000_000019_leftImg8bit.png
    gtFine/train/aachen/aachen_000000_000019_gtFine_labelIds.png

There may be any folders above these. A name has the city, the number of a drive's sequence, and the frame in
it. The annotations of test are not published, so test is left out. 19 of the 34 label ids are evaluated as
classes (Cordts et al. 2016, arXiv 1604.01685, section 2); pixels of the others are void.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

import numpy as np

from dataset.fetch.annotated import COLUMNS, Annotated, Form, Layout, Reading
from dataset.fetch.voc import MAX_MASK_BYTES
from dataset.store.annotations import VOID, encoded_mask, read_mask

CLASSES: Mapping[int, str] = {
    7: "road", 8: "sidewalk", 11: "building", 12: "wall", 13: "fence", 17: "pole", 19: "traffic light",
    20: "traffic sign", 21: "vegetation", 22: "terrain", 23: "sky", 24: "person", 25: "rider", 26: "car",
    27: "truck", 28: "bus", 31: "train", 32: "motorcycle", 33: "bicycle",
}  # fmt: skip
"""The evaluated classes by their label ids; their order is that of the train ids 0 to 18."""
NUM_IDS = 34
SPLITS = ("train", "val")
CITY, SEQUENCE = "city", "sequence"
"""The ways to deal the images: by city, and by a drive's sequence within it."""
_NAME = re.compile(r"(([A-Za-z-]+)_[0-9]+)_[0-9]+")
_MASK, _IMAGE = "_gtFine_labelIds", "_leftImg8bit"
_TRAIN_IDS = np.full(NUM_IDS, VOID, np.uint8)
_TRAIN_IDS[list(CLASSES)] = np.arange(len(CLASSES))


def wanted(path: PurePosixPath, form: Form) -> tuple[str, int] | None:
    """The name and largest size of a file that is read; see `dataset.fetch.annotated.Layout.wanted`."""
    is_mask = len(path.parts) > 3 and path.parts[-4] == "gtFine" and path.parts[-3] in SPLITS
    if not is_mask or path.suffix != ".png" or not path.stem.endswith(_MASK):
        return None
    return "/".join(path.parts[-3:]), MAX_MASK_BYTES


def read(files: Mapping[str, bytes], origin: str, reading: Reading) -> Annotated:
    """Read the annotations; see `dataset.fetch.annotated.Layout.read`."""
    records, cities, sequences, ids = [], dict[str, str](), dict[str, str](), dict[str, str]()
    for name in sorted(files):
        where = f"{origin}: gtFine/{name}"
        split, folder, file = name.split("/")
        scene = file.removesuffix(f"{_MASK}.png")
        found = _NAME.fullmatch(scene)
        if found is None or found[2] != folder:
            raise ValueError(
                f"{where} is not named after its folder's city, a sequence and a frame, as "
                f"{folder[:40]}_000000_000019{_MASK}.png"
            )
        image = scene + _IMAGE
        if image in cities:
            raise ValueError(f"{where}: scene {scene} is in another split, too; keep one of them")
        cities[image], sequences[image], ids[scene] = folder, found[1], image
        records.append({"image_id": image, "partition": split, COLUMNS["mask"]: mask_png(files[name], where)})
    if not any(record["partition"] == "train" for record in records):
        raise ValueError(
            f"{origin} holds no gtFine/train/CITY/*{_MASK}.png: give the folder that holds gtFine and "
            "leftImg8bit, or gtFine_trainvaltest.zip and leftImg8bit_trainvaltest.zip"
        )
    ways = {CITY: cities, SEQUENCE: sequences}
    folders = frozenset(cities.values())
    return Annotated("mask", records, [*CLASSES.values()], folders, ids=ids, ways=ways)


CITYSCAPES = Layout(("mask",), wanted, read, ways=(CITY, SEQUENCE))


def mask_png(content: bytes, origin: str) -> bytes:
    """A mask of label ids as one of train ids, both PNG.

    Raises:
        ValueError: when it is no mask, or has an unknown id; the message names the file.
    """
    try:
        mask = read_mask(content)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from None
    if (highest := int(mask.max(initial=0))) >= NUM_IDS:
        raise ValueError(
            f"{origin} has the label id {highest}; there are 0 to {NUM_IDS - 1}: give the masks *{_MASK}.png "
            "as they were published"
        )
    return encoded_mask(_TRAIN_IDS[mask])
