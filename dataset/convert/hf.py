"""A Hugging Face data set with a client column: parquet files, or a folder of ``save_to_disk``.

pyarrow reads both; the ``datasets`` package is not needed. Class names come from the features that
``datasets`` writes into its files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from dataset.convert.source import Found, Part, Rows
from dataset.convert.text import SPLIT_NAMES, Names, checked_text, shown, split_named
from dataset.fetch import parquet, source
from dataset.fetch.source import Image
from dataset.store.annotations import Kind
from dataset.store.index import TAXONOMIES

MAX_STATE_BYTES = 1 << 24


@dataclass(frozen=True)
class Columns:
    """The names of a data set's columns. An empty name means that there is no such column."""

    client: str
    image: str = "image"
    label: str = "label"
    fine: str = ""
    split: str = ""
    image_id: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """One for each annotation."""
        return (self.label, self.fine) if self.fine else (self.label,)


@dataclass(frozen=True)
class _File:
    path: Path
    name: str  # below the source, without its suffix: of image ids
    split: str | None

    def batches(self, columns: list[str], start: int = 0) -> Iterator[Any]:
        if self.path.suffix == ".arrow":
            return _arrow_batches(self.path, columns, start)
        return parquet.batches(self.path, columns, start)

    def schema(self) -> pa.Schema:
        with parquet.readable(self.path, "Arrow" if self.path.suffix == ".arrow" else "parquet"):
            if self.path.suffix == ".arrow":
                with pa.memory_map(str(self.path)) as mapped:
                    return pa.ipc.open_stream(mapped).schema
            return pa.parquet.read_schema(self.path)


def _arrow_batches(path: Path, columns: list[str], start: int) -> Iterator[Any]:
    """The record batches of an Arrow stream; see `dataset.fetch.parquet.batches`."""
    with (
        parquet.readable(path, "Arrow"),
        pa.memory_map(str(path)) as mapped,
        pa.ipc.open_stream(mapped) as stream,
    ):
        missing = [name for name in columns if name not in stream.schema.names]
        if missing:
            raise ValueError(f"it has no column {missing[0]!r}; it needs {', '.join(columns)}")
        for whole in stream:
            for first in range(0, len(whole), source.BATCH):
                batch = whole.slice(first, source.BATCH)
                if start < len(batch):
                    yield batch.select(columns).slice(start)
                start = max(0, start - len(batch))


def files_of(place: Path) -> list[_File]:
    """The files of a data set, with the splits from their names or folders.

    Raises:
        ValueError: when there are no files, or only some of them have a split.
    """
    if place.is_file():
        return [_File(place, place.stem, None)]
    if not place.is_dir():
        raise ValueError(f"--source {place} is neither a folder nor a file")
    if (place / "dataset_dict.json").is_file():
        splits = _json(place / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or not all(isinstance(name, str) for name in splits):
            raise ValueError(f"{place / 'dataset_dict.json'} has no list of splits")
        return [
            file
            for name in splits
            for file in _saved(place / _plain(name, place), split_named(name, str(place)))
        ]
    if (place / "state.json").is_file():
        return _saved(place, None)
    found = sorted(place.rglob("*.parquet"))
    found = [
        path for path in found if not any(part.startswith(".") for part in path.relative_to(place).parts)
    ]
    if not found:
        raise ValueError(f"--source {place} holds neither *.parquet nor what save_to_disk writes")
    files = [
        _File(path, path.relative_to(place).with_suffix("").as_posix(), _split_of(path.relative_to(place)))
        for path in found
    ]
    without = [file for file in files if file.split is None]
    if 0 < len(without) < len(files):
        raise ValueError(
            f"{without[0].path} has no split ({', '.join(SPLIT_NAMES)}) in its name, others have one"
        )
    return files


def _split_of(path: Path) -> str | None:
    """``data/train-00000-of-00004.parquet``, ``train.parquet`` and ``train/0000.parquet`` are of train."""
    words = [path.stem.partition("-")[0], *reversed(path.parts[:-1])]
    return next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), None)


