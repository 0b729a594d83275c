"""Whatever is wrong with a source ends in one line with the file and the row, exit code 2, and no file."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataset.cli import run
from dataset.convert.__main__ import main
from dataset.preprocess import make
from dataset.store import probe
from dataset.store.hdf5 import DataFile
from tests.dataset.convert.made_sources import (
    convert,
    shown,
    write_folder,
    write_image,
    write_listed,
)
from tests.dataset.convert.refused import refused
from tests.dataset.drawn import png_of

OUT = "--output_file=out.hdf5 --workers=1"
LISTED = f"folder --images=own/images --labels=own/labels.csv {OUT}"
FOLDER = f"folder --images=own {OUT}"
HF = f"hf --source=own --client_column=client {OUT}"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probe, "probe", lambda path: None)


def replaced(old: str, new: str) -> Callable[[], None]:
    def change() -> None:
        path = Path("own/labels.csv")
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return change


def rewritten(content: bytes) -> Callable[[], None]:
    def change() -> None:
        Path("own/labels.csv").write_bytes(content)

    return change


def image(content: bytes) -> Callable[[], None]:
    def change() -> None:
        Path("own/images/5.png").write_bytes(content)

    return change


def link(target: str) -> Callable[[], None]:
    def change() -> None:
        Path("own/images/5.png").unlink()
        Path("secret.png").write_bytes(Path("own/images/4.png").read_bytes())
        Path("own/images/5.png").symlink_to(target)

    return change


def linked_folder() -> None:
    Path("elsewhere").mkdir()
    write_image(Path("elsewhere/5.png"), 5)
    Path("own/images/sub").symlink_to(Path("elsewhere").resolve())
    replaced("\n5.png,", "\nsub/5.png,")()


def bomb() -> bytes:
    """A PNG of 30,000 x 30,000 pixels in a kilobyte."""
    return png_of(struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0), b"\0" * 1000)


LINE = "own/labels.csv, line 6"  # of image 5
ROWS: list[tuple[Callable[[], None], str]] = [
    (
        replaced("\n5.png,", "\n../secret.png,"),
        f"{LINE} has the path '../secret.png', which is not a path inside",
    ),
    (replaced("\n5.png,", "\n/etc/passwd,"), f"{LINE} has the path '/etc/passwd', which is not a path"),
    (replaced("\n5.png,", "\na/../../5.png,"), f"{LINE} has the path 'a/../../5.png'"),
    (replaced("\n5.png,", "\n,"), f"{LINE} has the path ''"),
    (replaced("\n5.png,", "\n.,"), f"{LINE} has the path '.'"),
    (replaced("\n5.png,", "\n6.png,"), "line 7 has the image '6.png' a second time (the first is " + LINE),
    (
        replaced("\n5.png,", "\n./6.png,"),
        "line 7 has the image '6.png' a second time (the first is " + LINE,
    ),
    (replaced("\n5.png,", "\n55.png,"), f"{LINE}: it is listed, but its file is missing"),
    (replaced("\n5.png,", "\n4.png/5.png,"), f"{LINE}: 4.png/5.png cannot be read: Not a directory"),
    (replaced("\n5.png,", f"\n{'5' * 300}.png,"), f"{LINE}: the image id '555"),
    (link("../../secret.png"), f"{LINE}: 5.png is a link to a place outside --images own/images"),
    (link("/etc/passwd"), f"{LINE}: 5.png is a link to a place outside --images own/images"),
    (link("."), f"{LINE}: 5.png is not a file"),
    (linked_folder, f"{LINE}: sub/5.png is a link to a place outside --images own/images"),
    (image(b""), f"{LINE}: it is empty"),
    (image(b"neither"), f"{LINE}: it is not a JPEG, PNG, WebP, GIF, BMP or TIFF image"),
    (lambda: image(Path("own/images/4.png").read_bytes()[:60])(), f"{LINE}: it cannot be decoded"),
    (image(bomb()), f"{LINE}: it cannot be decoded (Image size (900000000 pixels) exceeds"),
    (replaced(",bob,eel", ",,eel"), f"{LINE} has an empty client"),
    (replaced(",bob,eel", ", bob,eel"), f"{LINE} has white space around the client ' bob'"),
    (replaced(",bob,eel", ",b\x07b,eel"), "has characters that cannot be printed"),
    (replaced(",bob,eel", f",{'b' * 256},eel"), "has 256 bytes; at most 255 are allowed"),
    (replaced(",bob,eel", ",bob,"), f"{LINE} has an empty label"),
    (replaced(",bob,eel", ",bob,eel,x"), f"{LINE} has 4 cells, not 3"),
    (replaced(",bob,eel", ",bob"), f"{LINE} has 2 cells, not 3"),
    (replaced(",bob,eel", ',"bob,eel'), "own/labels.csv, line 1"),  # unclosed: it ends with the file
    (
        replaced("path,", "file,"),
        "own/labels.csv has no column 'path'; it has 'file', ",
    ),
    (replaced("path,client", "path;client"), "own/labels.csv has no column 'path'"),
    (replaced("label\n", "client\n"), "own/labels.csv has two columns named 'client': remove or rename one"),
    (rewritten(b""), "own/labels.csv has no column 'path'; it needs path, client, label, but it is empty"),
    (rewritten(b"path,client,label\n"), "own/labels.csv has no image"),
    (
        rewritten(b"path,client,label\n4.png,b\xff,x\n"),
        "own/labels.csv, line 2 is not UTF-8 text: save it as UTF-8",
    ),
    (
        rewritten("path,client,label\n4.png,b,x\n".encode("utf-16")),
        "own/labels.csv, line 1 is not UTF-8 text",
    ),
    (rewritten(b"path,client,label\n4.png,b\0,x\n"), "own/labels.csv, line 2"),
]


@pytest.mark.parametrize(("change", "said"), ROWS)
def test_a_csv_that_is_wrong(
    change: Callable[[], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_listed(Path("own"), range(1, 13))
    change()
    refused(f"{LISTED} --split_by=images --test_share=0.4", said, capsys)


def test_an_unknown_split_and_a_split_that_hides_all(capsys: pytest.CaptureFixture[str]) -> None:
    write_listed(Path("own"), range(1, 13), split="train")
    replaced("eel,train", "eel,tset")()
    refused(LISTED, "line 3 has the split 'tset'; it must be one of train, val, valid, validation", capsys)
    text = Path("own/labels.csv").read_text().replace("tset", "train")
    Path("own/labels.csv").write_text(text.replace(",train", ",test"))
    refused(LISTED, "there is no image for training: name a split of the source train, or", capsys)


WORDS = [
    ("", "the following arguments are required: FORMAT"),
    ("webdataset", "invalid choice: 'webdataset'"),
    (f"folder {OUT}", "the following arguments are required: --images"),
    (f"folder --images=nowhere {OUT}", "--images nowhere is not a folder"),
    (f"folder --images=own/labels.csv {OUT}", "--images own/labels.csv is not a folder"),
    (f"folder --images=own/images --labels=own {OUT}", "--labels own is a folder; give a file"),
    (f"folder --images=own/images --label_column=x {OUT}", "--label_column needs --labels: add --labels"),
    (f"folder --images=own/images {OUT}", "is not in the folder of a class: images must be in"),
    (f"{LISTED} --label_column=species", "own/labels.csv has no column 'species'"),
    (f"{LISTED} --val_share=1", "--val_share is 1: give a number of at least 0 and below 1"),
    (f"{LISTED} --val_share=nan", "--val_share is nan: give a number of at least 0 and below 1"),
    (f"{LISTED} --val_share=0.5 --test_share=0.5", "--val_share and --test_share leave no images for"),
    (f"{LISTED} --seed=-1", "--seed is -1; give a number from 0"),
    (f"{LISTED} --splits=given", "--splits given: the source has no splits; leave it out, or give"),
    (f"{LISTED} --val_share=0 --test_share=0 --seed=1", "--seed has no effect: the source's splits are"),
    (f"{LISTED} --val_share=0 --test_share=0 --split_by=users", "--split_by has no effect: the source's"),
    (f"{LISTED} --storage=png", "--storage: invalid choice: 'png'"),
    (f"{LISTED} --image_size=64", "--image_size needs --storage raw: add --storage raw, or leave it out"),
    (f"{LISTED} --image_size=own", "--image_size needs --storage raw: add --storage raw, or leave it out"),
    (f"{LISTED} --image_size=0 --storage=raw", "--image_size must be at least 1"),
    (f"{LISTED} --workers=0", "--workers must be at least 1"),
    (f"{LISTED} --jpeg_quality=0", "--jpeg_quality is 0"),
    (f"{LISTED} --classes=nowhere", "--classes nowhere cannot be read"),
    (f"{LISTED} --classes=own/labels.csv", "which is not one of the classes"),
    (f"{LISTED} --classes=", "--classes is empty"),
    (f"{LISTED} --output_file=own", "--output_file own is a folder"),
    (f"{LISTED} --output_file=own/labels.csv", "own/labels.csv already exists; add --overwrite to replace"),
    (f"{LISTED} --output_file=own/labels.csv --overwrite", "--output_file own/labels.csv is the source file"),
    (f"leaf --source=nowhere {OUT}", "--source nowhere does not exist: give a folder or a file"),
    (f"leaf --source=own {OUT}", "--source own has no *.json files, and its folders train/ and test/ have"),
    (f"leaf --source=own/labels.csv {OUT}", "own/labels.csv: it has 'p' where { is expected"),
    (f"tff --source=own {OUT}", "--source own is neither an HDF5 file nor a folder with *.h5"),
    (f"tff --source=own/labels.csv {OUT}", "own/labels.csv is not an HDF5 file"),
    (HF, "--source own has neither *.parquet files nor the files that save_to_disk"),
    (f"hf --source=own/labels.csv --client_column=c {OUT}", "own/labels.csv cannot be read as parquet"),
    (
        f"fedscale --images=own --labels=own {OUT}",
        "--labels own has none of the files train.csv, val.csv and test.csv",
    ),
    (
        f"fedscale --images=own/images --labels=own/labels.csv {OUT}",
        "line 2 has the label 'dog', which is not a class number",
    ),
    (f"flamby --images=own --labels=own/labels.csv {OUT}", "own/labels.csv has no column 'image'"),
]


@pytest.mark.parametrize(("words", "said"), WORDS)
def test_a_bad_call(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_listed(Path("own"), range(1, 13))
    refused(words, said, capsys)


def test_too_few_users_for_the_splits(capsys: pytest.CaptureFixture[str]) -> None:
    write_listed(Path("own"), range(1, 6))
    refused(LISTED, "2 users are not enough for 3 splits", capsys)


def test_a_file_that_another_command_has_made_meanwhile_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While this one listed its source; the check before did not find it yet."""
    write_folder(Path("own"), range(1, 28))
    words = f"{FOLDER} --split_by=images --test_share=0.4".split()
    place, codes = "dataset.convert.__main__.make", list[int]()

    def meanwhile(*args: Any) -> None:
        monkeypatch.setattr(place, make)
        codes.append(run(main, [*words, "--seed=9"]))
        make(*args)

    monkeypatch.setattr(place, meanwhile)
    assert run(main, words) == 2
    assert codes == [0]
    assert capsys.readouterr().err.endswith("out.hdf5 already exists; add --overwrite to replace it\n")
    dealt = shown(Path("out.hdf5"))
    assert {path.name for path in Path().iterdir()} == {"own", "out.hdf5"}
    monkeypatch.setattr(place, meanwhile)
    assert run(main, [*words, "--overwrite"]) == 0
    assert codes == [0, 2], "the other one has no --overwrite"
    assert shown(Path("out.hdf5")) != dealt


