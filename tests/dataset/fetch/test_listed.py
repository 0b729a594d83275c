"""iNaturalist and Landmarks from a server or a folder: only what is listed, and everything that is."""

from __future__ import annotations

import csv
import dataclasses
import re
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dataset import preprocess_listed as listed_preprocess
from dataset.cli import run
from dataset.fetch import http, listed
from dataset.fetch.http import Patience
from dataset.fetch.listed import ListedSet, keep, read_lists
from dataset.journal import only_downloader, only_writer
from dataset.store.hdf5 import DataFile
from dataset.store.validate import validate
from dataset.store.views import SingleLabelView
from tests.dataset.drawn import add_member, jpeg
from tests.dataset.fetch.faulty_server import FaultyServer, serving
from tests.dataset.fetch.made_lists import (
    CLASSES,
    INATURALIST,
    LANDMARKS,
    TEST,
    TRAIN,
    assert_paired,
    author,
    cell,
    class_of,
    google_inaturalist_csvs,
    image_id,
    inaturalist_csvs,
    landmark_csvs,
    served,
    write_archives,
)

QUICK = Patience(attempts=3, timeout_s=0.5, pause_s=0.01)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FaultyServer]:
    with serving(tmp_path / "served") as state:
        yield state


def make(spec: ListedSet, output: Path, *arguments: str | Path) -> int:
    return run(
        partial(listed_preprocess.main, {"only": spec}), ["--output_file", str(output), *map(str, arguments)]
    )


def assert_dealt(path: Path, name: str, owner: dict[int, str]) -> None:
    """A partition gives each of these images, and no other, to its owner."""
    with DataFile(path) as file:
        store, ids = SingleLabelView(file, name).split("train"), file.split("train").image_ids
        owners = np.repeat(np.array(store.user_ids), np.diff(store.user_offsets)).tolist()
        found = {ids[int(row)]: user for row, user in zip(store.file_rows, owners)}
    assert found == {image_id(number): user for number, user in owner.items()}


