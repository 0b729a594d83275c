"""VOC's, SBD's and COCO's archives on few images, each of which shows its own number.

A layout is the content of its files by path; what an image has follows from its number.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.io
from PIL import Image

from dataset import preprocess_annotated
from dataset.arrays import ByteArray
from dataset.cli import run
from dataset.coco.download_preprocess import COCO_2017
from dataset.fetch.voc import CLASSES
from dataset.preprocess_annotated import AnnotatedSet
from dataset.sbd.download_preprocess import SEMANTIC_BOUNDARIES
from dataset.store.annotations import VOID
from dataset.voc.download_preprocess import SUBSETS
from tests.dataset.drawn import SIDE, add_member, jpeg

Files = dict[str, bytes]
CATEGORIES = {90: "toothbrush", 1: "person", 18: "dog"}  # not in the order of their ids, and with gaps


@dataclass(frozen=True)
class Photo:
    """An image of a layout."""

    number: int
    split: str

    @property
    def image_id(self) -> str:
        return f"{self.number:06d}"

    @property
    def owner(self) -> str | None:
        return (None, "Fried Camels", "Jo?")[self.number % 3]

    @property
    def mask(self) -> ByteArray:
        mask = np.zeros((SIDE, SIDE), np.uint8)
        mask[self.number % SIDE :] = self.number % 20 + 1
        return mask

    @property
    def boxes(self) -> list[tuple[int, list[int], bool]]:
        """Class of VOC, corners counted from 0, and whether it is flagged."""
        return [(k * self.number % 20, [k, 0, SIDE - k, 2 + k], k % 2 == 1) for k in range(self.number % 4)]


TRAIN, VAL, TEST = (
    [Photo(number, split) for number in numbers]
    for split, numbers in (("train", (1, 2, 3, 7, 9)), ("val", (4, 5, 10)), ("test", (6, 8, 11)))
)


def photo(number: int) -> Photo:
    return next(one for one in (*TRAIN, *VAL, *TEST) if one.number == number)


def palette_png(mask: ByteArray) -> bytes:
    image = Image.fromarray(mask, "P")
    image.putpalette([value for k in range(256) for value in (k * 37 % 256, k * 91 % 256, k)])
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def voc_xml(one: Photo, with_owner: bool) -> bytes:
    owner = one.owner or "?"
    entries = "".join(
        f"<object><name>{CLASSES[k]}</name><difficult>{flagged:d}</difficult>"
        f"<bndbox><xmin>{box[0] + 1}</xmin><ymin>{box[1] + 1}</ymin>"
        f"<xmax>{box[2]}</xmax><ymax>{box[3]}</ymax></bndbox>"
        "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part></object>"
        for k, box, flagged in one.boxes
    )
    people = f"<owner><flickrid>{owner}</flickrid><name>{owner}</name></owner>" if with_owner else ""
    size = f"<size><width>{SIDE}</width><height>{SIDE}</height><depth>3</depth></size>"
    return f"<annotation>{people}{size}{entries}</annotation>\n".encode()


def voc_files(year: str, photos: Mapping[str, list[Photo]]) -> Files:
    """Files of one archive: the lists of these splits, and what they list; every second image has a mask."""
    root, files = f"VOCdevkit/VOC{year}", {}
    for split, ones in photos.items():
        with_masks = [one for one in ones if one.number % 2]
        for name, listed in (("Segmentation", with_masks), ("Main", ones)):
            files[f"{root}/ImageSets/{name}/{split}.txt"] = "".join(
                f"{one.image_id}\n" for one in listed
            ).encode()
        files[f"{root}/ImageSets/Main/dog_{split}.txt"] = b"".join(b"000001 -1\n" for _ in ones)
        for one in ones:
            files[f"{root}/JPEGImages/{one.image_id}.jpg"] = jpeg(one.number)
            files[f"{root}/Annotations/{one.image_id}.xml"] = voc_xml(one, with_owner=year == "2007")
        for one in with_masks:
            mask = one.mask
            mask[0, 0] = VOID
            for folder in ("SegmentationClass", "SegmentationObject"):
                files[f"{root}/{folder}/{one.image_id}.png"] = palette_png(mask)
    return files


def sbd_files() -> Files:
    root, files = "benchmark_RELEASE/dataset", {}
    for split, ones in (("train", TRAIN), ("val", VAL)):
        files[f"{root}/{split}.txt"] = "".join(f"{one.image_id}\n" for one in ones).encode()
        for one in ones:
            files[f"{root}/img/{one.image_id}.jpg"] = jpeg(one.number)
            files[f"{root}/cls/{one.image_id}.mat"] = matlab(one.mask)
    files["benchmark_RELEASE/benchmark_code/train.txt"] = b"no list of images"
    return files


def matlab(mask: npt.NDArray[Any], compressed: bool = True) -> bytes:
    """As SBD's files: a struct with the mask, and more."""
    boundaries = np.empty((20, 1), object)
    boundaries[:] = [[np.zeros((2, 2), np.uint8)] for _ in range(20)]
    content = {"Segmentation": mask, "CategoriesPresent": np.unique(mask), "Boundaries": boundaries}
    buffer = io.BytesIO()
    scipy.io.savemat(buffer, {"GTcls": content}, do_compression=compressed)
    return buffer.getvalue()