FOLDERS: list[tuple[Callable[[], object], str]] = [
    (
        lambda: Path("own/eve").mkdir(),
        "1 user has no image, for example eve: remove such users from the source, or leave",
    ),
    (lambda: Path("own/bob/fox").mkdir(parents=True), ""),
    (lambda: write_image(Path("own/x.jpg"), 99), "own/x.jpg is not in the folder of a class: images must"),
    (lambda: write_image(Path("own/bob/x.jpg"), 99), "own/bob/x.jpg is not in the folder of a class"),
    (
        lambda: write_image(Path("own/bob/cat/a/x.jpg"), 99),
        "own/bob/cat/a is a folder, but images must be in client/class/, or all",
    ),
    (
        lambda: Path("own/bob/cat/x.txt").write_text("x"),
        "cannot be used, own: it is not a JPEG, PNG, WebP, GIF, BMP or TIFF image",
    ),
    (lambda: os.mkfifo("own/bob/cat/x.jpg"), "own/bob/cat/x.jpg: bob/cat/x.jpg is not a file"),
    (lambda: Path("own/bob/cat/x.jpg").symlink_to("/etc/passwd"), "is a link to a place outside --images"),
    (
        lambda: write_image(Path("own/train/bob/cat/x.jpg"), 99),
        "own/007: train beside it is a split, so all folders here must be splits",
    ),
    (
        lambda: Path(os.fsdecode(b"own/bob/cat/\xff.jpg")).write_bytes(b"x"),
        "has characters that cannot be printed",
    ),
]


