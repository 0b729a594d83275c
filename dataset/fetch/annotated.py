"""Images with masks or boxes as a source: their records and their owners, from a ``users.csv`` or elsewhere.

``users.csv`` has a column ``image_id``, optionally ``partition`` (train, val or test), and for each way to
deal the images a column whose name begins with ``user``. An empty cell, or ``NA``, means that the owner is
unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from dataset.fetch.archives import IMAGE_SUFFIXES
from dataset.files import utf8
from dataset.partitions.assignments import NOBODY, csv_rows, deal
from dataset.store.columns import FLAGGED_BOXES, schema
from dataset.store.index import NAME, SPLITS, DatasetIndex, SplitIndex, in_another_split

USERS_CSV = "users.csv"
MAX_USERS_BYTES = 1 << 28
Form = Literal["mask", "boxes"]
COLUMNS: dict[Form, str] = {"mask": "mask", "boxes": "objects"}
"""The annotation's name in the file."""
ROUNDING = 0.01
"""Pixels by which a box may exceed its image, since COCO's coordinates have two decimals."""


NO_AUTHOR = "no-author"
"""The user of images of which nobody is known, in a split with others."""


@dataclass(frozen=True)
class Annotated:
    """The content of the annotations of a folder or of archives.

    Attributes:
        form: the kind of the annotations.
        records: ``image_id``, ``partition`` and the annotation under its name in `COLUMNS`, for each image.
        classes: the names of the K classes, in the order of their numbers.
        folders: names of the folders with the images.
        owners: users by image, if the annotations have them.
        ways: users by image for each of the layout's ways to deal them, instead of ``owners``.
        ids: maps another id of an image, under which ``users.csv`` may list it, to its id.
        sizes: width and height of an image according to the annotations.
        repaired: numbers for the screen, such as that of boxes that were cut off or left out.
        notes: notes for the provenance.
        warning: a line for the screen.
    """

    form: Form
    records: Sequence[Mapping[str, Any]]
    classes: Sequence[str]
    folders: frozenset[str]
    owners: Mapping[str, str] = field(default_factory=dict)
    ways: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    ids: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    repaired: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    warning: str | None = None

    def with_val_as_test(self) -> Annotated:
        """The same annotations with the images of ``val`` as ``test``.

        Raises:
            ValueError: when there are images of test.
        """
        if any(record["partition"] == "test" for record in self.records):
            raise ValueError(
                "--val_as test cannot be used, because there already are images of test: give --val_as val"
            )
        moved = {"partition": "test"}
        records = [{**r, **(moved if r["partition"] == "val" else {})} for r in self.records]
        return replace(self, records=records)

    def table(self, owners: Mapping[str, str]) -> pa.Table:
        """A source's records.

        The users of ``val`` and ``test`` have their split's name as a prefix, since users are disjoint
        between splits. An image without owner has the user ``no-author``, or ``all-SPLIT`` if no image of its
        split has an owner.
        """
        known = {record["partition"] for record in self.records if record["image_id"] in owners}
        rows = []
        for record in self.records:
            split = record["partition"]
            user = owners.get(record["image_id"])
            if user is None:
                user = NO_AUTHOR if split in known else f"all-{split}"
            if split != "train" and split in known:
                user = in_another_split(user, split)
            rows.append({**record, "user_id": user})
        kind = FLAGGED_BOXES if self.form == "boxes" else self.form
        return pa.Table.from_pylist(rows, schema({COLUMNS[self.form]: kind}))


@dataclass(frozen=True)
class Reading:
    """How annotations are read.

    Attributes:
        form: masks or boxes.
        cut: whether to cut boxes off at the border of their image, and leave out those of which nothing
            remains; else such boxes are an error.
        first_pixel: the number of an image's first pixel in its boxes, 1 or 0, if the layout leaves it open.
        splits: the splits of the images by id or file name, if the layout's own files do not have them.
        upright: whether images are stored turned by their EXIF orientation.
        skip: whether images without an annotation are left out; their records then have None as such.
        values: the values that the classes have in the masks; empty: their numbers, and 255 for no class.
    """

    form: Form
    cut: bool = False
    first_pixel: int = 1
    splits: Mapping[str, str] = field(default_factory=dict)
    upright: bool = False
    skip: bool = False
    values: Sequence[int] = ()


