"""Whatever is wrong with a source ends in one line with the file and the row, exit code 2, and no file."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from dataset.cli import run
from dataset.convert.__main__ import main
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
        f"{LINE} has the path '../secret.png', which is not one below",
    ),
    (replaced("\n5.png,", "\n/etc/passwd,"), f"{LINE} has the path '/etc/passwd', which is not one below"),
    (replaced("\n5.png,", "\na/../../5.png,"), f"{LINE} has the path 'a/../../5.png'"),
    (replaced("\n5.png,", "\n,"), f"{LINE} has the path ''"),
    (replaced("\n5.png,", "\n.,"), f"{LINE} has the path '.'"),
    (replaced("\n5.png,", "\n6.png,"), "line 7 lists the image '6.png' a second time (the first is " + LINE),
    (
        replaced("\n5.png,", "\n./6.png,"),
        "line 7 lists the image '6.png' a second time (the first is " + LINE,
    ),
    (replaced("\n5.png,", "\n55.png,"), f"{LINE}: it is listed, but its file is missing"),
    (replaced("\n5.png,", "\n4.png/5.png,"), f"{LINE}: 4.png/5.png cannot be read: Not a directory"),
    (replaced("\n5.png,", f"\n{'5' * 300}.png,"), f"{LINE} has the image id '555"),
    (link("../../secret.png"), f"{LINE}: 5.png leads out of --images own/images by a link"),
    (link("/etc/passwd"), f"{LINE}: 5.png leads out of --images own/images by a link"),
    (link("."), f"{LINE}: 5.png is no file"),
    (linked_folder, f"{LINE}: sub/5.png leads out of --images own/images by a link"),
    (image(b""), f"{LINE}: it is empty"),
    (image(b"neither"), f"{LINE}: it is none of JPEG, PNG, WebP, GIF, BMP and TIFF"),
    (lambda: image(Path("own/images/4.png").read_bytes()[:60])(), f"{LINE}: it cannot be decoded"),
    (image(bomb()), f"{LINE}: it cannot be decoded (Image size (900000000 pixels) exceeds"),
    (replaced(",bob,eel", ",,eel"), f"{LINE} has an empty client"),
    (replaced(",bob,eel", ", bob,eel"), f"{LINE} has white space around the client ' bob'"),
    (replaced(",bob,eel", ",b\x07b,eel"), f"{LINE} has characters that cannot be shown in the client"),
    (replaced(",bob,eel", f",{'b' * 256},eel"), "of 256 bytes, more than 255"),
    (replaced(",bob,eel", ",bob,"), f"{LINE} has an empty label"),
    (replaced(",bob,eel", ",bob,eel,x"), f"{LINE} has 4 cells, not 3"),
    (replaced(",bob,eel", ",bob"), f"{LINE} has 2 cells, not 3"),
    (replaced(",bob,eel", ',"bob,eel'), "own/labels.csv, line 1"),  # unclosed: it ends with the file
    (
        replaced("path,", "file,"),
        "own/labels.csv has no column 'path'; it has 'file', ",
    ),
    (replaced("path,client", "path;client"), "own/labels.csv has no column 'path'"),
    (replaced("label\n", "client\n"), "own/labels.csv has two columns 'client': leave one out"),
    (rewritten(b""), "own/labels.csv is empty; it needs the columns path, client, label"),
    (rewritten(b"path,client,label\n"), "own/labels.csv lists no image"),
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
    refused(LISTED, "line 3 has the split 'tset'; there are train, val, valid, validation, dev, test", capsys)
    text = Path("own/labels.csv").read_text().replace("tset", "train")
    Path("own/labels.csv").write_text(text.replace(",train", ",test"))
    refused(LISTED, "there is no image for training: call its split train, or deal", capsys)


WORDS = [
    ("", "the following arguments are required: FORMAT"),
    ("webdataset", "invalid choice: 'webdataset'"),
    (f"folder {OUT}", "the following arguments are required: --images"),
    (f"folder --images=nowhere {OUT}", "--images nowhere is no folder"),
    (f"folder --images=own/labels.csv {OUT}", "--images own/labels.csv is no folder"),
    (f"folder --images=own/images --labels=own {OUT}", "--labels own is a folder; give a file"),
    (f"folder --images=own/images --label_column=x {OUT}", "--label_column is for --labels: leave it out"),
    (f"folder --images=own/images {OUT}", "lies too high: images lie in client/class/"),
    (f"{LISTED} --label_column=species", "own/labels.csv has no column 'species'"),
    (f"{LISTED} --val_share=1", "--val_share is 1: give a share from 0 on and below 1"),
    (f"{LISTED} --val_share=nan", "--val_share is nan: give a share"),
    (f"{LISTED} --val_share=0.5 --test_share=0.5", "--val_share and --test_share leave nothing for training"),
    (f"{LISTED} --seed=-1", "--seed is -1; give a number from 0"),
    (f"{LISTED} --splits=given", "--splits is given, and the source has none"),
    (f"{LISTED} --val_share=0 --test_share=0 --seed=1", "--seed has no effect, as nothing is dealt"),
    (f"{LISTED} --val_share=0 --test_share=0 --split_by=users", "--split_by has no effect, as nothing"),
    (f"{LISTED} --storage=png", "--storage: invalid choice: 'png'"),
    (f"{LISTED} --image_size=64", "--image_size is for --storage raw: leave it out, or choose raw"),
    (f"{LISTED} --image_size=own", "--image_size is for --storage raw: leave it out, or choose raw"),
    (f"{LISTED} --image_size=0 --storage=raw", "--image_size must be at least 1"),
    (f"{LISTED} --workers=0", "--workers must be at least 1"),
    (f"{LISTED} --jpeg_quality=0", "--jpeg_quality is 0"),
    (f"{LISTED} --classes=nowhere", "--classes nowhere cannot be read"),
    (f"{LISTED} --classes=own/labels.csv", "which is none of the classes"),
    (f"{LISTED} --classes=", "--classes is empty"),
    (f"{LISTED} --output_file=own", "--output_file own is a folder"),
    (f"{LISTED} --output_file=own/labels.csv", "own/labels.csv exists; give --overwrite"),
    (f"leaf --source=nowhere {OUT}", "--source nowhere is neither a folder nor a file"),
    (f"leaf --source=own {OUT}", "--source own holds no *.json"),
    (f"leaf --source=own/labels.csv {OUT}", "own/labels.csv: it has 'p' in the place of {"),
    (f"tff --source=own {OUT}", "--source own is neither an HDF5 file nor a folder with *.h5"),
    (f"tff --source=own/labels.csv {OUT}", "own/labels.csv is not an HDF5 file"),
    (HF, "--source own holds neither *.parquet nor what save_to_disk writes"),
    (f"hf --source=own/labels.csv --client_column=c {OUT}", "own/labels.csv cannot be read as parquet"),
    (
        f"fedscale --images=own --labels=own {OUT}",
        "--labels own holds none of train.csv, val.csv and test.csv",
    ),
    (
        f"fedscale --images=own/images --labels=own/labels.csv {OUT}",
        "line 2 has the label 'dog', which is no class",
    ),
    (f"flamby --images=own --labels=own/labels.csv {OUT}", "own/labels.csv has no column 'image'"),
]


@pytest.mark.parametrize(("words", "said"), WORDS)
def test_a_bad_call(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_listed(Path("own"), range(1, 13))
    refused(words, said, capsys)


def test_too_few_users_for_the_splits(capsys: pytest.CaptureFixture[str]) -> None:
    write_listed(Path("own"), range(1, 6))
    refused(LISTED, "2 users are too few for 3 splits", capsys)


FOLDERS: list[tuple[Callable[[], object], str]] = [
    (
        lambda: Path("own/eve").mkdir(),
        "1 user has no image, eve among them: remove such users, or leave them out",
    ),
    (lambda: Path("own/bob/fox").mkdir(parents=True), ""),
    (lambda: write_image(Path("own/x.jpg"), 99), "own/x.jpg lies too high: images lie in client/class/"),
    (lambda: write_image(Path("own/bob/x.jpg"), 99), "own/bob/x.jpg lies too high"),
    (
        lambda: write_image(Path("own/bob/cat/a/x.jpg"), 99),
        "own/bob/cat/a is a folder: images lie in client/class/",
    ),
    (
        lambda: Path("own/bob/cat/x.txt").write_text("x"),
        "cannot be used, own: it is none of JPEG, PNG, WebP, GIF, BMP and TIFF",
    ),
    (lambda: os.mkfifo("own/bob/cat/x.jpg"), "own/bob/cat/x.jpg: bob/cat/x.jpg is no file"),
    (lambda: Path("own/bob/cat/x.jpg").symlink_to("/etc/passwd"), "leads out of --images own by a link"),
    (
        lambda: write_image(Path("own/train/bob/cat/x.jpg"), 99),
        "own/007: beside train there are splits alone",
    ),
    (lambda: Path(os.fsdecode(b"own/bob/cat/\xff.jpg")).write_bytes(b"x"), "cannot be shown in the image id"),
]


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
