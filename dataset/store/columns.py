"""The steps from a source's records to a data set's index, all on whole Arrow columns.

Shape letters: R records in the source's order, U users, N images, K labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dataset.arrays import BoolArray, IntArray
from dataset.store.annotations import (
    Annotation,
    Boxes,
    Kind,
    LabelMatrix,
    Masks,
    OneClass,
    check_num_labels,
    offsets_of,
)
from dataset.store.index import SPLITS, DatasetIndex, IdColumn, SplitIndex

_BOX: list[tuple[str, pa.DataType]] = [("name", pa.string()), ("corners", pa.list_(pa.float32(), 4))]
ARROW: dict[Kind, pa.DataType] = {
    "label set": pa.list_(pa.string()),
    "class": pa.string(),
    "mask": pa.large_binary(),
    "boxes": pa.list_(pa.struct(_BOX)),
}
"""The type of a source's column of each kind. A mask is a PNG of class numbers; corners are left, top, right,
bottom in pixels."""
FLAGGED_BOXES = pa.list_(pa.struct([*_BOX, ("flags", pa.uint8())]))
"""Another type for boxes, with `dataset.store.annotations.CROWD` and ``DIFFICULT``."""

ID_COLUMNS = ("user_id", "image_id", "partition")
MAX_ID_BYTES = 255  # ids are held in columns of fixed width


def schema(annotations: Mapping[str, Kind | pa.DataType]) -> pa.Schema:
    """The columns of a source's records: ids, which are strings, and annotations by name."""
    ids = [(name, pa.string()) for name in ID_COLUMNS]
    types = {name: ARROW.get(kind, kind) for name, kind in annotations.items()}
    return pa.schema([*ids, *types.items()])


def kinds(columns: pa.Schema) -> dict[str, Kind]:
    """The annotations of a source's records, by name."""
    by_type: dict[str, Kind] = {str(arrow): kind for kind, arrow in ARROW.items()}
    by_type[str(FLAGGED_BOXES)] = "boxes"
    return {field.name: by_type[str(field.type)] for field in columns if field.name not in ID_COLUMNS}


@dataclass(frozen=True)
class Placement:
    """The split of each record, as a position in ``names`` (-1: it goes nowhere), and its row; ``[R]``."""

    names: tuple[str, ...]
    split: npt.NDArray[np.int8]
    row: IntArray


def build_index(
    table: pa.Table,
    keep: BoolArray,
    *,
    grouped: bool,
    vocabulary: Mapping[str, list[str]],
    provenance: Mapping[str, Any],
    sizes: npt.NDArray[np.int32] | None = None,
    ids_are_positions: bool = False,
) -> tuple[DatasetIndex, Placement]:
    """The index of the records to keep, and the place of each.

    Users are sorted by id, and a user's images by id, so that the result does not depend on the order of the
    source; not grouped, images stay in the source's order.

    Args:
        table: the columns of `schema`, a row for each record.
        keep: which records, ``[R]``.
        grouped: whether the images of a user become neighbours.
        vocabulary: the class names by annotation, in the order of their numbers. Where it is not given, the
            names that occur, sorted; masks need one.
        provenance: where the data come from.
        sizes: height and width of each image, ``[R, 2]``.
        ids_are_positions: whether image ids are positions in their split: images then stay in the source's
            order, and two splits may have the same ids.

    Raises:
        ValueError: that names user and image, for a label outside the vocabulary, an unknown partition and an
            image that comes twice; for more classes than can be numbered.
    """
    ids = {name: _ids(table[name]) for name in ("user_id", "image_id")}
    table = table.combine_chunks()

    def whose(record: int) -> str:
        return f"image {ids['image_id'][record].decode()} of user {ids['user_id'][record].decode()}"

    split_of = _split_of(table["partition"], whose)
    _refuse_twice(ids["image_id"], split_of if ids_are_positions else np.zeros_like(split_of), keep, whose)
    columns = {
        name: _annotation(table[name], kind, keep, name, vocabulary.get(name), whose)
        for name, kind in kinds(table.schema).items()
    }
    mappings = {name: mapping for name, (mapping, _) in columns.items()}
    present = tuple(name for number, name in enumerate(SPLITS) if (split_of[keep] == number).any())
    placement = Placement(present, np.full(len(keep), -1, np.int8), np.full(len(keep), -1, np.int64))
    splits: dict[str, SplitIndex] = {}
    for number, name in enumerate(present):
        records = np.flatnonzero(keep & (split_of == SPLITS.index(name)))
        user_ids, owner = np.unique(ids["user_id"][records], return_inverse=True)
        if grouped:
            keys = (owner,) if ids_are_positions else (ids["image_id"][records], owner)
            order = np.lexsort(keys)
            records, owner = records[order], owner[order]
        placement.split[records], placement.row[records] = number, np.arange(len(records))
        offsets = offsets_of(np.bincount(owner))
        annotations = {key: column.take(records) for key, (_, column) in columns.items()}
        splits[name] = SplitIndex(
            IdColumn(user_ids),
            offsets if grouped else np.empty(0, np.int64),
            owner.astype(np.int32),
            IdColumn(ids["image_id"][records]),
            annotations,
            image_sizes=None if sizes is None else sizes[records],
        )
    return DatasetIndex(splits, mappings, provenance, grouped), placement