def write_csvs(folder: Path, texts: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("subset", ["160k", "23k"])
def test_landmarks_from_their_server_leave_only_what_is_listed(
    tmp_path: Path, server: FaultyServer, subset: str
) -> None:
    spec = served(LANDMARKS[subset], server.root, server.url, landmark_csvs())
    output = tmp_path / "f.hdf5"
    assert make(spec, output) == 0
    validate(output)
    assert_paired(output)
    assert {path.name for path in tmp_path.iterdir()} == {"served", "f.hdf5"}
    with DataFile(output) as file:
        task = SingleLabelView(file)
        assert task.partition_names == ()
        assert task.label_names == tuple(f"{k:02d}" for k in range(CLASSES))
        assert sorted(task.split("train").user_ids) == sorted({author(n) for n in TRAIN})
    fetched = [path for path, _ in server.asked]
    assert [fetched.count(f"/{one.path}") for one in spec.archives] == [1, 1, 1]  # though each is read twice


def test_a_download_folder_keeps_what_was_in_it(tmp_path: Path, server: FaultyServer) -> None:
    spec = served(LANDMARKS["23k"], server.root, server.url, landmark_csvs())
    own = tmp_path / "data" / "splits" / "mine.csv"
    own.parent.mkdir(parents=True)
    own.write_text("own")
    assert make(spec, tmp_path / "data" / "f.hdf5", f"--download_folder={tmp_path / 'data'}") == 0
    assert own.read_text() == "own"
    found = [path.relative_to(tmp_path / "data").as_posix() for path in (tmp_path / "data").rglob("*")]
    assert sorted(found) == ["f.hdf5", "splits", "splits/mine.csv"]


def test_nothing_is_downloaded_for_a_file_that_another_process_writes(
    tmp_path: Path, server: FaultyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes would cut off each other's half of a download."""
    spec, output = served(LANDMARKS["23k"], server.root, server.url, landmark_csvs()), tmp_path / "f.hdf5"
    with only_writer(output):
        assert make(spec, output) == 2
    assert f"error: another process is writing {output}: wait until it ends" in capsys.readouterr().err
    with only_downloader(tmp_path):
        assert make(spec, output, f"--download_folder={tmp_path}") == 2
    assert f"error: another process is downloading into {tmp_path}: wait" in capsys.readouterr().err
    assert server.asked == []


@pytest.mark.parametrize("google", [False, True])
def test_inaturalist_has_all_its_partitions_beside_the_authors(
    tmp_path: Path, server: FaultyServer, google: bool
) -> None:
    spec = served(INATURALIST, server.root, server.url, inaturalist_csvs())
    more = ["--splits", str(write_csvs(tmp_path / "csv", google_inaturalist_csvs()))] if google else []
    output = tmp_path / "f.hdf5"
    assert make(spec, output, *more) == 0
    validate(output)
    assert_paired(output)
    assert_dealt(output, "user-120k", {n: author(n) for n in TRAIN})
    assert_dealt(output, "geo-100", {n: cell(n) for n in TRAIN if cell(n) != "NA"})
    with DataFile(output) as file:
        coarse = SingleLabelView(file).split("train").classes
        assert list(file.label_mapping("labels")) == [f"{k:02d}" for k in range(CLASSES)]
        if not google:  # these CSVs name no classes
            assert file.annotation_names == ("labels",)
            return
        fine = list(file.label_mapping("fine_grained_labels"))
        assert fine == sorted(f"species {k}" for k in range(CLASSES))
        rows = SingleLabelView(file, taxonomy="fine_grained_labels").split("train")
        assert [fine[k] for k in rows.classes] == [f"species {k}" for k in coarse]


def test_a_folder_of_images_or_of_archives_gives_the_same_file(tmp_path: Path) -> None:
    texts = landmark_csvs()
    write_csvs(tmp_path / "tar", texts)
    write_archives(tmp_path / "tar", LANDMARKS["160k"].archives[:2])
    (tmp_path / "loose").mkdir()
    with zipfile.ZipFile(tmp_path / "loose" / "landmarks-user-160k.zip", "w") as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
    for path in sorted((tmp_path / "tar").rglob("*.tar")):
        with tarfile.open(path) as archive:
            archive.extractall(tmp_path / "loose" / path.stem, filter="data")
    shutil.copytree(tmp_path / "tar", tmp_path / "mixed")
    loose = sorted((tmp_path / "loose").rglob("*.jpg"))
    shutil.copy(loose[0], tmp_path / "mixed")  # the archives beside it are read all the same
    prints = set()
    for source in ("tar", "loose", "mixed"):
        output = tmp_path / "f.hdf5"
        assert make(LANDMARKS["160k"], output, "--source", tmp_path / source, "--overwrite") == 0
        assert_paired(output)
        with DataFile(output) as file:
            prints.add(file.fingerprint)
    assert len(prints) == 1
    assert len(list((tmp_path / "tar").rglob("*.tar"))) == 2  # what is the user's is left alone


def test_missing_images_are_counted_and_listed_and_users_without_any_are_dropped(
    tmp_path: Path, server: FaultyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = (*(n for n in TRAIN if author(n) == "9"), TRAIN[1], TEST[0])
    spec = served(INATURALIST, server.root, server.url, inaturalist_csvs(), without=gone)
    output = tmp_path / "f.hdf5"
    assert make(spec, output) == 0
    validate(output)
    assert_paired(output, without=gone)
    said = capsys.readouterr().err
    assert f"{len(set(gone))} of 52 listed images are missing" in said
    assert "users who are left out because all their images are missing: 1 of" in said
    with open(tmp_path / "f.hdf5.missing.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["image_id"] for row in rows} == {image_id(n) for n in gone}
    assert {row["reason"] for row in rows} == {"it is listed, but its file is missing"}
    with DataFile(output) as read:
        assert read.provenance["skipped_images"]["count"] == len(set(gone))
        assert read.provenance["users_without_images"] == {"user-120k": 1, "geo-100": 0}
        assert "9" not in SingleLabelView(read, "user-120k").split("train").user_ids
    assert_dealt(output, "user-120k", {n: author(n) for n in TRAIN if n not in gone})
    assert make(spec, tmp_path / "g.hdf5", "--on_bad_image", "fail") == 2
    assert "it is listed, but its file is missing" in capsys.readouterr().err
    assert not (tmp_path / "g.hdf5").exists()


def test_a_damaged_image_is_not_taken_for_a_missing_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_csvs(tmp_path / "in", landmark_csvs())
    for number in (*TRAIN, *TEST):
        (folder / f"{image_id(number)}.jpg").write_bytes(jpeg(number))
    (folder / f"{image_id(5)}.jpg").write_bytes(jpeg(5)[:-40])
    assert make(LANDMARKS["160k"], tmp_path / "f.hdf5", "--source", folder) == 2
    assert re.search(f"image {image_id(5)} of user {author(5)} cannot be used", capsys.readouterr().err)
    assert make(LANDMARKS["160k"], tmp_path / "f.hdf5", "--source", folder, "--on_bad_image", "skip") == 0
    assert_paired(tmp_path / "f.hdf5", without=(5,))


def test_a_download_goes_on_archive_by_archive_on_a_bad_day(
    tmp_path: Path, server: FaultyServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command ends in one line; what was kept of an archive is never fetched again."""
    spec = served(LANDMARKS["160k"], server.root, server.url, landmark_csvs())
    monkeypatch.setattr(http, "PATIENCE", QUICK)
    first, second, third = (one.path for one in spec.archives)
    server.faults = {first: ["short"], second: ["short", 404], third: ["flipped"]}
    output = tmp_path / "f.hdf5"
    assert make(spec, output) == 2
    assert "404" in capsys.readouterr().err
    assert make(spec, output) == 2
    assert "images_002.tar was damaged in the download (MD5" in capsys.readouterr().err
    kept = sorted(path.name.partition(".")[0] for path in (tmp_path / "f.hdf5.download").glob("*.kept.tar"))
    assert kept == ["images_000", "images_001"]
    assert not list((tmp_path / "f.hdf5.download").glob("images_00?.tar"))  # nothing of what was not listed
    assert make(spec, output) == 0
    assert_paired(output)
    fetched = [path for path, asked in server.asked if not asked]
    assert [fetched.count(f"/{path}") for path in (first, second, third)] == [1, 1, 2]
    assert not (tmp_path / "f.hdf5.download").exists()


def test_lists_that_arrive_damaged_are_not_used(
    tmp_path: Path, server: FaultyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = served(LANDMARKS["160k"], server.root, server.url, landmark_csvs())
    server.faults = {spec.splits[0].path: ["flipped"]}
    assert make(spec, tmp_path / "f.hdf5") == 2
    assert "landmarks-user-160k.zip was damaged in the download (MD5" in capsys.readouterr().err
    assert make(spec, tmp_path / "f.hdf5") == 0


def test_coordinates_give_partitions_by_cells(tmp_path: Path, server: FaultyServer) -> None:
    """Three towns of ten images each, within three metres; N_max = 5 divides each of them."""
    spec = served(INATURALIST, server.root, server.url, inaturalist_csvs())
    towns = {0: (48.85, 2.35), 1: (-33.9, 18.4), 2: (35.7, 139.7)}
    lines = ["image_id,latitude,longitude"]
    for number in list(TRAIN)[:30]:
        latitude, longitude = towns[number % 3]
        lines.append(f"{image_id(number)},{latitude + number / 1e6},{longitude}")
    places = tmp_path / "places.csv"
    places.write_text("\n".join(lines))
    assert make(spec, tmp_path / "f.hdf5", "--coordinates", places, "--n_max", "10, 5") == 0
    with DataFile(tmp_path / "f.hdf5") as file:
        assert SingleLabelView(file).partition_names == ("geo-100", "s2-10", "s2-5", "user-120k")
        train = file.split("train")
        town = {image_id(number): number % 3 for number in TRAIN}
        for name in ("s2-10", "s2-5"):
            store = SingleLabelView(file, name).split("train")
            sizes = np.diff(store.user_offsets)
            assert sizes.sum() == 30  # images without a place are in no cell
            assert sizes.tolist() == [10, 10, 10] if name == "s2-10" else sizes.max() <= 5
            seen = [town[train.image_ids[int(row)]] for row in store.file_rows]
            for start, stop in zip(store.user_offsets, store.user_offsets[1:]):
                assert len(set(seen[start:stop])) == 1


def test_only_what_is_wanted_is_kept_of_an_archive(tmp_path: Path) -> None:
    """Names lose their last suffix and nothing else; members that climb out land nowhere but in the copy."""
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("x/pigg.jpg", "x/pig.jpg", "../../climber.jpg", "other.jpg", "pig.png"):
            add_member(archive, name, name.encode())
    assert keep(tmp_path / "a.tar", {"pigg", "climber"}, tmp_path / "kept.tar") == 2
    with tarfile.open(tmp_path / "kept.tar") as archive:
        assert archive.getnames() == ["pigg.jpg", "climber.jpg"]
        content = archive.extractfile("pigg.jpg")
        assert content is not None
        assert content.read() == b"x/pigg.jpg"
    assert {path.name for path in tmp_path.iterdir()} == {"a.tar", "kept.tar"}
    whole = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(whole[: 512 + 4])
    with pytest.raises(ValueError, match=r"a\.tar is damaged"):
        keep(tmp_path / "a.tar", {"pigg"}, tmp_path / "again.tar")
    assert {path.name for path in tmp_path.iterdir()} == {"a.tar", "kept.tar"}


def test_lists_that_contradict_one_another_are_refused(tmp_path: Path) -> None:
    def refused(texts: dict[str, str]) -> str:
        folder = write_csvs(tmp_path / str(len(list(tmp_path.iterdir()))), texts)
        with pytest.raises(ValueError, match=r"take|leave|give|use|holds|download") as caught:
            read_lists(folder).table("user-120k")
        return str(caught.value)

    texts = google_inaturalist_csvs()
    assert "0 test CSV files" in refused({name: text for name, text in texts.items() if name != "test.csv"})
    assert "0 training CSV files" in refused({"test.csv": texts["test.csv"]})
    other = texts["federated_train_geo_100.csv"].replace(
        f"{image_id(1)},{class_of(1)},", f"{image_id(1)},{class_of(1) + 1},"
    )
    assert f"image {image_id(1)} has class" in refused({**texts, "federated_train_geo_100.csv": other})
    both = texts["test.csv"] + f"{image_id(2)},1,x\n"
    assert f"image {image_id(2)} is a training image but is also in" in refused({**texts, "test.csv": both})
    twice = {**texts, "federated_train_user-120k.csv": texts["federated_train_user_120k.csv"]}
    assert "has two CSV files of the same partition" in refused(twice)


def test_options_that_cannot_be_are_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_csvs(tmp_path / "in", landmark_csvs())
    (folder / f"{image_id(1)}.jpg").write_bytes(jpeg(1))
    (tmp_path / "none").mkdir()
    places = tmp_path / "places.csv"
    places.write_text("image_id,latitude,longitude\nq,1,2\n")
    for arguments, said in [
        (
            ["--source", "nowhere", "--splits", str(folder)],
            "--source nowhere is neither an existing folder nor an address",
        ),
        (["--source", str(folder), "--splits", "nowhere"], "--splits nowhere does not exist: give a"),
        (["--source", str(tmp_path / "none"), "--splits", str(folder)], "has none of the images that the"),
        (["--source", str(folder), "--coordinates", str(places), "--n_max", "1k"], "--n_max is '1k'"),
        (["--source", str(folder), "--coordinates", str(places)], "--coordinates has none of the training"),
        (["--source", str(folder), "--workers", "0"], "--workers must be at least 1"),
    ]:
        assert make(LANDMARKS["160k"], tmp_path / "f.hdf5", *arguments) == 2
        line = capsys.readouterr().err.replace("\r", "\n").splitlines()[-1]
        assert line.startswith("error: ")
        assert said in line
    (folder / "deep" / f"{image_id(1)}.jpeg").mkdir(parents=True)
    assert make(LANDMARKS["160k"], tmp_path / "g.hdf5", "--source", folder) == 0, "a folder is no image"
    capsys.readouterr()
    (folder / "deep" / f"{image_id(1)}.jpg").write_bytes(jpeg(1))
    assert make(LANDMARKS["160k"], tmp_path / "f.hdf5", "--source", folder) == 2
    assert f"two files are named like image {image_id(1)}" in capsys.readouterr().err


def test_the_public_addresses_are_those_of_the_reference() -> None:
    """reference/federated-visual-classification.md, B4."""
    assert len(LANDMARKS["160k"].archives) == 500
    last = LANDMARKS["23k"].archives[-1]
    assert (last.path, last.md5_path) == ("train/images_499.tar", "md5sum/train/md5.images_499.txt")
    assert [one.path for one in INATURALIST.archives] == ["train_val_images.tar.gz", "test2017.tar.gz"]
    assert all(len(one.md5) == 32 for one in (*INATURALIST.archives, *INATURALIST.splits))
    assert dataclasses.replace(LANDMARKS["160k"], splits=(), splits_base="") == dataclasses.replace(
        LANDMARKS["23k"], splits=(), splits_base=""
    )
    assert listed.class_name(7, 2028) == "0007"
