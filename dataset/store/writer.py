"""Write our HDF5 file: places are known beforehand, rows come in any order, the name appears at the end.

Shape letters: U users, N images, S side in pixels.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import platform
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from dataset.arrays import ByteArray, IntArray
from dataset.files import locked, sync
from dataset.journal import FULL, Journal
from dataset.store.annotations import offsets_of, stored
from dataset.store.index import DatasetIndex, IdColumn, PartitionIndex, SplitIndex, check_index
from dataset.store.native import (
    ANNOTATED,
    FORMATS,
    MAPPINGS,
    PARTITIONS,
    TYPES,
    Storage,
    checksum,
    content_checksum,
    leaf_name,
    leaves_of,
    version_of,
)
from dataset.store.validate import validate

_SLACK = 1 << 20  # bytes reserved beyond the data, for what HDF5 adds when the file is completed


class DataWriter:
    """Writes one file; a context manager.

    The index is written first and room for every image is reserved on the disk; ``write`` then puts images at
    their places with positioned writes. On leaving the block every row must have been written; the file is
    checked, flushed to the disk and renamed to ``path``. If the block raises, nothing is left behind.

    With a journal, the file in the making is the journal's and outlives the process: a writer of the same
    plan (index, lengths and ``origin``) takes it up; `already` says what `put_down` put there before.

    Args:
        path: where the file is to appear; an existing one is replaced at the end.
        index: users, images, labels, label mappings and provenance (JSON values only).
        storage: ``jpeg`` keeps the bytes of each image, ``raw`` its pixels.
        image_bytes: for ``jpeg``, the byte length of each image, ``[N]`` by split.
        image_size: for ``raw``, the side S of the images in pixels; None keeps the pixels of each image in
            its own size, which the index must give.
        journal: of a preprocessing that can be stopped and taken up again.
        origin: what identifies the images' bytes.

    Raises:
        ValueError: if the index contradicts itself.
        OSError: if the disk is full.
    """

    def __init__(
        self,
        path: Path,
        index: DatasetIndex,
        *,
        storage: Storage,
        image_bytes: Mapping[str, IntArray] | None = None,
        image_size: int | None = None,
        journal: Journal | None = None,
        origin: str = "",
    ) -> None:
        assert (storage == "jpeg") == (image_bytes is not None), "image_bytes goes with jpeg storage"
        assert storage == "raw" or image_size is None, "image_size goes with raw storage"
        check_index(index)
        self._path, self._index, self._storage, self._image_size = Path(path), index, storage, image_size
        self._journal, self._origin = journal, origin
        temporary = self._path.with_name(f"{self._path.name}.tmp-{platform.node()}-{os.getpid()}")
        self._temporary = journal.data if journal else temporary
        counts = {name: split.num_images for name, split in index.splits.items()}
        self._crc = {name: np.zeros(count, np.uint32) for name, count in counts.items()}
        self._written = {name: np.zeros(count, bool) for name, count in counts.items()}
        self._places: dict[str, IntArray] = {}
        for name, count in counts.items():
            if image_bytes is not None:
                sizes = np.asarray(image_bytes[name], np.int64)
                assert len(sizes) == count
                assert (sizes > 0).all(), "image_bytes gives every image's length"
            elif image_size is not None:
                sizes = np.full(count, image_size * image_size * 3, np.int64)
            else:
                shapes = index.splits[name].image_sizes
                assert shapes is not None, "raw images of their own size need sizes"
                sizes = shapes.astype(np.int64).prod(axis=1) * 3
            self._places[name] = offsets_of(sizes)
        self._data_at: dict[str, int] = {}
        self._descriptor = -1
        self._cleanup = ExitStack()  # without a journal: deletes the unfinished file, and gives up its lock

    def __enter__(self) -> DataWriter:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with _disk_errors(self._path, self._journal):
                plan = self._plan().encode()
                if self._journal and self._journal.get("plan") == plan and self._temporary.exists():
                    self._take_up()
                else:
                    self._begin()
                    if self._journal:
                        self._journal.forget("written")
                        self._journal.put("plan", plan)
        except BaseException:
            self._discard()
            raise
        return self

    def _begin(self) -> None:
        _sweep(self._path)
        if self._journal:
            self._temporary.unlink(missing_ok=True)
        free = shutil.disk_usage(self._path.parent).free
        index_bytes = sum(128 * split.num_images for split in self._index.splits.values())
        need = sum(int(places[-1]) for places in self._places.values()) + index_bytes + _SLACK
        if free < need:
            raise OSError(
                f"there is not enough space on the disk of {self._path}: {(need - free) / 1e9:.2f} GB "
                "more are needed; free some space or choose another disk"
            ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._journal is None:
            lock = _lock_of(self._temporary)
            refusal = f"another process is writing {self._temporary}: wait until it ends"
            self._cleanup.enter_context(locked(lock, refusal))
            self._cleanup.callback(lock.unlink, missing_ok=True)
            self._cleanup.callback(self._temporary.unlink, missing_ok=True)
        self._create()
        self._descriptor = os.open(self._temporary, os.O_RDWR)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._descriptor, 0, self._temporary.stat().st_size + _SLACK)
        os.fsync(self._descriptor)

    def _take_up(self) -> None:
        with h5py.File(self._temporary) as file:
            self._data_at = {name: int(file[f"{name}/images"].id.get_offset() or 0) for name in self._places}
        self._descriptor = os.open(self._temporary, os.O_RDWR)

    def _plan(self) -> str:
        """SHA-256 of all that decides which byte lies where."""
        digest = hashlib.sha256(f"{self._origin} {self._storage} {self._image_size}".encode())
        digest.update(json.dumps([dict(m) for m in self._index.label_mappings.values()]).encode())
        version = version_of(self._index)
        for name, split in self._index.splits.items():
            digest.update(name.encode() + checksum(self._places[name]).encode())
            for key, column in _columns(split, self._index.grouped, version).items():
                digest.update(f"{key} {checksum(column)}".encode())
        return digest.hexdigest()

    def put_down(self, name: str, rows: Mapping[str, IntArray]) -> None:
        """Have the journal say that these rows are on the disk, when they are."""
        assert self._journal is not None
        os.fdatasync(self._descriptor)
        crc = [self._crc[split][here].tobytes() for split, here in rows.items()]
        self._journal.put(f"written-{name}", b"".join(crc))

    def already(self, name: str, rows: Mapping[str, IntArray]) -> bool:
        """Whether `put_down` said so in an earlier process; then they need not be written."""
        assert self._journal is not None
        kept = self._journal.get(f"written-{name}")
        if kept is None or len(kept) != 4 * sum(map(len, rows.values())):
            return False
        crc, done = np.frombuffer(kept, np.uint32), 0
        for split, here in rows.items():
            self._crc[split][here] = crc[done : done + len(here)]
            self._written[split][here] = True
            done += len(here)
        return True

    def write(
        self,
        split: str,
        rows: IntArray,
        images: Sequence[bytes | memoryview | ByteArray] | ByteArray,
    ) -> None:
        """Put image i of ``images`` at row ``rows[i]`` of a split. Threads may write different rows at once.

        For ``jpeg`` storage each image is its bytes, of the announced length; for ``raw``, its pixels
        ``[S, S, 3]``, or ``[H, W, 3]`` in its own size, as uint8. Neighbouring rows are written at once.
        """
        rows = np.asarray(rows, np.int64)
        assert len(rows) == len(images)
        assert not self._written[split][rows].any(), "a row is written once"
        assert all(image.dtype == np.uint8 for image in images if isinstance(image, np.ndarray))
        content = [
            np.ascontiguousarray(image).reshape(-1).data if isinstance(image, np.ndarray) else image
            for image in images
        ]
        places, base = self._places[split], self._data_at[split]
        sizes = np.fromiter(map(len, content), np.int64, count=len(content))
        assert np.array_equal(sizes, places[rows + 1] - places[rows]), "a length was announced otherwise"
        self._crc[split][rows] = [zlib.crc32(image) for image in content]
        breaks = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        with _disk_errors(self._path, self._journal):
            for start, stop in pairwise(breaks):
                if start < stop:
                    _write_all(self._descriptor, content[start:stop], base + int(places[rows[start]]))
        self._written[split][rows] = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                with _disk_errors(self._path, self._journal):
                    self._complete()
        finally:
            self._discard()

    def _complete(self) -> None:
        missing = {name: int((~done).sum()) for name, done in self._written.items() if not done.all()}
        assert not missing, f"rows were never written: {missing}"
        os.close(self._descriptor)
        self._descriptor = -1
        if self._journal:
            self._journal.forget("plan")  # a file left half completed is started over
        with h5py.File(self._temporary, "r+") as file:
            for name, crc in self._crc.items():
                file[name]["image_crc32"][...] = crc
                file[name]["image_crc32"].attrs["sha256"] = checksum(crc)
            file.attrs["content_sha256"] = content_checksum(file)
        with ThreadPoolExecutor() as pool:  # the disk and the processor work side by side
            on_disk = pool.submit(sync, self._temporary)
            validate(self._temporary)
            on_disk.result()
        self._temporary.replace(self._path)
        sync(self._path.parent)

    def _discard(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._cleanup.close()

    def _create(self) -> None:
        # Format 1.8 keeps checksums over HDF5's own structures, which the older default does not.
        with h5py.File(self._temporary, "w", libver=("v108", "v108")) as file:
            size, version = self._image_size or 0, version_of(self._index)
            file.attrs.update(
                format=FORMATS[version],
                schema_version=version,
                storage=self._storage,
                grouped=self._index.grouped,
                image_size=size,
                content_sha256="0" * 64,
            )
            mappings = self._index.label_mappings
            texts: dict[str, Any] = {"annotations": []}
            if version < ANNOTATED:
                texts = {name: dict(mappings[taxonomy]) for taxonomy, name in MAPPINGS.items()}
            else:
                for name, found in next(iter(self._index.splits.values())).annotations.items():
                    entry = {"name": name, "kind": found.kind, "classes": list(mappings[name])}
                    texts["annotations"].append(entry)
            for name, value in {**texts, "provenance": dict(self._index.provenance)}.items():
                text = json.dumps(value, sort_keys=True, ensure_ascii=False).encode()
                _put(file, f"metadata/{name}", np.frombuffer(text, np.uint8))
            for name, split in self._index.splits.items():
                for key, column in _columns(split, self._index.grouped, version).items():
                    _put(file, f"{name}/{key}", column)
                _put(file, f"{name}/image_crc32", self._crc[name])
                if not size:
                    _put(file, f"{name}/image_offsets", self._places[name])
                total, count = int(self._places[name][-1]), split.num_images
                shape = (count, size, size, 3) if size else (total,)
                self._data_at[name] = _reserve(file, f"{name}/images", shape)


def _columns(split: SplitIndex, grouped: bool, version: int) -> dict[str, npt.NDArray[Any]]:
    columns: dict[str, npt.NDArray[Any]] = {"user_ids": IdColumn.of(split.user_ids).raw}
    owners = {"user_offsets": split.user_offsets} if grouped else {"user_index": split.user_index}
    columns |= {name: column.astype(TYPES[name]) for name, column in owners.items()}
    columns["image_ids"] = IdColumn.of(split.image_ids).raw
    for name, annotation in split.annotations.items():
        data = stored(annotation)
        for leaf in leaves_of(annotation.kind, version):
            columns[leaf_name(name, leaf, version)] = data[leaf]
    if split.image_sizes is not None:
        columns["image_sizes"] = split.image_sizes.astype(np.int32)
    return columns | _partition_columns(split.partitions)


def put_partitions(
    file: h5py.File, split: str, partitions: Mapping[str, PartitionIndex], provenance: str
) -> None:
    """Write these partitions of a split, and another provenance, into a complete file."""
    version = max(2, int(file.attrs["schema_version"]))
    file.attrs.update(format=FORMATS[version], schema_version=version)
    for name in (f"{split}/{PARTITIONS}/{part}" for part in partitions):
        if name in file:
            del file[name]
    for name, column in _partition_columns(partitions).items():
        _put(file, f"{split}/{name}", column)
    del file["metadata/provenance"]
    _put(file, "metadata/provenance", np.frombuffer(provenance.encode(), np.uint8))
    file.attrs["content_sha256"] = content_checksum(file)


def _partition_columns(partitions: Mapping[str, PartitionIndex]) -> dict[str, npt.NDArray[Any]]:
    columns: dict[str, npt.NDArray[Any]] = {}
    for name, partition in partitions.items():
        columns[f"{PARTITIONS}/{name}/user_ids"] = IdColumn.of(partition.user_ids).raw
        columns[f"{PARTITIONS}/{name}/rows"] = partition.rows.astype(np.int64)
        columns[f"{PARTITIONS}/{name}/offsets"] = partition.offsets.astype(np.int64)
    return columns


def _put(file: h5py.File, name: str, array: npt.NDArray[Any]) -> None:
    file.create_dataset(name, data=array, track_times=False).attrs["sha256"] = checksum(array)


def _reserve(file: h5py.File, name: str, shape: tuple[int, ...]) -> int:
    """An unwritten contiguous uint8 data set; returns where its bytes begin in the file."""
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_layout(h5py.h5d.CONTIGUOUS)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    layout.set_obj_track_times(False)
    space = h5py.h5s.create_simple(shape)
    data = h5py.h5d.create(file.id, name.encode(), h5py.h5t.STD_U8LE, space, layout)
    return int(data.get_offset() or 0)


def _write_all(descriptor: int, images: Sequence[bytes | memoryview], at: int) -> None:
    view = memoryview(images[0] if len(images) == 1 else b"".join(images))
    while len(view):
        count = os.pwrite(descriptor, view, at)
        view, at = view[count:], at + count


def _lock_of(temporary: Path) -> Path:
    """The lock of a file in the making, which a container with this machine's name may be writing."""
    return temporary.with_name(f"{temporary.name}.lock")


def _sweep(path: Path) -> None:
    """Delete what processes of this machine that are dead, and hold no lock, left of the same file."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.tmp-{glob.escape(platform.node())}-*"):
        number = left.name.rpartition("-")[2]
        if number.isdigit() and not Path(f"/proc/{number}").exists() and Path("/proc/self").exists():
            with suppress(ValueError), locked(_lock_of(left), "its process runs on a machine of this name"):
                left.unlink(missing_ok=True)
                _lock_of(left).unlink(missing_ok=True)


@contextmanager
def _disk_errors(path: Path, journal: Journal | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            kept = "nothing was kept: free some space or choose another disk"
            if journal and error.errno in FULL:
                kept = (
                    f"the finished part is kept in {journal.folder}: free some space, then run the same "
                    "command again to continue"
                )
            raise OSError(f"the disk is full, so {path} could not be written; {kept}") from error
        raise