def _split_of(column: pa.ChunkedArray, whose: Callable[[int], str]) -> IntArray:
    """The split of each record, as a position in `SPLITS`."""
    names, codes = _coded(column)
    for name in sorted(set(names) - set(SPLITS)):
        record = int(np.flatnonzero(codes == names.index(name))[0])
        raise ValueError(f"{whose(record)} is in partition {name!r}; it must be one of {', '.join(SPLITS)}")
    return np.array([SPLITS.index(name) for name in names], np.int64)[codes]


def _ids(column: pa.ChunkedArray) -> npt.NDArray[np.bytes_]:
    """Strings as a fixed-width byte array, chunk by chunk: few Python objects at a time."""
    width = pc.max(pc.binary_length(column)).as_py() or 1
    if width > MAX_ID_BYTES:
        raise ValueError(
            f"an id has {width:,} bytes, more than {MAX_ID_BYTES}: check that this column has ids"
        )
    if pc.any(pc.match_substring(column, "\0")).as_py():  # at its end it would be lost, and two users be one
        raise ValueError("an id has the character with the code 0: check that this column has ids")
    ids, done = np.zeros(len(column), f"S{width}"), 0
    for chunk in column.cast(pa.binary()).chunks:
        ids[done : done + len(chunk)] = chunk.to_pylist()
        done += len(chunk)
    return ids


def _coded(column: pa.ChunkedArray) -> tuple[list[str], IntArray]:
    """Distinct values, and each element as a position among them."""
    coded = column.dictionary_encode().combine_chunks()
    return coded.dictionary.to_pylist(), coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)


def _refuse_twice(
    image_ids: npt.NDArray[np.bytes_], scope: IntArray, keep: BoolArray, whose: Callable[[int], str]
) -> None:
    """Raise ValueError for two records with one id in one scope."""
    records = np.flatnonzero(keep)
    order = records[np.lexsort((image_ids[records], scope[records]))]
    same = (image_ids[order[1:]] == image_ids[order[:-1]]) & (scope[order[1:]] == scope[order[:-1]])
    twice = np.flatnonzero(same)
    if len(twice):
        first, second = (whose(int(order[twice[0] + step])) for step in (0, 1))
        raise ValueError(
            f"{first} is there twice (also as {second}): check that the source does not have the same "
            "part twice"
        )


def _annotation(
    column: pa.ChunkedArray,
    kind: Kind,
    keep: BoolArray,
    name: str,
    vocabulary: list[str] | None,
    whose: Callable[[int], str],
) -> tuple[dict[str, int], Annotation]:
    """The mapping from name to number, and the annotation of all records, empty for those not to keep."""
    if kind == "mask":
        if vocabulary is None:
            raise ValueError(f"{name}: a mask holds numbers; the vocabulary must name its classes")
        masks = [mask if kept else b"" for mask, kept in zip(column.to_pylist(), keep.tolist())]
        return {label: k for k, label in enumerate(vocabulary)}, Masks.of(masks, len(vocabulary))
    if kind == "class":
        record, values = np.arange(len(column)), column
    else:
        record, values = pc.list_parent_indices(column).to_numpy().astype(np.int64), pc.list_flatten(column)
    kept = keep[record]
    corners, flags = np.zeros((len(record), 4), np.float32), np.zeros(len(record), np.uint8)
    if kind == "boxes":
        if values.type.get_field_index("flags") >= 0:
            flags = pc.struct_field(values, "flags").to_numpy()
        corners = pc.list_flatten(pc.struct_field(values, "corners")).to_numpy().reshape(-1, 4)
        values = pc.struct_field(values, "name")
    names, codes = _coded(values)
    record, codes = record[kept], codes[kept]
    mapping = _numbers(names, codes, name, vocabulary, lambda place: whose(int(record[place])))
    to_number = np.array([mapping.get(label, -1) for label in names], np.int64)
    classes = to_number[codes] if len(codes) else codes
    if kind == "label set":
        return mapping, LabelMatrix.from_pairs(record, classes, len(keep), len(mapping))
    if kind == "boxes":
        indptr = offsets_of(np.bincount(record, minlength=len(keep)))
        return mapping, Boxes(indptr, corners[kept], classes.astype(np.uint16), flags[kept], len(mapping))
    every = np.zeros(len(keep), np.int64)
    every[record] = classes
    return mapping, OneClass.of(every, len(mapping))


def _numbers(
    names: list[str], codes: IntArray, name: str, vocabulary: list[str] | None, whose: Callable[[int], str]
) -> dict[str, int]:
    """The number of each name in the vocabulary, or without one of each that occurs in an annotation.

    Args:
        names: those of all records.
        codes: the places in ``names`` of what occurs.
        name: of the annotation.
        vocabulary: the names in the order of their numbers.
        whose: the record of an element of ``codes``, in words.

    Raises:
        ValueError: for a name that the vocabulary has not.
    """
    occurring = np.unique(codes).tolist()
    known = vocabulary if vocabulary is not None else sorted(names[code] for code in occurring)
    check_num_labels(name, len(known))
    mapping = {label: rank for rank, label in enumerate(known)}
    for code in occurring:
        if names[code] not in mapping:
            where = whose(int(np.flatnonzero(codes == code)[0]))
            raise ValueError(
                f"{where} has the label {names[code]!r}, which --label_mapping does not list under {name}"
            )
    return mapping
