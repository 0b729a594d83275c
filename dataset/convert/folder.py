"""Image files: in folders by client, or listed by a CSV, such as FLamby's and FedScale's."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dataset.convert.files import FileRows, Folder
from dataset.convert.source import NO_CLIENT, Found, Part
from dataset.convert.text import Names, lines, shown, split_named
from dataset.fetch.archives import IMAGE_SUFFIXES
from dataset.store.annotations import Kind
from dataset.store.index import SPLIT_NAMES, TAXONOMIES
from dataset.tables import header_of, rows_of

SEVERAL = ";"
"""What stands between several labels of an image."""
_RUBBISH = frozenset(("thumbs.db", "desktop.ini", "__macosx"))


@dataclass(frozen=True)
class Columns:
    """The names of a CSV's columns. An empty name means that there is no such column.

    Attributes:
        path: column of the images' paths.
        client: column of their owners.
        label: column of an image's class, or of labels with ``separator`` between them.
        split: column of train, val, validation or test.
        fine: column of an image's class, or labels, of a second, finer kind.
        separator: between several labels; empty: an image has one label.
    """

    path: str = "path"
    client: str = "client"
    label: str = "label"
    split: str = ""
    fine: str = ""
    separator: str = ""


def columns_of(table: Path, given: Mapping[str, str | None], several: bool) -> Columns:
    """The columns of a CSV.

    Args:
        table: the CSV.
        given: names of the columns path, client, label, split and fine; None: the usual name.
        several: whether an image has several labels, as also where its column is ``labels``.

    Raises:
        ValueError: when the CSV lacks one.
    """
    header = header_of(lines(table), table)
    several = several or (given["label"] is None and "labels" in header and "label" not in header)
    label = "labels" if several else "label"
    fine = f"fine_{label}"
    asked = {"path": given["path"] or "path", "client": given["client"] or "client"}
    asked["label"] = given["label"] or label
    lacking = [name for name in asked.values() if name not in header]
    if lacking and header and len(set(header)) == len(header):
        which = ", ".join(f"--{key}_column" for key, name in asked.items() if name in lacking)
        has = ", ".join(map(shown, header))[:200]
        raise ValueError(f"{table} has no column {lacking[0]!r}; it has {has}: give its name with {which}")
    return Columns(
        **asked,
        split=given["split"] or ("split" if "split" in header else ""),
        fine=given["fine"] or (fine if fine in header else ""),
        separator=SEVERAL if several else "",
    )


def _kinds(fine: bool, separator: str) -> dict[str, Kind]:
    names = TAXONOMIES if fine else TAXONOMIES[:1]
    return dict.fromkeys(names, "label set" if separator else "class")


def listed(
    folder: Folder,
    tables: Sequence[tuple[Path, str | None]],
    columns: Columns,
    names: Mapping[str, Names],
    suffix: str = "",
    in_split_folder: bool = False,
) -> Found:
    """The images that CSVs list.

    Args:
        folder: the images' folder.
        tables: the CSVs, each with the split of its images, or None.
        columns: the CSVs' columns.
        names: the classes of each annotation.
        suffix: is added to each path, such as ``.jpg``.
        in_split_folder: whether an image may be in a folder named after its split, as in FedScale's data.

    Raises:
        ValueError: one line that names file and line.
    """
    kinds = _kinds(bool(columns.fine), columns.separator)
    parts: list[Part] = []
    needed = [name for name in (columns.path, columns.client, columns.label) if name]
    others = [name for name in (columns.split, columns.fine) if name]
    size = 0
    for table, stated in tables:
        rows, numbers = FileRows(folder, kinds, names), array("q")
        for line, row in rows_of(lines(table), table, [*needed, *others]):
            where, path = f"{table}, line {line}", row[columns.path]
            split = split_named(row[columns.split], where) if columns.split else stated
            labels = [row[name] for name in (columns.label, columns.fine) if name]
            if in_split_folder and stated and (folder.root / stated / folder.named(path, where)).exists():
                path = f"{stated}/{path}"
            values = [_separated(label, columns.separator) for label in labels]
            rows.put(where, row[columns.client], path + suffix, split, values)
            numbers.append(line)
        parts.append(rows.part(str(table), _lines_of(table, numbers)))
        size += rows.num_bytes
    return Found(parts, kinds, names, size)


def _lines_of(table: Path, numbers: array[int]) -> Callable[[int], str]:
    """The place of each record: the line of its CSV."""
    return lambda row: f"{table}, line {numbers[row]}"


def _separated(cell: str, separator: str) -> object:
    """A label, or several; a cell without any means that the image has none."""
    if not separator:
        return cell
    return [label.strip() for label in cell.split(separator)] if cell.strip() else []


def unread_columns(table: Path, columns: Columns) -> list[str]:
    """The columns of a CSV that are not read."""
    read = {columns.path, columns.client, columns.label, columns.split, columns.fine}
    return [name for name in header_of(lines(table), table) if name and name not in read]


def walked(folder: Folder, names: Mapping[str, Names]) -> Found:
    """The images of ``client/class/file`` or ``split/client/class/file``; or, without clients, of
    ``class/file`` or ``split/class/file``.

    The first folders are splits if all of them have names of splits. Empty folders of classes, hidden files
    and those that operating systems leave behind are ignored.

    Raises:
        ValueError: one line that names the path, for a client without images, an image at a wrong depth, a
            link out of the folder, or when there is no image at all.
    """
    tops = _folders(folder, PurePosixPath())
    are_splits = _are_splits(folder, tops)
    _refuse_images(folder, PurePosixPath())
    kinds = _kinds(False, "")
    rows, empty = FileRows(folder, kinds, names), []
    below = {top: _folders(folder, top) if are_splits else [top] for top in tops}  # clients, or classes
    filled = [path for inner in below.values() for path in inner if any(_inside(folder, path))]
    no_clients = bool(filled) and all(_holds_images_alone(folder, path) for path in filled)
    for top, inner in below.items():
        split = SPLIT_NAMES[top.name] if are_splits else None
        if are_splits:
            _refuse_images(folder, top)
        if no_clients:
            for path in inner:
                _walk_class(folder, path, NO_CLIENT, split, rows)
            continue
        empty += [str(client) for client in inner if not _walk_client(folder, client, split, rows)]
        if not inner:
            empty.append(str(top))
    part = rows.part(str(folder.root), lambda row: str(folder.root))
    return Found([part], kinds, names, rows.num_bytes, empty_users=empty, clients=not no_clients)


def _are_splits(folder: Folder, tops: Sequence[PurePosixPath]) -> bool:
    """Whether the first folders are splits; ValueError where only some of them are."""
    splits = [path for path in tops if path.name in SPLIT_NAMES]
    if splits and len(splits) < len(tops):
        other = next(path for path in tops if path.name not in SPLIT_NAMES)
        raise ValueError(
            f"{folder.root / other}: {splits[0].name} beside it is a split, so all folders here must be "
            f"splits ({', '.join(SPLIT_NAMES)}): rename or move one of them"
        )
    return bool(splits)


def _walk_client(folder: Folder, client: PurePosixPath, split: str | None, rows: FileRows) -> int:
    """Add the images of a client, and return their number."""
    _refuse_images(folder, client)
    labels = _folders(folder, client)
    return sum(_walk_class(folder, label, client.name, split, rows) for label in labels)


def _walk_class(folder: Folder, label: PurePosixPath, client: str, split: str | None, rows: FileRows) -> int:
    """Add the images of a client's class, and return their number."""
    count = 0
    for file in _inside(folder, label):
        where = str(folder.root / file)
        if _is_folder(folder, file):
            raise ValueError(
                f"{where} is a folder, but images must be in client/class/, or all in class/, not in "
                "deeper folders"
            )
        rows.put(where, client, str(file), split, [label.name])
        count += 1
    return count


