"""Folders in YOLO's layout: a text file of objects beside each image.

    data.yaml                          names: [car, person], or {0: car, 1: person}; or classes.txt
    images/train/a.jpg                 or train/images/a.jpg
    labels/train/a.txt                 or train/labels/a.txt, or beside the image

A folder on an image's path is called train, val (valid, validation, dev) or test, which is its split;
without one the column partition of ``users.csv`` says it. A line of a text file is an object: ``class x y
width height``, centre and size as shares of the image's, or ``class x0 y0 x1 y1 x2 y2 ...``, an outline. An
image without a text file has no objects. Shares are of the image as people see it, turned by its EXIF
orientation.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import yaml
from PIL import Image
from tqdm import tqdm

from dataset.fetch.annotated import USERS_CSV, Annotated, Form, Layout, Reading
from dataset.fetch.archives import IMAGE_SUFFIXES
from dataset.fetch.coco import Json, Reader
from dataset.fetch.members import files_below
from dataset.fetch.outlines import packed
from dataset.files import utf8
from dataset.store.index import SPLIT_NAMES

NAMES = ("data.yaml", "data.yml", "classes.txt")
"""Files with the names of the classes; the first that is there counts."""
MAX_NAMES_BYTES, MAX_LABELS_BYTES = 1 << 20, 1 << 24
OF_A_BOX = 4
TEXT = ".txt"
LARGEST = 1e6
"""Above every share of an image, and every number of pixels."""
_ORIENTATION, _TURNED, _SIDEWAYS = 0x0112, range(2, 9), range(5, 9)  # of EXIF
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def wanted(path: PurePosixPath, form: Form) -> tuple[str, int] | None:
    """The name and largest size of a file that is read; see `dataset.fetch.annotated.Layout.wanted`."""
    if len(path.parts) == 1 and path.name in NAMES:
        return path.name, MAX_NAMES_BYTES
    if path.suffix.lower() != TEXT or len(path.parts) == 1 or path.name in NAMES:
        return None
    return path.with_suffix(TEXT).as_posix(), MAX_LABELS_BYTES


def read(files: Mapping[str, bytes], origin: str, reading: Reading) -> Annotated:
    """Read the annotations; see `dataset.fetch.annotated.Layout.read`."""
    names, root = _names(files, origin), Path(origin)
    images = _images(root, files, reading.splits)
    contents: dict[str, Json] = {}
    kinds: dict[bool, str] = {}
    unreadable, turned = set(), []
    categories = [{"id": number, "name": name} for number, name in enumerate(names)]
    for number, (path, image) in enumerate(tqdm(images.items(), desc="sizes", unit="image", disable=None)):
        empty: Json = {"images": [], "annotations": [], "categories": categories}
        content = contents.setdefault(image.split, empty)
        size, orientation = _upright_size(root / path)
        width, height = size or (1, 1)
        content["images"].append({"id": number, "file_name": path.name, "width": width, "height": height})
        if size is None:
            unreadable.add(path.stem)  # which is refused, or left out, where images are read
            continue
        if orientation != 1:
            turned.append(path.as_posix())
        for line, words in _lines(files.get(image.label, b""), f"{origin}: {image.label}"):
            where = f"{image.label} line {line}"
            found = _object(words, size, f"{origin}: {where}")
            kinds.setdefault(bool(found["segmentation"]), where)
            content["annotations"].append({"id": where, "image_id": number, **found})
    if turned and not reading.upright:
        raise ValueError(
            f"{origin}: {len(turned):,} photos are rotated by their EXIF orientation, for example "
            f"{turned[0]}, and the boxes are those of the rotated photos: give --upright"
        )
    if len(kinds) > 1:
        raise ValueError(
            f"{origin} has lines with boxes ({kinds[False]}) and lines with outlines ({kinds[True]}), "
            "or with tracks or keypoints, which are not read: use only boxes, or only outlines"
        )
    reader = Reader(reading.cut, reading.form)
    for split, content in contents.items():
        reader.read(content, origin, split, split)
    annotated = reader.annotated(origin)
    sizes = {image: size for image, size in annotated.sizes.items() if image not in unreadable}
    folders = frozenset(path.parent.name for path in images)
    return replace(annotated, folders=folders, ids={}, sizes=sizes, notes={})


YOLO = Layout(("boxes", "mask"), wanted, read)


@dataclass(frozen=True)
class _Image:
    split: str
    label: str
    """Its text file, or where that would be."""


def _images(root: Path, files: Mapping[str, bytes], splits: Mapping[str, str]) -> dict[PurePosixPath, _Image]:
    """The images below a folder, by path; every text file beside them, or in ``labels``, is one of theirs.

    Raises:
        ValueError: for an image of no split or several, or in no folder, and where text files are
            missing or nobody's.
    """
    found: dict[PurePosixPath, _Image] = {}
    for file in sorted(files_below(root)):
        path = PurePosixPath(file.relative_to(root).as_posix())
        if file.name.startswith(".") or file.suffix.lower() not in IMAGE_SUFFIXES:
            continue
        if len(path.parts) == 1:
            raise ValueError(
                f"{file} cannot be used; it is not in a folder below --source: put images into a folder, "
                "such as train/images"
            )
        found[path] = _Image(_split(path, splits, file), _label(path, files))
    if not found:
        raise ValueError(f"{root} has no image ({', '.join(IMAGE_SUFFIXES)})")
    _check_texts(root, files, found)
    return found


def _check_texts(root: Path, files: Mapping[str, bytes], found: Mapping[PurePosixPath, _Image]) -> None:
    """Refuse text files of no image, and splits without any; say how many images have none."""
    used, stems = {image.label for image in found.values()}, {path.stem for path in found}
    unused = [PurePosixPath(name) for name in files if "/" in name and name not in used]
    if lost := [path.as_posix() for path in unused if "labels" in path.parts or path.stem in stems]:
        raise ValueError(
            f"{root}: {len(lost):,} text files belong to no image, for example {lost[0]}: the text file "
            "of an image must be beside the image, or in labels/ if the image is in images/"
        )
    for split in sorted({image.split for image in found.values()}):
        bare = [image.label not in files for image in found.values() if image.split == split]
        if all(bare):
            raise ValueError(f"{root}: no image of {split} has a text file of objects, not even an empty one")
        if any(bare):
            print(
                f"{sum(bare):,} images of {split} have no text file, and count as images without objects",
                file=sys.stderr,
            )


def _split(path: PurePosixPath, splits: Mapping[str, str], file: Path) -> str:
    named = {SPLIT_NAMES[part] for part in path.parts[:-1] if part in SPLIT_NAMES}
    if not named:
        named = {splits[name] for name in (path.stem, path.name) if name in splits}
    if len(named) != 1:
        raise ValueError(
            f"{file} belongs to no split, or to several: name exactly one folder above it train, val or "
            f"test, or give a {USERS_CSV} with a column partition"
        )
    return named.pop()


def _label(image: PurePosixPath, files: Mapping[str, bytes]) -> str:
    """The text file of an image: below ``labels`` where the image is below ``images``, else beside it."""
    beside = image.with_suffix(TEXT)
    parts = list(beside.parts)
    for place in reversed(range(len(parts) - 1)):
        if parts[place] == "images":
            parts[place] = "labels"
            break
    usual = PurePosixPath(*parts).as_posix()
    return usual if usual in files else beside.as_posix()


def _names(files: Mapping[str, bytes], origin: str) -> list[str]:
    """The names of the classes, in the order of their numbers.

    Raises:
        ValueError: when no file has them, or one is no list of different texts.
    """
    name = next((name for name in NAMES if name in files), None)
    if name is None:
        raise ValueError(
            f"{origin} has none of {', '.join(NAMES)}, so the class names are not known: add one of them"
        )
    where = f"{origin}: {name}"
    try:
        text = files[name].decode("utf-8-sig")
        if name.endswith(TEXT):
            found: object = {"names": [line.strip() for line in text.rstrip().split("\n")]}
        else:
            found = yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as fault:
        raise ValueError(f"{where} cannot be read ({' '.join(str(fault).split())[:200]})") from None
    if not isinstance(found, dict):
        found = {}
    names: object = found.get("names")
    if isinstance(names, dict) and all(type(number) is int for number in names):
        numbers = sorted(names)
        names = [names[number] for number in numbers] if numbers == [*range(len(numbers))] else None
    texts = [each for each in names if isinstance(each, str) and each] if isinstance(names, list) else []
    if not texts or not isinstance(names, list) or len(set(texts)) < len(names):
        raise ValueError(
            f"{where} needs names: a list of different texts, or a mapping from the numbers 0, 1, 2, "
            "... to texts (put yes, no, on, off and numbers in quotes)"
        )
    if found.get("nc", len(texts)) != len(texts):
        raise ValueError(f"{where} has {len(texts)} names, but nc is another number: correct one of the two")
    if "kpt_shape" in found:
        raise ValueError(
            f"{where} has kpt_shape, but keypoints are not read; use annotations with boxes or outlines"
        )
    return texts


def _upright_size(path: Path) -> tuple[tuple[int, int] | None, int]:
    """Width and height of the image in a file, as people see it, and its EXIF orientation, 1 for none.

    The size is None where it cannot be read.
    """
    try:
        with Image.open(path) as image:
            size, orientation = image.size, int(image.getexif().get(_ORIENTATION, 1))
    except (OSError, ValueError, TypeError, SyntaxError, Image.DecompressionBombError):
        return None, 1
    if orientation in _SIDEWAYS:
        size = size[1], size[0]
    return size, orientation if orientation in _TURNED else 1


def _lines(content: bytes, where: str) -> Iterator[tuple[int, list[str]]]:
    """The number and the words of each line that is not empty."""
    for number, line in enumerate(utf8(content, where).split("\n"), 1):
        if words := line.split():
            yield number, words


def _object(words: list[str], size: tuple[int, int], where: str) -> Json:
    """An object in COCO's form.

    Raises:
        ValueError: when the line is none, with its place.
    """
    shares = [float(word) for word in words[1:]] if all(map(_NUMBER.fullmatch, words[1:])) else []
    outline = len(shares) >= 6 and len(shares) % 2 == 0
    if not words[0].isascii() or not words[0].isdigit() or not (outline or len(shares) == OF_A_BOX):
        raise ValueError(
            f"{where} has {' '.join(words)[:60]!r}; it needs a class number and x y width height, or a "
            "class number and three or more pairs x y"
        )
    if not all(abs(share) < LARGEST for share in shares):
        raise ValueError(
            f"{where} has numbers that are too large: coordinates are fractions of the image's width "
            "and height"
        )
    scaled = [share * size[place % 2] for place, share in enumerate(shares)]
    category = {"category_id": int(words[0][:18])}
    if outline:
        left, top, right, bottom = min(scaled[::2]), min(scaled[1::2]), max(scaled[::2]), max(scaled[1::2])
        box = [left, top, right - left, bottom - top]
        return {**category, "bbox": box, "segmentation": packed([scaled])}
    x, y, width, height = scaled
    return {**category, "bbox": [x - width / 2, y - height / 2, width, height], "segmentation": []}
