"""The file: what is written is read, whatever the order of writing; nothing half-done keeps a name."""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import pickle
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import h5py
import numpy as np
import pytest
import simplejpeg  # type: ignore[import-untyped]
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFilter

from dataset.store.annotations import LabelMatrix
from dataset.store.hdf5 import DataFile
from dataset.store.images import decode, jpeg_size, resize
from dataset.store.index import DatasetIndex, IdColumn, PartitionIndex, SplitIndex
from dataset.store.native import Storage, opened
from dataset.store.writer import DataWriter
from tests.dataset.drawn import content_hash, draw, jpeg, label_rows, number_in

COUNTS = (2, 1, 4)


def split_index(
    users: Sequence[str] = ("a", "b", "c"), first: int = 0, counts: Sequence[int] = COUNTS
) -> SplitIndex:
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts[: len(users)])])
    total = int(offsets[-1])
    return SplitIndex(
        list(users),
        offsets,
        np.repeat(np.arange(len(users), dtype=np.int32), counts[: len(users)]),
        [str(first + i) for i in range(total)],
        {
            "labels": label_rows([[i % 2] for i in range(total)], 2),
            "fine_grained_labels": label_rows([[i % 3, 2] for i in range(total)], 3),
        },
    )


def dataset_index(**changes: object) -> DatasetIndex:
    mappings = {"labels": {"x": 0, "y": 1}, "fine_grained_labels": {"p": 0, "q": 1, "r": 2}}
    splits = {"train": split_index(), "val": split_index(("d", "é"), 100)}
    return replace(DatasetIndex(splits, mappings, {"source": "drawn"}), **changes)  # type: ignore[arg-type]


def partitioned() -> dict[str, SplitIndex]:
    """The splits of `dataset_index`, with two partitions of the training images; the second is of five."""
    crossed = PartitionIndex(["p", "q"], np.array([6, 0, 3, 1, 2, 5, 4]), np.array([0, 3, 7]))
    part = PartitionIndex(["one", "two", "é"], np.array([5, 2, 3, 0, 6]), np.array([0, 1, 3, 5]))
    train = replace(split_index(), partitions={"crossed": crossed, "geo-100": part})
    return {**dataset_index().splits, "train": train}


def write(path: Path, storage: Storage, order: Sequence[int] | None = None, **changes: object) -> Path:
    """Image i of a split shows i + 1 (train) or i + 101 (val)."""
    path.unlink(missing_ok=True)
    index = dataset_index(**changes)
    numbers = {"train": 1, "val": 101}
    sizes = {
        name: np.array([len(jpeg(numbers[name] + i)) for i in range(split.num_images)])
        for name, split in index.splits.items()
    }
    image_bytes, image_size = (sizes, None) if storage == "jpeg" else (None, 32)
    with DataWriter(path, index, storage=storage, image_size=image_size, image_bytes=image_bytes) as writer:
        for name, split in index.splits.items():
            rows = list(range(split.num_images)) if order is None or name == "val" else list(order)
            for part in filter(None, (rows[:3], rows[3:])):
                shown = [numbers[name] + row for row in part]
                if storage == "raw":
                    writer.write(name, np.array(part), np.stack([draw(number) for number in shown]))
                else:
                    writer.write(name, np.array(part), [jpeg(number) for number in shown])
        assert not path.exists()
    return path


@pytest.mark.parametrize("storage", ["jpeg", "raw"])
def test_what_is_written_is_read(tmp_path: Path, storage: Storage) -> None:
    with DataFile(write(tmp_path / "f.hdf5", storage)) as file:
        assert file.splits == ("train", "val")
        assert file.storage == storage
        assert file.image_size == (32 if storage == "raw" else None)
        assert file.provenance == {"source": "drawn"}
        assert file.label_mapping("labels") == {"x": 0, "y": 1}
        for name, first in (("train", 1), ("val", 101)):
            written, split = dataset_index().splits[name], file.split(name)
            assert list(split.user_ids) == list(written.user_ids)
            assert list(split.image_ids) == list(written.image_ids)
            assert split.user_ids[1] == written.user_ids[1]
            assert np.array_equal(split.user_offsets, written.user_offsets)
            assert np.array_equal(split.user_index, written.user_index)
            for taxonomy, labels in written.labels.items():
                rows = np.arange(split.num_images)
                assert np.array_equal(split.labels[taxonomy].dense(rows), labels.dense(rows))
            wanted = np.array([2, 0, 1, 1])
            shown = [number_in(image) - first for image in file.read_images(name, wanted, 32)]
            assert shown == wanted.tolist()
        assert file.read_images("train", np.array([], np.int64), 16).shape == (0, 16, 16, 3)
    assert list(tmp_path.iterdir()) == [tmp_path / "f.hdf5"]