def _holds_images_alone(folder: Folder, path: PurePosixPath) -> bool:
    """Whether a folder has images, and no folder."""
    inside = [*_inside(folder, path)]
    images = any(file.suffix.lower() in IMAGE_SUFFIXES for file in inside)
    return images and not any(_is_folder(folder, file) for file in inside)


def _inside(folder: Folder, path: PurePosixPath) -> Iterator[PurePosixPath]:
    """The content of a folder below the root, in alphabetical order."""
    try:
        found = sorted(child.name for child in (folder.root / path).iterdir())
    except OSError as error:
        raise ValueError(f"{folder.root / path} cannot be read: {error.strerror}") from None
    yield from (path / name for name in found if not name.startswith(".") and name.lower() not in _RUBBISH)


def _folders(folder: Folder, path: PurePosixPath) -> list[PurePosixPath]:
    """The folders directly in a folder below the root, in alphabetical order."""
    return [inner for inner in _inside(folder, path) if _is_folder(folder, inner)]


def _is_folder(folder: Folder, path: PurePosixPath) -> bool:
    return (folder.root / path).is_dir()


def _refuse_images(folder: Folder, path: PurePosixPath) -> None:
    """Raise ValueError for an image in a folder that should have only folders, since it would be lost."""
    for file in _inside(folder, path):
        if file.suffix.lower() in IMAGE_SUFFIXES and not _is_folder(folder, file):
            raise ValueError(
                f"{folder.root / file} is not in the folder of a class: images must be in "
                "client/class/, or all in class/"
            )


