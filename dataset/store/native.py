"""Our own file format: names and types of its parts, its checksums, and its reader.

`dataset.store.hdf5` describes the schema. Shape letters: U users, N images, S side in pixels.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
import numpy.typing as npt

from dataset.arrays import ByteArray, IntArray
from dataset.store.annotations import LEAF_TYPES, LEAVES, Boxes, Kind, restored, rises
from dataset.store.index import SPLITS, TAXONOMIES, DatasetIndex, IdColumn, PartitionIndex, SplitIndex

FORMATS = {1: "flair-on-pfl", 2: "flair-on-pfl", 3: "federated-images", 4: "federated-images"}
"""What a file of each schema version says that it is."""
SCHEMA_VERSION = 4
"""The newest that is read. A file is written as the oldest version that can hold it."""
ANNOTATED, FLAGGED = 3, 4
"""The versions from which on annotations have names of their own, and boxes have flags."""
ANNOTATIONS = "annotations"
PARTITIONS = "partitions"
PARTITION_COLUMNS = ("offsets", "rows", "user_ids")
MAPPINGS = {"labels": "label_mapping", "fine_grained_labels": "fine_grained_label_mapping"}

TYPES = LEAF_TYPES | dict.fromkeys(("user_offsets", "image_offsets", "rows", "offsets"), "<i8")
TYPES |= {"user_index": "<i4", "image_sizes": "<i4", "image_crc32": "<u4"}
TYPES |= {f"{taxonomy}_{leaf}": LEAF_TYPES[leaf] for taxonomy in TAXONOMIES for leaf in LEAVES["label set"]}
WIDTHS = {"image_sizes": 2, "corners": 4}
"""Widths of the columns that are matrices."""

Storage = Literal["jpeg", "raw"]
StoredImages = Sequence[memoryview | ByteArray] | ByteArray
"""Images as they are stored: the bytes of each JPEG, the pixels of each image, or ``[n, S, S, 3]``."""


def damaged(path: Path | str, what: object, state: str = "damaged: ") -> ValueError:
    """The error for a file whose content is damaged, and what to do about it."""
    remedy = "make it again with the command that made it (download_preprocess or dataset.convert)"
    return ValueError(f"{path} is {state}{' '.join(str(what).split())}; {remedy}")


@contextmanager
def opened(path: Path | str) -> Iterator[h5py.File]:
    """Open an HDF5 file. Errors of the library and the block become one ValueError that names the file."""
    if not Path(path).is_file():
        raise ValueError(
            f"there is no file {path}; make it with python -m dataset.NAME.download_preprocess or "
            "python -m dataset.convert"
        )
    try:
        with h5py.File(path) as file:
            yield file
    except ValueError as error:
        if str(path) in str(error):  # it names the file already
            raise
        raise damaged(path, error) from None
    except (OSError, RuntimeError, KeyError, TypeError, OverflowError) as error:
        text = " ".join(str(error).split())
        if "file signature not found" in text:
            raise ValueError(f"{path} is not an HDF5 file") from None
        if "Permission denied" in text:
            raise ValueError(f"{path} cannot be read: you do not have the permission") from None
        if "truncated" in text:
            raise damaged(path, "(the copy is incomplete)", "truncated ") from None
        raise damaged(path, text[:160]) from None


def member(group: h5py.Group, name: str) -> Any:
    """A group or data set of an untrusted file.

    Raises:
        ValueError: with a clause, if it is missing; or if it, or any link to it, leads to another file.
    """
    here, where = group, f"{group.name}/{name}".strip("/")
    for part in name.split("/"):
        if not isinstance(here, h5py.Group):
            raise ValueError(f"{where} is missing")
        if isinstance(here.get(part, getlink=True), h5py.ExternalLink):
            raise ValueError(f"{where} is in another file")
        if part not in here:
            raise ValueError(f"{where} is missing")
        here = here[part]
        if h5py.h5f.get_name(here.id) != h5py.h5f.get_name(group.id):  # by a soft link to an external one
            raise ValueError(f"{where} is in another file")
    return here


def dataset(group: h5py.Group, name: str) -> h5py.Dataset:
    """A data set of an untrusted file.

    Raises:
        ValueError: with a clause, as `member`; or if it declares more bytes than could have been stored
            (deflate packs 1,032 to one). Reading it would take memory, or secrets.
    """
    here, where = member(group, name), f"{group.name}/{name}".strip("/")
    if not isinstance(here, h5py.Dataset) or here.shape is None:
        raise ValueError(f"{where} has no data")
    if here.external or here.is_virtual:
        raise ValueError(f"{where} has its data in other files")
    stored = here.id.get_storage_size()
    if here.nbytes > 1100 * stored + (1 << 16):
        raise ValueError(f"{where} declares {here.nbytes:,} bytes but has {stored:,}")
    return here


def column(group: h5py.Group, name: str) -> npt.NDArray[Any]:
    """A column of a split. Raises ValueError if it has another type or shape than the schema's."""
    data, leaf = dataset(group, name), name.rpartition("/")[2]
    known = data.dtype.str == TYPES[leaf] if leaf in TYPES else data.dtype.kind == "S"
    if not known or data.shape[1:] != ((WIDTHS[leaf],) if leaf in WIDTHS else ()):
        where = f"{group.name}/{name}".strip("/")
        raise ValueError(f"{where} has type {data.dtype}, not {TYPES.get(leaf, 'bytes')}, or another shape")
    return np.asarray(data[()])


