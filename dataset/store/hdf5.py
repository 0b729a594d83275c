"""One HDF5 file holds a FLAIR-like data set; read it, write it, describe and validate it.

    python -m dataset.store F

Schema, versions 1 and 2. Shape letters: U users, N images, B bytes of all JPEGs, S side in pixels, P
positives, V users of a partition, M images of it.

    attributes of /       format "flair-on-pfl" | schema_version 1, or 2 with partitions
                          | storage "jpeg" or "raw" | grouped | image_size S, or 0 for jpeg | content_sha256
    /metadata/label_mapping, fine_grained_label_mapping     JSON {name: column}, alphabetical, as uint8 bytes
    /metadata/provenance                                    JSON: source, revision, counts, tool, licence
    /{train|val|test}/user_ids            bytes [U]         fixed width, UTF-8
                     /user_offsets        int64 [U+1]       grouped: user u has rows offsets[u]:offsets[u+1]
                     /user_index          int32 [N]         not grouped: whose each image is
                     /image_ids           bytes [N]
                     /labels_indptr       int64 [N+1]       CSR: columns of image i are
                     /labels_indices      uint16 [P]        indices[indptr[i]:indptr[i+1]], sorted
                     /fine_grained_labels_indptr, _indices  the same for the fine taxonomy
                     /images              uint8 [B]         jpeg: the bytes of all images, in row order
                                          uint8 [N,S,S,3]   raw: RGB
                     /image_offsets       int64 [N+1]       jpeg: image i has bytes offsets[i]:offsets[i+1]
                     /image_crc32         uint32 [N]        CRC-32 of each image as stored
                     /partitions/NAME     further ways to deal the images to users, none or more:
                         /user_ids        bytes [V]
                         /rows            int64 [M]         rows of the split, each at most once
                         /offsets         int64 [V+1]       user v has rows[offsets[v]:offsets[v+1]]

Every data set is contiguous and uncompressed. Each but ``images`` has an attribute ``sha256`` of its bytes;
``images`` has ``image_crc32``. ``content_sha256`` covers all but provenance, so it is the same for the same
data whenever and from whichever source the file was made. HDF5's own structures carry checksums (format 1.8).

`DataFile` also reads the files of pfl-research and ml-flair (`dataset.store.foreign`).
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from dataset.cli import OneLineParser
from dataset.files import file_digest
from dataset.store import probe
from dataset.store.foreign import ForeignReader, is_foreign
from dataset.store.images import decode, resize
from dataset.store.index import TAXONOMIES, IntArray, SplitIndex
from dataset.store.native import REMAKE, NativeReader, Reader, Storage, is_native, opened
from dataset.store.validate import check_foreign, check_split, describe, validate
from dataset.store.writer import DataWriter

__all__ = ["DataFile", "DataWriter", "Storage"]


class DataFile:
    """Reads a file. Cheap to construct; may be shared by threads, forked, and pickled (as its path).

    Raises ValueError, in one line, if the file is missing, no HDF5, truncated, of no known layout, or newer
    than this code.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._reader = _reader(self.path)
        self._splits: dict[str, SplitIndex] = {}
        self._lock = threading.Lock()

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that the file holds."""
        return self._reader.splits

    @property
    def grouped(self) -> bool:
        """Whether the images of a user are neighbours."""
        return self._reader.grouped

    @property
    def storage(self) -> Storage:
        """How images are stored."""
        return self._reader.storage

    @property
    def image_size(self) -> int | None:
        """Side of every stored image in pixels; None if not known or not the same."""
        return self._reader.image_size

    @property
    def provenance(self) -> dict[str, Any]:
        """Where the data came from."""
        return self._reader.provenance

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the content; of a file of another make, of its size and all but its pixels."""
        if isinstance(self._reader, NativeReader):
            return self._reader.content_sha256
        digest = hashlib.sha256(f"{self.path.stat().st_size}".encode())
        for name in self.splits:
            split = self.split(name)
            digest.update("\n".join([name, *split.user_ids, *split.image_ids]).encode())
            digest.update(split.user_index.tobytes())
            for taxonomy in TAXONOMIES:
                labels = split.labels[taxonomy]
                digest.update(json.dumps([taxonomy, self.label_mapping(taxonomy)]).encode())
                digest.update(labels.indptr.tobytes() + labels.indices.tobytes())
        return digest.hexdigest()

    def content_sha256(self) -> str:
        """SHA-256 of the content; of a file of another make, of all its bytes: it is read once."""
        if isinstance(self._reader, NativeReader):
            return self._reader.content_sha256
        return file_digest(self.path)

    def label_mapping(self, taxonomy: str) -> dict[str, int]:
        """Label name -> column of a taxonomy, alphabetical."""
        if taxonomy not in TAXONOMIES:
            raise ValueError(f"{taxonomy!r} is not a taxonomy; there are {', '.join(TAXONOMIES)}")
        return dict(self._reader.label_mappings[taxonomy])

    def split(self, name: str) -> SplitIndex:
        """The index of one split; read once."""
        if name not in self.splits:
            raise ValueError(f"{self.path} has no split {name!r}; it has {', '.join(self.splits)}")
        with self._lock:
            if name not in self._splits:
                split = self._reader.split(name)
                try:
                    check_split(split, self.grouped, self._reader.label_mappings, ids=False)
                except ValueError as error:
                    raise ValueError(f"{self.path} is damaged: split {name}: {error}; {REMAKE}") from None
                self._splits[name] = split
            return self._splits[name]

    def read_images(self, split: str, rows: IntArray, image_size: int) -> npt.NDArray[np.uint8]:
        """The images at these rows, ``[len(rows), S, S, 3]`` RGB uint8 with S = ``image_size``.

        Images of another size are resized as `dataset.store.images.decode` does. Threads may call this at the
        same time; decoding then runs in parallel.
        """
        rows = np.asarray(rows, np.int64)
        stored = self._reader.stored(split, rows)
        if isinstance(stored, np.ndarray):
            return resize(stored, image_size)
        out = np.empty((len(rows), image_size, image_size, 3), np.uint8)
        for i, image in enumerate(stored):
            try:
                if isinstance(image, memoryview):
                    decode(image, image_size, out[i])
                else:
                    out[i] = resize(image[None], image_size)[0]
            except ValueError as error:
                image_id = self.split(split).image_ids[int(rows[i])]
                raise ValueError(
                    f"image {image_id} ({split}, row {rows[i]}) of {self.path}: {error}; "
                    f"check the file with python -m dataset.store {self.path}"
                ) from None
        return out

    def close(self) -> None:
        """Release the file; a later call opens it again."""
        self._reader.close()

    def __enter__(self) -> DataFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[DataFile], tuple[Path]]:
        return DataFile, (self.path,)


def _reader(path: Path) -> Reader:
    with opened(path) as file:
        if is_native(file):
            return NativeReader(path)
        if is_foreign(file):
            return ForeignReader(path)
    raise ValueError(f"{path} is HDF5, but has none of the layouts of FLAIR that are known here")


def main(argv: Sequence[str]) -> None:
    """Describe a file on standard output and validate it; ValueError at the first damage."""
    parser = OneLineParser(prog="python -m dataset.store", description=main.__doc__)
    parser.add_argument("file", type=Path)
    path = parser.read(argv).file
    probe.probe(path)
    reader = _reader(path)
    try:
        if isinstance(reader, NativeReader):
            validate(path)
        else:
            check_foreign(path, reader)
        print(describe(path, reader))
    finally:
        reader.close()