def fedscale(folder: Folder, place: Path, class_names: Sequence[str] | None) -> Found:
    """FedScale's ``client_data_mapping``: ``train.csv``, ``val.csv``, ``test.csv``, or one CSV.

    The columns are the client, the path, the class name and the class number, under any names. The last
    column is the label, and there may be further columns before it.

    Args:
        folder: the images' folder; images may be in a subfolder named after their split.
        place: the folder of the CSVs, or one CSV.
        class_names: the class names by number; None: the names beside the numbers, if each number has one.

    Raises:
        ValueError: one line that names file and line.
    """
    tables: list[tuple[Path, str | None]] = [(place, None)]
    if place.is_dir():
        tables = [(place / f"{name}.csv", split) for name, split in SPLIT_NAMES.items()]
        tables = [(path, split) for path, split in tables if path.is_file()]
        if not tables:
            raise ValueError(f"--labels {place} has none of the files train.csv, val.csv and test.csv")
    headers = [header_of(lines(path), path) for path, _ in tables]
    for (path, _), header in zip(tables, headers):
        if len(header) < 3 or header != headers[0]:
            raise ValueError(
                f"{path} has the columns {', '.join(map(shown, header))[:200]}; all CSV files need the "
                "same columns, at least a client, a path and a label"
            )
    client, column, *between, label = headers[0]
    if class_names is None and between:
        class_names = _named_numbers([table for table, _ in tables], between[0], label)
    names = {TAXONOMIES[0]: Names(class_names, numbered=True)}
    return listed(folder, tables, Columns(column, client, label), names, in_split_folder=True)


def _named_numbers(tables: Sequence[Path], name_column: str, number_column: str) -> list[str] | None:
    """The class names by number; None unless each number has exactly one name and each name one number."""
    found: dict[int, str] = {}
    for table in tables:
        for _, row in rows_of(lines(table), table, [name_column, number_column]):
            name, number = row[name_column], row[number_column]
            if not (number.isascii() and number.isdigit() and len(number) < 6):
                return None  # the reader says where
            if found.setdefault(int(number), name) != name or not name.strip():
                return None
    named = len(set(found.values())) == len(found) and sorted(found) == list(range(len(found)))
    return [found[number] for number in range(len(found))] if named else None
