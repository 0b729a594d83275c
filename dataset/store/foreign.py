"""Reads the predecessors' HDF5 files without conversion: pfl-research's and ml-flair's, grouped or not.

    /{split}/{user_id}/images [n,H,W,3], image_ids [n]          grouped, with labels either as
                      /labels_row, labels_col                     coordinates (pfl-research), or as
                      /labels                                     joined strings [n] (ml-flair)
    /{split}/{image_id}/image [H,W,3], user_id, labels           not grouped; labels one joined string
    /metadata/label_mapping or label_counter                     JSON by label name

and the same for ``fine_grained_labels``. The metadata hold columns only in pfl-research's grouped files; in
all others they hold counts. The alphabetical rank of a name is its column in every case.

A split's index is gathered once, from one small group per user or image, which takes a while.
Shape letters: N images, K labels.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from dataset.arrays import ByteArray, IntArray
from dataset.store.annotations import LabelMatrix, offsets_of
from dataset.store.index import SPLITS, TAXONOMIES, IdColumn, SplitIndex
from dataset.store.native import Storage, StoredImages, dataset, member, opened

_NAMES = {"labels": ("label_mapping", "label_counter")}
_NAMES["fine_grained_labels"] = ("fine_grained_label_mapping", "fine_grained_label_counter")
_DELIMITER = "|"


def is_foreign(file: h5py.File) -> bool:
    """Whether the file has one of the layouts that are read here."""
    return all(any(f"metadata/{name}" in file for name in names) for names in _NAMES.values()) and any(
        split in file for split in SPLITS
    )


class ForeignReader:
    """A predecessor's file behind the interface of `dataset.store.native.NativeReader`."""

    storage: Storage = "raw"
    image_size: int | None = None  # HDF5 data sets have different shapes
    content_sha256: str | None = None

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._handle: tuple[int, h5py.File] | None = None
        self._splits: dict[str, SplitIndex] = {}
        with opened(path) as file:
            self.splits = tuple(split for split in SPLITS if len(file.get(split, ())))
            if not self.splits:
                raise ValueError(f"{path} has no images")
            first = next(iter(file[self.splits[0]].values()))
            self.grouped = "images" in first
            self._coordinates = "labels_row" in first
            self.label_mappings: dict[str, dict[str, int]] = {}
            self._to_column: dict[str, IntArray] = {}  # column in the file -> alphabetical column
            for taxonomy, names in _NAMES.items():
                present = next(name for name in names if f"metadata/{name}" in file)
                values = _numbers(dataset(file, f"metadata/{present}")[()])
                mapping = {name: column for column, name in enumerate(sorted(values))}
                in_file = sorted(values, key=values.__getitem__)
                if self._coordinates and [values[name] for name in in_file] != list(range(len(values))):
                    raise ValueError(f"the mapping of {taxonomy} does not number its names 0, 1, 2, ...")
                self.label_mappings[taxonomy] = mapping
                self._to_column[taxonomy] = np.array([mapping[name] for name in in_file], np.int64)
        maker = "pfl-research" if self._coordinates or present.endswith("mapping") else "ml-flair"
        self.provenance: dict[str, Any] = {"source": f"{maker} HDF5", "file": str(path)}

    def _file(self) -> h5py.File:
        """The open file; a forked child opens its own."""
        if self._handle is None or self._handle[0] != os.getpid():
            self._handle = os.getpid(), h5py.File(self._path, "r")
        return self._handle[1]

    def split(self, name: str) -> SplitIndex:
        """The index of one split; gathered at the first call."""
        with self._lock, _named(self._path, name):
            if name not in self._splits:
                self._splits[name] = self._read(member(self._file(), name))
            return self._splits[name]

    def _read(self, group: h5py.Group) -> SplitIndex:
        """The index of a split, whose groups are users or, where it is not grouped, images."""
        names, ids, owners, start = list(group), [], [], 0
        labels: dict[str, list[IntArray]] = {taxonomy: [] for taxonomy in TAXONOMIES}
        for name in names:
            part = member(group, name)
            if self.grouped:
                ids.append(_image_ids(part, name))
            else:
                ids.append(np.array([name.encode()]))
                owners.append(_text(dataset(part, "user_id")[()]))
            for taxonomy in TAXONOMIES:
                labels[taxonomy].append(self._pairs(part, taxonomy, name, start, len(ids[-1])))
            start += len(ids[-1])
        matrices = {}
        for taxonomy, parts in labels.items():
            rows, columns = np.concatenate(parts).T
            width = len(self.label_mappings[taxonomy])
            matrices[taxonomy] = LabelMatrix.from_pairs(rows, columns, start, width)
        images = IdColumn(np.concatenate(ids))
        if not self.grouped:
            users, numbers = np.unique(owners, return_inverse=True)
            ids_of_users, no_offsets = IdColumn.of(users.tolist()), np.empty(0, np.int64)
            return SplitIndex(ids_of_users, no_offsets, numbers.astype(np.int32), images, matrices)
        counts = np.array([len(found) for found in ids])
        owner = np.repeat(np.arange(len(names), dtype=np.int32), counts)
        return SplitIndex(IdColumn.of(names), offsets_of(counts), owner, images, matrices)

    def _pairs(self, part: h5py.Group, taxonomy: str, name: str, start: int, count: int) -> IntArray:
        """``[positives, 2]``: row in the split, column."""
        whose = f"{'user' if self.grouped else 'image'} {name}"
        if not self._coordinates:
            joined = np.atleast_1d(dataset(part, taxonomy)[()])
            if len(joined) != count:
                raise ValueError(f"{whose} has {count} images, but {taxonomy} of {len(joined)} images")
            return self._named_pairs(joined.tolist(), taxonomy, whose, start)
        rows, columns = (dataset(part, f"{taxonomy}_{leaf}")[()].astype(np.int64) for leaf in ("row", "col"))
        lookup = self._to_column[taxonomy]
        if rows.ndim != 1 or rows.shape != columns.shape:
            raise ValueError(
                f"{whose} has {taxonomy} of the shapes {rows.shape} and {columns.shape}, which must be "
                "the same"
            )
        if (rows >= count).any() or (columns >= len(lookup)).any() or (np.minimum(rows, columns) < 0).any():
            raise ValueError(f"{whose} has numbers in {taxonomy} that are out of range")
        return np.stack([start + rows, lookup[columns]], axis=1)

    def _named_pairs(self, joined: Sequence[bytes | str], taxonomy: str, whose: str, start: int) -> IntArray:
        mapping, pairs = self.label_mappings[taxonomy], []
        for row, text in enumerate(joined, start):
            for name in filter(None, _text(text).split(_DELIMITER)):
                if name not in mapping:
                    raise ValueError(
                        f"{whose} has the label {name!r}, which is not in the mapping of {taxonomy}"
                    )
                pairs.append((row, mapping[name]))
        return np.array(pairs, np.int64).reshape(-1, 2)

    def stored(self, split: str, rows: IntArray) -> StoredImages:
        """The pixels of the images at these rows, each in its own size."""
        index = self.split(split)
        with self._lock, _named(self._path, split):
            group = member(self._file(), split)
            if not self.grouped:
                return [_rgb(dataset(group, f"{index.image_ids[row]}/image")) for row in rows.tolist()]
            images = []
            for row in rows.tolist():
                user = int(index.user_index[row])
                first = int(index.user_offsets[user])
                images.append(dataset(group, f"{index.user_ids[user]}/images")[row - first])
            return images

    def close(self) -> None:
        """Close the handle of this process."""
        if self._handle is not None and self._handle[0] == os.getpid():
            self._handle[1].close()
        self._handle = None