def test_an_image_beside_the_folders_of_classes_of_a_split(capsys: pytest.CaptureFixture[str]) -> None:
    write_image(Path("own/train/cat/x.jpg"), 1)
    write_image(Path("own/train/y.jpg"), 2)
    refused(FOLDER, "own/train/y.jpg is not in the folder of a class: images must be in", capsys)


@pytest.mark.parametrize(("change", "said"), FOLDERS)
def test_a_folder_that_is_wrong(
    change: Callable[[], object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(Path("own"), range(1, 13))
    change()
    words = f"{FOLDER} --split_by=images --test_share=0.4"
    if said:
        refused(words, said, capsys)
    else:
        assert run(main, words.split()) == 0


def test_bad_images_and_users_without_images_are_left_out_on_request() -> None:
    write_folder(Path("own"), range(1, 28))
    Path("own/eve").mkdir()
    Path("own/bob/cat/x.jpg").write_bytes(b"x")
    more = "--on_bad_image=skip --on_empty_user=skip --split_by=images --test_share=0.4"
    convert(f"folder --images=own {more} --licence=CC0", Path("out.hdf5"))
    assert len(shown(Path("out.hdf5"))) == 27
    with DataFile(Path("out.hdf5")) as file:
        assert file.provenance["licence"] == "CC0"
        assert [one["image_id"] for one in file.provenance["skipped_images"]] == ["bob/cat/x.jpg"]
        assert file.provenance["users_without_images"] == 1
