"""Find damage in a file, and describe it: what an index must satisfy, and that every byte is as written.

Shape letters: U users, N images, K labels.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from dataset.partitions.dirichlet import meaning
from dataset.store.annotations import (
    Annotation,
    Boxes,
    IntArray,
    Kind,
    Masks,
    check_annotation,
    fault_of_mask,
    kind_of,
    rises,
    within,
)
from dataset.store.images import jpeg_size
from dataset.store.index import SPLITS, DatasetIndex, PartitionIndex, SplitIndex
from dataset.store.native import (
    MAPPINGS,
    PARTITION_COLUMNS,
    PARTITION_NAME,
    PARTITIONS,
    REMAKE,
    SCHEMA_VERSION,
    TYPES,
    IdColumn,
    NativeReader,
    Reader,
    checksum,
    content_checksum,
    dataset,
    index_names,
    is_native,
    opened,
    partition_names,
)

_BLOCK = 32  # images that a thread checks at once
MOST_LABELS = 100
"""As many labels of a taxonomy are listed one by one: all of FLAIR's 17, not its 1,628."""


def check_index(index: DatasetIndex) -> None:
    """Raise ValueError, with a sentence that says where, if an index contradicts itself."""
    for name, kind in kinds_of(index).items():
        mapping = index.label_mappings.get(name) or {}
        names = sorted(mapping) if kind == "label set" else list(mapping)
        if dict(mapping) != {one: number for number, one in enumerate(names)}:
            order = "alphabetical and " if kind == "label set" else ""
            raise ValueError(f"the mapping of {name} is not {order}numbered from 0")
    unknown = set(index.splits) - set(SPLITS)
    if unknown:
        raise ValueError(f"{sorted(unknown)[0]!r} is not a split; there are {', '.join(SPLITS)}")
    owners: dict[bytes, str] = {}
    for name, split in index.splits.items():
        try:
            check_split(split, index.grouped, index.label_mappings)
        except ValueError as error:
            raise ValueError(f"split {name}: {error}") from None
        for user in IdColumn.of(split.user_ids).raw.tolist():
            if owners.setdefault(user, name) != name:
                raise ValueError(f"user {user.decode()} is in two splits, {owners[user]} and {name}")


def check_split(
    split: SplitIndex, grouped: bool, mappings: Mapping[str, Mapping[str, int]], ids: bool = True
) -> None:
    """Raise ValueError if the columns of a split contradict one another; and its ids, which takes longer."""
    users, images = split.num_users, split.num_images
    for what, column in (("user", split.user_ids), ("image", split.image_ids)) if ids else ():
        _check_ids(what, column)
    if grouped and not rises(split.user_offsets, users, images, least=1):
        raise ValueError("user_offsets do not rise from 0 to the number of images")
    if len(split.user_index) != images or not within(split.user_index, users):
        raise ValueError("user_index does not give each image one of the users")
    if grouped:
        if not np.array_equal(split.user_index, np.repeat(np.arange(users), np.diff(split.user_offsets))):
            raise ValueError("user_index contradicts user_offsets")
    elif len(split.user_offsets):
        raise ValueError("there are user_offsets although images are not grouped by user")
    for name, annotation in split.annotations.items():
        if annotation.num_labels != len(mappings[name]):
            raise ValueError(f"{name} has {annotation.num_labels} columns but {len(mappings[name])} names")
        check_annotation(name, annotation, images)
    _check_sizes(split)
    for name, partition in split.partitions.items():
        try:
            _check_partition(name, partition, images, ids)
        except ValueError as error:
            raise ValueError(f"partition {name!r}: {error}") from None


def kinds_of(index: DatasetIndex) -> dict[str, Kind]:
    """The annotations of a data set by name. Raises ValueError if its splits have different ones."""
    found = [
        {name: kind_of(one) for name, one in split.annotations.items()} for split in index.splits.values()
    ]
    if any(kinds != found[0] for kinds in found):
        raise ValueError("its splits have different annotations")
    for name in found[0] if found else ():
        if not PARTITION_NAME.fullmatch(name):
            raise ValueError(
                f"annotation {name!r}: its name has other characters than letters, digits and ._+-"
            )
    return found[0] if found else {}


def _check_sizes(split: SplitIndex) -> None:
    """Raise ValueError if sizes are missing where annotations refer to them, or boxes reach beyond them."""
    sizes = split.image_sizes
    if sizes is not None and (sizes.shape != (split.num_images, 2) or (sizes < 1).any()):
        raise ValueError("image_sizes does not give each image a height and a width")
    for name, annotation in split.annotations.items():
        if isinstance(annotation, (Masks, Boxes)) and sizes is None:
            raise ValueError(f"{name} needs image_sizes, which are missing")
        if isinstance(annotation, Boxes) and sizes is not None:
            bounds = np.repeat(sizes[:, ::-1], np.diff(annotation.indptr), axis=0)
            if (annotation.corners[:, 2:] > bounds).any():
                raise ValueError(f"{name}: a box reaches beyond its image")


