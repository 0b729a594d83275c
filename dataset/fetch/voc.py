"""Folders and archives in PASCAL VOC's layout: images, and their masks or boxes.

    JPEGImages/000032.jpg
    SegmentationClass/000032.png             a mask: a palette's or grey PNG of class numbers, 255 is no class
    Annotations/000032.xml                   boxes, and in VOC 2007 whose photograph it is
    ImageSets/Segmentation/train.txt, ...    the ids of a split's images with masks (Main: with boxes)
    classes.txt                              the names of the classes in order, if they are not VOC's
    users.csv                                whose each image is (`dataset.fetch.annotated`)

Any folders may stand above these. Boxes count pixels from 1 and include the last, as VOC's do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from dataset.fetch.annotated import (
    COLUMNS,
    USERS_CSV,
    Annotated,
    Form,
    Layout,
    Reading,
    fitted,
    without_suffix,
)
from dataset.fetch.mask_values import check_classes, numbered
from dataset.files import utf8
from dataset.store.annotations import BACKGROUND, DIFFICULT
from dataset.store.index import SPLITS

CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable",
    "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
CLASSES_TXT = "classes.txt"
SETS: dict[Form, str] = {"mask": "Segmentation", "boxes": "Main"}
MAX_XML_BYTES = 1 << 20
MAX_MASK_BYTES = 1 << 24
MAX_LIST_BYTES = 1 << 26
MAX_DEPTH = 16
UNKNOWN = "?"
"""VOC 2007's entry for an unknown photographer."""
_NUMBER = re.compile(r"[-+]?[0-9]{1,9}(\.[0-9]{1,20})?")


def wanted(path: PurePosixPath, form: Form) -> tuple[str, int] | None:
    """The name and largest size of a file that is read; see `dataset.fetch.annotated.Layout.wanted`."""
    folder = path.parts[-2] if len(path.parts) > 1 else ""
    if path.name == CLASSES_TXT:
        return path.name, MAX_LIST_BYTES
    if path.suffix == ".txt" and path.parts[-3:-1] == ("ImageSets", SETS[form]):
        in_use = path.stem in (*SPLITS, "trainval")
        return (f"ImageSets/{path.name}", MAX_LIST_BYTES) if in_use else None
    if path.suffix == ".xml" and folder == "Annotations":
        return f"Annotations/{path.stem}", MAX_XML_BYTES
    if path.suffix == ".png" and folder == "SegmentationClass" and form == "mask":
        return f"SegmentationClass/{path.stem}", MAX_MASK_BYTES
    return None


def read(files: Mapping[str, bytes], origin: str, reading: Reading) -> Annotated:
    """Read the annotations; see `dataset.fetch.annotated.Layout.read`."""
    form = reading.form
    classes = _classes(files, origin, form)
    if reading.values and len(reading.values) != len(classes):
        raise ValueError(
            f"--mask_values has {len(reading.values)} values, but there are {len(classes)} classes "
            f"({', '.join(classes)[:200]}): give one for each; classes are listed in {CLASSES_TXT}"
        )
    split_of = _sets(files, origin, form)
    if not split_of:
        annotated = {name.partition("/")[2] for name in files}
        split_of = {i if i in annotated else without_suffix(i): split for i, split in reading.splits.items()}
    if not split_of:
        raise ValueError(
            f"{origin} does not say which images are for training: add ImageSets/{SETS[form]}/train.txt, "
            f"or a {USERS_CSV} with a column partition"
        )
    owners: dict[str, str] = {}
    sizes: dict[str, tuple[int, int]] = {}
    repaired: Counter[str] = Counter()
    records = []
    for image, split in split_of.items():
        annotation: Any = files.get(f"SegmentationClass/{image}")
        document = files.get(f"Annotations/{image}")
        if (annotation if form == "mask" else document) is None and not reading.skip:
            place = "SegmentationClass/*.png" if form == "mask" else "Annotations/*.xml"
            raise ValueError(
                f"{origin}: image {image} of {split} has no annotation in {place}; add it, or leave "
                "such images out with --on_bad_image skip"
            )
        if annotation is not None and form == "mask" and reading.values:
            try:
                annotation = numbered(annotation, reading.values)
            except ValueError as error:
                raise ValueError(f"{origin}: SegmentationClass/{image}.png: {error}") from None
        if document is not None:
            where = f"{origin}: Annotations/{image}.xml"
            root = parse_xml(document, where)
            if owner := _owner(root):
                owners[image] = owner
            if form == "boxes":
                sizes[image] = _size(root, where)
                annotation = _boxes(root, sizes[image], classes, reading, repaired, where)
        records.append({"image_id": image, "partition": split, COLUMNS[form]: annotation})
    inside, warning = frozenset(["JPEGImages"]), None
    if form == "mask":
        masks = (record[COLUMNS[form]] for record in records)
        warning = check_classes((mask for mask in masks if mask is not None), classes, origin)
    notes = {"mask_values": list(reading.values)} if reading.values else {}
    return Annotated(
        form, records, classes, inside, owners, sizes=sizes, repaired=repaired, notes=notes, warning=warning
    )