def _json(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > MAX_STATE_BYTES:
            raise ValueError("it is too large")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON of save_to_disk ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no JSON of save_to_disk")
    return content


def _plain(name: object, place: Path) -> str:
    """A name of a file or folder, checked to be no path that leads elsewhere."""
    if not isinstance(name, str) or not name or Path(name).name != name:
        raise ValueError(f"{place} names the file {shown(name)}, which is none in its folder")
    return name


def _saved(folder: Path, split: str | None) -> list[_File]:
    """The files of one split that was saved, in their order."""
    state = _json(folder / "state.json")
    entries = state.get("_data_files")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{folder / 'state.json'} has no list of _data_files")
    if state.get("_indices_data_files"):
        raise ValueError(f"{folder} has an index of its rows: call flatten_indices() before save_to_disk")
    paths = [folder / _plain(entry.get("filename"), folder / "state.json") for entry in entries]
    stem = f"{split}/" if split else ""
    return [_File(path, f"{stem}{path.stem}", split) for path in paths]


def _class_names(schema: pa.Schema, column: str) -> list[str] | None:
    """The names of a ``ClassLabel`` column, or of a list of them; None where there are none."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        feature = features[column]
        for _ in range(2):
            feature = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
        names = feature["names"]
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, RecursionError):
        return None
    if not isinstance(names, list) or len(set(map(str, names))) < len(names):
        return None
    return [str(name) for name in names]


def read(place: Path, columns: Columns, given: Sequence[str] | None) -> Found:
    """Read the files of a data set.

    Args:
        place: a folder, or a file.
        columns: the data set's columns.
        given: the class names of the label, in the order of their numbers; None: those in the files.

    Raises:
        ValueError: one line that names file and row.
    """
    files = files_of(place)
    schema = files[0].schema()
    kinds: dict[str, Kind] = {}
    names: dict[str, Names] = {}
    for annotation, column in zip(TAXONOMIES, columns.labels):
        if column not in schema.names:
            has = ", ".join(map(shown, schema.names))[:200]
            raise ValueError(f"{files[0].path} has no column {column!r}; it has {has}")
        kind = schema.field(column).type
        several = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        kinds[annotation] = "label set" if several else "class"
        known = given if given is not None and column == columns.label else _class_names(schema, column)
        names[annotation] = Names(known, numbered=pa.types.is_integer(kind.value_type if several else kind))
    parts = [_part(file, columns, kinds, names) for file in files]
    return Found(parts, kinds, names, sum(file.path.stat().st_size for file in files))


def _part(file: _File, columns: Columns, kinds: Mapping[str, Kind], names: Mapping[str, Names]) -> Part:
    """The records of one file."""
    rows = Rows(kinds, names)
    others = [name for name in (columns.split, columns.image_id) if name]
    asked = list(dict.fromkeys([columns.client, *columns.labels, *others]))
    number = 0
    for batch in file.batches([*asked, columns.image]):
        lists = {name: batch.column(name).to_pylist() for name in asked}
        for row in range(len(batch)):
            where = f"{file.path}, row {number}"
            split = split_named(lists[columns.split][row], where) if columns.split else file.split
            client = _id(lists[columns.client][row], "client", where)
            image = f"{file.name}/{number}"
            if columns.image_id:
                image = _id(lists[columns.image_id][row], "image id", where)
            labels = [_labels(lists[name][row], name, where) for name in columns.labels]
            rows.add(where, client, image, split, labels)
            number += 1
    stat, name = file.path.stat(), str(file.path)

    def images(start: int) -> Iterator[Image]:
        for batch in file.batches([columns.image], start):
            yield from parquet.binary(name, columns.image, batch)

    key = f"{name} {stat.st_size} {stat.st_mtime_ns}"
    return Part(name, key, rows.table(), lambda row: f"{name}, row {row}", images)


def _id(value: object, what: str, where: str) -> str:
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{where} has the {what} {shown(value)}, which is not UTF-8 text") from None
    if value is None:
        raise ValueError(f"{where} has no {what}")
    return checked_text(value, what, where)


def _labels(value: Any, column: str, where: str) -> Any:
    """A label, or a list of labels."""
    if value is None or (isinstance(value, list) and None in value):
        raise ValueError(f"{where} has no value in the column {column!r}")
    return value