def test_folders_that_lack_are_made(tmp_path: Path) -> None:
    with DataFile(write(tmp_path / "no" / "such" / "f.hdf5", "raw")) as file:
        assert file.splits == ("train", "val")


@pytest.mark.parametrize("storage", ["jpeg", "raw"])
def test_partitions_are_read_as_written_and_change_nothing_else(tmp_path: Path, storage: Storage) -> None:
    plain, dealt = write(tmp_path / "p.hdf5", storage), tmp_path / "d.hdf5"
    with DataFile(plain) as without, DataFile(write(dealt, storage, splits=partitioned())) as file:
        written, read = partitioned()["train"].partitions, file.split("train").partitions
        assert list(read) == ["crossed", "geo-100"]
        for name, partition in written.items():
            assert list(read[name].user_ids) == list(partition.user_ids)
            np.testing.assert_array_equal(read[name].rows, partition.rows)
            np.testing.assert_array_equal(read[name].offsets, partition.offsets)
        assert not file.split("val").partitions
        assert not without.split("train").partitions
        rows = np.arange(7)
        np.testing.assert_array_equal(
            file.read_images("train", rows, 32), without.read_images("train", rows, 32)
        )
        assert file.fingerprint != without.fingerprint
    with h5py.File(plain) as old, h5py.File(dealt) as new:
        assert (old.attrs["schema_version"], new.attrs["schema_version"]) == (1, 2)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(7)), storage=st.sampled_from(["jpeg", "raw"]))
def test_the_order_of_writing_leaves_no_trace(tmp_path: Path, order: list[int], storage: Storage) -> None:
    first = write(tmp_path / "first.hdf5", storage)
    second = write(tmp_path / "second.hdf5", storage, order)
    assert first.read_bytes() == second.read_bytes()


def test_the_content_hash_is_of_the_data_and_not_of_its_provenance(tmp_path: Path) -> None:
    first = content_hash(write(tmp_path / "1.hdf5", "jpeg"))
    assert content_hash(write(tmp_path / "2.hdf5", "jpeg", provenance={"created": "later"})) == first
    other = {
        "train": replace(split_index(), image_ids=[str(7 + i) for i in range(7)]),
        "val": split_index(("d", "é")),
    }
    assert content_hash(write(tmp_path / "3.hdf5", "jpeg", splits=other)) != first
    assert content_hash(write(tmp_path / "4.hdf5", "raw")) != first


def test_an_exception_leaves_nothing_behind(tmp_path: Path) -> None:
    path = write(tmp_path / "f.hdf5", "raw")
    before = path.read_bytes()

    def write_twice() -> None:
        with DataWriter(path, dataset_index(), storage="raw", image_size=8) as writer:
            for _ in range(2):
                writer.write("train", np.arange(2), np.zeros((2, 8, 8, 3), np.uint8))

    with pytest.raises(AssertionError, match="a row is written once"):
        write_twice()
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


def test_a_file_with_missing_rows_never_gets_its_name(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match=r"never written.*train.*5"),
        DataWriter(tmp_path / "f.hdf5", dataset_index(), storage="raw", image_size=8) as writer,
    ):
        writer.write("train", np.arange(2), np.zeros((2, 8, 8, 3), np.uint8))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("storage", ["jpeg", "raw"])
