"""Folders and archives in COCO's layout: images, objects' boxes or outlines in ``instances_*.json``.

    annotations/instances_train2017.json     images, annotations and categories
    train2017/000000000009.jpg, ...          or below images/

The part of a file's name after ``instances_`` begins with train, val or test, which is its split. It is also
the name of the folder with its images (or all images are in ``images``). Boxes are left, top, width and
height in pixels. Outlines become a mask of classes for each image (`dataset.fetch.outlines`): 0 where there
is no object, else the index of the object's category, from 1 on.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from dataset.fetch.annotated import COLUMNS, Annotated, Form, Layout, Reading, fitted
from dataset.fetch.outlines import CROWD_CLASS, LEAST_NUMBERS, MAX_PIXELS, Outline, checked, mask_png, packed
from dataset.store.annotations import BACKGROUND, CROWD, VOID, is_background

MAX_JSON_BYTES = 1 << 30
"""Largest size of such a file in bytes; COCO's largest has 448 MB."""
MAX_CATEGORIES = 1 << 16
MAX_SHOWN = 160
"""Letters of an annotation's id in an error."""
_NAME = re.compile(r"instances_((train|val|test)[A-Za-z0-9._-]*)\.json")
_KEPT = {
    "images", "annotations", "categories", "id", "name", "file_name", "width", "height", "image_id",
    "category_id", "bbox", "iscrowd",
}  # fmt: skip
"""The keys that are read."""
_OF_OUTLINES = {"segmentation", "size", "counts"}
"""Further keys for masks. Otherwise outlines, which are most of the bytes, are dropped during parsing."""

Json = dict[str, Any]


def wanted(path: PurePosixPath, form: Form) -> tuple[str, int] | None:
    """The name and largest size of a file that is read; see `dataset.fetch.annotated.Layout.wanted`."""
    return (path.name, MAX_JSON_BYTES) if _NAME.fullmatch(path.name) else None


def read(files: Mapping[str, bytes], origin: str, reading: Reading) -> Annotated:
    """Read the annotations; see `dataset.fetch.annotated.Layout.read`."""
    reader = Reader(reading.cut, reading.form)
    for name in sorted(files):
        if found := _NAME.fullmatch(name):
            content = parse_json(files[name], f"{origin}: {name}", reading.form)
            reader.read(content, f"{origin}: {name}", found[1], found[2])
    if not reader.records:
        raise ValueError(
            f"{origin} has none of the files annotations/instances_train*.json, instances_val*.json and "
            "instances_test*.json"
        )
    return reader.annotated(origin)


COCO = Layout(("boxes", "mask"), wanted, read)


