"""Checked text from untrusted files: ids, labels, splits and lists. Errors name the place.

Ids are always text: client 007 is not client 7.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from dataset.store.columns import MAX_ID_BYTES
from dataset.store.index import SPLIT_NAMES

_WORD = re.compile(r"[a-z]+")
MAX_CLASSES = 1 << 16
_SHOWN = 80


def shown(value: object) -> str:
    """A value in an error: quoted, and not longer than a line."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def checked_text(value: object, what: str, where: str) -> str:
    """An id or a label as text.

    Args:
        value: the value in the file; a whole number becomes its decimal digits. Text becomes Unicode's
            NFC, so that one name is one however it is typed; not an image id, which may be a file's name.
        what: the column, for the error.
        where: file and row, for the error.

    Raises:
        ValueError: when the value is neither text nor a whole number, is empty or too long for an id, or has
            white space around it or characters that cannot be shown.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise ValueError(f"{where} has the {what} {shown(value)}, which is neither text nor a whole number")
    if not value:
        raise ValueError(f"{where} has an empty {what}")
    if value != value.strip():
        raise ValueError(f"{where} has white space around the {what} {shown(value)}: remove it")
    if not value.isprintable():
        raise ValueError(
            f"{where}: the {what} {shown(value)} has characters that cannot be printed: remove them"
        )
    if (length := len(value.encode())) > MAX_ID_BYTES:
        raise ValueError(
            f"{where}: the {what} {shown(value)} has {length:,} bytes; at most {MAX_ID_BYTES} are allowed"
        )
    return value if what == "image id" else unicodedata.normalize("NFC", value)


def split_named(value: object, where: str) -> str:
    """The split that a source means.

    Raises:
        ValueError: for another word than those in `SPLIT_NAMES`.
    """
    if not isinstance(value, str) or value not in SPLIT_NAMES:
        raise ValueError(f"{where} has the split {shown(value)}; it must be one of {', '.join(SPLIT_NAMES)}")
    return SPLIT_NAMES[value]


def split_in_name(path: PurePath) -> str | None:
    """The split that a file's path below its source names by a word: ``data/train-00000-of-00004.parquet``,
    ``mnist_train.parquet``, ``Train/0000.parquet``; None where no word is one of a split. Folders count where
    the file's own name has none.

    Raises:
        ValueError: for a path that names two.
    """
    for part in (path.stem, path.parent.as_posix()):
        found = sorted({SPLIT_NAMES[word] for word in _WORD.findall(part.lower()) if word in SPLIT_NAMES})
        if len(found) > 1:
            raise ValueError(f"{path} names two splits, {' and '.join(found)}: rename or move it")
        if found:
            return found[0]
    return None


def split_by_names(root: Path, paths: Sequence[Path]) -> list[str | None]:
    """The split that each file's path below ``root`` names.

    Raises:
        ValueError: for a path that names two splits, or none where others name one.
    """
    splits = [split_in_name(path.relative_to(root)) for path in paths]
    if None in splits and len(set(splits)) > 1:
        raise ValueError(
            f"{paths[splits.index(None)]} has no split ({', '.join(SPLIT_NAMES)}) in its name, but "
            "other files have one: rename or move it"
        )
    return splits


def say_splits(root: Path, files: Sequence[tuple[Path, str | None]]) -> None:
    """A line on the screen that says which file of a folder was taken for which split."""
    if not root.is_dir():
        return
    of: dict[str | None, list[Path]] = {}
    for path, split in files:
        of.setdefault(split, []).append(path.relative_to(root))
    more = {split: f" and {len(paths) - 1:,} more" if len(paths) > 1 else "" for split, paths in of.items()}
    parts = "; ".join(f"{split} is {paths[0]}{more[split]}" for split, paths in of.items())
    said = "no file name has a split, so images are divided at random" if None in of else parts
    print(f"splits by file names: {said}", file=sys.stderr)


class Names:
    """The class names of one annotation.

    Args:
        class_names: all names in the order of their numbers, if they are known beforehand.
        numbered: whether the source has class numbers. Without ``class_names`` the names are then ``0``,
            ``1``, ... up to the highest number that occurs.

    Raises:
        ValueError: for class names of which two are one in Unicode's NFC.
    """

    def __init__(self, class_names: Sequence[str] | None = None, numbered: bool = False) -> None:
        self.class_names = class_names and [unicodedata.normalize("NFC", name) for name in class_names]
        self.numbered = numbered
        self._known = frozenset(self.class_names or ())
        if self.class_names and len(self._known) < len(self.class_names):
            name = next(name for name, count in Counter(self.class_names).items() if count > 1)
            raise ValueError(
                f"two classes have the same name {shown(name)} (perhaps with accents that are encoded "
                "in two ways): give different names with --classes"
            )
        self._seen: dict[object, str] = {}

    def name(self, label: object, where: str) -> str:
        """The name of a label, which is a class name, or a class number if the source has numbers.

        Raises:
            ValueError: for a label that is not one of the classes, or a number out of range.
        """
        if (known := self._seen.get((type(label), label))) is None:
            known = self._seen[(type(label), label)] = self._checked(label, where)
        return known

    def _checked(self, label: object, where: str) -> str:
        if isinstance(label, str) and (name := unicodedata.normalize("NFC", label)) in self._known:
            return name
        if self.numbered:
            return self._of_number(label, where)
        text = checked_text(label, "label", where)
        if self.class_names is not None and text not in self._known:
            raise ValueError(f"{where} has the label {shown(label)}, which is not one of the classes")
        if len(self._seen) >= MAX_CLASSES:
            raise ValueError(
                f"{where} has class number {MAX_CLASSES:,} of this file, which is more than are "
                "allowed: check that this column has labels"
            )
        return text

    def _of_number(self, label: object, where: str) -> str:
        number = label
        if isinstance(label, str) and label.isascii() and label.isdigit() and len(label) < 9:
            number = int(label)
        if isinstance(number, float) and number.is_integer():  # pandas writes 3.0 where a value was missing
            number = int(number)
        if not isinstance(number, int) or isinstance(number, bool):
            raise ValueError(f"{where} has the label {shown(label)}, which is not a class number")
        most = MAX_CLASSES if self.class_names is None else len(self.class_names)
        if not 0 <= number < most:
            raise ValueError(
                f"{where} has the label {number}, which is out of range: class numbers go from 0 to "
                f"{most - 1}"
            )
        return str(number) if self.class_names is None else self.class_names[number]

    def vocabulary(self) -> list[str]:
        """The names in the order of their numbers. Names that are numbers are sorted by value."""
        if self.class_names is not None:
            return list(self.class_names)
        names = set(self._seen.values())
        if self.numbered:
            return [str(number) for number in range(1 + max(map(int, names), default=-1))]
        numbers = all(name.isascii() and name.isdigit() and len(name) < 19 for name in names)
        return sorted(names, key=(lambda name: (int(name), name)) if numbers else None)


def read_classes(option: str, path: Path) -> list[str]:
    """Class names from a text file, one on each line, in the order of their numbers.

    Raises:
        ValueError: one line that names option, file and line.
    """
    names: list[str] = []
    for number, line in enumerate(lines(path), start=1):
        if not line.strip():
            continue
        name = checked_text(line.rstrip("\r\n"), "class", f"{option} {path}, line {number}")
        if name in names:
            raise ValueError(f"{option} {path}, line {number} has the class {shown(name)} a second time")
        names.append(name)
    if not 0 < len(names) < MAX_CLASSES:
        raise ValueError(f"{option} {path} has {len(names)} classes; give 1 to {MAX_CLASSES - 1}")
    return names


def lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, with or without a byte order mark.

    Raises:
        ValueError: that names file and line, for bytes that are not UTF-8.
    """
    number = 0
    with open(path, encoding="utf-8-sig", errors="strict", newline="") as file:
        try:
            for line in file:
                number += 1
                yield line
        except UnicodeDecodeError:
            # the decoder reads ahead of the lines: look for the one that holds the bytes
            raise ValueError(f"{path}, line {_not_utf8(path)} is not UTF-8 text: save it as UTF-8") from None


def _not_utf8(path: Path) -> int:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1