def test_a_full_disk_is_one_clear_error_and_leaves_nothing(
    tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "f.hdf5"
    for name in ("pwrite", "posix_fallocate"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(OSError, match=f"the disk is full, so {path} could not be"):
                write(path, storage)
        assert not list(tmp_path.iterdir())
    closed: list[int] = []
    monkeypatch.setattr(os, "close", closed.append)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match=r"not enough space on the disk of .* GB more are needed"):
        write(path, storage)
    assert not closed, "no file was opened"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "said, shown",
    [
        ("Unable to open file (Permission denied)", r"cannot be read: you do not have the permission"),
        ("file signature not found", "is not an HDF5 file"),
        ("truncated file: eof = 96", r"is truncated \(the copy is incomplete\); make it again"),
        ("bad object header", "is damaged: bad object header; make it again"),
    ],
)
def test_what_the_library_complains_of_becomes_a_line_with_a_remedy(
    said: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(said)

    (tmp_path / "f.hdf5").touch()
    monkeypatch.setattr(h5py, "File", refuses)
    with pytest.raises(ValueError, match=f"f.hdf5 {shown}"), opened(tmp_path / "f.hdf5"):
        pass


def test_an_index_that_contradicts_itself_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    splits = {"train": split_index(), "val": split_index(("c", "d"), 100)}
    with pytest.raises(ValueError, match="user c is in two splits, train and val"):
        DataWriter(tmp_path / "f.hdf5", dataset_index(splits=splits), storage="raw", image_size=8)
    assert not list(tmp_path.iterdir())


def _numbers(file: DataFile, rows: list[int]) -> list[int]:
    return [number_in(image) for image in file.read_images("train", np.array(rows), 32)]


@pytest.mark.parametrize("storage", ["jpeg", "raw"])
def test_a_reader_works_in_threads_forks_and_after_pickling(tmp_path: Path, storage: Storage) -> None:
    with DataFile(write(tmp_path / "f.hdf5", storage)) as file:
        assert _numbers(file, [4]) == [5]  # the descriptor is open before the fork
        with ThreadPoolExecutor(4) as pool:
            parts = [[(i + j) % 7 for j in range(5)] for i in range(40)]
            assert list(pool.map(lambda part: _numbers(file, part), parts)) == [
                [r + 1 for r in p] for p in parts
            ]
        context = multiprocessing.get_context("fork")
        receive, send = context.Pipe(duplex=False)
        child = context.Process(target=lambda: send.send(_numbers(file, [6, 0])))
        child.start()
        assert receive.recv() == [7, 1]
        child.join(10)
        with pickle.loads(pickle.dumps(file)) as other:
            assert _numbers(other, [2]) == [3]
        file.close()
        assert _numbers(file, [1]) == [2]


def test_opening_41131_users_takes_at_most_a_fifth_of_a_second(tmp_path: Path) -> None:
    users, each = 41_131, 8
    total = users * each
    labels = LabelMatrix(np.arange(total + 1) * 3, np.tile(np.array([0, 4, 9], np.uint16), total), 17)
    split = SplitIndex(
        [f"{user:08d}@N00" for user in range(users)],
        np.arange(users + 1) * each,
        np.repeat(np.arange(users, dtype=np.int32), each),
        [str(10**10 + image) for image in range(total)],
        {"labels": labels, "fine_grained_labels": labels},
    )
    mapping = {f"{i:02d}": i for i in range(17)}
    index = DatasetIndex({"train": split}, {"labels": mapping, "fine_grained_labels": mapping})
    with DataWriter(tmp_path / "f.hdf5", index, storage="raw", image_size=1) as writer:
        writer.write("train", np.arange(total), np.zeros((total, 1, 1, 3), np.uint8))
    seconds = []
    for _ in range(3):
        start = time.process_time()
        with DataFile(tmp_path / "f.hdf5") as file:
            assert file.split("train").num_users == users
        seconds.append(time.process_time() - start)
    assert min(seconds) <= 0.2


def test_unknown_splits_and_taxonomies_are_named(tmp_path: Path) -> None:
    with DataFile(write(tmp_path / "f.hdf5", "raw")) as file:
        with pytest.raises(ValueError, match="no split 'test'; it has train, val"):
            file.split("test")
        with pytest.raises(ValueError, match="has no annotation 'fine'; it has"):
            file.label_mapping("fine")


@given(
    st.lists(
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1), min_size=1
    )
)
def test_ids_survive_packing(ids: list[str]) -> None:
    column = IdColumn.of(ids)
    assert list(column) == ids
    assert [column[i] for i in range(len(ids))] == ids
    assert list(column[1:]) == ids[1:]