def check_sum(data: h5py.Dataset, content: npt.NDArray[Any]) -> None:
    """Raise ValueError if the content of a data set does not agree with its checksum."""
    if data.attrs.get("sha256") != checksum(content):
        raise ValueError(f"{data.name.strip('/')} does not match its checksum")


def _annotations(content: Any) -> tuple[dict[str, Kind], dict[str, dict[str, int]]]:
    """Kind and class names of each annotation, from the metadata of version 3."""
    try:
        kinds: dict[str, Kind] = {str(entry["name"]): entry["kind"] for entry in content}
        mappings = {
            str(entry["name"]): {str(name): k for k, name in enumerate(entry["classes"])} for entry in content
        }
        if set(kinds.values()) <= set(LEAVES) and len(kinds) == len(content):
            return kinds, mappings
    except (TypeError, KeyError):
        pass
    raise ValueError("metadata/annotations does not list annotations")


def is_native(file: h5py.File) -> bool:
    """Whether the file says that it is one of ours."""
    known = [*FORMATS.values(), *(name.encode() for name in FORMATS.values())]
    return bool("format" in file.attrs and file.attrs["format"] in known)


def version_of(index: DatasetIndex) -> int:
    """The oldest schema version that can hold an index."""
    alphabetical = all(list(names) == sorted(names) for names in index.label_mappings.values())
    version = 0
    for split in index.splits.values():
        kinds = [(name, annotation.kind) for name, annotation in split.annotations.items()]
        plain = alphabetical and split.image_sizes is None
        if not plain or kinds != [(name, "label set") for name in TAXONOMIES]:
            boxes = [found for found in split.annotations.values() if isinstance(found, Boxes)]
            version = max(version, FLAGGED if any(found.flags.any() for found in boxes) else ANNOTATED)
    if version:
        return version
    return 2 if any(split.partitions for split in index.splits.values()) else 1


def leaf_name(annotation: str, leaf: str, version: int) -> str:
    """The path of a data set of an annotation within a split's group."""
    return f"{annotation}_{leaf}" if version < ANNOTATED else f"{ANNOTATIONS}/{annotation}/{leaf}"


def leaves_of(kind: Kind, version: int) -> tuple[str, ...]:
    """The data sets of an annotation of this kind in a file of this schema version."""
    return tuple(leaf for leaf in LEAVES[kind] if leaf != "flags" or version >= FLAGGED)


def partition_names(group: h5py.Group) -> list[str]:
    """The partitions of a split's group, in order of their names."""
    link = group.get(PARTITIONS, getlink=True)
    if link is None:
        return []
    if isinstance(link, h5py.ExternalLink) or not isinstance(group[PARTITIONS], h5py.Group):
        raise ValueError(f"{PARTITIONS} is not an HDF5 group")
    return sorted(group[PARTITIONS])


