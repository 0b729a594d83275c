"""Every kind of damage to a file is found, and reported in one line with exit code 2."""

from __future__ import annotations

import dataclasses
import multiprocessing
import re
import signal
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataset.cli import run
from dataset.flair.mini import MiniSpec, write_mini
from dataset.store import probe
from dataset.store.annotations import LabelMatrix
from dataset.store.hdf5 import DataFile
from dataset.store.index import TAXONOMIES, DatasetIndex, SplitIndex, check_index
from dataset.store.native import checksum
from dataset.store.validate import describe, main, validate
from tests.dataset.drawn import label_rows
from tests.dataset.store.test_hdf5 import dataset_index, partitioned, write

SMALL = MiniSpec(train_users=3, val_users=2, test_users=2, image_size=16, num_fine_labels=20)


def rejected(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which the command refuses a file."""
    assert run(main, [str(path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert str(path) in output.err
    return output.err


def put(file: h5py.File, name: str, array: np.ndarray[Any, Any]) -> None:
    """Replace a data set and its checksum, as no accident would."""
    del file[name]
    file[name] = array
    file[name].attrs["sha256"] = checksum(array)


def content(path: Path) -> list[Any]:
    """Everything that the file says."""
    with DataFile(path) as file:
        found: list[Any] = [file.splits, file.grouped, file.storage, file.image_size, file.provenance]
        found += [file.label_mapping(taxonomy) for taxonomy in TAXONOMIES]
        for name in file.splits:
            split = file.split(name)
            rows = np.arange(split.num_images)
            found += [list(split.user_ids), list(split.image_ids), split.user_offsets.tolist()]
            found += [split.labels[taxonomy].dense(rows).tolist() for taxonomy in TAXONOMIES]
            found.append(file.read_images(name, rows, 32).tobytes())
            for part, dealt in split.partitions.items():
                found += [part, list(dealt.user_ids), dealt.rows.tolist(), dealt.offsets.tolist()]
        return found


def pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("fork"))


@pytest.fixture
def others() -> Iterator[list[ProcessPoolExecutor]]:
    """A pool of one process; each one that died is followed by the next."""
    pools = [pool()]
    yield pools
    for each in pools:
        each.shutdown()


def judged(damaged: Path, path: Path) -> None:
    """Damage is found, or touches nothing; where the library hangs, this process dies."""
    signal.setitimer(signal.ITIMER_PROF, 3.0)  # SIGPROF ends a process; 0.07 s of CPU time are needed
    try:
        validate(damaged)
        finding = None
    except ValueError as error:
        finding = str(error)
    if finding is None:
        assert content(damaged) == content(path)
    else:
        assert "damaged.hdf5" in finding


@pytest.mark.usefixtures("real_probes")
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_is_found_or_touches_nothing(
    others: list[ProcessPoolExecutor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    data: st.DataObject,
) -> None:
    """Where the library hangs or crashes on it (a text said to be opaque bytes), `probe` finds it."""
    path = tmp_path / "f.hdf5"
    if not path.exists():
        write(path, "jpeg", splits=partitioned())
    sound = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(sound) - 1))
    sound[at] ^= 1 << data.draw(st.integers(0, 7))
    damaged = tmp_path / "damaged.hdf5"
    damaged.write_bytes(sound)
    try:
        others[-1].submit(judged, damaged, path).result()
    except BrokenProcessPool:
        others.append(pool())
        monkeypatch.setattr(probe, "CPU_S", 3)
        with pytest.raises(ValueError, match=r"damaged\.hdf5 is damaged \(the HDF5 library crashes or hangs"):
            probe.probe(damaged)


@pytest.mark.parametrize("storage", ["jpeg", "raw"])
def test_a_flipped_bit_in_an_image_is_reported_with_its_user_and_image(
    tmp_path: Path, storage: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "f.hdf5", storage)
    with h5py.File(path) as file:
        last = file["train/images"].id.get_offset() + file["train/images"].id.get_storage_size() - 30
    whole = bytearray(path.read_bytes())
    whole[last] ^= 4
    path.write_bytes(whole)
    line = rejected(path, capsys)
    assert "image 6 of user c (train, row 6): it does not match its checksum" in line


def test_each_image_of_a_split_larger_than_a_threads_block_is_checked(tmp_path: Path) -> None:
    """70 images are two blocks and a part: the first and the last of each are images as the others."""
    users = [f"user-{u:02d}" for u in range(35)]
    labels = {name: label_rows([[0]] * 70, k) for name, k in (("labels", 2), ("fine_grained_labels", 3))}
    owners = np.repeat(np.arange(35, dtype=np.int32), 2)
    train = SplitIndex(users, np.arange(0, 71, 2), owners, [str(i) for i in range(70)], labels)
    path = write(tmp_path / "f.hdf5", "jpeg", splits={"train": train})
    with h5py.File(path) as file:
        start, offsets = file["train/images"].id.get_offset(), file["train/image_offsets"][()]
    sound = path.read_bytes()
    validate(path)
    for row in range(70):
        damaged = bytearray(sound)
        damaged[start + int(offsets[row + 1]) - 1] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(
            ValueError, match=rf"image {row} of user user-{row // 2:02d} \(train, row {row}\): "
        ):
            validate(path)


def repeated(labels: LabelMatrix) -> LabelMatrix:
    """The first image has its first label twice, the others have what they had."""
    indptr = labels.indptr + 1
    indptr[0] = 0
    return replace(labels, indptr=indptr, indices=np.concatenate([labels.indices[:1], labels.indices]))


def falling(labels: LabelMatrix) -> LabelMatrix:
    """The first image has its labels from the last to the first."""
    stop = int(labels.indptr[1])
    return replace(labels, indices=np.concatenate([labels.indices[:stop][::-1], labels.indices[stop:]]))


def begins_at_one(labels: LabelMatrix) -> LabelMatrix:
    indptr = labels.indptr.copy()
    indptr[0] = 1
    return replace(labels, indptr=indptr)


def ends_early(labels: LabelMatrix) -> LabelMatrix:
    indptr = labels.indptr.copy()
    indptr[-1] -= 1
    return replace(labels, indptr=indptr)


def ends_late(labels: LabelMatrix) -> LabelMatrix:
    indptr = labels.indptr.copy()
    indptr[-1] += 1
    return replace(labels, indptr=indptr)


def falls_between(labels: LabelMatrix) -> LabelMatrix:
    indptr = labels.indptr.copy()
    indptr[[1, 2]] = indptr[[2, 1]]
    return replace(labels, indptr=indptr)


def one_row_short(labels: LabelMatrix) -> LabelMatrix:
    return replace(labels, indptr=np.delete(labels.indptr, 1))


def beyond(labels: LabelMatrix) -> LabelMatrix:
    """The least label that there is not."""
    return replace(labels, indices=np.where(labels.indices == 2, 3, labels.indices).astype(np.uint16))


@pytest.mark.parametrize(
    "damage, message",
    [
        (repeated, "the label indices of an image in fine_grained_labels are not sorted and unique"),
        (falling, "the label indices of an image in fine_grained_labels are not sorted and unique"),
        (begins_at_one, "fine_grained_labels_indptr does not rise from 0"),
        (ends_early, "fine_grained_labels_indptr does not rise from 0 to the number of labels"),
        (ends_late, "fine_grained_labels_indptr does not rise from 0 to the number of labels"),
        (falls_between, "fine_grained_labels_indptr does not rise"),
        (one_row_short, "fine_grained_labels_indptr does not rise"),
        (beyond, "a label index of fine_grained_labels is out of range"),
    ],
)
def test_labels_that_contradict_themselves_are_refused(
    damage: Callable[[LabelMatrix], LabelMatrix], message: str
) -> None:
    rows = [[0, 1], [2], [], [0, 1, 2], [1], [0], [1, 2]]
    fine, index = label_rows(rows, 3), dataset_index()

    def with_labels(labels: LabelMatrix) -> DatasetIndex:
        train = index.splits["train"]
        changed = replace(train, annotations={**train.labels, "fine_grained_labels": labels})
        return replace(index, splits={**index.splits, "train": changed})

    check_index(with_labels(fine))
    with pytest.raises(ValueError, match=f"split train: .*{re.escape(message)}"):
        check_index(with_labels(damage(fine)))


@pytest.mark.parametrize("offsets", [[1, 2, 3, 7], [0, 2, 3, 6], [0, 2, 2, 7], [0, 3, 2, 7], [0, 2, 7]])
def test_offsets_of_users_rise_from_0_to_the_number_of_images(offsets: list[int]) -> None:
    index = dataset_index()
    train = replace(index.splits["train"], user_offsets=np.array(offsets))
    with pytest.raises(ValueError, match="split train: user_offsets do not rise"):
        check_index(replace(index, splits={**index.splits, "train": train}))


@pytest.mark.parametrize("part", [0.0, 0.02, 0.5, 0.9, 0.9999])
def test_a_truncated_file_is_refused_on_opening(
    tmp_path: Path, part: float, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "f.hdf5", "jpeg")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(part * len(whole))])
    rejected(path, capsys)
    with pytest.raises(ValueError, match=r"truncated|not an HDF5 file|damaged"):
        DataFile(path)


def offsets_fall(file: h5py.File) -> None:
    put(file, "train/user_offsets", np.array([0, 4, 3, 7]))


def image_offsets_fall(file: h5py.File) -> None:
    offsets = file["train/image_offsets"][()]
    offsets[[2, 3]] = offsets[[3, 2]]
    put(file, "train/image_offsets", offsets)


def label_out_of_range(file: h5py.File) -> None:
    indices = file["val/labels_indices"][()]
    indices[0] = 17
    put(file, "val/labels_indices", indices)


def user_in_two_splits(file: h5py.File) -> None:
    put(file, "val/user_ids", np.array([b"a", b"e"]))


def image_without_header(file: h5py.File) -> None:
    start, stop = (int(offset) for offset in file["train/image_offsets"][1:3])
    file["train/images"][start : start + 2] = 0
    crc = file["train/image_crc32"][()]
    crc[1] = zlib.crc32(bytes(file["train/images"][start:stop]))
    put(file, "train/image_crc32", crc)


def missing(file: h5py.File) -> None:
    del file["val/image_ids"]


def missing_images(file: h5py.File) -> None:
    del file["train/images"]


def other_type(file: h5py.File) -> None:
    put(file, "train/labels_indptr", file["train/labels_indptr"][()].astype(np.int32))


def stale_checksum(file: h5py.File) -> None:
    file["train/user_ids"][0] = b"z"


def mapping_out_of_order(file: h5py.File) -> None:
    put(file, "metadata/label_mapping", np.frombuffer(b'{"x": 1, "y": 0}', np.uint8))


def other_content(file: h5py.File) -> None:
    put(file, "train/image_ids", np.array([b"%d" % i for i in range(50, 57)]))


def newer(file: h5py.File) -> None:
    file.attrs["schema_version"] = 5


def no_mapping(file: h5py.File) -> None:
    del file["metadata/label_mapping"]


def something_else(file: h5py.File) -> None:
    file["notes"] = np.arange(3)


def no_utf8(file: h5py.File) -> None:
    ids = file["train/user_ids"][()]
    ids[0] = b"\xff"
    put(file, "train/user_ids", ids)


@pytest.mark.parametrize(
    "damage, message",
    [
        (something_else, "notes is not an HDF5 group"),
        (no_utf8, r"split train: a user has the id b'\xff', which is not UTF-8"),
        (offsets_fall, "split train: user_offsets do not rise"),
        (image_offsets_fall, "train/image_offsets do not rise"),
        (label_out_of_range, r"split val: a label index of labels is out of range (0..1)"),
        (user_in_two_splits, "user a is in two splits, train and val"),
        (image_without_header, "image 1 of user a (train, row 1): it is not a JPEG"),
        (missing, "val/image_ids"),
        (missing_images, "train/images"),
        (other_type, "train/labels_indptr has type int32"),
        (stale_checksum, "train/user_ids does not match its checksum"),
        (mapping_out_of_order, "the mapping of labels is not numbered from 0 in its order"),
        (other_content, "its content does not match its checksum"),
        (newer, "has schema version 5, but this version of the code reads only up to 4"),
        (no_mapping, "label_mapping"),
    ],
)
def test_each_kind_of_damage_is_named(
    tmp_path: Path, damage: Callable[[h5py.File], None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "f.hdf5", "jpeg")
    with h5py.File(path, "r+") as file:
        damage(file)
    assert message in rejected(path, capsys)


def test_what_is_no_such_file_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no file" in rejected(tmp_path / "missing.hdf5", capsys)
    (tmp_path / "text.hdf5").write_text("hello")
    assert "is not an HDF5 file" in rejected(tmp_path / "text.hdf5", capsys)
    with h5py.File(tmp_path / "other.hdf5", "w") as file:
        file["x"] = 1
    assert "is an HDF5 file, but in no format that can be read" in rejected(tmp_path / "other.hdf5", capsys)
    assert "no file" in rejected(tmp_path, capsys)


def test_the_size_of_images_is_theirs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A larger one would be asked of the memory."""
    path = write(tmp_path / "f.hdf5", "raw")
    with h5py.File(path, "r+") as file:
        file.attrs["image_size"] = 10**9
    assert "train/images has the wrong shape" in rejected(path, capsys)


def test_annotations_that_are_no_group_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mini(path := tmp_path / "f.hdf5", SMALL)
    with h5py.File(path, "r+") as file:
        file["train/annotations"] = np.arange(3)
    assert "train/annotations is not an HDF5 group" in rejected(path, capsys)


def test_a_split_without_images_is_described(tmp_path: Path) -> None:
    write_mini(tmp_path / "f.hdf5", SMALL)
    with DataFile(tmp_path / "f.hdf5") as file:
        index = file.split("val")
        nobody = index.user_index[:0]
        empty = dataclasses.replace(
            index,
            user_ids=index.user_ids[:0],
            user_offsets=index.user_offsets[:0],
            user_index=nobody,
            image_ids=index.image_ids[:0],
            annotations={
                name: LabelMatrix.from_pairs(nobody, nobody, 0, len(mapping))
                for name, mapping in file.reader.label_mappings.items()
            },
        )
        with mock.patch.dict(file._splits, {"val": empty}):
            assert "   val: no images" in describe(file)
