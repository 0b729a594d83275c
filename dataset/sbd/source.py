"""SBD's layout: images, a MATLAB file with the mask of each, and lists of the splits.

    img/2008_000002.jpg        cls/2008_000002.mat        train.txt  val.txt

Any folders may stand above these. A mask has the classes 0 (background) to 20, and no border of no class.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from dataset.fetch.annotated import COLUMNS, Annotated, Form, Layout, Reading
from dataset.fetch.voc import CLASSES, MAX_LIST_BYTES, MAX_MASK_BYTES, image_ids
from dataset.sbd.matlab import byte_matrix
from dataset.store.annotations import BACKGROUND, encoded_mask

LISTS = ("train", "val")


def wanted(path: PurePosixPath, form: Form) -> tuple[str, int] | None:
    """The name and largest size of a file that is read; see `dataset.fetch.annotated.Layout.wanted`."""
    if path.suffix == ".txt" and path.stem in LISTS and path.parent.name in ("", "dataset"):
        return path.name, MAX_LIST_BYTES
    is_mask = path.suffix == ".mat" and len(path.parts) > 1 and path.parts[-2] == "cls"
    return (f"cls/{path.stem}", MAX_MASK_BYTES) if is_mask else None


def read(files: Mapping[str, bytes], origin: str, reading: Reading) -> Annotated:
    """Read the annotations; see `dataset.fetch.annotated.Layout.read`."""
    split_of: dict[str, str] = {}
    for split in LISTS:
        if f"{split}.txt" in files:
            split_of = image_ids(files[f"{split}.txt"], f"{origin}: {split}.txt", split, split_of)
    if not split_of:
        raise ValueError(f"{origin} has no train.txt, which lists the training images")
    records = []
    for image, split in split_of.items():
        if f"cls/{image}" not in files:
            raise ValueError(f"{origin}: image {image} of {split} has no cls/{image}.mat")
        mask = mask_png(files[f"cls/{image}"], f"{origin}: cls/{image}.mat")
        records.append({"image_id": image, "partition": split, COLUMNS["mask"]: mask})
    return Annotated("mask", records, [BACKGROUND, *CLASSES], frozenset(["img"]))


SBD = Layout(("mask",), wanted, read)


def mask_png(content: bytes, origin: str) -> bytes:
    """The mask in a MATLAB file (``GTcls.Segmentation``, ``[H, W]`` uint8) as a PNG.

    Raises:
        ValueError: that names the file.
    """
    try:
        mask = byte_matrix(content, "GTcls", "Segmentation")
    except ValueError as error:
        raise ValueError(f"{origin} has no GTcls.Segmentation ({error})") from None
    return encoded_mask(mask)