def parse_json(content: bytes, origin: str, form: Form) -> Json:
    """The object in a JSON text, without unused keys, and with polygons as arrays.

    Raises:
        ValueError: when it is no JSON object.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"it has {constant}, which is not a number in JSON")

    wanted = _KEPT | _OF_OUTLINES if form == "mask" else _KEPT

    def kept(entry: Json) -> Json:
        found = {key: entry[key] for key in entry if key in wanted}
        return {**found, "segmentation": packed(found["segmentation"])} if "segmentation" in found else found

    try:
        found = json.loads(content, object_hook=kept, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{origin} is not valid JSON ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{origin} is not a JSON object with images, annotations and categories")
    return found


@dataclass
class Reader:
    """Collects the images of one file after another.

    Args:
        cut: as in `Reading`.
        form: as in `Reading`.
    """

    cut: bool
    form: Form
    records: list[Json] = field(default_factory=list)
    categories: dict[int, str] = field(default_factory=dict)
    folders: set[str] = field(default_factory=lambda: {"images"})
    ids: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    twice: set[str] = field(default_factory=set)  # ids that two files have
    repaired: Counter[str] = field(default_factory=Counter)
    outlined: bool = False  # whether any object has an outline

    def read(self, content: Json, origin: str, folder: str, split: str) -> None:
        """Take the images of a file.

        Args:
            content: the file's, by `parse_json`.
            origin: the file, for errors.
            folder: the folder with its images.
            split: of its images.
        """
        self._take_categories(_categories(_list(content, "categories", origin), origin), origin)
        self.folders.add(folder)
        images = self._images(content, origin, split)
        for entry in _list(content, "annotations", origin):
            where = f"{origin}: annotation {str(entry.get('id'))[:MAX_SHOWN]}"
            number = _whole(entry, "image_id", where)
            if number not in images:
                raise ValueError(f"{where} belongs to image {number}, which is not in the list images")
            objects, size = images[number]["record"][COLUMNS[self.form]], images[number]["size"]
            if self.form == "mask":
                objects.append(self._outlined(entry, size, where))
            elif (box := self._box(entry, size, where)) is not None:
                objects.append(box)
        for image in images.values() if self.form == "mask" else ():
            image["record"][COLUMNS["mask"]] = mask_png(image["record"][COLUMNS["mask"]], image["size"])
        self.records += [image["record"] for image in images.values()]

    def _take_categories(self, categories: dict[int, str], origin: str) -> None:
        """Keep the categories of a file, which are those of the files before it, if there were any."""
        if self.form == "mask" and len(categories) >= VOID:
            raise ValueError(
                f"{origin} has {len(categories):,} categories, but masks can have at most {VOID - 1}: "
                "give --annotation boxes, or remove categories"
            )
        for number, name in categories.items() if self.form == "mask" else ():
            if is_background(name):
                raise ValueError(
                    f"{origin}: category {number} is named {name}, but masks already have the class "
                    f"{BACKGROUND} for pixels without an object: remove the category and its "
                    "annotations, or rename it"
                )
        if self.categories and categories != self.categories:
            raise ValueError(
                f"{origin} does not have the same categories as the files before it: use one list of "
                "categories in all files"
            )
        self.categories = categories

    def _images(self, content: Json, origin: str, split: str) -> dict[int, Json]:
        """The size of each image, and its record, which has no objects yet, by the image's number."""
        images: dict[int, Json] = {}
        for entry in _list(content, "images", origin):
            number, where = _whole(entry, "id", origin), f"{origin}: image {entry.get('id')}"
            if number in images:
                raise ValueError(f"{where} is there twice: remove one")
            name = _text(entry, "file_name", where)
            if name != Path(name).name or name.startswith("."):
                raise ValueError(f"{where} has the file_name {name[:200]!r}; give a name without folders")
            size = (_whole(entry, "width", where), _whole(entry, "height", where))
            self.sizes[Path(name).stem] = size
            if self.form == "mask" and size[0] * size[1] > MAX_PIXELS:
                raise ValueError(
                    f"{where} has {size[0]} x {size[1]} pixels; at most {MAX_PIXELS:,} are allowed"
                )
            images[number] = {
                "size": size,
                "record": {"image_id": Path(name).stem, "partition": split, COLUMNS[self.form]: []},
            }
            if str(number) in self.ids:
                self.twice.add(str(number))
            self.ids[str(number)] = Path(name).stem
        return images

    def _kind(self, entry: Json, where: str) -> tuple[int, bool]:
        """Category, and whether it is a group."""
        category, crowd = _whole(entry, "category_id", where), entry.get("iscrowd", 0)
        if category not in self.categories:
            raise ValueError(f"{where} has the category {category}, which is not in the list categories")
        if crowd not in (0, 1):
            raise ValueError(f"{where} has iscrowd {str(crowd)[:40]!r}; it must be 0 or 1")
        return category, bool(crowd)

    def _outlined(self, entry: Json, size: tuple[int, int], where: str) -> tuple[int, Outline, str]:
        category, crowd = self._kind(entry, where)
        outline = checked(entry.get("segmentation"), size, where)
        if isinstance(outline, Mapping) or any(map(len, outline)):
            self.outlined = True
        else:
            self.repaired["objects_without_an_outline"] += 1
        if flat := sum(len(part) < LEAST_NUMBERS for part in outline if not isinstance(part, str)):
            self.repaired["polygons_without_area"] += flat
        return CROWD_CLASS if crowd else [*self.categories].index(category) + 1, outline, where

    def _box(self, entry: Json, size: tuple[int, int], where: str) -> Json | None:
        category, crowd = self._kind(entry, where)
        box = entry.get("bbox")
        if not isinstance(box, list) or len(box) != 4 or not all(map(_finite, box)):
            raise ValueError(f"{where} has the bbox {str(box)[:80]}; it must be four numbers")
        x, y, width, height = map(float, box)
        corners = fitted((x, y, x + width, y + height), size, self.cut, self.repaired, where)
        name = self.categories[category]
        return None if corners is None else {"name": name, "corners": corners, "flags": CROWD * int(crowd)}

    def annotated(self, origin: str) -> Annotated:
        """All that was read; a ValueError where masks are wanted and no object has an outline."""
        if self.repaired["objects_without_an_outline"] and not self.outlined:
            raise ValueError(
                f"{origin}: no object has a segmentation, so masks cannot be made: give --annotation boxes"
            )
        notes = {"category_ids": list(self.categories)}
        ids = {number: image for number, image in self.ids.items() if number not in self.twice}
        classes = [*([BACKGROUND] if self.form == "mask" else []), *self.categories.values()]
        return Annotated(
            self.form,
            self.records,
            classes,
            frozenset(self.folders),
            ids=ids,
            sizes=self.sizes,
            repaired=self.repaired,
            notes=notes,
        )


def _categories(entries: Sequence[Json], origin: str) -> dict[int, str]:
    """Name by id, in the order of the ids."""
    found: dict[int, str] = {}
    names: set[str] = set()
    for entry in entries:
        number = _whole(entry, "id", f"{origin}: a category")
        name = _text(entry, "name", f"{origin}: category {number}")
        if number in found or name in names:
            raise ValueError(f"{origin} has the category {number} or the name {name!r} twice")
        found[number] = name
        names.add(name)
    if not 0 < len(found) <= MAX_CATEGORIES:
        raise ValueError(f"{origin} has {len(found):,} categories; give 1 to {MAX_CATEGORIES:,}")
    return dict(sorted(found.items()))


def _list(content: Json, key: str, origin: str) -> list[Json]:
    found = content.get(key)
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise ValueError(f"{origin} has no list of objects under {key!r}")
    return found


def _whole(entry: Json, key: str, where: str) -> int:
    value = entry.get(key)
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{where}: {key} is {str(value)[:40]!r}; it must be a whole number of at least 0")
    return value


def _text(entry: Json, key: str, where: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError(f"{where}: {key} is {str(value)[:40]!r}; it must be text on one line")
    return value


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e9