@dataclass(frozen=True)
class Layout:
    """The layout of a data set's lists and annotations on the disk.

    Attributes:
        forms: the kinds of annotations that it can have, the usual one first.
        wanted: like `dataset.fetch.members.Wanted`, for one kind of annotation; without ``users.csv``.
        read: reads the wanted files, given their contents by name, and their place for errors. A ValueError
            names the file and what is wrong in it.
        open_first_pixel: whether `Reading.first_pixel` may be 1 or 0.
        open_values: whether `Reading.values` may be given.
        ways: names of the ways to deal the images that its own files define, the usual one first.
    """

    forms: tuple[Form, ...]
    wanted: Callable[[PurePosixPath, Form], tuple[str, int] | None]
    read: Callable[[Mapping[str, bytes], str, Reading], Annotated]
    open_first_pixel: bool = False
    open_values: bool = False
    ways: tuple[str, ...] = ()


@dataclass(frozen=True)
class Users:
    """The content of a ``users.csv``, by the image ids in it."""

    origin: str
    columns: Mapping[str, Mapping[str, str]]  # column -> image -> user; images of nobody are left out
    partitions: Mapping[str, str]  # image -> split; empty without such a column
    images: frozenset[str]

    def named(self, annotated: Annotated) -> Users:
        """The users by these images' ids, without other images. The CSV may list images by their other ids.

        An id is a file name without its suffix; the CSV may have the suffix.

        Raises:
            ValueError: when it lists none of the images, one twice, gives an image another split, lists them
                by ids that are those of other images, too, or some by the one id and some by the other.
        """
        split_of = {record["image_id"]: record["partition"] for record in annotated.records}
        ids = {name: name if name in split_of else without_suffix(name) for name in self.images}
        by_id = {name: image for name, image in ids.items() if image in split_of}
        by_other = {image: annotated.ids[image] for image in self.images if image in annotated.ids}
        to_id, rest = (by_id, by_other) if len(by_id) >= len(by_other) else (by_other, by_id)
        unsure = [name for name in by_id if by_other.get(name, name) != name]
        if len(by_id) == len(by_other) and unsure:
            image = min(unsure)
            raise ValueError(
                f"{self.origin}: it is not clear whether images are listed by file name or by the "
                f"annotations' ids, because {image} is the file {image} as well as the id of "
                f"{by_other[image]}: rename the files, or change the ids"
            )
        listed = frozenset(to_id.values())
        more = [name for name in rest if name not in to_id and rest[name] not in listed]
        if more or (len(by_id) == len(by_other) and by_id != by_other):
            by_name, by_number = min(by_id), min(by_other.keys() - by_id.keys())
            raise ValueError(
                f"{self.origin} lists some images by file name ({by_name}) and some by id ({by_number}): use "
                "one of the two for all images"
            )
        if not to_id:
            image = min(self.images)
            raise ValueError(
                f"{self.origin} lists images that are not in the source, for example {image!r}: list "
                f"images of this source, as {min(split_of)!r}"
            )
        if len(listed) < len(to_id):
            image, times = Counter(to_id.values()).most_common(1)[0]
            raise ValueError(f"{self.origin} lists the image {image} {times} times: keep one line of it")
        for image in sorted(to_id):
            stated, split = self.partitions.get(image), split_of[to_id[image]]
            if stated not in (None, split):
                raise ValueError(
                    f"{self.origin} says that image {image} is in {stated}, but the annotations say "
                    f"{split}: correct one of the two"
                )
        columns = {
            name: {to_id[image]: user for image, user in column.items() if image in to_id}
            for name, column in self.columns.items()
        }
        return replace(self, columns=columns, images=frozenset(to_id.values()))


def without_suffix(name: str) -> str:
    """A file name without the suffix of an image."""
    path = PurePosixPath(name)
    return path.stem if path.suffix.lower() in IMAGE_SUFFIXES else name


