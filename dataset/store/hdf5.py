"""One HDF5 file holds a data set: users, images and annotations; read it, write it, describe and validate it.

    python -m dataset.store F

Schema, versions 1 to 4; a file is written as the oldest version that can hold it. Shape letters: U users,
N images, B bytes of all images, S side in pixels, K classes, P labels, M boxes, V users of a partition, R
images of it.

    attributes of /       format "federated-images", or "flair-on-pfl" for versions 1 and 2 | schema_version
                          | storage "jpeg" or "raw" | grouped | content_sha256
                          | image_size S, or 0 where each image has its own size
    /metadata/provenance                                    JSON: source, revision, counts, tool, licence
    /{train|val|test}/user_ids            bytes [U]         fixed width, UTF-8
                     /user_offsets        int64 [U+1]       grouped: user u has rows offsets[u]:offsets[u+1]
                     /user_index          int32 [N]         not grouped: whose each image is
                     /image_ids           bytes [N]
                     /images              uint8 [B]         jpeg: the bytes of all images, in row order;
                                                            raw with image_size 0: the pixels of all images
                                          uint8 [N,S,S,3]   raw: RGB
                     /image_offsets       int64 [N+1]       image i has bytes offsets[i]:offsets[i+1], where
                                                            image_size is 0
                     /image_crc32         uint32 [N]        CRC-32 of each image as stored

Version 1 holds two label sets. Those of image i are indices[indptr[i]:indptr[i+1]], sorted:

    /metadata/label_mapping, fine_grained_label_mapping     JSON {name: column}, alphabetical
    /{split}/labels_indptr, labels_indices                  int64 [N+1], uint16 [P]
            /fine_grained_labels_indptr, _indices           the same for the fine taxonomy

Version 2 adds further ways to deal the images of a split to users:

    /{split}/partitions/NAME/user_ids     bytes [V]
                            /rows         int64 [R]         rows of the split, each at most once
                            /offsets      int64 [V+1]       user v has rows[offsets[v]:offsets[v+1]]

Version 3 holds any annotations instead of the two label sets, each under a name of its own:

    /metadata/annotations                                   JSON [{name, kind, classes}], in order
    /{split}/annotations/NAME/indptr, indices               label set: int64 [N+1], uint16 [P], as above
                             /classes                       class: uint16 [N]
                             /offsets, png                  mask: int64 [N+1], uint8 [bytes of all masks]
                             /indptr, corners, classes      boxes: int64 [N+1], float32 [M,4], uint16 [M]
    /{split}/image_sizes                  int32 [N,2]       each image's own height and width, to which masks
                                                            and boxes refer

Version 4 adds to boxes, where any is flagged:

    /{split}/annotations/NAME/flags       uint8 [M]         1: it surrounds a crowd (COCO), 2: difficult (VOC)

JSON texts are uint8 bytes. Every data set is contiguous and uncompressed. Each but ``images`` has an
attribute ``sha256`` of its bytes; ``images`` has ``image_crc32``. ``content_sha256`` covers all but
provenance, so it is the same for the same data whenever and from whichever source the file was made. HDF5's
own structures carry checksums (format 1.8).

`DataFile` also reads the files of pfl-research and ml-flair (`dataset.store.foreign`).
"""

from __future__ import annotations

import hashlib
import json
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from dataset.arrays import ByteArray, IntArray
from dataset.files import file_digest
from dataset.store.annotations import LabelMatrix, Masks, has_background, present
from dataset.store.foreign import ForeignReader, is_foreign
from dataset.store.images import decode, resize
from dataset.store.index import TAXONOMIES, DatasetIndex, SplitIndex, check_split
from dataset.store.native import NativeReader, StoredImages, damaged, is_native, opened


