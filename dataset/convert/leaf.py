"""LEAF's JSON: ``users``, ``num_samples`` and ``user_data``, in ``train/`` and ``test/`` or in one folder.

Each sample has ``x``, a list of pixels (for FEMNIST 784 numbers from 0 to 1) or the name of an image file
(for CelebA), and ``y``, a class number. LEAF splits by sample, so that train and test have the same users, or
by user. Both are read, and so are files before they are split, as in ``all_data``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dataset.convert.files import FileRows, Folder
from dataset.convert.pixels import Scale, array_of, shape_of
from dataset.convert.source import Found, Part, Rows
from dataset.convert.text import Names, shown, split_by_names
from dataset.fetch.json_stream import members
from dataset.fetch.source import Image
from dataset.files import state_of
from dataset.store.annotations import Kind
from dataset.store.index import SPLIT_NAMES

KINDS: Mapping[str, Kind] = {"labels": "class"}
DATA = "user_data"


def json_files(source: Path) -> list[tuple[Path, str | None]]:
    """LEAF's files with their splits, by their folders or else by their names.

    Raises:
        ValueError: where there are none, and where names leave a split open.
    """
    if source.is_file():
        return [(source, None)]
    if not source.is_dir():
        raise ValueError(f"--source {source} does not exist: give a folder or a file")
    split = [
        (path, SPLIT_NAMES[folder])
        for folder in SPLIT_NAMES
        for path in sorted((source / folder).glob("*.json"))
    ]
    if split:
        return [*split]
    paths = sorted(source.glob("*.json"))
    if not paths:
        raise ValueError(
            f"--source {source} has no *.json files, and its folders train/ and test/ have none either"
        )
    return [*zip(paths, split_by_names(source, paths))]


def read(source: Path, images: Folder | None, class_names: list[str] | None) -> Found:
    """Read LEAF's files.

    Args:
        source: a folder with ``train/`` and ``test/``, a folder with files, or a file.
        images: the folder of the images that the files name; None if the files hold pixels.
        class_names: the class names by number.

    Raises:
        ValueError: one line that names file, user and sample.
    """
    names = {"labels": Names(class_names, numbered=True)}
    scale = Scale()
    parts: list[Part] = []
    empty: list[str] = []
    seen: set[tuple[str | None, str]] = set()
    size = 0
    files = json_files(source)
    total = sum(path.stat().st_size for path, _ in files)
    with tqdm(total=total, desc="0/2 list", unit="B", unit_scale=True, mininterval=0.5) as bar:
        for path, split in files:
            rows = Rows(KINDS, names) if images is None else FileRows(images, KINDS, names)
            reading = _Reading(path, split, rows, scale)
            for user, count in reading.users():
                if (split, user) in seen:
                    raise ValueError(
                        f"{path}: user {shown(user)} also has data in an earlier file of this split: "
                        "keep only one of them"
                    )
                seen.add((split, user))
                empty += [] if count else [user]
            bar.update(path.stat().st_size)
            size += path.stat().st_size if images is None else rows.num_bytes  # type: ignore[attr-defined]
            parts.append(reading.part())
    side = scale.side(source) if images is None else None
    return Found(parts, KINDS, names, size, side, empty, files=files)


@dataclass
class _Reading:
    """Reads one file."""

    path: Path
    split: str | None
    rows: Rows
    scale: Scale

    def users(self) -> Iterator[tuple[str, int]]:
        """Add the samples of each listed user; yields each user and its number of samples.

        A user of ``user_data`` that ``users`` does not list must have no sample: LEAF's own split leaves such
        users behind.
        """
        counts: dict[str, int] = {}
        top: dict[str, Any] = {}
        for inside, name, value in members(self.path, DATA, "LEAF"):
            if inside is None:
                top[name] = value
            else:
                counts[name] = self._put(name, value)
        listed = self._listed(top)
        for user, count in counts.items():
            if user in listed and listed[user] != count:
                raise ValueError(
                    f"{self.path}: user {shown(user)} has {count} samples, but num_samples says "
                    f"{listed[user]}: correct one of the two"
                )
            if user not in listed and count:
                raise ValueError(
                    f"{self.path}: user {shown(user)} has samples but is not in the list users: add it there"
                )
        for user in listed:
            if user not in counts:
                raise ValueError(
                    f"{self.path}: user {shown(user)} is in the list users but not in {DATA}: remove it "
                    "from the list"
                )
            yield user, counts[user]

    def _listed(self, top: Mapping[str, Any]) -> dict[str, int]:
        users, numbers = top.get("users"), top.get("num_samples")
        if not isinstance(users, list) or not isinstance(numbers, list) or len(users) != len(numbers):
            raise ValueError(
                f"{self.path} needs users and num_samples, two lists of the same length, as in the "
                "format of LEAF"
            )
        if not all(isinstance(user, str) for user in users) or len(set(users)) < len(users):
            raise ValueError(f"{self.path}: the list users has a user twice, or a user that is not text")
        return dict(zip(users, numbers))

    def _put(self, user: str, value: Any) -> int:
        """The samples of one user."""
        x, y = (value.get("x"), value.get("y")) if isinstance(value, dict) else (None, None)
        if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
            raise ValueError(f"{self.path}: user {shown(user)} needs x and y, two lists of the same length")
        for number, (image, label) in enumerate(zip(x, y)):
            where = f"{self.path}, user {shown(user)}, sample {number}"
            if isinstance(self.rows, FileRows):
                if not isinstance(image, str):
                    raise ValueError(f"{where} has pixels, not a file name: leave --images out")
                self.rows.put(where, user, image, self.split, [label])
                continue
            if isinstance(image, str):
                raise ValueError(
                    f"{where} is {shown(image)}: if this is a file name, give the folder of the files "
                    "with --images"
                )
            array = array_of(image, where)
            self.scale.shape_of(array.shape, where)
            self.scale.note(array, where)
            stem = f"{self.split}/{user}" if self.split else user
            self.rows.add(where, user, f"{stem}/{number}", self.split, [label])
        return len(x)

    def part(self) -> Part:
        """The records, and their images."""
        key = f"{self.path} {state_of(self.path)}"
        if isinstance(self.rows, FileRows):
            listing = self.rows.part(str(self.path), lambda row: str(self.path))
            return Part(listing.name, f"{key} {listing.key}", listing.table, listing.place, listing.images)
        return Part(str(self.path), key, self.rows.table(), lambda row: str(self.path), self._images)

    def _images(self, start: int) -> Iterator[Image]:
        for inside, _, value in members(self.path, DATA, "LEAF"):
            samples = value["x"] if inside else []
            for sample in samples[start:]:
                array = np.asarray(sample)
                yield self.scale.pixels(array, shape_of(array.shape, str(self.path)))
            start = max(0, start - len(samples))