VOC = Layout(("mask", "boxes"), wanted, read, open_first_pixel=True, open_values=True)


def _boxes(
    root: Element,
    size: tuple[int, int],
    classes: Sequence[str],
    reading: Reading,
    repaired: Counter[str],
    where: str,
) -> list[dict[str, Any]]:
    found = []
    for entry in root.findall("object"):
        name = " ".join((entry.findtext("name") or "").split())
        if name not in classes:
            raise ValueError(
                f"{where} has an object of the class {name[:80]!r}, which is not one of the "
                f"{len(classes)} classes; list all classes in a {CLASSES_TXT}"
            )
        ends = [_number(entry, f"bndbox/{side}", where) for side in ("xmin", "ymin", "xmax", "ymax")]
        # With 1 as the first pixel, the last pixel is within the box; with 0, the box ends before it.
        corners = (ends[0] - reading.first_pixel, ends[1] - reading.first_pixel, *ends[2:])
        zero = "; if the boxes count pixels from 0, give --first_pixel 0" if reading.first_pixel else ""
        if (fits := fitted(corners, size, reading.cut, repaired, where, zero)) is not None:
            difficult = (entry.findtext("difficult") or "").strip() == "1"
            found.append({"name": name, "corners": fits, "flags": DIFFICULT if difficult else 0})
    return found


def parse_xml(content: bytes, origin: str) -> Element:
    """The root of an XML document, which may declare no entities and nest `MAX_DEPTH` deep.

    Raises:
        ValueError: that names the file.
    """
    builder, depth = TreeBuilder(), 0

    def refuse(*_: object) -> None:
        raise ValueError("it has a document type declaration, which is not allowed")

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"its elements are nested more than {MAX_DEPTH} deep")
        builder.start(name, attributes)

    def end(name: str) -> None:
        nonlocal depth
        depth -= 1
        builder.end(name)

    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = refuse
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = builder.data
    try:
        parser.Parse(content, True)
        return builder.close()
    except (expat.ExpatError, ValueError, LookupError) as error:
        raise ValueError(f"{origin} is not valid XML ({' '.join(str(error).split())})") from None


def _classes(files: Mapping[str, bytes], origin: str, form: Form) -> list[str]:
    """The names in ``classes.txt``, or else VOC's."""
    if CLASSES_TXT not in files:
        return [BACKGROUND, *CLASSES] if form == "mask" else list(CLASSES)
    names = [" ".join(line.split()) for line in _lines(files[CLASSES_TXT], f"{origin}: {CLASSES_TXT}")]
    if not names or len(set(names)) < len(names) or len(names) > 255:
        raise ValueError(f"{origin}: {CLASSES_TXT} needs 1 to 255 different names, one on each line")
    return names


def _sets(files: Mapping[str, bytes], origin: str, form: Form) -> dict[str, str]:
    """The split of each image that a list of ``ImageSets`` has."""
    lists = {name: files[f"ImageSets/{name}.txt"] for name in SPLITS if f"ImageSets/{name}.txt" in files}
    if "train" not in lists and "ImageSets/trainval.txt" in files:
        lists["train"] = files["ImageSets/trainval.txt"]
        lists.pop("val", None)
    found: dict[str, str] = {}
    for split, content in lists.items():
        found = image_ids(content, f"{origin}: ImageSets/{SETS[form]}/{split}.txt", split, found)
    return found


def image_ids(content: bytes, where: str, split: str, known: Mapping[str, str]) -> dict[str, str]:
    """The splits of images that are ``known``, and those of a list with an id on each line.

    Raises:
        ValueError: that names the list, for a line that is no id, and an image that has a split already.
    """
    found = dict(known)
    for line in _lines(content, where):
        if line != Path(line).name or len(line.split()) > 1:
            raise ValueError(f"{where} has the line {line[:80]!r}; each line must be one image id")
        if line in found:
            raise ValueError(
                f"{where} lists image {line}, which is already in {found[line]}: remove one of the two"
            )
        found[line] = split
    return found


def _lines(content: bytes, origin: str) -> list[str]:
    return [line.strip() for line in utf8(content, origin).splitlines() if line.strip()]


def _owner(root: Element) -> str | None:
    """The photographer's Flickr id, or name, in an XML of VOC 2007."""
    texts = (" ".join((root.findtext(f"owner/{key}") or "").split()) for key in ("flickrid", "name"))
    return next((text for text in texts if text not in ("", UNKNOWN)), None)


def _size(root: Element, where: str) -> tuple[int, int]:
    """Width and height."""
    return int(_number(root, "size/width", where)), int(_number(root, "size/height", where))


def _number(entry: Element, path: str, where: str) -> float:
    text = (entry.findtext(path) or "").strip()
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{where}: {path} is {text[:40]!r}; it must be a number")
    return float(text)