def _check_partition(name: str, partition: PartitionIndex, images: int, ids: bool) -> None:
    if not PARTITION_NAME.fullmatch(name):
        raise ValueError("its name has other characters than letters, digits and ._+-")
    if ids:
        _check_ids("user", partition.user_ids)
    if not len(partition.user_ids):
        raise ValueError("it has no user")
    if not rises(partition.offsets, len(partition.user_ids), len(partition.rows), least=1):
        raise ValueError("its offsets do not rise from 0 to the number of its images")
    if not within(partition.rows, images):
        raise ValueError(f"a row is out of range (0..{images - 1})")
    if np.bincount(partition.rows).max(initial=0) > 1:
        raise ValueError("it deals an image twice")


def _check_ids(what: str, column: Sequence[str]) -> None:
    ordered = np.sort(IdColumn.of(column).raw)
    if len(ordered) and not ordered[0]:
        raise ValueError(f"a {what} has an empty id")
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise ValueError(f"{what} {ordered[twice[0]].decode()} is there twice")


def validate(path: Path) -> None:
    """Check every byte of a file of ours. Raises ValueError in one sentence at the first damage."""
    reader = NativeReader(path)
    try:
        with opened(path) as file:
            if not is_native(file):
                raise ValueError(f"{path} is damaged: it does not say what it is; {REMAKE}")
            _check_datasets(path, file, reader)
            try:
                check_index(index_of(reader))
            except ValueError as error:
                raise ValueError(f"{path} is damaged: {error}; {REMAKE}") from None
            for split in reader.splits:
                _check_images(path, file, reader, split)
            if file.attrs["content_sha256"] != content_checksum(file):
                raise ValueError(f"{path} is damaged: its content checksum does not agree; {REMAKE}")
    finally:
        reader.close()


def index_of(reader: Reader) -> DatasetIndex:
    """Everything that a file says, without its pixels."""
    splits = {name: reader.split(name) for name in reader.splits}
    return DatasetIndex(splits, reader.label_mappings, reader.provenance, reader.grouped)


def check_foreign(path: Path, reader: Reader) -> None:
    """Check a file of another make: its index, and that the first image of each split can be read."""
    try:
        check_index(index_of(reader))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    for split in reader.splits:
        reader.stored(split, np.arange(1))


def describe(path: Path, reader: Reader) -> str:
    """A summary for people: size, storage, users and images of each split, labels, provenance."""
    size = f", {reader.image_size} pixels" if reader.image_size else ""
    layout = "grouped by user" if reader.grouped else "not grouped by user"
    lines = [f"{path}: {path.stat().st_size / 1e6:,.1f} MB, {reader.storage}{size}, {layout}, valid"]
    for name in reader.splits:
        split = reader.split(name)
        images = np.bincount(split.user_index, minlength=split.num_users)
        per_image = {one: elements(found) / split.num_images for one, found in split.annotations.items()}
        lines.append(
            f"{name:>6}: {split.num_users:,} users, {split.num_images:,} images "
            f"(per user: median {np.median(images):g}, mean {images.mean():.2f}, max {images.max():,}); "
            + ", ".join(f"{value:.3f} {one}/image" for one, value in per_image.items())
        )
        for part, dealt in split.partitions.items():
            sizes = np.diff(dealt.offsets)
            lines.append(
                f"        partition {part}: {len(sizes):,} users, {len(dealt.rows):,} images "
                f"(per user: median {np.median(sizes):g}, mean {sizes.mean():.2f}, max {sizes.max():,})"
                + (f"; {clause}" if (clause := meaning(part, _num_classes(reader))) else "")
            )
    lines += _label_lines(reader)
    if isinstance(reader, NativeReader):
        lines.append(f"content sha256: {reader.content_sha256}")
    lines += ["provenance:", *(f"  {key}: {value}" for key, value in reader.provenance.items())]
    return "\n".join(lines)


def elements(annotation: Annotation) -> int:
    """How many labels, masks or boxes an annotation has."""
    if isinstance(annotation, Masks):
        return len(annotation)
    return len(annotation.classes if isinstance(annotation, Boxes) else annotation.indices)


def _num_classes(reader: Reader) -> int:
    """K of the first annotation, which partitions refer to."""
    return len(next(iter(reader.label_mappings.values()), {}))


