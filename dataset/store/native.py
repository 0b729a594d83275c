"""Our own file at rest: names and types of its parts, its checksums, and how it is read.

The schema is written down in `dataset.store.hdf5`. Shape letters: U users, N images, S side in pixels.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol, overload

import h5py
import numpy as np
import numpy.typing as npt

from dataset.store.annotations import LEAF_TYPES, LEAVES, IntArray, Kind, kind_of, restored
from dataset.store.index import SPLITS, TAXONOMIES, DatasetIndex, PartitionIndex, SplitIndex

FORMATS = {1: "flair-on-pfl", 2: "flair-on-pfl", 3: "federated-images"}
"""What a file of each schema version says that it is."""
SCHEMA_VERSION = 3
"""The newest that is read. A file is written as the oldest version that can hold it."""
ANNOTATIONS = "annotations"
PARTITIONS = "partitions"
PARTITION_COLUMNS = ("offsets", "rows", "user_ids")
PARTITION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,79}")
MAPPINGS = {"labels": "label_mapping", "fine_grained_labels": "fine_grained_label_mapping"}
REMAKE = "make it again with its data set's download_preprocess command"

TYPES = {
    "user_offsets": "<i8",
    "user_index": "<i4",
    "image_offsets": "<i8",
    "image_crc32": "<u4",
    "images": "|u1",
    "rows": "<i8",
    "offsets": "<i8",
}
TYPES |= {"image_sizes": "<i4"} | LEAF_TYPES
TYPES |= {f"{taxonomy}_indptr": "<i8" for taxonomy in TAXONOMIES}
TYPES |= {f"{taxonomy}_indices": "<u2" for taxonomy in TAXONOMIES}

WIDTHS = {"image_sizes": 2, "corners": 4}
"""Of the columns that are matrices."""

Storage = Literal["jpeg", "raw"]
StoredImages = Sequence[memoryview | npt.NDArray[np.uint8]] | npt.NDArray[np.uint8]


class Reader(Protocol):
    """What `dataset.store.hdf5.DataFile` asks of each layout that it can read."""

    splits: tuple[str, ...]
    grouped: bool
    storage: Storage
    image_size: int | None
    label_mappings: dict[str, dict[str, int]]
    provenance: dict[str, Any]

    def split(self, name: str) -> SplitIndex:
        """The index of one split."""
        ...

    def stored(self, split: str, rows: IntArray) -> StoredImages:
        """The images at these rows as stored: JPEG bytes each, or pixels each, or ``[n, S, S, 3]``."""
        ...

    def close(self) -> None:
        """Release the file."""
        ...


class IdColumn(Sequence[str]):
    """User or image ids as a fixed-width byte array; each becomes a string only when it is looked at."""

    def __init__(self, raw: npt.NDArray[np.bytes_]) -> None:
        self.raw = raw

    @classmethod
    def of(cls, ids: Sequence[str]) -> IdColumn:
        """Pack strings (UTF-8)."""
        if isinstance(ids, IdColumn):
            return ids
        encoded = [one.encode() for one in ids]
        return cls(np.array(encoded, f"S{max(map(len, encoded), default=1) or 1}"))

    def __len__(self) -> int:
        return len(self.raw)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> IdColumn: ...
    def __getitem__(self, at: int | slice) -> str | IdColumn:
        if isinstance(at, slice):
            return IdColumn(self.raw[at])
        return bytes(self.raw[at]).decode()

    def __iter__(self) -> Iterator[str]:
        return (one.decode() for one in self.raw.tolist())


@contextmanager
def opened(path: Path | str, mode: str = "r") -> Iterator[h5py.File]:
    """An HDF5 file, whose library's complaints become one ValueError that names the file."""
    if not Path(path).is_file():
        raise ValueError(f"no file {path}; make one with python -m dataset.NAME.download_preprocess")
    try:
        with h5py.File(path, mode) as file:
            yield file
    except ValueError as error:
        if str(path) in str(error):  # it has a sentence of its own
            raise
        raise ValueError(f"{path} is damaged ({' '.join(str(error).split())[:160]}); {REMAKE}") from None
    except (OSError, RuntimeError, KeyError, TypeError, OverflowError) as error:
        text = " ".join(str(error).split())
        if "file signature not found" in text:
            raise ValueError(f"{path} is not an HDF5 file") from None
        if "truncated" in text:
            raise ValueError(f"{path} is truncated (it was not copied whole); {REMAKE}") from None
        if "Permission denied" in text:
            raise ValueError(f"{path} may not be read (permission denied)") from None
        raise ValueError(f"{path} is damaged ({text[:160]}); {REMAKE}") from None