@contextmanager
def _named(path: Path, split: str) -> Iterator[None]:
    """Turn errors of reading a split into one ValueError that names file and split."""
    try:
        yield
    except (KeyError, OSError, RuntimeError, TypeError, OverflowError, ValueError) as error:
        text = " ".join(str(error).split())
        raise ValueError(f"{path}, split {split}, is damaged: {text[:400]}") from None


def _numbers(text: bytes | str) -> dict[str, int]:
    """The numbers by label that a metadata text holds."""
    try:
        values = json.loads(text)
        if isinstance(values, dict) and all(isinstance(value, int) for value in values.values()):
            return values
    except (ValueError, TypeError, RecursionError):
        pass
    raise ValueError("its metadata are not a JSON mapping from labels to numbers")


def _image_ids(part: h5py.Group, user: str) -> npt.NDArray[np.bytes_]:
    """The ids of a user's images, whose number is checked against the images' shape."""
    ids, images = dataset(part, "image_ids")[()], dataset(part, "images")
    if ids.dtype.kind != "S" or ids.ndim != 1:
        raise ValueError(f"user {user} has image_ids that are not text")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[::3] != (len(ids), 3):
        raise ValueError(f"user {user} has images of shape {images.shape} for {len(ids)} ids")
    return np.asarray(ids)


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode()


def _rgb(stored: h5py.Dataset) -> ByteArray:
    if stored.dtype != np.uint8 or (stored.shape[2:] != (3,) and stored.ndim != 2):
        raise ValueError(f"an image has type {stored.dtype} and shape {stored.shape}")
    image: ByteArray = stored[()]
    return image if image.ndim == 3 else np.repeat(image[:, :, None], 3, axis=2)
