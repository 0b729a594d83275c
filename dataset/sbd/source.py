"""SBD's layout: images, a MATLAB file with the mask of each, and lists of the splits.

    img/2008_000002.jpg        cls/2008_000002.mat        train.txt  val.txt

Any folders may stand above these. A mask has the classes 0 (background) to 20, and no border of no class.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import scipy.io
from PIL import Image

from dataset.fetch.annotated import COLUMNS, MAX_USERS_BYTES, USERS_CSV, Annotated, Form, Layout, Reading
from dataset.fetch.voc import CLASSES, MAX_LIST_BYTES, MAX_MASK_BYTES, image_ids
from dataset.store.annotations import BACKGROUND

LISTS = ("train", "val")
MAX_MATRIX_BYTES = 1 << 26
_HEADER, _COMPRESSED = 128, 15  # bytes of a MATLAB file's header; the type of a compressed element


def wanted(path: PurePosixPath, form: Form) -> tuple[str, int] | None:
    """As `dataset.fetch.annotated.Layout.wanted`."""
    if path.name == USERS_CSV:
        return path.name, MAX_USERS_BYTES
    if path.suffix == ".txt" and path.stem in LISTS and path.parent.name in ("", "dataset"):
        return path.name, MAX_LIST_BYTES
    is_mask = path.suffix == ".mat" and len(path.parts) > 1 and path.parts[-2] == "cls"
    return (f"cls/{path.stem}", MAX_MASK_BYTES) if is_mask else None


def read(files: Mapping[str, bytes], origin: str, reading: Reading) -> Annotated:
    """As `dataset.fetch.annotated.Layout.read`."""
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
        _refuse_bomb(content)
        (entry,) = scipy.io.loadmat(io.BytesIO(content), variable_names=["GTcls"])["GTcls"].flat
        mask: Any = entry["Segmentation"]
    except Exception as error:  # scipy's reader raises whatever comes of damage
        what = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise ValueError(f"{origin} holds no GTcls.Segmentation ({what})") from None
    if not isinstance(mask, np.ndarray) or mask.dtype != np.uint8 or mask.ndim != 2 or not mask.size:
        raise ValueError(f"{origin}: GTcls.Segmentation is no matrix of bytes")
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(mask)).save(buffer, "PNG")
    return buffer.getvalue()


def _refuse_bomb(content: bytes) -> None:
    """ValueError for a MATLAB file (level 5) of more than `MAX_MATRIX_BYTES` when it is decompressed."""
    order = {b"IM": "little", b"MI": "big"}.get(content[_HEADER - 2 : _HEADER])
    if order is None:
        raise ValueError("it is no MATLAB file of level 5")
    at, total = _HEADER, 0
    while at + 8 <= len(content):
        kind, size = (int.from_bytes(content[at + k : at + k + 4], order) for k in (0, 4))  # type: ignore[arg-type]
        if kind == _COMPRESSED:
            total += len(
                zlib.decompressobj().decompress(content[at + 8 : at + 8 + size], MAX_MATRIX_BYTES + 1)
            )
        if total > MAX_MATRIX_BYTES:
            raise ValueError(f"it has more than {MAX_MATRIX_BYTES:,} bytes when it is decompressed")
        at += 8 + size