class DataFile:
    """Reads a file. Cheap to construct; may be shared by threads, forked, and pickled (as its path).

    Args:
        path: of the file.
        check_images: whether an image that is read must be the one that was stored, by its checksum. A
            predecessor's file has none.

    Raises:
        ValueError: one line, if the file is missing, no HDF5, truncated, of an unknown layout, or newer than
            this code.
    """

    def __init__(self, path: Path | str, check_images: bool = False) -> None:
        self.path, self._check_images = Path(path), check_images
        self.reader = _reader(self.path)
        self.splits = self.reader.splits
        """The splits that the file holds."""
        self.grouped = self.reader.grouped
        """Whether the images of a user are neighbours."""
        self.storage = self.reader.storage
        """How images are stored."""
        self.image_size = self.reader.image_size
        """Side of every stored image in pixels; None if not known or not the same."""
        self.provenance = self.reader.provenance
        """The known origin of the data."""
        self.annotation_names = tuple(self.reader.label_mappings)
        """The annotations that the file holds."""
        self._splits: dict[str, SplitIndex] = {}
        self._present: dict[tuple[str, str], LabelMatrix] = {}
        self._lock = threading.Lock()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the content; for a predecessor's file, of its size and everything but its pixels."""
        if self.reader.content_sha256 is not None:
            return self.reader.content_sha256
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
        """SHA-256 of the content; for a predecessor's file, of all its bytes, which are read once."""
        return self.reader.content_sha256 or file_digest(self.path)

    def label_mapping(self, taxonomy: str) -> dict[str, int]:
        """Class name -> class number of an annotation, in the order of the numbers."""
        if taxonomy not in self.reader.label_mappings:
            known = ", ".join(self.reader.label_mappings) or "none"
            raise ValueError(f"{self.path} has no annotation {taxonomy!r}; it has {known}")
        return dict(self.reader.label_mappings[taxonomy])

    def split(self, name: str) -> SplitIndex:
        """The index of one split; read once."""
        if name not in self.splits:
            raise ValueError(f"{self.path} has no split {name!r}; it has {', '.join(self.splits)}")
        with self._lock:
            if name not in self._splits:
                split = self.reader.split(name)
                try:
                    check_split(split, self.grouped, self.reader.label_mappings, ids=False)
                except ValueError as error:
                    raise damaged(self.path, f"split {name}: {error}") from None
                self._splits[name] = split
            return self._splits[name]

    def present(self, split: str, name: str) -> LabelMatrix:
        """The classes that each image of a split contains; masks are decoded, once, and background is none.

        Args:
            split: of the file.
            name: of an annotation.

        Raises:
            ValueError: for an annotation that the file lacks, and a mask that cannot be read.
        """
        background = has_background(self.label_mapping(name))
        annotation = self.split(split).annotations[name]
        with self._lock:
            if (split, name) not in self._present:
                try:
                    found = present(annotation, int(background and isinstance(annotation, Masks)))
                except ValueError as error:
                    raise damaged(self.path, f"split {split}: {error}") from None
                self._present[split, name] = found
            return self._present[split, name]

    def index(self) -> DatasetIndex:
        """Everything that the file says, without its pixels."""
        splits = {name: self.split(name) for name in self.splits}
        return DatasetIndex(splits, self.reader.label_mappings, self.provenance, self.grouped)

    def read_images(self, split: str, rows: IntArray, image_size: int) -> ByteArray:
        """The images at these rows, ``[len(rows), S, S, 3]`` RGB uint8 with S = ``image_size``.

        Images of another size are resized as `dataset.store.images.decode` does. Threads may call this at the
        same time; decoding then runs in parallel.
        """
        rows = np.asarray(rows, np.int64)
        stored = self._stored(split, rows)
        if isinstance(stored, np.ndarray):
            return resize(stored, image_size)
        out = np.empty((len(rows), image_size, image_size, 3), np.uint8)
        for i, image in enumerate(stored):
            with self._named(split, rows[i]):
                if isinstance(image, memoryview):
                    decode(image, image_size, out[i])
                else:
                    out[i] = resize(image[None], image_size)[0]
        return out

    def _stored(self, split: str, rows: IntArray) -> StoredImages:
        stored = self.reader.stored(split, rows)
        if self._check_images and isinstance(self.reader, NativeReader):
            checksums = self.reader.checksums(split)
            for row, image in zip(rows, stored):
                if zlib.crc32(image) != checksums[row]:
                    with self._named(split, row):
                        raise ValueError("it does not match its checksum")
        return stored

    def read_masks(self, split: str, rows: IntArray, name: str, side: int) -> ByteArray:
        """The masks of an annotation at these rows, ``[len(rows), S, S]`` class numbers with S = ``side``.

        An oblong mask is squashed as its image is; each pixel has the class at its centre.

        Raises:
            ValueError: that names the image, for a mask that cannot be read.
        """
        masks = self.split(split).annotations[name]
        assert isinstance(masks, Masks)
        out = np.empty((len(rows), side, side), np.uint8)
        for i, row in enumerate(rows.tolist()):
            with self._named(split, row):
                out[i] = masks.read(row, side)
        return out

    def read_own(self, split: str, rows: IntArray) -> list[ByteArray]:
        """The images at these rows, ``[H, W, 3]`` RGB uint8 each, in the size at which each is stored."""
        rows = np.asarray(rows, np.int64)
        stored = self._stored(split, rows)
        out = []
        for row, image in zip(rows, stored):
            with self._named(split, row):
                out.append(decode(image, None) if isinstance(image, memoryview) else image)
        return out

    @contextmanager
    def _named(self, split: str, row: int) -> Iterator[None]:
        """Add the image's name to errors in this context."""
        try:
            yield
        except ValueError as error:
            image_id = self.split(split).image_ids[int(row)]
            raise ValueError(
                f"image {image_id} ({split}, row {row}) of {self.path}: {error}; "
                f"check the file with python -m dataset.store {self.path}"
            ) from None

    def close(self) -> None:
        """Release the file; a later call opens it again."""
        self.reader.close()

    def __enter__(self) -> DataFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[DataFile], tuple[Path, bool]]:
        return DataFile, (self.path, self._check_images)


def _reader(path: Path) -> NativeReader | ForeignReader:
    with opened(path) as file:
        if is_native(file):
            return NativeReader(path)
        if is_foreign(file):
            return ForeignReader(path)
    raise ValueError(
        f"{path} is an HDF5 file, but in no format that can be read here: if it is from TensorFlow "
        "Federated, convert it with python -m dataset.convert tff"
    )
