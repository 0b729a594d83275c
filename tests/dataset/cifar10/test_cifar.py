"""CIFAR from every source it is had from, with its splits: one file, the same data; and what is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import signal
import tarfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataset.cifar10 import preprocess as cifar_preprocess
from dataset.cifar10.source import Cifar
from dataset.cifar10_pfl.download_preprocess import CIFAR10_PFL
from dataset.cli import run
from dataset.fetch import http
from dataset.fetch.http import Patience
from dataset.journal import only_downloader, only_writer
from dataset.partitions import __main__ as partitions
from dataset.store.hdf5 import DataFile
from dataset.store.validate import main as describe
from dataset.store.validate import validate
from dataset.store.views import SingleLabelView
from dataset.store.writer import DataWriter
from tests.dataset.cifar10.made_cifar import (
    CIFAR10,
    CIFAR100,
    SIZES,
    class_of,
    pixels,
    write_binary,
    write_parquet,
    write_splits,
)
from tests.dataset.drawn import add_member
from tests.dataset.fetch.faulty_server import serving


def make(spec: Cifar, output: Path, *arguments: str | Path) -> int:
    return run(partial(cifar_preprocess.main, spec), ["--output_file", str(output), *map(str, arguments)])


def assert_holds(path: Path, spec: Cifar, dealt: dict[str, dict[str, list[int]]]) -> None:
    """Every image with its own class and pixels, and every user of every partition with its own images."""
    validate(path)
    with DataFile(path) as file:
        for split, count in SIZES.items():
            store = SingleLabelView(file).split(split)
            images, targets = store.read(np.arange(count))
            np.testing.assert_array_equal(images, [pixels(split, row) for row in range(count)])
            assert store.classes.tolist() == [class_of(spec, row) for row in range(count)]
            assert (targets.argmax(1) == store.classes).all()
        assert SingleLabelView(file).label_names == spec.classes
        assert SingleLabelView(file).partition_names == tuple(dealt)
        for name, users in dealt.items():
            store = SingleLabelView(file, name).split("train")
            assert list(store.user_ids) == sorted(users, key=int)
            for user, start, stop in zip(store.user_ids, store.user_offsets, store.user_offsets[1:]):
                assert store.file_rows[start:stop].tolist() == sorted(users[user])


@pytest.mark.parametrize("spec", [CIFAR10, CIFAR100], ids=["cifar10", "cifar100"])
def test_every_source_gives_the_same_file(
    tmp_path: Path, spec: Cifar, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dealt = write_splits(spec, tmp_path / "parquet")
    write_parquet(spec, tmp_path / "parquet")
    write_parquet(spec, tmp_path / "webp", "WEBP", lossless=True)
    write_splits(spec, tmp_path / "webp", zipped=True)
    made = dataclasses.replace(write_binary(spec, tmp_path / "tar"), official={})
    with tarfile.open(tmp_path / "tar" / spec.archive) as archive:
        archive.extractall(tmp_path / "loose", filter="data")
    csvs, prints = tmp_path / "parquet", set[str]()
    with serving(tmp_path / "served") as server:
        write_splits(spec, server.root, zipped=True)
        shutil.copy(tmp_path / "tar" / spec.archive, server.root)
        monkeypatch.setattr(cifar_preprocess, "SPLITS_BASE", server.url)
        sources: list[tuple[Path | str, tuple[str | Path, ...]]] = [
            (csvs, ()),
            (tmp_path / "webp", ()),
            (tmp_path / "tar", ("--splits", csvs)),
        ]
        sources += [(tmp_path / "tar", ()), (tmp_path / "loose", ("--splits", csvs)), (server.url, ())]
        for number, (source, more) in enumerate(sources):
            output = tmp_path / f"{number}.hdf5"
            assert make(made, output, "--source", source, *more) == 0
            assert_holds(output, spec, dealt)
            with DataFile(output) as file:
                prints.add(file.fingerprint)
            assert not output.with_name(output.name + ".download").exists()
    assert len(prints) == 1
    assert capsys.readouterr().err.count("is complete") == len(sources)


@pytest.mark.parametrize("write", [write_binary, write_parquet])
def test_pfls_pixels_are_the_files_bytes_read_as_rows(
    tmp_path: Path, write: Callable[[Cifar, Path], Cifar | None]
) -> None:
    """Byte f of an image, colour after colour, stands at row f // 96, column f % 96 // 3, colour f % 3."""
    spec = write(CIFAR10_PFL, tmp_path / "in") or CIFAR10_PFL
    output = tmp_path / "f.hdf5"
    assert make(spec, output, "--source", tmp_path / "in", "--splits", "none") == 0
    with DataFile(output) as file:
        images, targets = SingleLabelView(file).split("train").read(np.arange(SIZES["train"]))
        assert file.provenance["tool"] == "dataset.cifar10_pfl.download_preprocess"
    f = np.arange(3072)
    for row in range(SIZES["train"]):
        in_file = pixels("train", row).transpose(2, 0, 1).ravel()
        assert np.array_equal(images[row, f // 96, f % 96 // 3, f % 3], in_file)
        assert targets[row].argmax() == class_of(spec, row)


def test_a_preprocessing_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dealt, output = write_splits(CIFAR10, tmp_path / "in"), tmp_path / "f.hdf5"
    write_parquet(CIFAR10, tmp_path / "in")
    real, calls = DataWriter.put_down, []

    def stopped(writer: DataWriter, *arguments: Any) -> None:
        real(writer, *arguments)
        calls.append(arguments[0])
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(DataWriter, "put_down", stopped)
    assert make(CIFAR10, output, "--source", tmp_path / "in") == 75
    assert not output.exists()
    assert make(CIFAR10, output, "--source", tmp_path / "in") == 0
    assert len(calls) == len(SIZES), "what was written is not written again"
    assert_holds(output, CIFAR10, dealt)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "f.hdf5"}


def test_our_own_partitions_say_what_alpha_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where they are made, described and compared; the old option and the old name are read as totals."""
    write_parquet(CIFAR10, tmp_path / "in")
    source = ["--source", str(tmp_path / "in"), "--splits", "none", "--seed", "7"]
    size = ["--clients", "5", "--images_per_client", "12"]
    new = ["--dirichlet_total", "0.3, 10", "--dirichlet_per_class", "0.30"]
    path = tmp_path / "new.hdf5"
    assert make(CIFAR10, path, *source, *size, *new) == 0
    made = capsys.readouterr().err
    with DataFile(path) as file:
        task = SingleLabelView(file, "dirichlet-total-0.3-seed-7")
        names = ["dirichlet-per-class-0.3-seed-7", "dirichlet-total-0.3-seed-7", "dirichlet-total-10-seed-7"]
        assert list(task.partition_names) == names
        assert np.diff(task.split("train").user_offsets).tolist() == [12] * 5
        rows = {name: SingleLabelView(file, name).split("train").file_rows.tolist() for name in names}
        assert (
            SingleLabelView(file, "dirichlet-0.3-seed-7").split("train").file_rows.tolist() == rows[names[1]]
        )
        assert rows[names[0]] != rows[names[1]]
        assert file.provenance["dirichlet"][names[0]] == {"alpha": 0.3, "alpha_is": "per-class", "seed": 7}
    assert run(describe, [str(path)]) == 0
    described = capsys.readouterr().out
    assert run(partitions.main, [str(path)]) == 0
    compared = capsys.readouterr().out
    for text in (made, described, compared):
        assert "alpha 0.3 is per class (as in Flower, FedML, pfl); the total over the 10 classes" in text
        assert "alpha 0.3 is the total over the 10 classes (as in Hsu, Qi, Brown); per class" in text
    assert make(CIFAR10, tmp_path / "old.hdf5", *source, *size, "--alphas", "0.3") == 0
    assert capsys.readouterr().err.startswith(
        "--alphas is the old name of --dirichlet_total, whose alpha is the sum over"
    )
    with DataFile(tmp_path / "old.hdf5") as file:
        assert SingleLabelView(file, names[1]).split("train").file_rows.tolist() == rows[names[1]]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads are tried once."""
    monkeypatch.setattr(http, "PATIENCE", Patience(attempts=1, timeout_s=5))


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a refusal."""
    line = capsys.readouterr().err
    assert (line.startswith("error: "), line.count("\n")) == (True, 1), line
    return line


@pytest.mark.usefixtures("impatient")
def test_cifar_is_made_without_the_splits_where_they_cannot_be_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal names both remedies, and each of them works with what the refusal left behind."""
    write_parquet(CIFAR10, tmp_path / "in")
    dealt = write_splits(CIFAR10, tmp_path / "copy", zipped=True)
    output = tmp_path / "f.hdf5"
    with serving(tmp_path / "served") as server:
        monkeypatch.setattr(cifar_preprocess, "SPLITS_BASE", server.url)
        for asked in ((), ("--splits", "official")):
            assert make(CIFAR10, output, "--source", tmp_path / "in", *asked) == 2
            line = error_of(capsys)
            assert "cannot download" in line
            assert "or give a copy of cifar10_v1.1.zip with --splits DIR; or draw partitions" in line
            assert not output.exists()
        assert make(CIFAR10, output, "--source", tmp_path / "in", "--splits", "none") == 0
        assert "has no partition" in capsys.readouterr().err
        assert_holds(output, CIFAR10, {})
        more = ("--source", tmp_path / "in", "--splits", tmp_path / "copy", "--overwrite")
        assert make(CIFAR10, output, *more) == 0
        assert_holds(output, CIFAR10, dealt)


@pytest.mark.usefixtures("impatient")
def test_official_splits_are_known_by_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row that went to another user is noticed; the archive is then downloaded again."""
    write_parquet(CIFAR10, tmp_path / "in")
    dealt = write_splits(CIFAR10, tmp_path / "in")
    output = tmp_path / "f.hdf5"
    assert make(CIFAR10, output, "--source", tmp_path / "in") == 0
    with DataFile(output) as file:
        digests = file.provenance["splits_sha256"]
    assert list(digests) == list(dealt)
    capsys.readouterr()
    spec = dataclasses.replace(CIFAR10, official=digests)
    changed = tmp_path / "changed"
    write_splits(CIFAR10, changed)
    listed = changed / "federated_train_alpha_1.00.csv"
    listed.write_text(listed.read_text().replace("0,58,", "1,58,"))
    more = ("--source", tmp_path / "in", "--splits", "official", "--overwrite")
    with serving(tmp_path / "served") as server:
        monkeypatch.setattr(cifar_preprocess, "SPLITS_BASE", server.url)
        with zipfile.ZipFile(server.root / spec.splits_archive, "w") as archive:
            for path in changed.iterdir():
                archive.write(path, path.name)
        assert make(spec, output, *more) == 2
        assert "the rows of alpha-1.00 have the SHA-256" in error_of(capsys)
        write_splits(spec, server.root, zipped=True)
        assert make(spec, output, *more) == 0
        assert_holds(output, spec, dealt)
    assert not output.with_name("f.hdf5.download").exists()


@pytest.mark.usefixtures("impatient")
def test_splits_over_http_need_their_checksum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_parquet(CIFAR10, tmp_path / "in")
    output = tmp_path / "f.hdf5"
    with serving(tmp_path / "served") as server:
        dealt = write_splits(CIFAR10, server.root, zipped=True)
        more = ("--source", tmp_path / "in", "--splits", server.url)
        assert make(CIFAR10, output, *more) == 2
        assert "files from http addresses cannot be trusted; give an https address, or" in error_of(capsys)
        assert server.asked == []
        assert make(CIFAR10, output, *more, "--splits_sha256", "0" * 64) == 2
        assert "cifar10_v1.1.zip was damaged in the download (SHA256" in error_of(capsys)
        digest = hashlib.sha256((server.root / CIFAR10.splits_archive).read_bytes()).hexdigest()
        assert make(CIFAR10, output, *more, "--splits_sha256", digest.upper()) == 0
        assert_holds(output, CIFAR10, dealt)


@pytest.mark.usefixtures("impatient")
def test_images_that_arrive_damaged_are_downloaded_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path / "served") as server:
        spec = write_binary(CIFAR10, server.root)
        server.faults[spec.archive] = ["flipped"]
        more = ("--source", server.url, "--splits", "none")
        assert make(spec, tmp_path / "f.hdf5", *more) == 2
        assert "cifar-10-binary.tar.gz was damaged in the download (MD5" in error_of(capsys)
        assert make(spec, tmp_path / "f.hdf5", *more) == 0
        assert_holds(tmp_path / "f.hdf5", spec, {})


def test_nothing_is_downloaded_for_a_file_that_another_process_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    down, more = tmp_path / "down", ("--splits", "none", "--source")
    with serving(tmp_path / "served") as server, only_downloader(down), only_writer(tmp_path / "f.hdf5"):
        spec = write_binary(CIFAR10, server.root)
        assert make(spec, tmp_path / "f.hdf5", *more, server.url) == 2
        assert "another process is writing" in error_of(capsys)
        assert make(spec, tmp_path / "g.hdf5", *more, server.url, "--download_folder", down) == 2
        assert "another process is downloading into" in error_of(capsys)
        assert server.asked == []


def test_splits_that_do_not_fit_the_images_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parquet(CIFAR10, tmp_path / "in")

    def refused(splits: Path) -> str:
        code = make(CIFAR10, tmp_path / "f.hdf5", "--source", tmp_path / "in", "--splits", splits)
        line = capsys.readouterr().err
        assert (code, line.startswith("error: "), line.count("\n")) == (2, True, 1)
        return line

    folder = tmp_path / "csv"
    write_splits(CIFAR10, folder)
    listed = folder / "federated_train_alpha_0.00.csv"
    text = listed.read_text()
    listed.write_text(text.replace("9,59,3\n", "9,59,4\n"))
    assert "says that image 59 has class 4, but its class is 3: use splits of this data" in refused(folder)
    listed.write_text(text.replace("9,59,3\n", "9,60,3\n"))
    assert "image 60, which this data set does not have" in refused(folder)
    old = tmp_path / "cifar10.zip"
    with zipfile.ZipFile(old, "w") as archive:
        archive.writestr("federated_train_alpha_0.00.csv", text)
    assert "cifar10.zip is version 1.0 of the splits" in refused(old)
    (tmp_path / "empty").mkdir()
    assert "has no federated_train*.csv: give the folder that has them, or" in refused(tmp_path / "empty")
    assert "does not exist: give official, none, a folder, a zip archive or" in refused(tmp_path / "nowhere")
    broken = tmp_path / "cifar10_v1.1.zip"
    broken.write_bytes(b"PK\x03\x04 and no more")
    assert "cifar10_v1.1.zip is damaged" in refused(broken)


def test_an_archive_that_climbs_out_writes_nothing_outside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Members are read by the last part of their name and never unpacked."""
    write_parquet(CIFAR10, tmp_path / "in")
    with zipfile.ZipFile(tmp_path / "splits.zip", "w") as archive:
        archive.writestr("../../federated_train_alpha_0.00.csv", "user_id,image_id,class\n0,0,0\n")
    assert (
        make(CIFAR10, tmp_path / "f.hdf5", "--source", tmp_path / "in", "--splits", tmp_path / "splits.zip")
        == 0
    )
    with DataFile(tmp_path / "f.hdf5") as file:
        assert SingleLabelView(file).partition_names == ("alpha-0.00",)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "splits.zip", "f.hdf5"}
    spec = write_binary(CIFAR10, tmp_path / "tar")
    with tarfile.open(tmp_path / "tar" / spec.archive, "w:gz") as archive:
        add_member(archive, "/etc/data_batch_1.bin", b"")
    assert make(spec, tmp_path / "g.hdf5", "--source", tmp_path / "tar", "--splits", "none") == 2
    assert "is damaged (MD5" in capsys.readouterr().err


def test_options_that_cannot_be_are_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parquet(CIFAR10, tmp_path / "in")
    source = ["--source", str(tmp_path / "in"), "--splits", "none"]
    (tmp_path / "there.hdf5").touch()
    for arguments, said in [
        (["--alphas", "much"], "--alphas is 'much'; give numbers"),
        (
            ["--alphas", "-1", "--clients", "2", "--images_per_client", "3"],
            "--alphas is '-1'; give numbers of at least 0",
        ),
        (["--alphas", "1"], "60 images are not enough for 100 clients with 500 images each"),
        (["--seed", "-1"], "--seed is -1"),
        (["--source", str(tmp_path / "no")], "is neither an existing folder nor an address"),
    ]:
        assert make(CIFAR10, tmp_path / "f.hdf5", *source, *arguments) == 2
        assert said in capsys.readouterr().err
    assert make(CIFAR10, tmp_path / "there.hdf5", *source) == 2
    assert "already exists; add --overwrite to replace it" in capsys.readouterr().err
