"""Files made to harm: sizes that are lies, links that lead elsewhere, nesting without end."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dataset.cli import MAX_LINE, run
from dataset.flair import download_preprocess, sources
from dataset.store import probe
from dataset.store.columns import MAX_ID_BYTES
from dataset.store.hdf5 import DataFile
from dataset.store.images import MAX_SCANS, decode, jpeg_size
from dataset.store.native import Storage, checksum
from dataset.store.validate import main as describe
from tests.dataset.drawn import (
    Record,
    jpeg,
    records,
    write_archives,
    write_metadata,
    write_parquet,
    write_predecessor,
)
from tests.dataset.store.test_hdf5 import write


def refused(main: Callable[[Any], None], capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line of a refusal."""
    assert run(main, argv) == 2
    lines = [line for line in capsys.readouterr().err.replace("\r", "\n").split("\n") if "error: " in line]
    assert len(lines) == 1
    assert len(lines[0]) < MAX_LINE + 50
    return lines[0]


def sized(data: bytes, width: int, height: int) -> bytes:
    """A JPEG that declares another size."""
    at = next(i for i in range(2, len(data)) if data[i] == 0xFF and data[i + 1] in (0xC0, 0xC2))
    return data[: at + 5] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + data[at + 9 :]


@pytest.mark.parametrize("width, height", [(65_500, 65_500), (65_500, 1_100), (9_000, 9_000), (2_000, 2_000)])
def test_a_jpeg_bomb_is_refused_before_memory_is_taken(width: int, height: int) -> None:
    bomb = sized(jpeg(5), width, height)
    for read in (jpeg_size, lambda data: decode(data, None), lambda data: decode(data, 32)):
        with pytest.raises(ValueError, match=f"declares {width} x {height} pixels in {len(bomb):,} bytes"):
            read(bomb)


def test_a_plain_large_image_is_no_bomb() -> None:
    """One colour: as few bytes for its pixels as an honest encoder makes."""
    for options in ({}, {"progressive": True, "optimize": True}, {"subsampling": 2, "quality": 5}):
        buffer = io.BytesIO()
        Image.new("RGB", (4000, 3000), (40, 90, 10)).save(buffer, "JPEG", **options)
        assert jpeg_size(buffer.getvalue()) == (4000, 3000)
        assert decode(buffer.getvalue(), 32).shape == (32, 32, 3)


def test_a_jpeg_of_a_thousand_scans_is_refused_at_once() -> None:
    buffer = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    first = data.index(b"\xff\xda")
    second = data.index(b"\xff\xc4", first)
    many = data[:second] + data[first:second] * MAX_SCANS + data[second:]
    with pytest.raises(ValueError, match=f"more than {MAX_SCANS} scans"):
        decode(many, 32)


def test_a_video_behind_a_jpeg_has_no_scans_of_it() -> None:
    """As motion photos have; and what a segment of the camera's holds is no scan either."""
    buffer = io.BytesIO()
    Image.effect_noise((64, 64), 50).convert("RGB").save(buffer, "JPEG", progressive=True)
    data, video = buffer.getvalue(), b"\xff\xda\0\2" * (MAX_SCANS + 1)
    segment = b"\xff\xe5" + (len(video) + 2).to_bytes(2, "big") + video
    for photo in (data + video, data[:2] + segment + data[2:]):
        assert jpeg_size(photo) == (64, 64)
        assert np.array_equal(decode(photo, None), decode(data, None))


@given(st.binary(max_size=300), st.booleans())
@settings(max_examples=300)
def test_any_bytes_are_a_jpeg_or_a_clause(data: bytes, headed: bool) -> None:
    for read in (jpeg_size, lambda content: decode(content, 8)):
        try:
            read(b"\xff\xd8" + data if headed else data)
        except ValueError as error:
            assert "\n" not in str(error)  # noqa: PT017


def read_as_training_does(path: Path) -> None:
    with DataFile(path) as file:
        file.read_images("train", np.arange(file.split("train").num_images), 8)


def elsewhere(file: h5py.File, secret: Path) -> None:
    size = secret.stat().st_size
    del file["train/images"]
    file["train"].create_dataset("images", (size,), "u1", external=[(str(secret), 0, size)])


def linked(file: h5py.File, secret: Path) -> None:
    with h5py.File(secret.with_name("other.hdf5"), "w") as other:
        other["ids"] = np.array([b"%d" % i for i in range(7)])
        other["ids"].attrs["sha256"] = checksum(other["ids"][()])
    del file["train/image_ids"]
    file["train/image_ids"] = h5py.ExternalLink(str(secret.with_name("other.hdf5")), "ids")


