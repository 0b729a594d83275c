"""Files in the layout of TensorFlow Federated's SQLite, whose examples Google's own library serialises."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from tests.dataset.drawn import draw

PACKAGE = "made"
FIELD = descriptor_pb2.FieldDescriptorProto
Splits = Mapping[str, Mapping[str, Sequence[int]]]
"""The numbers of the images of each client of each split."""


def _field(name: str, number: int, kind: Any, of: str = "", repeated: bool = False) -> Any:
    label = FIELD.LABEL_REPEATED if repeated else FIELD.LABEL_OPTIONAL
    return FIELD(
        name=name, number=number, type=kind, type_name=f".{PACKAGE}.{of}" if of else None, label=label
    )


def _example_class() -> Any:
    """The message ``tf.train.Example``, built from its definition."""
    file = descriptor_pb2.FileDescriptorProto(name="made.proto", package=PACKAGE, syntax="proto3")

    def message(name: str, *fields: Any) -> None:
        file.message_type.add(name=name, field=fields)

    for name, kind in (("Bytes", FIELD.TYPE_BYTES), ("Floats", FIELD.TYPE_FLOAT), ("Ints", FIELD.TYPE_INT64)):
        message(name, _field("value", 1, kind, repeated=True))
    lists = ("bytes_list", "Bytes"), ("float_list", "Floats"), ("int64_list", "Ints")
    places = enumerate(lists, 1)
    message("Feature", *[_field(name, at, FIELD.TYPE_MESSAGE, of) for at, (name, of) in places])
    key, value = _field("key", 1, FIELD.TYPE_STRING), _field("value", 2, FIELD.TYPE_MESSAGE, "Feature")
    message("Entry", key, value)  # a map is such entries
    message("Features", _field("feature", 1, FIELD.TYPE_MESSAGE, "Entry", repeated=True))
    message("Example", _field("features", 1, FIELD.TYPE_MESSAGE, "Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.Example"))


EXAMPLE = _example_class()


def serialised(**features: Any) -> bytes:
    """An example; a float or a list of floats, integers or bytes becomes the feature of its kind."""
    example = EXAMPLE()
    for name, value in features.items():
        entry = example.features.feature.add(key=name)
        if isinstance(value, bytes):
            entry.value.bytes_list.value.append(value)
        else:
            array = np.atleast_1d(np.asarray(value)).ravel()
            kind = "float_list" if array.dtype.kind == "f" else "int64_list"
            getattr(entry.value, kind).value.extend(array.tolist())
    return bytes(example.SerializeToString())


def emnist(number: int) -> bytes:
    """Grey pixels from 0 to 1."""
    return serialised(pixels=draw(number)[:, :, 0] / np.float32(255), label=number % 3)


def cifar100(number: int) -> bytes:
    """Colours as levels."""
    return serialised(image=draw(number).astype(np.int64), label=number % 3, coarse_label=number % 2)


def celeba(number: int) -> bytes:
    """Colours and attributes."""
    kinds = {name: number % 3 == place for place, name in enumerate(("cat", "dog", "eel"))}
    values = {name: int(value) for name, value in kinds.items()}
    return serialised(image=draw(number).astype(np.int64), **values, old=number % 2)


def write_sqlite(path: Path, splits: Splits, of: Any = emnist) -> Path:
    """A file with these images; ``of`` serialises one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute(
            "CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL, "
            "serialized_example_proto BLOB NOT NULL)"
        )
        database.execute("CREATE INDEX by_split ON examples (split_name, client_id)")
        rows = [
            (split, client, of(number))
            for split, clients in splits.items()
            for client, numbers in clients.items()
            for number in numbers
        ]
        database.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
    return path
