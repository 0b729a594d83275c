"""From a source's records, as Arrow columns, to a data set's index: every step on whole columns.

Shape letters: R records in the source's order, U users, N images, K labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dataset.store.index import SPLITS, TAXONOMIES, DatasetIndex, IntArray, LabelMatrix, SplitIndex
from dataset.store.native import IdColumn

COLUMNS = ("user_id", "image_id", "partition", *TAXONOMIES)
MAX_ID_BYTES = 255  # ids are held in columns of fixed width
SCHEMA = pa.schema(
    [(name, pa.string()) for name in COLUMNS[:3]] + [(name, pa.list_(pa.string())) for name in TAXONOMIES]
)
"""The columns of `Records.table`, under the names of ``apple/flair``; ids are strings."""


def label_matrix(rows: IntArray, columns: IntArray, num_images: int, num_labels: int) -> LabelMatrix:
    """N x K from (row, column) pairs in any order; repeated pairs count once."""
    width = max(num_labels, 1)
    flat = np.unique(rows * width + columns)
    indptr = np.searchsorted(flat, np.arange(num_images + 1) * width).astype(np.int64)
    return LabelMatrix(indptr, (flat % width).astype(np.uint16), num_labels)


@dataclass(frozen=True)
class Placement:
    """Where each record of the source goes, ``[R]`` each: position in ``names`` (-1: nowhere), and row."""

    names: tuple[str, ...]
    split: npt.NDArray[np.int8]
    row: IntArray


def build_index(
    table: pa.Table,
    keep: npt.NDArray[np.bool_],
    *,
    grouped: bool,
    vocabulary: Mapping[str, list[str]],
    provenance: Mapping[str, Any],
) -> tuple[DatasetIndex, Placement]:
    """The index of the records to keep, and the place of each.

    Users are sorted by id, and a user's images by id, so that the result does not depend on the order of the
    source; not grouped, images stay in the source's order. A label's column is its alphabetical rank in
    ``vocabulary[taxonomy]``, or where that is not given among the labels that occur.

    Raises ValueError that names user and image for a label outside the vocabulary, an unknown partition and
    an image that comes twice.
    """
    ids = {name: _ids(table[name]) for name in ("user_id", "image_id")}
    table = table.combine_chunks()

    def whose(record: int) -> str:
        return f"image {ids['image_id'][record].decode()} of user {ids['user_id'][record].decode()}"

    names, codes = _coded(table["partition"])
    for code in sorted(set(names) - set(SPLITS)):
        record = int(np.flatnonzero(codes == names.index(code))[0])
        raise ValueError(f"{whose(record)} is in partition {code!r}; there are {', '.join(SPLITS)}")
    _refuse_twice(ids["image_id"], keep, whose)
    pairs, mappings = {}, {}
    for taxonomy in TAXONOMIES:
        pairs[taxonomy], mappings[taxonomy] = _labels(table[taxonomy], keep, taxonomy, vocabulary, whose)
    present = tuple(name for name in SPLITS if name in names and (keep & (codes == names.index(name))).any())
    placement = Placement(present, np.full(len(keep), -1, np.int8), np.full(len(keep), -1, np.int64))
    splits: dict[str, SplitIndex] = {}
    for number, name in enumerate(present):
        records = np.flatnonzero(keep & (codes == names.index(name)))
        user_ids, owner = np.unique(ids["user_id"][records], return_inverse=True)
        if grouped:
            order = np.lexsort((ids["image_id"][records], owner))
            records, owner = records[order], owner[order]
        placement.split[records], placement.row[records] = number, np.arange(len(records))
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(owner))])
        labels = {}
        for taxonomy, (of_record, column) in pairs.items():
            here = placement.split[of_record] == number
            rows, width = placement.row[of_record[here]], len(mappings[taxonomy])
            labels[taxonomy] = label_matrix(rows, column[here], len(records), width)
        splits[name] = SplitIndex(
            IdColumn(user_ids),
            offsets if grouped else np.empty(0, np.int64),
            owner.astype(np.int32),
            IdColumn(ids["image_id"][records]),
            labels,
        )
    return DatasetIndex(splits, mappings, provenance, grouped), placement


def _ids(column: pa.ChunkedArray) -> npt.NDArray[np.bytes_]:
    """Strings as a fixed-width byte array, chunk by chunk: few Python objects at a time."""
    width = pc.max(pc.binary_length(column)).as_py() or 1
    if width > MAX_ID_BYTES:
        raise ValueError(f"an id has {width:,} bytes, more than {MAX_ID_BYTES}; is this FLAIR?")
    ids, done = np.zeros(len(column), f"S{width}"), 0
    for chunk in column.cast(pa.binary()).chunks:
        ids[done : done + len(chunk)] = chunk.to_pylist()
        done += len(chunk)
    return ids


def _coded(column: pa.ChunkedArray) -> tuple[list[str], IntArray]:
    """Distinct values, and each element as a position among them."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    coded = (array.chunk(0) if isinstance(array, pa.ChunkedArray) else array).dictionary_encode()
    return coded.dictionary.to_pylist(), coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)


def _refuse_twice(image_ids: npt.NDArray[np.bytes_], keep: npt.NDArray[np.bool_], whose: Any) -> None:
    records = np.flatnonzero(keep)
    order = records[np.argsort(image_ids[records], kind="stable")]
    twice = np.flatnonzero(image_ids[order[1:]] == image_ids[order[:-1]])
    if len(twice):
        first, second = (whose(int(order[twice[0] + step])) for step in (0, 1))
        raise ValueError(f"{first} comes a second time ({second}); does the source hold a shard twice?")


def _labels(
    column: pa.ChunkedArray,
    keep: npt.NDArray[np.bool_],
    taxonomy: str,
    vocabulary: Mapping[str, list[str]],
    whose: Any,
) -> tuple[tuple[IntArray, IntArray], dict[str, int]]:
    """The (record, column) pairs of the records to keep, and the mapping name -> column."""
    record = pc.list_parent_indices(column).to_numpy().astype(np.int64)
    names, codes = _coded(pc.list_flatten(column))
    kept = keep[record]
    record, codes = record[kept], codes[kept]
    occurring = np.unique(codes)
    known = sorted(vocabulary.get(taxonomy, [names[code] for code in occurring.tolist()]))
    mapping = {name: rank for rank, name in enumerate(known)}
    for code in occurring.tolist():
        if names[code] not in mapping:
            where = whose(int(record[np.flatnonzero(codes == code)[0]]))
            raise ValueError(
                f"{where} has the label {names[code]!r}, which --label_mapping does not list under {taxonomy}"
            )
    to_column = np.array([mapping.get(name, -1) for name in names], np.int64)
    return (record, to_column[codes] if len(codes) else codes), mapping