def checksum(array: npt.NDArray[Any]) -> str:
    """SHA-256 of an array's bytes, in hexadecimal."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def _begins(path: Path, data: h5py.Dataset) -> int:
    """The position in the file of a data set's first byte; 0 for a data set without any.

    Raises:
        ValueError: for a data set that was compressed or cut into chunks, as by h5repack. Its bytes are not
            where they are read.
    """
    offset: int | None = data.id.get_offset()
    if offset is None and data.size:
        raise ValueError(
            f"{path} has {data.name.strip('/')} compressed or in chunks, but images and masks are read in "
            f"one piece: run h5repack -l CONTI -f NONE {path} NEW, and take the file NEW"
        )
    return offset or 0


def _group(file: h5py.File, name: str) -> h5py.Group:
    """A group of an untrusted file; ValueError if it is none."""
    found = member(file, name)
    if not isinstance(found, h5py.Group):
        raise ValueError(f"{name} is not an HDF5 group")
    return found


def content_checksum(file: h5py.File) -> str:
    """SHA-256 over header, index, label mappings and image checksums: the same data, the same value.

    Provenance, and with it every date and path, is left out.
    """
    lines = [f"{key}={file.attrs[key]}" for key in ("schema_version", "storage", "grouped", "image_size")]
    version = int(file.attrs["schema_version"])
    names = (
        [f"metadata/{name}" for name in MAPPINGS.values()]
        if version < ANNOTATED
        else ["metadata/annotations"]
    )
    for split in sorted(set(file) - {"metadata"}):
        groups = ("images", PARTITIONS, ANNOTATIONS)
        names += [f"{split}/{name}" for name in sorted(_group(file, split)) if name not in groups]
        held = f"{split}/{ANNOTATIONS}"
        for annotation in sorted(_group(file, held)) if ANNOTATIONS in file[split] else ():
            leaves = _group(file, f"{held}/{annotation}")
            names += [f"{held}/{annotation}/{leaf}" for leaf in sorted(leaves)]
        parts = [f"{split}/{PARTITIONS}/{name}" for name in partition_names(file[split])]
        names += [f"{part}/{leaf}" for part in parts for leaf in PARTITION_COLUMNS]
    for name in names:
        data = dataset(file, name)
        lines.append(f"{name} {data.dtype.str} {data.shape} {data.attrs['sha256']}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def read_json(file: h5py.File, name: str) -> Any:
    """A JSON text that is stored as bytes under ``metadata``."""
    data = dataset(file, f"metadata/{name}")
    check_sum(data, data[()])
    try:
        return json.loads(bytes(data[()]))
    except (ValueError, RecursionError):
        raise ValueError(f"metadata/{name} is not JSON") from None


class NativeReader:
    """Reads our layout; pixels by positioned reads of one descriptor, which threads and forks may share."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with opened(path) as file:
            self.version = int(file.attrs["schema_version"])
            if self.version > SCHEMA_VERSION:
                raise ValueError(
                    f"{path} has schema version {self.version}, but this version of the code reads only "
                    f"up to {SCHEMA_VERSION}: update the code"
                )
            self.storage: Storage = "raw" if file.attrs["storage"] == "raw" else "jpeg"
            self.grouped = bool(file.attrs["grouped"])
            self.image_size: int | None = int(file.attrs["image_size"]) or None
            self.splits = tuple(name for name in SPLITS if name in file)
            self.content_sha256: str | None = str(file.attrs["content_sha256"])
            self.kinds: dict[str, Kind] = dict.fromkeys(TAXONOMIES, "label set")
            self.label_mappings: dict[str, dict[str, int]]
            if self.version < ANNOTATED:
                self.label_mappings = {t: read_json(file, name) for t, name in MAPPINGS.items()}
            else:
                self.kinds, self.label_mappings = _annotations(read_json(file, "annotations"))
            self.provenance: dict[str, Any] = read_json(file, "provenance")
            for content in (*self.label_mappings.values(), self.provenance):
                if not isinstance(content, dict):
                    raise ValueError("its metadata are not JSON objects")
            self._sized = any("image_sizes" in file[name] for name in self.splits)
            images = {name: dataset(file, f"{name}/images") for name in self.splits}
            self._data_at = {name: _begins(path, data) for name, data in images.items()}
        self._columns: dict[tuple[str, str], IntArray] = {}
        self._descriptor: int | None = None

    def column_names(self) -> list[str]:
        """The data sets of a split's group, without ``images`` and partitions."""
        names = ["user_ids", "user_offsets" if self.grouped else "user_index", "image_ids", "image_crc32"]
        for name, kind in self.kinds.items():
            names += [leaf_name(name, leaf, self.version) for leaf in leaves_of(kind, self.version)]
        names += ["image_sizes"] if self._sized else []
        return names + (["image_offsets"] if self.image_size is None else [])

    def split(self, name: str) -> SplitIndex:
        """The index of one split: a few contiguous reads whatever the number of users."""
        with opened(self._path) as file:
            group = file[name]
            users, images = IdColumn(column(group, "user_ids")), IdColumn(column(group, "image_ids"))
            if self.grouped:
                offsets = column(group, "user_offsets")
                if not rises(offsets, len(users), len(images), least=1):
                    raise ValueError(f"split {name}: user_offsets do not rise from 0 to the number of images")
                owner = np.repeat(np.arange(len(users), dtype=np.int32), np.diff(offsets))
            else:
                offsets, owner = np.empty(0, np.int64), column(group, "user_index")
            annotations = {}
            for key, kind in self.kinds.items():
                found = {}
                for leaf in leaves_of(kind, self.version):
                    at = leaf_name(key, leaf, self.version)
                    found[leaf] = self._bytes(group, at) if leaf == "png" else column(group, at)
                annotations[key] = restored(kind, found, len(self.label_mappings[key]))
            partitions = {}
            for part in partition_names(group):
                dealt, rows, ids = (
                    column(group, f"{PARTITIONS}/{part}/{leaf}") for leaf in PARTITION_COLUMNS
                )
                partitions[part] = PartitionIndex(IdColumn(ids), rows, dealt)
            sizes = column(group, "image_sizes") if self._sized else None
            return SplitIndex(users, offsets, owner, images, annotations, partitions, sizes)

    def _bytes(self, group: h5py.Group, name: str) -> ByteArray:
        """The bytes of masks, which are mapped and not read."""
        data = dataset(group, name)
        if data.dtype != np.uint8 or data.ndim != 1 or not data.size:
            raise ValueError(f"{name} holds no bytes")
        return np.memmap(self._path, np.uint8, "r", _begins(self._path, data), data.shape)

    def _column(self, split: str, name: str) -> IntArray:
        """A column of a split; read once."""
        if (split, name) not in self._columns:
            with opened(self._path) as file:
                data = column(file[split], name).astype(np.int64)
                sizes = len(file[split]["image_ids"]), len(file[split]["images"])
                if name == "image_offsets" and not rises(data, *sizes, least=1):
                    raise ValueError(f"{split}/{name} do not rise from 0 to the number of bytes")
            self._columns[split, name] = data
        return self._columns[split, name]

    def image_offsets(self, split: str) -> IntArray:
        """The offset of each image in ``images``, in bytes, ``[N + 1]``."""
        return self._column(split, "image_offsets")

    def checksums(self, split: str) -> IntArray:
        """The CRC-32 of each image as it was stored, ``[N]``."""
        return self._column(split, "image_crc32")

    def stored(self, split: str, rows: IntArray) -> StoredImages:
        """The images at these rows as stored; neighbouring rows are read at once."""
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(rows, breaks) if len(run)]
        if self.image_size is not None:
            out, done = np.empty((len(rows), self.image_size, self.image_size, 3), np.uint8), 0
            for start, stop in runs:
                size = out[0].nbytes
                self._read_into(out[done : done + stop - start], self._data_at[split] + start * size)
                done += stop - start
            return out
        offsets = self.image_offsets(split)
        images: list[memoryview] = []
        for start, stop in runs:
            buffer = np.empty(int(offsets[stop] - offsets[start]), np.uint8)
            self._read_into(buffer, self._data_at[split] + int(offsets[start]))
            cuts = (offsets[start : stop + 1] - offsets[start]).tolist()
            images += [buffer.data[a:b] for a, b in pairwise(cuts)]
        if self.storage == "jpeg":
            return images
        sizes = self._column(split, "image_sizes")
        shapes = sizes[rows] if len(sizes) == len(offsets) - 1 else np.zeros((len(rows), 2), np.int64)
        if (shapes.prod(axis=1) * 3 != np.diff(offsets)[rows]).any():
            raise damaged(self._path, f"{split}/image_sizes contradict its images")
        return [np.asarray(image).reshape(h, w, 3) for image, (h, w) in zip(images, shapes.tolist())]

    def _read_into(self, buffer: ByteArray, at: int) -> None:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDONLY)
            self._finalizer = weakref.finalize(self, os.close, self._descriptor)
        view = buffer.reshape(-1).data
        while len(view):
            count = os.preadv(self._descriptor, [view], at)
            if count == 0:
                raise damaged(self._path, "(it ends early)", "truncated ")
            view, at = view[count:], at + count

    def close(self) -> None:
        """Close the descriptor; a later read opens another."""
        if self._descriptor is not None:
            self._finalizer()
            self._descriptor = None
