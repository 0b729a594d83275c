"""A Hugging Face data set with a client column: parquet files, or a folder of ``save_to_disk``.

pyarrow reads both; the ``datasets`` package is not needed. Class names come from the features that
``datasets`` writes into its files.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from dataset.convert.source import NO_CLIENT, Found, Part, Rows
from dataset.convert.text import Names, checked_text, shown, split_by_names, split_named
from dataset.fetch import parquet, source
from dataset.fetch.source import Image
from dataset.files import state_of
from dataset.store.annotations import Kind
from dataset.store.index import TAXONOMIES

MAX_STATE_BYTES = 1 << 24


@dataclass(frozen=True)
class Columns:
    """The names of a data set's columns. An empty name means that there is no such column."""

    client: str = ""
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


def files_of(place: Path, by_name: bool) -> list[_File]:
    """The files of a data set, with the splits from their names or folders.

    Args:
        place: a folder, or a file.
        by_name: whether the names of parquet files hold their splits.

    Raises:
        ValueError: when there are no files, or names leave a split open.
    """
    if place.is_file():
        return [_File(place, place.stem, None)]
    if not place.is_dir():
        raise ValueError(f"--source {place} does not exist: give a folder or a file")
    if (place / "dataset_dict.json").is_file():
        splits = _json(place / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or not all(isinstance(name, str) for name in splits):
            raise ValueError(
                f"{place / 'dataset_dict.json'} has no list of splits: save the data set again with "
                "save_to_disk"
            )
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
        raise ValueError(
            f"--source {place} has neither *.parquet files nor the files that save_to_disk writes"
        )
    splits = split_by_names(place, found) if by_name else [None] * len(found)
    names = [path.relative_to(place).with_suffix("").as_posix() for path in found]
    return [_File(*file) for file in zip(found, names, splits)]


def _json(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > MAX_STATE_BYTES:
            raise ValueError("it is too large")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON file of save_to_disk ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON file of save_to_disk")
    return content


def _plain(name: object, place: Path) -> str:
    """A name of a file or folder, checked to be no path that leads elsewhere."""
    if not isinstance(name, str) or not name or Path(name).name != name:
        raise ValueError(
            f"{place} names the file {shown(name)}, which is not the name of a file in its folder"
        )
    return name


def _saved(folder: Path, split: str | None) -> list[_File]:
    """The files of one split that was saved, in their order."""
    state = _json(folder / "state.json")
    entries = state.get("_data_files")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(
            f"{folder / 'state.json'} has no list _data_files: save the data set again with save_to_disk"
        )
    if state.get("_indices_data_files"):
        raise ValueError(
            f"{folder} stores an index of its rows, which is not read: call flatten_indices() before "
            "save_to_disk"
        )
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
    return [unicodedata.normalize("NFC", str(name)) for name in names]


def read(place: Path, columns: Columns, class_names: Sequence[str] | None) -> Found:
    """Read the files of a data set.

    Args:
        place: a folder, or a file.
        columns: the data set's columns.
        class_names: the class names of the label, in the order of their numbers; None: those in the files.

    Raises:
        ValueError: one line that names file and row.
    """
    files = files_of(place, by_name=not columns.split)
    kinds: dict[str, Kind] = {}
    names: dict[str, Names] = {}
    owns: list[list[Names | None]] = [[] for _ in files]
    for annotation, column in zip(TAXONOMIES, columns.labels):
        by = class_names if column == columns.label else None
        forms = [_form_of(file, column, by) for file in files]
        _check_forms(files, forms, column, column == columns.label)
        kinds[annotation] = "label set" if forms[0].several else "class"
        known = [*dict.fromkeys(name for form in forms for name in form.names)]
        whole = by if by is not None else known or None
        names[annotation] = Names(whole, numbered=forms[0].numbers)
        for names_of_file, form in zip(owns, forms):
            names_of_file.append(Names(form.names, numbered=True) if form.names else None)
    parts = [_part(file, columns, kinds, names, names_of_file) for file, names_of_file in zip(files, owns)]
    named = [] if columns.split else [(file.path, file.split) for file in files]
    size = sum(file.path.stat().st_size for file in files)
    return Found(parts, kinds, names, size, clients=bool(columns.client), files=named)


@dataclass(frozen=True)
class _Form:
    """How a file has its labels: whether several, as numbers without names, and the names of its numbers.

    ``renamed`` says whether given names are in the place of the file's own; None where it has none.
    """

    several: bool
    numbers: bool
    names: Sequence[str]
    renamed: bool | None = None

    def __str__(self) -> str:
        what = "class numbers without names" if self.numbers else "class names"
        return f"lists of {what}" if self.several else what


def _form_of(file: _File, column: str, class_names: Sequence[str] | None) -> _Form:
    """The form of a column. Numbers are those of the given names unless these hold all of the file's own."""
    schema = file.schema()
    if column not in schema.names:
        has = ", ".join(map(shown, schema.names))[:200]
        raise ValueError(f"{file.path} has no column {column!r}; its columns are {has}")
    kind = schema.field(column).type
    several = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not pa.types.is_integer(kind.value_type if several else kind):
        return _Form(several, False, ())
    in_file = _class_names(schema, column) or ()
    renamed = class_names is not None and not set(in_file) <= set(class_names)
    names = class_names if class_names is not None and (renamed or not in_file) else in_file
    return _Form(several, not names, names, renamed if in_file else None)


def _check_forms(files: Sequence[_File], forms: Sequence[_Form], column: str, is_label: bool) -> None:
    """Refuse files that have a column's labels in different forms. ``is_label``: --classes names them."""
    for file, form in zip(files, forms):
        if (form.several, form.numbers) != (forms[0].several, forms[0].numbers):
            named = form.several == forms[0].several and is_label
            more = ", or give the class names with --classes" if named else ""
            raise ValueError(
                f"{file.path} has {form} in the column {column!r}, but {files[0].path} has "
                f"{forms[0]}: use the same form in all files{more}"
            )
    if len({form.renamed for form in forms} - {None}) > 1:
        place = next(file.path for file, form in zip(files, forms) if form.renamed)
        raise ValueError(
            f"{place} has class names in the column {column!r} that are missing in --classes, "
            "although --classes has all names of other files: add them to --classes"
        )


def _part(
    file: _File,
    columns: Columns,
    kinds: Mapping[str, Kind],
    names: Mapping[str, Names],
    by_number: Sequence[Names | None],
) -> Part:
    """The records of one file, whose class numbers have names of its own, or those of all files."""
    rows = Rows(kinds, names)
    others = [name for name in (columns.split, columns.image_id) if name]
    asked = list(dict.fromkeys([*filter(None, [columns.client]), *columns.labels, *others]))
    number = 0
    for batch in file.batches([*asked, columns.image]):
        lists = {name: batch.column(name).to_pylist() for name in asked}
        for row in range(len(batch)):
            where = f"{file.path}, row {number}"
            split = split_named(lists[columns.split][row], where) if columns.split else file.split
            client = _id(lists[columns.client][row], "client", where) if columns.client else NO_CLIENT
            image = f"{file.name}/{number}"
            if columns.image_id:
                image = _id(lists[columns.image_id][row], "image id", where)
            labels = [
                _labels(lists[name][row], name, where, by) for name, by in zip(columns.labels, by_number)
            ]
            rows.add(where, client, image, split, labels)
            number += 1
    name = str(file.path)

    def images(start: int) -> Iterator[Image]:
        for batch in file.batches([columns.image], start):
            yield from parquet.binary(name, columns.image, batch)

    return Part(name, f"{name} {state_of(file.path)}", rows.table(), lambda row: f"{name}, row {row}", images)


def _id(value: object, what: str, where: str) -> str:
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{where}: the {what} {shown(value)} is not UTF-8 text") from None
    if value is None:
        raise ValueError(f"{where} has no {what}: fill it in, or remove the row")
    return checked_text(value, what, where)


def _labels(value: Any, column: str, where: str, by_number: Names | None) -> Any:
    """A label, or a list of labels; by its name, where the file names its numbers."""
    if value is None or (isinstance(value, list) and None in value):
        raise ValueError(f"{where} has no value in the column {column!r}: fill it in, or remove the row")
    if not isinstance(value, list):
        return by_number.name(value, where) if by_number else value
    if len(set(map(str, value))) < len(value) and all(number in (0, 1) for number in value):
        raise ValueError(
            f"{where} has the same number twice in the column {column!r}, {shown(value)}: list each "
            "class of an image once (for a vector of 0 and 1, list the positions of its ones)"
        )
    return [by_number.name(number, where) for number in value] if by_number else value
