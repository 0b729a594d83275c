"""Folders in YOLO's layout: a text file of objects beside each image.

    data.yaml                          names: [car, person], or {0: car, 1: person}; or classes.txt
    images/train/a.jpg                 or train/images/a.jpg
    labels/train/a.txt                 or train/labels/a.txt, or beside the image

A folder on an image's path is called train, val (valid, validation) or test, which is its split; without one
the column partition of ``users.csv`` says it. A line of a text file is an object: ``class x y width height``,
centre and size as shares of the image's, or ``class x0 y0 x1 y1 x2 y2 ...``, an outline. An image without a
text file has no objects. Shares are of the image as people see it, turned by its EXIF orientation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

import yaml
from PIL import Image
from tqdm import tqdm

from dataset.fetch.annotated import MAX_USERS_BYTES, USERS_CSV, Annotated, Form, Layout, Reading
from dataset.fetch.archives import IMAGE_SUFFIXES
from dataset.fetch.coco import Json, Reader
from dataset.fetch.members import files_below
from dataset.fetch.outlines import packed

NAMES = ("data.yaml", "data.yml", "classes.txt")
"""Files with the names of the classes; the first that is there counts."""
MAX_NAMES_BYTES, MAX_LABELS_BYTES = 1 << 20, 1 << 24
OF_A_BOX = 4
SPLIT_FOLDERS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
_ORIENTATION, _SIDEWAYS = 0x0112, range(5, 9)  # of EXIF


def wanted(path: PurePosixPath, form: Form) -> tuple[str, int] | None:
    """The name and largest size of a file that is read; see `dataset.fetch.annotated.Layout.wanted`."""
    if path.name == USERS_CSV:
        return path.name, MAX_USERS_BYTES
    if len(path.parts) == 1 and path.name in NAMES:
        return path.name, MAX_NAMES_BYTES
    is_label = path.suffix == ".txt" and len(path.parts) > 1 and path.name not in NAMES
    return (path.as_posix(), MAX_LABELS_BYTES) if is_label else None


def read(files: Mapping[str, bytes], origin: str, reading: Reading) -> Annotated:
    """Read the annotations; see `dataset.fetch.annotated.Layout.read`."""
    names, root = _names(files, origin), Path(origin)
    images = _images(root, files, reading.splits)
    contents: dict[str, Json] = {}
    unreadable = set()
    categories = [{"id": number, "name": name} for number, name in enumerate(names)]
    for number, (path, split) in enumerate(tqdm(images.items(), desc="sizes", unit="image", disable=None)):
        content = contents.setdefault(split, {"images": [], "annotations": [], "categories": categories})
        size = _upright_size(root / path)
        width, height = size or (1, 1)
        content["images"].append({"id": number, "file_name": path.name, "width": width, "height": height})
        if size is None:
            unreadable.add(path.stem)  # which is refused, or left out, where images are read
            continue
        label = _label(path).as_posix()
        for line, words in _lines(files.get(label, b""), f"{origin}: {label}"):
            found = _object(words, size, f"{origin}: {label} line {line}")
            content["annotations"].append({"id": f"{label} line {line}", "image_id": number, **found})
    reader = Reader(reading.cut, reading.form)
    for split, content in contents.items():
        reader.read(content, origin, split, split)
    annotated = reader.annotated(origin)
    sizes = {image: size for image, size in annotated.sizes.items() if image not in unreadable}
    folders = frozenset(path.parent.name for path in images)
    return replace(annotated, folders=folders, ids={}, sizes=sizes, notes={})


YOLO = Layout(("boxes", "mask"), wanted, read)


def _images(root: Path, files: Mapping[str, bytes], splits: Mapping[str, str]) -> dict[PurePosixPath, str]:
    """The split of each image below a folder, by path; every text file is one of theirs."""
    found: dict[PurePosixPath, str] = {}
    for file in sorted(files_below(root)):
        path = PurePosixPath(file.relative_to(root).as_posix())
        if file.suffix.lower() not in IMAGE_SUFFIXES or file.name.startswith("."):
            continue
        named = {SPLIT_FOLDERS[part] for part in path.parts[:-1] if part in SPLIT_FOLDERS}
        if not named and path.stem in splits:
            named = {splits[path.stem]}
        if len(named) != 1:
            raise ValueError(
                f"{root / path}: which split is it of? Name one folder above it train, val or test, or give "
                f"the column partition of {USERS_CSV}"
            )
        found[path] = named.pop()
    if not found:
        raise ValueError(f"{root} holds no image ({', '.join(IMAGE_SUFFIXES)})")
    known = {_label(path).as_posix() for path in found}
    if lost := [name for name in files if "labels" in PurePosixPath(name).parts and name not in known]:
        raise ValueError(
            f"{root}: {len(lost):,} text files have no image, {lost[0]} among them: delete them, or bring "
            "the images back"
        )
    return found


def _label(image: PurePosixPath) -> PurePosixPath:
    """The text file of an image: below ``labels`` where the image is below ``images``, else beside it."""
    parts = list(image.with_suffix(".txt").parts)
    for place in reversed(range(len(parts) - 1)):
        if parts[place] == "images":
            parts[place] = "labels"
            break
    return PurePosixPath(*parts)


def _names(files: Mapping[str, bytes], origin: str) -> list[str]:
    """The names of the classes, in the order of their numbers.

    Raises:
        ValueError: when no file has them, or one is no list of different texts.
    """
    name = next((name for name in NAMES if name in files), None)
    if name is None:
        raise ValueError(f"{origin} has none of {', '.join(NAMES)}, which name the classes")
    where = f"{origin}: {name}"
    try:
        text = files[name].decode("utf-8-sig")
        found = text.split("\n") if name.endswith(".txt") else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as fault:
        raise ValueError(f"{where} cannot be read ({' '.join(str(fault).split())[:200]})") from None
    if name.endswith(".txt"):
        names: object = [line.strip() for line in found if line.strip()]
    else:
        names = found.get("names") if isinstance(found, dict) else None
    if isinstance(names, dict) and [*names] == [*range(len(names))]:
        names = [*names.values()]
    texts = [each for each in names if isinstance(each, str)] if isinstance(names, list) else []
    if not texts or not isinstance(names, list) or len(set(texts)) < len(names):
        raise ValueError(f"{where} needs names: a list of different texts, or of texts by number from 0 on")
    if isinstance(found, dict) and found.get("nc", len(texts)) != len(texts):
        raise ValueError(f"{where} has {len(texts)} names, and nc says another number")
    return texts


def _upright_size(path: Path) -> tuple[int, int] | None:
    """Width and height of the image in a file, as people see it; None where that cannot be read."""
    try:
        with Image.open(path) as image:
            sideways = image.getexif().get(_ORIENTATION) in _SIDEWAYS
            return (image.height, image.width) if sideways else (image.width, image.height)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


def _lines(content: bytes, where: str) -> Iterator[tuple[int, list[str]]]:
    """The number and the words of each line that is not empty."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{where} is not UTF-8 text") from None
    for number, line in enumerate(text.split("\n"), 1):
        if words := line.split():
            yield number, words


def _object(words: list[str], size: tuple[int, int], where: str) -> Json:
    """An object in COCO's form.

    Raises:
        ValueError: when the line is none, with its place.
    """
    try:
        shares = [float(word) for word in words[1:]]
    except ValueError:
        shares = []
    outline = len(shares) >= 6 and len(shares) % 2 == 0
    if not words[0].isascii() or not words[0].isdigit() or not (outline or len(shares) == OF_A_BOX):
        raise ValueError(
            f"{where} has {' '.join(words)[:60]!r}; it needs a class's number and x y width height, or three "
            "or more pairs x y"
        )
    if not all(math.isfinite(share) and abs(share) < 1e6 for share in shares):
        raise ValueError(f"{where} has numbers that are no shares of an image")
    scaled = [share * size[place % 2] for place, share in enumerate(shares)]
    category = {"category_id": int(words[0][:18])}
    if outline:
        left, top, right, bottom = min(scaled[::2]), min(scaled[1::2]), max(scaled[::2]), max(scaled[1::2])
        box = [left, top, right - left, bottom - top]
        return {**category, "bbox": box, "segmentation": packed([scaled])}
    x, y, width, height = scaled
    return {**category, "bbox": [x - width / 2, y - height / 2, width, height], "segmentation": []}
