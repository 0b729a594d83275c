"""From a source to one file: pairs survive, bad input is one line, nothing half-done keeps its name."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from dataset.cli import run
from dataset.fetch import hugging_face
from dataset.flair import sources
from dataset.flair.download_preprocess import main
from dataset.store.hdf5 import DataFile
from dataset.store.validate import main as describe
from tests.dataset.drawn import (
    Record,
    assert_paired,
    content_hash,
    number_in,
    records,
    write_archives,
    write_files,
    write_mixed,
    write_parquet,
)

CLOTHING = Path(__file__).parents[4] / "shared" / "data" / "clothing-flair"
WRITERS = [write_parquet, write_files, write_archives, write_mixed]
Folder = Callable[[Path, Sequence[Record]], Path]


def preprocess(folder: Path, output: Path, *options: str) -> Path:
    main(["--source", str(folder), "--output_file", str(output), *options])
    return output


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which the command ends, without its progress bars."""
    assert run(main, arguments) == 2
    lines = [line for line in capsys.readouterr().err.replace("\r", "\n").split("\n") if "error:" in line]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("write", "grouped", "storage"),
    [
        *((write_parquet, grouped, storage) for grouped in (True, False) for storage in ("jpeg", "raw")),
        *((write, *how) for write in WRITERS[1:] for how in ((True, "jpeg"), (False, "raw"))),
    ],
)
def test_each_image_keeps_its_labels_and_user(
    tmp_path: Path, write: Folder, grouped: bool, storage: str
) -> None:
    rows = records(80)
    options = RAW if storage == "raw" else []
    options = options + ([] if grouped else ["--not_group_data_by_user"])
    path = preprocess(write(tmp_path / "flair", rows), tmp_path / "f.hdf5", *options)
    assert_paired(path, rows)
    assert run(describe, [str(path)]) == 0
    with DataFile(path) as file:
        assert file.grouped is grouped
        assert file.storage == storage
        assert sum(split["images"] for split in file.provenance["counts"].values()) == 80


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.permutations(range(25)), shards=st.integers(1, 4), write=st.sampled_from(["parquet", "files"])
)
def test_the_content_does_not_depend_on_source_or_order(
    tmp_path: Path, order: list[int], shards: int, write: str
) -> None:
    rows = records(25)
    shutil.rmtree(tmp_path / "flair", ignore_errors=True)
    mixed = [rows[i] for i in order]
    if write == "parquet":
        write_parquet(tmp_path / "flair", mixed, shards)
    else:
        write_files(tmp_path / "flair", mixed)
    path = preprocess(tmp_path / "flair", tmp_path / "f.hdf5", "--overwrite", "--workers", "3")
    first = tmp_path / "first"
    if not first.exists():
        first.write_text(content_hash(path))
    assert content_hash(path) == first.read_text()


def test_users_and_their_images_are_sorted_and_jpegs_are_the_original_bytes(tmp_path: Path) -> None:
    rows = records(60)
    path = preprocess(write_parquet(tmp_path / "flair", rows), tmp_path / "f.hdf5")
    original = {str(one.image_id): one.image for one in rows}
    with DataFile(path) as file, h5py.File(path) as raw:
        split = file.split("train")
        assert list(split.user_ids) == sorted(split.user_ids)
        for start, stop in zip(split.user_offsets, split.user_offsets[1:]):
            mine = list(split.image_ids[int(start) : int(stop)])
            assert mine == sorted(mine)
        offsets = raw["train/image_offsets"][()]
        for row, image_id in enumerate(split.image_ids):
            assert bytes(raw["train/images"][offsets[row] : offsets[row + 1]]) == original[image_id]


def test_not_grouped_images_stay_in_the_sources_order(tmp_path: Path) -> None:
    rows = records(40)
    folder = write_parquet(tmp_path / "flair", rows, shards=1)
    path = preprocess(folder, tmp_path / "f.hdf5", "--not_group_data_by_user")
    with DataFile(path) as file:
        wanted = [str(one.image_id) for one in rows if one.partition == "train"]
        assert list(file.split("train").image_ids) == wanted


def test_raw_and_jpeg_storage_read_the_same_pixels_at_the_stored_size(tmp_path: Path) -> None:
    folder = write_parquet(tmp_path / "flair", records(30))
    for size in (32, 20):
        raw = preprocess(folder, tmp_path / f"raw{size}.hdf5", "--storage", "raw", "--image_size", str(size))
        jpeg = preprocess(folder, tmp_path / "jpeg.hdf5", "--overwrite")
        with DataFile(raw) as first, DataFile(jpeg) as second:
            assert first.image_size == size
            rows = np.arange(first.split("train").num_images)
            assert np.array_equal(
                first.read_images("train", rows, size), second.read_images("train", rows, size)
            )