def linked_by_two(file: h5py.File, secret: Path) -> None:
    linked(file, secret)
    file.move("train/image_ids", "through")
    file["train/image_ids"] = h5py.SoftLink("/through")


def virtual(file: h5py.File, secret: Path) -> None:
    layout = h5py.VirtualLayout((7,), "S1")
    layout[:] = h5py.VirtualSource(str(secret), "x", (7,))
    del file["train/image_ids"]
    file.create_virtual_dataset("train/image_ids", layout)


def enormous(file: h5py.File, secret: Path) -> None:
    del file["train/user_offsets"]
    file["train"].create_dataset("user_offsets", (2**38,), "<i8", chunks=(1024,), compression="gzip")


def endless_offsets(file: h5py.File, secret: Path) -> None:
    offsets = file["train/user_offsets"][()]
    offsets[-1] = 2**40
    file["train/user_offsets"][...] = offsets


def far_images(file: h5py.File, secret: Path) -> None:
    offsets = file["train/image_offsets"][()]
    offsets[1:] += 2**40
    file["train/image_offsets"][...] = offsets


def group_for_data(file: h5py.File, secret: Path) -> None:
    del file["train/image_ids"]
    file.create_group("train/image_ids")


@pytest.mark.parametrize(
    "harm, message",
    [
        (elsewhere, "has its data in other files"),
        (linked, "is in another file"),
        (linked_by_two, "is in another file"),
        (virtual, "has its data in other files"),
        (enormous, "declares 2,199,023,255,552 bytes but has 0"),
        (endless_offsets, "user_offsets"),
        (far_images, "image_offsets"),
        (group_for_data, "has no data"),
    ],
)
def test_an_hdf5_file_reads_nothing_but_itself_and_takes_no_more_than_it_holds(
    tmp_path: Path, harm: Callable[[h5py.File, Path], None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, secret = write(tmp_path / "f.hdf5", "jpeg"), tmp_path / "secret"
    secret.write_bytes(b"secret" * 100)
    with h5py.File(path, "r+") as file:
        harm(file, secret)
    assert "damaged" in refused(describe, capsys, str(path))
    with pytest.raises(ValueError, match=message):
        read_as_training_does(path)


@pytest.mark.parametrize("maker", ["pfl", "ml-flair"])
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_predecessors_file_reads_nothing_but_itself(
    tmp_path: Path, maker: str, grouped: bool, depth: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a data set of a user or image, nor a whole one, nor a split is taken from another file."""
    path = write_predecessor(tmp_path / "p.hdf5", records(20), maker, grouped=grouped)
    shutil.copy(path, tmp_path / "other.hdf5")
    with h5py.File(path, "r+") as file:
        first = next(iter(file["train"]))
        name = "/".join(["train", first, "image_ids" if grouped else "image"][:depth])
        del file[name]
        file[name] = h5py.ExternalLink(str(tmp_path / "other.hdf5"), name)
    assert "is in another file" in refused(describe, capsys, str(path))


def test_a_group_where_a_column_should_be_is_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "f.hdf5", "jpeg")
    with h5py.File(path, "r+") as file:
        file.create_group("train/more")
    assert "damaged: train/more has no data" in refused(describe, capsys, str(path))


@pytest.mark.usefixtures("real_probes")
def test_a_file_on_which_the_hdf5_library_hangs_or_crashes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fuzz campaign found a damaged attribute on which H5Aopen never returns."""
    path = write(tmp_path / "f.hdf5", "jpeg")
    probe.probe(path)
    for code in ("import os; os.kill(os.getpid(), 11)", "import time; time.sleep(60)"):
        monkeypatch.setattr(probe, "TIMEOUT_S", 1.0)
        command = tmp_path / "python"
        command.write_text(f"#!/bin/sh\nexec {probe.sys.executable} -c '{code}'\n")  # type: ignore[attr-defined]
        command.chmod(0o755)
        with monkeypatch.context() as patch:
            patch.setattr("sys.executable", str(command))
            with pytest.raises(ValueError, match="the HDF5 library crashes or hangs on it"):
                probe.probe(path)


def preprocess(folder: Path) -> list[str]:
    return ["--source", str(folder), "--output_file", str(folder.with_name("out.hdf5")), "--overwrite"]


def test_sizes_in_an_archive_are_not_believed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = records(6)
    for number, kind in enumerate(("member", "name", "zeros")):
        folder = tmp_path / f"{number}"
        write_metadata(folder, rows)
        header = tarfile.TarInfo(f"{rows[0].image_id}.jpg")
        header.size = 1 << 40
        if kind == "name":
            header.type, header.size = tarfile.GNUTYPE_LONGNAME, 1 << 33
        elif kind == "zeros":
            header.size = 1 << 28
        with gzip.open(folder / "a.tar.gz", "wb") as archive:
            archive.write(header.tobuf(tarfile.GNU_FORMAT))
            if kind == "zeros":  # two hundred megabytes in two hundred kilobytes
                archive.write(bytes(1 << 22))
        started = time.monotonic()
        line = refused(download_preprocess.main, capsys, *preprocess(folder))
        assert "a.tar.gz" in line
        assert ("bytes" in line) if kind != "zeros" else True
        assert time.monotonic() - started < 20


def test_a_flipped_byte_in_an_archive_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Python's tarfile does not look at gzip's checksum."""
    folder = write_archives(tmp_path / "flair", records(20), archives=1)
    archive = folder / "small_images-00.tar.gz"
    content = bytearray(gzip.decompress(archive.read_bytes()))
    stored = bytearray(gzip.compress(bytes(content), 0))  # nothing but the checksum tells
    stored[len(stored) // 2] ^= 1
    archive.write_bytes(stored)
    assert "is damaged" in refused(download_preprocess.main, capsys, *preprocess(folder))


def test_names_that_climb_out_of_a_folder_are_not_followed(tmp_path: Path) -> None:
    rows = records(5)
    write_metadata(tmp_path / "flair", rows)
    listing = json.loads((tmp_path / "flair" / "labels_and_metadata.json").read_text())
    listing.append({**listing[0], "image_id": "../secret"})
    listing.append({**listing[0], "image_id": "/etc/passwd"})
    (tmp_path / "flair" / "labels_and_metadata.json").write_text(json.dumps(listing))
    (tmp_path / "flair" / "small_images").mkdir()
    (tmp_path / "flair" / "secret.jpg").write_bytes(b"secret")
    source = sources.local(tmp_path / "flair")
    batches = [batch for part in range(2) for batch in source.records(part)]
    assert [image for batch in batches for image in batch.images] == [None] * 7


def test_metadata_without_end_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "flair"
    (folder / "small_images").mkdir(parents=True)
    for text in ("[" * 100_000, '[{"a": ' * 50_000, '["' + "x" * (3 << 20)):
        (folder / "labels_and_metadata.json").write_text(text)
        line = refused(download_preprocess.main, capsys, *preprocess(folder))
        assert "labels_and_metadata.json" in line


def test_an_id_of_a_megabyte_does_not_become_a_column_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = records(5)
    monkeypatch.setattr(Record, "user_id", "u" * 1_000_000)
    folder = write_parquet(tmp_path / "flair", rows)
    line = refused(download_preprocess.main, capsys, *preprocess(folder))
    assert f"an id has 1,000,000 bytes, more than {MAX_ID_BYTES}" in line


def test_a_label_mapping_nested_without_end_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.json").write_text("[" * 100_000)
    argv = [*preprocess(tmp_path), "--label_mapping", str(tmp_path / "m.json")]
    assert "m.json is not valid JSON" in refused(download_preprocess.main, capsys, *argv)


def test_too_little_memory_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def hungry(_: object) -> None:
        np.empty(2**60, np.uint8)

    assert "not enough memory" in refused(hungry, capsys)


@pytest.mark.usefixtures("real_probes")
def test_the_file_on_which_hdf5_never_ended_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by ``tests.campaigns.fuzz``, seed 0, "hdf5, read" 21."""
    path = tmp_path / "endless.hdf5"
    found = Path(__file__).parent / "damaged" / "hdf5-endless.gz"
    path.write_bytes(gzip.decompress(found.read_bytes()))
    monkeypatch.setattr(probe, "CPU_S", 3)
    with pytest.raises(ValueError, match="crashes or hangs on it"):
        probe.probe(path)


@pytest.mark.parametrize("storage", ["jpeg", "raw"])
@pytest.mark.parametrize("options", [{"compression": "gzip"}, {"compression": "lzf"}, {"chunks": True}])
def test_images_that_another_program_compressed_are_refused_before_they_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], storage: Storage, options: dict[str, Any]
) -> None:
    """Their bytes lie elsewhere; before, pixels were taken from the beginning of the file."""
    path = write(tmp_path / "f.hdf5", storage)
    with h5py.File(path, "a") as file:
        pixels = file["train/images"][()]
        del file["train/images"]
        file["train"].create_dataset("images", data=pixels, **options)
    with pytest.raises(ValueError, match=r"train/images compressed or in chunks.*h5repack -l CONTI -f NONE"):
        DataFile(path)
    assert "h5repack -l CONTI" in refused(describe, capsys, str(path))
