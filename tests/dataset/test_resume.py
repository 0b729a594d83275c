"""Preprocessing that was stopped goes on, block by block, and never with another source's blocks."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataset import scan
from dataset.cli import run
from dataset.fetch import source
from dataset.flair.sources import local
from dataset.journal import Journal
from dataset.preprocess import Options, preprocess
from dataset.store import writer
from dataset.store.hdf5 import DataFile
from dataset.store.native import Storage
from dataset.store.writer import DataWriter
from tests.dataset.drawn import (
    Record,
    assert_paired,
    content_hash,
    draw,
    jpeg,
    number_in,
    records,
    write_archives,
    write_files,
    write_parquet,
)
from tests.dataset.flair.test_download_preprocess import WRITERS, Folder
from tests.dataset.store.test_hdf5 import dataset_index, partitioned

BLOCK = 10


def make(folder: Path, output: Path, storage: Storage = "jpeg", **options: Any) -> int:
    """Preprocess in blocks of ten; the exit code."""
    chosen = Options(output, storage, image_size=32, block_images=BLOCK, workers=1, **options)
    return run(lambda _: preprocess(local(folder), chosen), [])


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "BATCH", 5)


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str, int], list[int]]:
    """Send SIGTERM at the n-th call of a function; the list that comes back counts the calls."""

    def arm(owner: Any, name: str, call: int) -> list[int]:
        real, calls = getattr(owner, name), [0]

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == call:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)
        return calls

    return arm


@pytest.mark.parametrize("write", WRITERS)
def test_what_was_checked_is_not_checked_again(tmp_path: Path, write: Folder, stop: Any) -> None:
    rows = records(100)
    folder, output = write(tmp_path / "flair", rows), tmp_path / "f.hdf5"
    put = stop(Journal, "put", 6)
    assert make(folder, output) == 75
    assert not output.exists()
    assert put == [6]
    checked = stop(scan, "_checked", -1)
    assert make(folder, output) == 0
    assert 100 - 8 * BLOCK <= checked[0] <= 100 - 5 * BLOCK
    assert_paired(output, rows)
    assert {path.name for path in tmp_path.iterdir()} == {"flair", "f.hdf5"}


@pytest.mark.parametrize("storage", ["jpeg", "raw"])
def test_what_was_written_is_not_written_again(tmp_path: Path, storage: Storage, stop: Any) -> None:
    rows = records(100)
    folder, output = write_parquet(tmp_path / "flair", rows), tmp_path / "f.hdf5"
    stop(DataWriter, "put_down", 7)
    assert make(folder, output, storage) == 75
    written = stop(DataWriter, "put_down", -1)
    created = stop(DataWriter, "_create", -1)
    assert make(folder, output, storage) == 0
    assert created == [0]
    assert 0 < written[0] < 7
    assert_paired(output, rows)


@pytest.mark.parametrize(
    "owner, name, done, number, most",
    [
        (Path, "write_bytes", 8, errno.ENOSPC, 2 * BLOCK),
        (Path, "write_bytes", 8, errno.EDQUOT, 2 * BLOCK),
        (os, "pwrite", 10, errno.ENOSPC, 0),
        (os, "posix_fallocate", 0, errno.ENOSPC, 0),
        (shutil, "disk_usage", 0, None, 0),
    ],
)
def test_a_disk_that_fills_costs_none_of_the_work(
    owner: Any,
    name: str,
    done: int,
    number: int | None,
    most: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop: Any,
) -> None:
    """While an entry of the journal is written, or an image; or before the output is begun."""
    rows = records(100)
    folder, output = write_parquet(tmp_path / "flair", rows), tmp_path / "f.hdf5"
    calls, real = [0], getattr(owner, name)

    def full(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] <= done:
            return real(*args)
        if number is None:
            return SimpleNamespace(free=3000)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        assert make(folder, output) == 2
    checked = stop(scan, "_checked", -1)
    assert make(folder, output) == 0
    assert checked[0] <= most
    assert_paired(output, rows)
    assert {path.name for path in tmp_path.iterdir()} == {"flair", "f.hdf5"}


def test_a_file_left_half_completed_is_begun_anew(tmp_path: Path, stop: Any) -> None:
    """HDF5's own structures may be half written then."""
    rows = records(40)
    folder, output = write_parquet(tmp_path / "flair", rows), tmp_path / "f.hdf5"
    stop(writer, "content_checksum", 1)
    assert make(folder, output) == 75
    created = stop(DataWriter, "_create", -1)
    assert make(folder, output) == 0
    assert created == [1]
    assert_paired(output, rows)


@pytest.mark.parametrize("write", [write_parquet, write_archives, write_files])
def test_a_source_that_changed_is_read_anew_where_it_changed(
    tmp_path: Path, write: Folder, stop: Any
) -> None:
    rows = records(60)
    folder, output = write(tmp_path / "flair", rows), tmp_path / "f.hdf5"
    stop(DataWriter, "put_down", 4)
    assert make(folder, output) == 75
    changed = [Record(one.number + 300) if one.number % 4 == 0 else one for one in rows]
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    write(folder, changed)
    assert make(folder, output) == 0
    assert_paired(output, changed)