def outline(box: list[int], as_runs: bool) -> Any:
    """The outline of a box: a polygon, or its pixels as runs column by column."""
    left, top, right, bottom = box
    if not as_runs:
        return [[left, top, right, top, right, bottom, left, bottom]]
    inside = np.zeros((SIDE, SIDE), np.uint8)
    inside[top:bottom, left:right] = 1
    ends = np.flatnonzero(np.diff(inside.T.ravel(), prepend=0, append=1 - inside[-1, -1]))
    return {"size": [SIDE, SIDE], "counts": np.diff(ends, prepend=0).tolist()}


def coco_json(photos: list[Photo], digits: int = 12) -> dict[str, Any]:
    """Class k of VOC is the k-th category, over and over; there are more keys, which nobody reads."""
    ids = sorted(CATEGORIES)
    boxes = [(one, *box) for one in photos for box in one.boxes]
    return {
        "info": {"year": 2017},
        "licenses": [{"id": 1, "name": "CC"}],
        "images": [
            {
                "id": one.number,
                "file_name": f"{one.number:0{digits}d}.jpg",
                "width": SIDE,
                "height": SIDE,
                "license": 1,
            }
            for one in photos
        ],
        "annotations": [
            {
                "id": number,
                "image_id": one.number,
                "category_id": ids[k % len(ids)],
                "bbox": [box[0], box[1], box[2] - box[0], box[3] - box[1]],
                "area": 1.5,
                "iscrowd": int(flagged),
                "segmentation": outline(box, flagged),
            }
            for number, (one, k, box, flagged) in enumerate(boxes)
        ],
        "categories": [{"id": k, "name": name, "supercategory": "thing"} for k, name in CATEGORIES.items()],
    }


def coco_files() -> dict[str, Files]:
    """By archive."""
    archives: dict[str, Files] = {"annotations/annotations_trainval2017.zip": {}}
    for split, ones in (("train", TRAIN), ("val", VAL)):
        name = f"annotations/instances_{split}2017.json"
        archives["annotations/annotations_trainval2017.zip"][name] = json.dumps(coco_json(ones)).encode()
        archives["annotations/annotations_trainval2017.zip"][name.replace("instances", "captions")] = b"{"
        archives[f"zips/{split}2017.zip"] = {
            f"{split}2017/{one.number:012d}.jpg": jpeg(one.number) for one in ones
        }
    return archives


VOC_2007 = {
    SUBSETS["2007"].archives[0].path: voc_files("2007", {"train": TRAIN, "val": VAL}),
    SUBSETS["2007"].archives[1].path: voc_files("2007", {"test": TEST}),
}
LAYOUTS: dict[str, tuple[AnnotatedSet, dict[str, Files]]] = {
    "voc2007": (SUBSETS["2007"], VOC_2007),
    "voc2012": (
        SUBSETS["2012"],
        {SUBSETS["2012"].archives[0].path: voc_files("2012", {"train": TRAIN, "val": VAL})},
    ),
    "sbd": (SEMANTIC_BOUNDARIES, {"benchmark.tgz": sbd_files()}),
    "coco": (COCO_2017, coco_files()),
}


def write_archive(path: Path, files: Files) -> str:
    """Returns its MD5."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
    else:
        with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as tar:
            for name, content in files.items():
                add_member(tar, name, content)
    return hashlib.md5(path.read_bytes()).hexdigest()


def write_files(root: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def served(layout: str, root: Path, url: str) -> AnnotatedSet:
    """The layout's archives in a server's folder, and the data set that is to be found there."""
    spec, archives = LAYOUTS[layout]
    md5 = {path: write_archive(root / path, files) for path, files in archives.items()}
    listing, images = (
        tuple(replace(archive, md5=md5[archive.path]) for archive in group)
        for group in (spec.listing, spec.images)
    )
    return replace(spec, base=url, listing=listing, images=images)


def without_root(files: Files) -> Files:
    return {name.split("/", 2)[2]: content for name, content in files.items()}


def coco_folder(folder: Path, train: Any) -> Path:
    """A folder with these training annotations, those of val, and no image."""
    text = json.dumps(train).encode()
    val = json.dumps(coco_json(VAL)).encode()
    return write_files(folder, {"annotations/instances_train.json": text, "instances_val.json": val})


def write_images(folder: Path) -> None:
    """COCO's, in ``train`` and ``val``."""
    for archive in LAYOUTS["coco"][0].images:
        for name, content in LAYOUTS["coco"][1][archive.path].items():
            write_files(folder, {name.replace("2017", ""): content})


def make(spec: AnnotatedSet, output: Path, *words: str | Path) -> int:
    main = partial(preprocess_annotated.main, {"only": spec})
    return run(main, [f"--output_file={output}", "--workers=1", *map(str, words)])
