"""TensorFlow Federated's SQLite: a row with a serialised ``tf.train.Example`` for each image.

EMNIST (``emnist_all.sqlite``), CIFAR-100 and CelebA come in this form, packed by LZMA. The table ``examples``
has split_name, client_id and serialized_example_proto. A file may hold several sets of splits, such as
all_train and all_test beside digits_only_train and digits_only_test.

Image: the feature ``pixels`` or ``image``, of a square. Classes: ``label``, and ``coarse_label`` where there
is one. Without ``label`` each other feature is an attribute, 0 or 1, and an image has those that are 1.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from dataset.convert.examples import parse
from dataset.convert.pixels import Scale, shape_of
from dataset.convert.source import Found, Part, Rows
from dataset.convert.text import Names, shown
from dataset.fetch.source import Image
from dataset.files import state_of
from dataset.store.annotations import Kind
from dataset.store.index import SPLIT_NAMES

Features = Mapping[str, npt.NDArray[Any]]
PIXELS = ("pixels", "image")
"""The names of an image."""
LABELS = {"label": "labels", "coarse_label": "coarse_labels"}
"""The names of a class, and the annotations that they become."""
_SPLITS = "SELECT DISTINCT split_name FROM examples ORDER BY split_name"
_EXAMPLES = (
    "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ? ORDER BY client_id, rowid"
)


def is_sqlite(path: Path) -> bool:
    """Whether a file begins as SQLite's do.

    Raises:
        ValueError: for one that is packed, with the command that unpacks it.
    """
    if not path.is_file():
        return False
    if path.suffix == ".lzma":
        raise ValueError(
            f"--source {path} is compressed: unpack it with xz --decompress --keep --format=lzma {path}"
        )
    with path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"


def read(source: Path, class_names: list[str] | None, prefix: str | None) -> Found:
    """Read one of these files.

    Args:
        source: the file.
        class_names: the class names of ``label`` by number.
        prefix: what the names of the splits begin with, such as ``all``, where there are several.

    Raises:
        ValueError: one line that names file, client and example.
    """
    state, scale, size, parts = state_of(source), Scale(), 0, []
    kinds: dict[str, Kind] = {}
    names: dict[str, Names] = {}
    for named, split in _splits(source, prefix).items():
        rows: Rows | None = None
        for where, client, number, features in _examples(source, named):
            if not kinds:
                kinds, names = _annotations(features, class_names, where)
            rows = rows or Rows(kinds, names)
            image = _image(features, where)
            shape = scale.shape_of(image.shape, where)
            scale.note(image, where)
            size += shape[0] * shape[1] * 3
            rows.add(
                where, client, f"{split}/{client}/{number}", split, _labels(features, kinds, names, where)
            )
        if rows is not None:
            key = f"{source} {state} {named}"
            parts.append(
                Part(str(source), key, rows.table(), lambda _: str(source), _images(source, named, scale))
            )
    return Found(parts, kinds, names, size, scale.side(source))


def _splits(source: Path, prefix: str | None) -> dict[str, str]:
    """The names of the file's splits that begin with a prefix, each with the split that it means."""
    sets: dict[str, dict[str, str]] = {}
    for (named,) in _query(source, _SPLITS):
        name = _text(named, f"{source}, split_name")
        begin, _, word = name.rpartition("_")
        if word not in SPLIT_NAMES:
            raise ValueError(
                f"{source} has the split {shown(name)}, whose name does not end in _train, _val or _test"
            )
        sets.setdefault(begin, {})[name] = SPLIT_NAMES[word]
    if not sets:
        raise ValueError(f"{source} has no example")
    if prefix is None and len(sets) == 1:
        return next(iter(sets.values()))
    if set(sets) == {""}:
        raise ValueError(f"the splits of {source} have no prefix: leave --prefix out")
    if prefix not in sets:
        refused = "" if prefix is None else f", not {prefix}"
        raise ValueError(
            f"{source} has splits with the prefixes {', '.join(map(shown, sets))}{refused}: choose one "
            "with --prefix"
        )
    return sets[prefix]


def _annotations(
    features: Features, class_names: list[str] | None, where: str
) -> tuple[dict[str, Kind], dict[str, Names]]:
    """The annotations that images like this one have, and their classes."""
    if "label" in features:
        found = [name for leaf, name in LABELS.items() if leaf in features]
        names = {name: Names(class_names if name == "labels" else None, numbered=True) for name in found}
        return dict.fromkeys(found, "class"), names
    attributes = sorted(set(features) - set(PIXELS))
    if not attributes:
        raise ValueError(f"{where} has neither the feature label nor other features that could be attributes")
    if class_names is not None:
        raise ValueError(
            f"--classes gives names to class numbers, but {where} has attributes that already have "
            "names: leave --classes out"
        )
    return {"labels": "label set"}, {"labels": Names(attributes)}


def _labels(
    features: Features, kinds: Mapping[str, Kind], names: Mapping[str, Names], where: str
) -> list[Any]:
    if kinds["labels"] == "class":
        return [_number(features, leaf, where) for leaf, name in LABELS.items() if name in kinds]
    attributes = names["labels"].class_names or ()
    values = {name: _number(features, name, where) for name in attributes}
    if bad := next((name for name, value in values.items() if value not in (0, 1)), None):
        raise ValueError(
            f"{where} has the attribute {shown(bad)} with {values[bad]}, which is neither 0 nor 1"
        )
    return [[name for name, value in values.items() if value]]


def _number(features: Features, leaf: str, where: str) -> int:
    found = features.get(leaf)
    if found is None or found.dtype != np.int64 or len(found) != 1:
        raise ValueError(f"{where} needs exactly one whole number as {shown(leaf)}")
    return int(found[0])


def _image(features: Features, where: str) -> npt.NDArray[Any]:
    found = next((features[leaf] for leaf in PIXELS if leaf in features), None)
    if found is None:
        raise ValueError(f"{where} has no numbers in {' or '.join(PIXELS)}")
    return found


def _images(source: Path, named: str, scale: Scale) -> Any:
    def images(start: int) -> Iterator[Image]:
        for where, _, _, features in _examples(source, named, start):
            image = _image(features, where)
            yield scale.pixels(image, shape_of(image.shape, where))

    return images


def _examples(source: Path, named: str, start: int = 0) -> Iterator[tuple[str, str, int, Features]]:
    """Each image's place for errors, its client, its number among the client's, and its features."""
    last, number = None, 0
    for place, (owner, proto) in enumerate(_query(source, _EXAMPLES, named)):
        client = _text(owner, f"{source}, row {place + 1} of split {named}, client_id")
        number = number + 1 if client == last else 0
        last = client
        if place >= start:
            where = f"{source}, split {named}, client {shown(client)}, example {number}"
            if not isinstance(proto, bytes):
                raise ValueError(f"{where} is not a serialised tf.train.Example")
            yield where, client, number, parse(proto, where)


def _text(value: object, where: str) -> str:
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        raise ValueError(f"{where} is not UTF-8 text: {shown(value)}") from None


def _query(source: Path, command: str, *values: str) -> Iterator[tuple[Any, ...]]:
    """The rows of a query. Text comes as bytes, as that in a damaged file may be no text."""
    place = f"file:{quote(str(source.resolve()))}?mode=ro&immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(place, uri=True)) as database:
            database.text_factory = bytes
            yield from database.execute(command, values)
    except sqlite3.Error as fault:
        raise ValueError(
            f"{source} is damaged, or is not an SQLite file of TensorFlow Federated: {fault}"
        ) from None