def broken(record: Record, how: str) -> Record:
    """The record with an image that is cut off, no image, damaged in its stream, or in its code tables."""
    image = record.image or b""
    if how == "tables":  # more codes of one bit than there are
        at = image.index(b"\xff\xc4") + 5
        return replace(record, image=image[:at] + b"\xff" + image[at + 1 :])
    if how == "cut":
        return replace(record, image=image[: len(image) // 2])
    if how == "text":
        return replace(record, image=b"<html>not found</html>")
    buffer = io.BytesIO()
    Image.effect_noise((256, 256), 90).save(buffer, "JPEG", quality=95)
    noise = buffer.getvalue()
    scan = noise.index(b"\xff\xda")
    return replace(record, image=noise[: scan + 400] + b"\xff\xd9")


RAW = ["--storage", "raw", "--image_size", "32"]


@pytest.mark.parametrize(
    "how, options",
    [
        *((how, options) for how in ("cut", "text", "inside", "tables") for options in ([], RAW)),
        *((how, [*RAW, "--verify", "header"]) for how in ("cut", "text", "tables")),
    ],
)
def test_a_bad_image_is_named_or_left_out(
    tmp_path: Path, how: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = records(60)
    bad = rows[17]
    rows[17] = broken(bad, how)
    folder, output = write_parquet(tmp_path / "flair", rows), tmp_path / "f.hdf5"
    line = refused(capsys, "--source", str(folder), "--output_file", str(output), *options)
    assert f"image {bad.image_id} of user {bad.user_id} cannot be used" in line
    assert "--on_bad_image skip" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flair"]
    preprocess(folder, output, "--on_bad_image", "skip", *options)
    assert_paired(output, [one for one in rows if one.number != bad.number])
    with DataFile(output) as file:
        (skipped,) = file.provenance["skipped_images"]
        assert (skipped["user_id"], skipped["image_id"]) == (bad.user_id, str(bad.image_id))


def test_header_checks_find_cut_files_and_let_the_rest_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = records(20)
    for how, passes in (("cut", False), ("text", False), ("tables", True)):
        changed = [broken(rows[0], how), *rows[1:]]
        shutil.rmtree(tmp_path / "flair", ignore_errors=True)
        folder = write_parquet(tmp_path / "flair", changed)
        arguments = ["--source", str(folder), "--output_file", str(tmp_path / "f.hdf5"), "--verify", "header"]
        if passes:
            main(arguments)
            with DataFile(tmp_path / "f.hdf5") as file:
                split = file.split(rows[0].partition)
                row = list(split.image_ids).index(str(rows[0].image_id))
                with pytest.raises(ValueError, match=f"image {rows[0].image_id} .* cannot be decoded"):
                    file.read_images(rows[0].partition, np.array([row]), 32)
        else:
            assert f"image {rows[0].image_id} of user {rows[0].user_id}" in refused(capsys, *arguments)


def test_a_listed_image_without_a_file_is_a_bad_image(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = records(30)
    folder = write_files(tmp_path / "flair", rows)
    (folder / "small_images" / f"{rows[4].image_id}.jpg").unlink()
    arguments = ["--source", str(folder), "--output_file", str(tmp_path / "f.hdf5")]
    line = refused(capsys, *arguments)
    assert f"image {rows[4].image_id} of user {rows[4].user_id}" in line
    assert "missing" in line
    main([*arguments, "--on_bad_image", "skip"])
    assert_paired(tmp_path / "f.hdf5", [*rows[:4], *rows[5:]])


class Elsewhere(Record):
    """A record whose split is another than its user's."""

    @property
    def partition(self) -> str:
        return "validation" if self.number == 0 else "test"


def test_records_that_contradict_each_other_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = records(30)
    train = next(one for one in rows if one.partition == "train")
    cases = {
        f"image {rows[3].image_id} of user {rows[3].user_id} is there twice": [*rows, rows[3]],
        f"user {train.user_id} is in two splits": [*rows, Elsewhere(train.number + 110)],
        f"image {Elsewhere(0).image_id} of user user-00@N00 is in partition 'validation'": [
            *rows,
            Elsewhere(0),
        ],
    }
    for number, (message, changed) in enumerate(cases.items()):
        folder = write_parquet(tmp_path / str(number), changed)
        line = refused(capsys, "--source", str(folder), "--output_file", str(tmp_path / "f.hdf5"))
        assert message in line
        assert not (tmp_path / "f.hdf5").exists()


def test_a_label_mapping_fixes_the_columns_and_an_unknown_label_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = records(30)
    folder, mapping = write_parquet(tmp_path / "flair", rows), tmp_path / "labels.json"
    coarse = sorted({name for one in rows for name in one.labels} | {"aardvark"})
    mapping.write_text(json.dumps({"labels": coarse[::-1]}))
    options = ["--label_mapping", str(mapping)]
    path = preprocess(folder, tmp_path / "f.hdf5", *options)
    assert_paired(path, rows)
    with DataFile(path) as file:
        assert list(file.label_mapping("labels")) == coarse
        assert file.split("train").labels["labels"].counts()[0] == 0
    mapping.write_text(json.dumps({"labels": {name: 1 for name in coarse if name != "coarse9"}}))
    line = refused(capsys, "--source", str(folder), "--output_file", str(tmp_path / "g.hdf5"), *options)
    first = next(one for shard in range(3) for one in rows[shard::3] if "coarse9" in one.labels)
    assert f"image {first.image_id} of user {first.user_id} has the label 'coarse9'" in line


def test_an_output_that_exists_is_replaced_only_on_demand_and_only_when_the_new_one_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = records(20)
    folder, output = write_parquet(tmp_path / "flair", rows), tmp_path / "f.hdf5"
    output.write_text("precious")
    arguments = ["--source", str(folder), "--output_file", str(output)]
    assert "already exists; add --overwrite" in refused(capsys, *arguments)
    shutil.rmtree(folder)
    write_parquet(folder, [broken(rows[0], "cut"), *rows[1:]])
    refused(capsys, *arguments, "--overwrite")
    assert output.read_text() == "precious"
    main([*arguments, "--overwrite", "--on_bad_image", "skip"])
    assert_paired(output, rows[1:])


def test_a_disk_that_is_or_becomes_full_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_parquet(tmp_path / "flair", records(20))
    arguments = ["--source", str(folder), "--output_file", str(tmp_path / "new" / "f.hdf5")]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3000))
        line = refused(capsys, *arguments, "--storage", "raw")
        assert "0.00 GB for" in line
        assert "free some space or choose another disk" in line

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert "f.hdf5.partial: free some space, then run the same command again" in refused(capsys, *arguments)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["f.hdf5.partial"]


def test_a_really_full_disk_is_one_line(tmp_path: Path) -> None:
    folder = write_parquet(tmp_path / "flair", records(40))
    (tmp_path / "small").mkdir()
    command = f"{sys.executable} -m dataset.flair.download_preprocess --source {folder} --storage raw"
    script = f"mount -t tmpfs -o size=200k none {tmp_path}/small && exec {command}"
    script += f" --output_file {tmp_path}/small/f.hdf5"
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no private mounts (unshare -rm)")
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=60)
    if "mount:" in done.stderr:
        pytest.skip("this machine allows no tmpfs")
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1
    assert "free some space or choose another disk" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--output_file"),
        (["--output_file", "f", "--storage", "png"], "invalid choice: 'png'"),
        (["--output_file", "f", "--workers", "two"], "--workers"),
        (["--output_file", "f", "--image_size", "0"], "--image_size must be at least 1"),
        (["--output_file", "f", "--sourec", "x"], "--sourec"),
        (["--output_file", "/"], "is a folder"),
        (["--output_file", "f", "--source", "nowhere"], "is not a folder: give hf, apple or a folder"),
        (["--output_file", "f", "--source", ".", "--label_mapping", "none.json"], "none.json"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *arguments)
    assert not list(tmp_path.iterdir())


def test_downloads_are_deleted_after_success_and_kept_after_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = records(20)
    served = write_parquet(tmp_path / "hub", rows, shards=1)
    name = "data/train-00000-of-00001.parquet"
    downloads = []

    def hf_hub_download(_: str, path: str, *, local_dir: Path, **__: object) -> str:
        downloads.append(path)
        (local_dir / path).parent.mkdir(parents=True, exist_ok=True)
        return str(shutil.copy(served / path, local_dir / path))

    api = SimpleNamespace(
        list_repo_commits=lambda *_, **__: [SimpleNamespace(commit_id=sources.REVISION + "0" * 32)],
        list_repo_tree=lambda *_, **__: [
            SimpleNamespace(path=name, size=(served / name).stat().st_size, lfs=None)
        ],
    )
    monkeypatch.setattr(hugging_face, "HfApi", lambda **_: api)
    monkeypatch.setattr(hugging_face, "hf_hub_download", hf_hub_download)
    output = tmp_path / "f.hdf5"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        refused(capsys, "--output_file", str(output))
    assert (tmp_path / "f.hdf5.download" / name).exists()
    main(["--output_file", str(output)])
    assert downloads == [name]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.hdf5", "hub"]
    assert_paired(output, rows)
    with DataFile(output) as file:
        assert file.provenance["revision"] == sources.REVISION + "0" * 32


@pytest.mark.skipif(not CLOTHING.is_dir(), reason=f"the real input {CLOTHING} is not here")
def test_real_photographs_are_preprocessed_as_they_stand(tmp_path: Path) -> None:
    path = preprocess(CLOTHING, tmp_path / "f.hdf5", "--verify", "header")
    stats = json.loads((CLOTHING / "stats.json").read_text())
    with DataFile(path) as file:
        for name in ("train", "val", "test"):
            split = file.split(name)
            assert {"users": split.num_users, "images": split.num_images} == stats[name]
        assert len(file.label_mapping("labels")) == stats["labels"]
        assert len(file.label_mapping("fine_grained_labels")) == stats["fine_grained_labels"]
        assert file.read_images("test", np.array([0, 301]), 64).std() > 10


def test_numbers_are_read_from_pixels_as_they_were_drawn() -> None:
    assert [
        number_in(np.asarray(Image.open(io.BytesIO(Record(n).image or b"")))) for n in (1, 77, 40_000)
    ] == [
        1,
        77,
        40_000,
    ]