def dataset(group: h5py.Group, name: str) -> h5py.Dataset:
    """A data set of a file that may come from anywhere.

    Raises ValueError if it, or a link to it, leads to another file, or if it declares more bytes than could
    have been stored (deflate packs 1,032 to one): reading it would take memory, or secrets.
    """
    here = group
    for part in name.split("/"):
        if isinstance(here.get(part, getlink=True), h5py.ExternalLink):
            raise ValueError(f"{group.file.filename} is damaged: {name} lies in another file; {REMAKE}")
        here = here[part]
    if not isinstance(here, h5py.Dataset) or here.shape is None:
        raise ValueError(f"{group.file.filename} is damaged: {name} holds no data; {REMAKE}")
    if here.external or here.is_virtual:
        raise ValueError(f"{group.file.filename} is damaged: {name} keeps its data in other files; {REMAKE}")
    if here.nbytes > 1100 * here.id.get_storage_size() + (1 << 16):
        raise ValueError(
            f"{group.file.filename} is damaged: {name} declares {here.nbytes:,} bytes and holds "
            f"{here.id.get_storage_size():,}; {REMAKE}"
        )
    return here


def column(group: h5py.Group, name: str) -> npt.NDArray[Any]:
    """A column of a split. Raises ValueError if it has another type or shape than the schema's."""
    data, leaf = dataset(group, name), name.rpartition("/")[2]
    where = f"{group.file.filename} is damaged: {group.name.strip('/')}/{name}"
    known = data.dtype.str == TYPES[leaf] if leaf in TYPES else data.dtype.kind == "S"
    width = WIDTHS.get(leaf)
    if not known or data.shape[1:] != (() if width is None else (width,)):
        raise ValueError(f"{where} has type {data.dtype}, not {TYPES.get(leaf, 'bytes')}; {REMAKE}")
    return np.asarray(data[()])


def _annotations(path: Path, content: Any) -> tuple[dict[str, Kind], dict[str, dict[str, int]]]:
    """Kind and class names of each annotation, from the metadata of version 3."""
    try:
        kinds: dict[str, Kind] = {str(one["name"]): one["kind"] for one in content}
        mappings = {
            str(one["name"]): {str(name): k for k, name in enumerate(one["classes"])} for one in content
        }
        if set(kinds.values()) <= set(LEAVES) and len(kinds) == len(content):
            return kinds, mappings
    except (TypeError, KeyError):
        pass
    raise ValueError(f"{path} is damaged: metadata/annotations does not list annotations; {REMAKE}")


def is_native(file: h5py.File) -> bool:
    """Whether the file says that it is one of ours."""
    known = [*FORMATS.values(), *(name.encode() for name in FORMATS.values())]
    return bool("format" in file.attrs and file.attrs["format"] in known)


def version_of(index: DatasetIndex) -> int:
    """The oldest schema version that can hold an index."""
    for split in index.splits.values():
        kinds = [(name, kind_of(one)) for name, one in split.annotations.items()]
        if split.image_sizes is not None or kinds != [(name, "label set") for name in TAXONOMIES]:
            return SCHEMA_VERSION
    return 2 if any(split.partitions for split in index.splits.values()) else 1


def annotation_names(kinds: Mapping[str, Kind], version: int) -> dict[str, dict[str, str]]:
    """Where the data sets of each annotation are in a split's group, by annotation and leaf."""
    pattern = "{}_{}" if version < SCHEMA_VERSION else ANNOTATIONS + "/{}/{}"
    return {name: {leaf: pattern.format(name, leaf) for leaf in LEAVES[kind]} for name, kind in kinds.items()}


def index_names(reader: NativeReader) -> list[str]:
    """The data sets of a split's group, without ``images`` and partitions."""
    names = ["user_ids", "user_offsets" if reader.grouped else "user_index", "image_ids", "image_crc32"]
    for leaves in annotation_names(reader.kinds, reader.version).values():
        names += leaves.values()
    names += ["image_sizes"] if reader.sized else []
    return names + (["image_offsets"] if reader.image_size is None else [])


def partition_names(group: h5py.Group) -> list[str]:
    """The partitions of a split's group, in order of their names."""
    link = group.get(PARTITIONS, getlink=True)
    if link is None:
        return []
    if isinstance(link, h5py.ExternalLink) or not isinstance(group[PARTITIONS], h5py.Group):
        raise ValueError(f"{group.file.filename} is damaged: {PARTITIONS} is no group of it; {REMAKE}")
    return sorted(group[PARTITIONS])