def test_a_source_with_the_same_ids_and_lengths_and_other_pixels_is_written_from_its_beginning(
    tmp_path: Path, stop: Any
) -> None:
    """Raw storage gives every image one length: only the source's origin tells the two plans apart."""
    rows = records(60)
    folder, output = write_parquet(tmp_path / "flair", rows), tmp_path / "f.hdf5"
    stop(DataWriter, "put_down", 4)
    assert make(folder, output, "raw") == 75
    pixels = [Record(one.number, jpeg(one.number ^ 0x8000)) for one in rows]
    shutil.rmtree(folder)
    write_parquet(folder, pixels)
    created = stop(DataWriter, "_create", -1)
    assert make(folder, output, "raw") == 0
    assert created == [1], "the plan is another one"
    with DataFile(output) as file:
        for name in file.splits:
            ids = [int(i) for i in file.split(name).image_ids]
            shown = [number_in(image) for image in file.read_images(name, np.arange(len(ids)), 32)]
            wanted = {one.image_id: one.number ^ 0x8000 for one in rows}
            assert shown == [wanted[i] for i in ids]


@pytest.mark.parametrize("origin, index, taken_up", [("a", 0, True), ("b", 0, False), ("a", 1, False)])
def test_a_plan_is_taken_up_when_its_source_and_its_index_are_the_same(
    origin: str, index: int, taken_up: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    indices = [dataset_index(), dataset_index(splits=partitioned())]
    output, rows = tmp_path / "f.hdf5", {"train": np.arange(7)}
    with Journal(output) as journal:
        begun = DataWriter(output, indices[0], storage="raw", image_size=32, journal=journal, origin="a")
        begun.__enter__()
        begun.write("train", rows["train"], np.stack([draw(i) for i in range(7)]))
        begun.put_down("x", rows)
        begun._discard()
        again = DataWriter(
            output, indices[index], storage="raw", image_size=32, journal=journal, origin=origin
        )
        again.__enter__()
        assert again.already("x", rows) == taken_up
        again._discard()


def test_damaged_entries_of_the_journal_are_not_believed(tmp_path: Path, stop: Any) -> None:
    rows = records(60)
    folder, output = write_parquet(tmp_path / "flair", rows), tmp_path / "f.hdf5"
    stop(DataWriter, "put_down", 4)
    assert make(folder, output) == 75
    for number, entry in enumerate(sorted((tmp_path / "f.hdf5.partial").glob("entry-*"))):
        content = bytearray(entry.read_bytes())
        content[-1] ^= 1
        entry.write_bytes(content if number % 2 else content[:20])
    assert make(folder, output) == 0
    assert_paired(output, rows)


def test_an_image_found_bad_before_the_stop_is_still_bad(
    tmp_path: Path, stop: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = records(40)
    rows[0] = Record(rows[0].number, b"no image")
    folder, output = write_parquet(tmp_path / "flair", rows), tmp_path / "f.hdf5"
    stop(Journal, "put", 4)
    assert make(folder, output, on_bad_image="skip") == 75
    assert make(folder, output, on_bad_image="skip") == 0
    assert_paired(output, rows[1:])
    output.unlink()
    stop(Journal, "put", 4)
    assert make(folder, output, on_bad_image="skip") == 75
    assert make(folder, output, on_bad_image="fail") == 2
    assert f"image {rows[0].image_id} of user {rows[0].user_id}" in capsys.readouterr().err
    assert not (tmp_path / "f.hdf5.partial").exists()


def test_listed_images_that_are_nowhere_are_still_missing_after_a_stop(tmp_path: Path, stop: Any) -> None:
    rows = records(60)
    folder = write_files(tmp_path / "flair", rows)
    for one in rows[:25]:
        (folder / "small_images" / f"{one.image_id}.jpg").unlink()
    output, whole = tmp_path / "f.hdf5", tmp_path / "whole.hdf5"
    assert make(folder, whole, on_bad_image="skip") == 0
    for call in range(1, 30):
        stop(Journal, "put", call)
        if make(folder, output, on_bad_image="skip") == 0:
            break
    assert output.exists()
    assert content_hash(output) == content_hash(whole)


def test_a_file_that_was_finished_meanwhile_is_replaced_only_on_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line has looked for it, but another process can finish it until the lock is taken."""
    rows = records(20)
    folder, output = write_parquet(tmp_path / "flair", rows), tmp_path / "f.hdf5"
    output.write_text("precious")
    kept = tmp_path / "f.hdf5.partial" / "entry-plan"
    kept.parent.mkdir()
    kept.write_text("of a stopped command with --overwrite")
    assert make(folder, output) == 2
    assert f"{output} already exists; add --overwrite to replace it" in capsys.readouterr().err
    assert output.read_text() == "precious"
    assert [*kept.parent.iterdir()] == [kept]
    assert make(folder, output, overwrite=True) == 0
    assert_paired(output, rows)
    assert {path.name for path in tmp_path.iterdir()} == {"flair", "f.hdf5"}


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    folder, output = write_parquet(tmp_path / "flair", records(20)), tmp_path / "f.hdf5"
    code = (
        "import sys; from pathlib import Path; from dataset.journal import Journal\n"
        "with Journal(Path(sys.argv[1])): print('mine', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(output)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"mine\n"
        assert make(folder, output) == 2
        other.kill()
    assert make(folder, output) == 0