def fitted(
    corners: Sequence[float],
    size: tuple[int, int],
    cut: bool,
    repaired: Counter[str],
    where: str,
    more: str = "",
) -> list[float] | None:
    """A box's left, top, right and bottom, within an image of this width and height; None if it is left out.

    A fraction of a pixel beyond the border, which rounding may leave, is always cut off; ``more`` is
    a further remedy for the error.

    Raises:
        ValueError: without ``cut``, for a box that is empty or reaches further.
    """
    left, top, right, bottom = stored = np.asarray(corners, np.float32).tolist()  # as they will be stored
    inner = [max(left, 0.0), max(top, 0.0), min(right, float(size[0])), min(bottom, float(size[1]))]
    empty = not (inner[0] < inner[2] and inner[1] < inner[3])
    beyond = max(abs(a - b) for a, b in zip(stored, inner))
    if (empty or beyond >= ROUNDING) and not cut:
        box = ", ".join(f"{value:g}" for value in corners)
        raise ValueError(
            f"{where}: the box ({box}) is empty or reaches beyond the image of {size[0]} x {size[1]} "
            "pixels; --bad_boxes cut cuts such boxes at the border, and leaves out boxes that are then "
            f"empty{more}"
        )
    if empty or beyond >= ROUNDING:
        repaired["boxes_left_out" if empty else "boxes_cut_off"] += 1
    return None if empty else inner


def read_users(content: bytes, origin: str) -> Users:
    """Parse a ``users.csv``.

    Raises:
        ValueError: that names file and line.
    """
    rows = list(csv_rows(utf8(content, origin), origin, ["image_id"]))
    header = rows[0][1]
    names = [name for name in header if name.startswith("user")]
    wrong = [name for name in names if not NAME.fullmatch(_partition(name))]
    if not names or wrong or len({*map(_partition, names)}) < len(names):
        raise ValueError(
            f"{origin} needs columns of users: their names must begin with user, differ, and have only "
            f"letters, digits and ._-; it has {', '.join(header)[:200]}"
        )
    columns: dict[str, dict[str, str]] = {name: {} for name in names}
    partitions: dict[str, str] = {}
    for where, row in rows:
        image = row["image_id"]
        if not image:
            raise ValueError(f"{where} has an empty image_id")
        if "partition" in row:
            if row["partition"] not in SPLITS:
                known = ", ".join(SPLITS)
                raise ValueError(f"{where} has the partition {row['partition']!r}; it must be one of {known}")
            partitions[image] = row["partition"]
        for name in names:
            if row[name] not in ("", NOBODY):
                columns[name][image] = row[name]
    return Users(origin, columns, partitions, frozenset(row["image_id"] for _, row in rows))


def _partition(column: str) -> str:
    """The name of the partition by a column of users."""
    return column.replace("_", "-")


@dataclass(frozen=True)
class Finish:
    """Adds to an index the partitions by the other columns of users.

    Attributes:
        columns: the users of images, by the column's name.
        sizes: as in `Annotated`.
    """

    columns: Mapping[str, Mapping[str, str]]
    sizes: Mapping[str, tuple[int, int]]

    def __call__(self, index: DatasetIndex) -> DatasetIndex:
        """The index with partitions; see `dataset.preprocess.Options.finish`.

        Raises:
            ValueError: when images have other sizes than their annotations say.
        """
        if wrong := [image for split in index.splits.values() for image in self._of_other_sizes(split)]:
            image, (width, height) = wrong[0]
            stated = "{} x {}".format(*self.sizes[image])
            raise ValueError(
                f"{len(wrong):,} images do not have the size that their annotations say, for example "
                f"{image} ({width} x {height}, not {stated} pixels): give the images that were "
                "annotated, or see --upright if they are photos with an EXIF orientation"
            )
        if "train" not in index.splits:
            return index
        ids = list(index.splits["train"].image_ids)
        partitions = {}
        for name, column in self.columns.items():
            rows = np.array([row for row, image in enumerate(ids) if image in column], np.int64)
            if len(rows):
                partitions[_partition(name)] = deal([column[ids[row]] for row in rows], rows)
        return index.with_partitions(partitions)

    def _of_other_sizes(self, split: SplitIndex) -> list[tuple[str, tuple[int, int]]]:
        assert split.image_sizes is not None, "masks and boxes have them"
        found = zip(split.image_ids, map(tuple, split.image_sizes[:, ::-1].tolist()))
        return [(image, size) for image, size in found if self.sizes.get(image, size) != size]