def checksum(array: npt.NDArray[Any]) -> str:
    """SHA-256 of an array's bytes, in hexadecimal."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def content_checksum(file: h5py.File) -> str:
    """SHA-256 over header, index, label mappings and image checksums: the same data, the same value.

    Provenance, and with it every date and path, is left out.
    """
    lines = [f"{key}={file.attrs[key]}" for key in ("schema_version", "storage", "grouped", "image_size")]
    version = int(file.attrs["schema_version"])
    names = [f"metadata/{name}" for name in MAPPINGS.values()] if version < 3 else ["metadata/annotations"]
    for split in sorted(set(file) - {"metadata"}):
        groups = ("images", PARTITIONS, ANNOTATIONS)
        names += [f"{split}/{name}" for name in sorted(file[split]) if name not in groups]
        for one in sorted(file[split].get(ANNOTATIONS, ())):
            names += [f"{split}/{ANNOTATIONS}/{one}/{leaf}" for leaf in sorted(file[split][ANNOTATIONS][one])]
        parts = [f"{split}/{PARTITIONS}/{name}" for name in partition_names(file[split])]
        names += [f"{part}/{leaf}" for part in parts for leaf in PARTITION_COLUMNS]
    for name in names:
        data = file[name]
        lines.append(f"{name} {data.dtype.str} {data.shape} {data.attrs['sha256']}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def read_json(file: h5py.File, name: str) -> Any:
    """A JSON text that is stored as bytes under ``metadata``."""
    data = dataset(file, f"metadata/{name}")
    if data.attrs.get("sha256") != checksum(data[()]):
        raise ValueError(
            f"{file.filename} is damaged: metadata/{name} does not agree with its checksum; {REMAKE}"
        )
    try:
        return json.loads(bytes(data[()]))
    except (ValueError, RecursionError):
        raise ValueError(f"{file.filename} is damaged: metadata/{name} is not JSON; {REMAKE}") from None


class NativeReader:
    """Reads our layout; pixels by positioned reads of one descriptor, which threads and forks may share."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with opened(path) as file:
            version = int(file.attrs["schema_version"])
            if version > SCHEMA_VERSION:
                raise ValueError(
                    f"{path} has schema version {version}, newer than {SCHEMA_VERSION}, the newest that this "
                    "version of the code reads; update the code"
                )
            self.storage: Storage = "raw" if file.attrs["storage"] == "raw" else "jpeg"
            self.grouped = bool(file.attrs["grouped"])
            self.image_size: int | None = int(file.attrs["image_size"]) or None
            self.splits = tuple(name for name in SPLITS if name in file)
            self.content_sha256 = str(file.attrs["content_sha256"])
            self.version = version
            self.kinds: dict[str, Kind] = dict.fromkeys(TAXONOMIES, "label set")
            self.label_mappings: dict[str, dict[str, int]] = {}
            if version < SCHEMA_VERSION:
                self.label_mappings = {t: read_json(file, name) for t, name in MAPPINGS.items()}
            else:
                self.kinds, self.label_mappings = _annotations(path, read_json(file, "annotations"))
            self.provenance: dict[str, Any] = read_json(file, "provenance")
            for content in (*self.label_mappings.values(), self.provenance):
                if not isinstance(content, dict):
                    raise ValueError(f"{path} is damaged: its metadata are no JSON objects; {REMAKE}")
            self.sized = any("image_sizes" in file[name] for name in self.splits)
            missing = [name for name in self.splits if "images" not in file[name]]
            if missing:
                raise ValueError(f"{path} is damaged: {missing[0]}/images is missing; {REMAKE}")
            images = {name: dataset(file, f"{name}/images") for name in self.splits}
            self.data_at = {name: data.id.get_offset() or 0 for name, data in images.items()}
        self._image_offsets: dict[str, IntArray] = {}
        self._image_sizes: dict[str, IntArray] = {}
        self._descriptor: int | None = None

    def split(self, name: str) -> SplitIndex:
        """Read one split's columns: a few contiguous reads whatever the number of users."""
        with opened(self._path) as file:
            group = file[name]
            image_ids = IdColumn(column(group, "image_ids"))
            if self.grouped:
                offsets = column(group, "user_offsets")
                sizes = np.diff(offsets).clip(0)
                if sizes.max(initial=0) > len(image_ids) or sizes.sum() > len(image_ids):
                    raise ValueError(
                        f"{self._path} is damaged: split {name}: user_offsets do not rise from 0 to the "
                        f"number of images; {REMAKE}"
                    )
                owner = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
            else:
                offsets, owner = np.empty(0, np.int64), column(group, "user_index")
            places = annotation_names(self.kinds, self.version)
            found = {
                one: restored(kind, partial(self._annotation, group, places[one]), self._width(one))
                for one, kind in self.kinds.items()
            }
            image_sizes = column(group, "image_sizes") if self.sized else None
            partitions = {
                part: PartitionIndex(
                    IdColumn(column(group, f"{PARTITIONS}/{part}/user_ids")),
                    column(group, f"{PARTITIONS}/{part}/rows"),
                    column(group, f"{PARTITIONS}/{part}/offsets"),
                )
                for part in partition_names(group)
            }
            users = IdColumn(column(group, "user_ids"))
            return SplitIndex(users, offsets, owner, image_ids, found, partitions, image_sizes)

    def _width(self, annotation: str) -> int:
        """K."""
        return len(self.label_mappings[annotation])

    def _annotation(self, group: h5py.Group, places: Mapping[str, str], leaf: str) -> npt.NDArray[Any]:
        """A column of an annotation; the bytes of masks are mapped, not read."""
        name = places[leaf]
        if not name.endswith("/png"):
            return column(group, name)
        data = dataset(group, name)
        offset = data.id.get_offset()
        if data.dtype != np.uint8 or data.ndim != 1 or offset is None:
            raise ValueError(f"{self._path} is damaged: {name} holds no bytes; {REMAKE}")
        return np.memmap(self._path, np.uint8, "r", offset, data.shape)

    def image_sizes(self, split: str) -> IntArray:
        """Height and width of each image, ``[N, 2]``."""
        if split not in self._image_sizes:
            with opened(self._path) as file:
                self._image_sizes[split] = column(file[split], "image_sizes").astype(np.int64)
        return self._image_sizes[split]

    def image_offsets(self, split: str) -> IntArray:
        """Where each image begins in ``images``, ``[N + 1]``, in bytes."""
        if split not in self._image_offsets:
            with opened(self._path) as file:
                offsets, size = column(file[split], "image_offsets"), len(file[split]["images"])
                if (
                    offsets.min(initial=0) < 0
                    or offsets.max(initial=0) > size
                    or (np.diff(offsets) < 0).any()
                ):
                    raise ValueError(
                        f"{self._path} is damaged: {split}/image_offsets do not rise from 0 to the number of "
                        f"bytes; {REMAKE}"
                    )
                self._image_offsets[split] = offsets
        return self._image_offsets[split]

    def stored(self, split: str, rows: IntArray) -> StoredImages:
        """As `Reader.stored`; neighbouring rows are read at once."""
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(rows, breaks) if len(run)]
        if self.image_size is not None:
            shape = (self.image_size, self.image_size, 3)
            out, done = np.empty((len(rows), *shape), np.uint8), 0
            for start, stop in runs:
                size = out[0].nbytes
                self._read_into(out[done : done + stop - start], self.data_at[split] + start * size)
                done += stop - start
            return out
        offsets = self.image_offsets(split)
        images: list[memoryview | npt.NDArray[np.uint8]] = []
        for start, stop in runs:
            buffer = np.empty(int(offsets[stop] - offsets[start]), np.uint8)
            self._read_into(buffer, self.data_at[split] + int(offsets[start]))
            cuts = (offsets[start : stop + 1] - offsets[start]).tolist()
            view = buffer.data
            images += [view[a:b] for a, b in pairwise(cuts)]
        if self.storage == "raw":
            sizes = self.image_sizes(split)
            shapes = sizes[rows] if len(sizes) == len(offsets) - 1 else np.zeros((len(rows), 2), np.int64)
            if (shapes.prod(axis=1) * 3 != np.diff(offsets)[rows]).any():
                raise ValueError(
                    f"{self._path} is damaged: {split}/image_sizes contradict its images; {REMAKE}"
                )
            return [np.asarray(one).reshape(h, w, 3) for one, (h, w) in zip(images, shapes.tolist())]
        return images

    def _read_into(self, buffer: npt.NDArray[np.uint8], at: int) -> None:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDONLY)
            self._finalizer = weakref.finalize(self, os.close, self._descriptor)
        view = buffer.reshape(-1).data
        while len(view):
            count = os.preadv(self._descriptor, [view], at)
            if count == 0:
                raise ValueError(f"{self._path} is truncated; {REMAKE}")
            view, at = view[count:], at + count

    def close(self) -> None:
        """Close the descriptor; a later read opens another."""
        if self._descriptor is not None:
            self._finalizer()
            self._descriptor = None