def _label_lines(reader: Reader) -> list[str]:
    """The classes of each annotation, and how many images or objects of each split have them."""
    lines: list[str] = []
    before: tuple[Any, ...] = ()
    kinds = kinds_of(index_of(reader))
    for taxonomy, mapping in reader.label_mappings.items():
        names, what = list(mapping), {"boxes": "with objects", "mask": "masks"}.get(kinds[taxonomy], "")
        if kinds[taxonomy] == "mask":
            lines.append(f"{taxonomy}: masks of {len(names):,} classes: {', '.join(names[:MOST_LABELS])}")
            continue
        counts = np.array([_counts(reader.split(name).annotations[taxonomy]) for name in reader.splits])
        if before == (names, counts.tolist()):
            lines.append(f"{taxonomy}: the same {len(names):,}")
            continue
        before = names, counts.tolist()
        lines.append(f"{taxonomy}: {len(names):,}, {what or 'with images'} in {', '.join(reader.splits)}")
        order = np.argsort(-counts.sum(0), kind="stable")
        lines += [
            f"  {names[k]}: {', '.join(f'{count:,}' for count in counts[:, k])}" for k in order[:MOST_LABELS]
        ]
        if len(names) > MOST_LABELS:
            rest = counts[:, order[MOST_LABELS:]].sum(1)
            lines.append(
                f"  {len(names) - MOST_LABELS:,} more, together: {', '.join(f'{count:,}' for count in rest)}"
            )
    return lines


def _counts(annotation: Annotation) -> IntArray:
    """Labels or objects of each class, ``[K]``."""
    assert not isinstance(annotation, Masks)
    numbers = annotation.classes if isinstance(annotation, Boxes) else annotation.indices
    return np.bincount(numbers, minlength=annotation.num_labels).astype(np.int64)


def _check_datasets(path: Path, file: h5py.File, reader: NativeReader) -> None:
    listed = [*MAPPINGS.values()] if reader.version < SCHEMA_VERSION else ["annotations"]
    names = [f"metadata/{name}" for name in [*listed, "provenance"]]
    leaves = [*index_names(reader), "images"]
    names += [f"{split}/{leaf}" for split in reader.splits for leaf in leaves]
    for split in reader.splits:
        parts = [f"{split}/{PARTITIONS}/{part}" for part in partition_names(file[split])]
        names += [f"{part}/{leaf}" for part in parts for leaf in PARTITION_COLUMNS]
    for name in names:
        if name not in file:
            raise ValueError(f"{path} is damaged: {name} is missing; {REMAKE}")
        data, leaf = dataset(file, name), name.rpartition("/")[2]
        if leaf in TYPES and data.dtype.str != TYPES[leaf]:
            raise ValueError(f"{path} is damaged: {name} has type {data.dtype}, not {TYPES[leaf]}; {REMAKE}")
        if leaf != "images" and data.attrs.get("sha256") != checksum(data[()]):
            raise ValueError(f"{path} is damaged: {name} does not agree with its checksum; {REMAKE}")


def _check_images(path: Path, file: h5py.File, reader: NativeReader, name: str) -> None:
    group, count = file[name], len(file[name]["image_ids"])
    if len(group["image_crc32"]) != count:
        raise ValueError(f"{path} is damaged: {name}/image_crc32 has the wrong length; {REMAKE}")
    if reader.image_size is None:
        if not rises(reader.image_offsets(name), count, len(group["images"]), least=1):
            raise ValueError(
                f"{path} is damaged: {name}/image_offsets do not rise from 0 to the number of bytes; {REMAKE}"
            )
    elif group["images"].shape != (count, reader.image_size, reader.image_size, 3):
        raise ValueError(f"{path} is damaged: {name}/images has the wrong shape; {REMAKE}")
    crc, index = group["image_crc32"][()], reader.split(name)
    masks = {one: found for one, found in index.annotations.items() if isinstance(found, Masks)}

    def damage(start: int) -> str | None:
        rows = np.arange(start, min(start + _BLOCK, count))
        for row, image in zip(rows.tolist(), reader.stored(name, rows)):
            fault = None
            if zlib.crc32(image) != crc[row]:
                fault = "it does not agree with its checksum"
            elif masks and (fault := _fault_of_masks(index, masks, row)):
                pass
            elif reader.storage == "jpeg":
                try:
                    jpeg_size(bytes(image))
                except ValueError as error:
                    fault = str(error)
            if fault:
                user, image_id = index.user_ids[int(index.user_index[row])], index.image_ids[row]
                return f"image {image_id} of user {user} ({name}, row {row}): {fault}"
        return None

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for fault in pool.map(damage, range(0, count, _BLOCK)):
            if fault:
                raise ValueError(f"{path} is damaged: {fault}; {REMAKE}")


def _fault_of_masks(index: SplitIndex, masks: Mapping[str, Masks], row: int) -> str | None:
    assert index.image_sizes is not None
    height, width = index.image_sizes[row].tolist()
    found = (fault_of_mask(one.png(row), (height, width), one.num_labels) for one in masks.values())
    return next((fault for fault in found if fault), None)