def test_raw_storage_at_a_size_holds_what_jpeg_storage_gives_at_that_size() -> None:
    rng = np.random.default_rng(0)
    smooth = np.kron(rng.integers(0, 256, (16, 16, 3)), np.ones((16, 16, 1))).astype(np.uint8)
    data = jpeg_of(smooth)
    stored_small = decode(data, 64)
    assert np.array_equal(resize(stored_small[None], 64)[0], stored_small)
    whole = decode(data, 256)
    assert np.array_equal(decode(data, None), whole)
    apart = np.abs(resize(whole[None], 64)[0].astype(int) - stored_small)
    assert apart.mean() < 1.0  # the stated tolerance of reading at a fraction of the stored size


def jpeg_of(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=92)
    return buffer.getvalue()


def test_a_jpeg_header_gives_its_size_and_any_cut_is_found() -> None:
    data = jpeg(12345, side=64)
    assert jpeg_size(data) == (64, 64)
    for length in range(len(data) - 1):
        with pytest.raises(ValueError, match=r"cut off|not a JPEG|empty|broken|no size"):
            jpeg_size(data[:length])


@pytest.mark.parametrize("marker", range(0xC0, 0xD0))
def test_a_jpegs_size_stands_in_its_frame_and_in_no_other_segment(marker: int) -> None:
    """Three of the markers C0 to CF begin tables and extensions (ITU-T T.81, table B.1)."""
    data = jpeg(5, side=64)
    at = data.index(b"\xff\xda")
    segment = bytes([0xFF, marker, 0, 11, 8, 0, 40, 0, 50, 1, 1, 17, 0])
    expected = (64, 64) if marker in (0xC4, 0xC8, 0xCC) else (50, 40)
    assert jpeg_size(data[:at] + segment + data[at:]) == expected


def test_grey_and_oblong_images_become_square_rgb() -> None:
    buffer = io.BytesIO()
    Image.new("L", (50, 20), 77).save(buffer, "JPEG")
    assert jpeg_size(buffer.getvalue()) == (50, 20)
    pixels = decode(buffer.getvalue(), 24)
    assert pixels.shape == (24, 24, 3)
    assert (pixels == 77).all()


@pytest.mark.parametrize("image_size", [None, 96, 64, 40, 24, 10, 3])
@pytest.mark.parametrize("shape", [(96, 96), (131, 70)])
def test_decoding_in_place_gives_the_same_pixels_and_never_fewer_than_twice_the_side_before_resizing(
    image_size: int | None, shape: tuple[int, int]
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    data = jpeg_of(np.asarray(Image.fromarray(noise).filter(ImageFilter.GaussianBlur(3))))
    pixels = decode(data, image_size)
    assert pixels.shape == ((image_size, image_size, 3) if image_size else (*shape, 3))
    out = np.zeros_like(pixels)
    decode(data, image_size, out)
    assert np.array_equal(out, pixels)
    with Image.open(io.BytesIO(data)) as image:  # Pillow as the oracle
        expected = (
            image if image_size is None else image.resize((image_size, image_size), Image.Resampling.BILINEAR)
        )
        apart = np.abs(np.asarray(expected).astype(int) - pixels)
    whole = image_size is None or min(shape) < 4 * image_size
    assert apart.max() == 0 if whole else apart.mean() < 2.0


@pytest.mark.parametrize(("side", "decoded"), [(39, 39), (40, 20), (79, 40), (80, 20), (160, 20), (640, 80)])
def test_a_jpeg_of_four_times_the_side_is_decoded_at_half(side: int, decoded: int) -> None:
    data = jpeg_of(np.zeros((side, side, 3), np.uint8))
    with mock.patch.object(simplejpeg, "decode_jpeg", side_effect=simplejpeg.decode_jpeg) as spy:
        decode(data, 10)
    assert spy.call_args.kwargs["min_height"] == decoded


def test_a_cmyk_image_becomes_rgb() -> None:
    buffer = io.BytesIO()
    Image.new("CMYK", (16, 16), (255, 0, 0, 0)).save(buffer, "JPEG")
    red, green, blue = decode(buffer.getvalue(), 8).mean(axis=(0, 1))
    assert red < 10
    assert min(green, blue) > 240
