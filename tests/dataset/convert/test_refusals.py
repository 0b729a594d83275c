"""Whatever is wrong with a source ends in one line with the file and the row, exit code 2, and no file."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataset.cli import run
from dataset.convert.__main__ import main
from dataset.store import probe
from dataset.store.hdf5 import DataFile
from tests.bad_calls import check_refused
from tests.dataset.convert.made_sources import (
    convert,
    leaf_user,
    shown,
    write_folder,
    write_image,
    write_leaf,
    write_listed,
    write_tff,
)
from tests.dataset.drawn import draw

OUT = "--output_file=out.hdf5 --workers=1"
LISTED = f"folder --images=own/images --labels=own/labels.csv {OUT}"
FOLDER = f"folder --images=own {OUT}"
LEAF = f"leaf --source=own {OUT}"
TFF = f"tff --source=own/a.h5 {OUT}"
HF = f"hf --source=own --client_column=client {OUT}"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probe, "probe", lambda path: None)


def refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The progress bars of a source that is read before it is refused are not looked at."""
    real = capsys.readouterr

    class Line:
        @staticmethod
        def readouterr() -> Any:
            found = real()
            lines = [part for part in found.err.replace("\r", "\n").splitlines() if part.strip()]
            bars = ("0/2 list", "1/2 check", "2/2 write", "own/labels.csv: these columns")
            kept = [line for line in lines if not line.lstrip("\x1b[A ").startswith(bars)]
            return type(found)(found.out, "".join(f"{line}\n" for line in kept))

    check_refused(main, words, said, Path.cwd(), Line())  # type: ignore[arg-type]
    assert not Path("out.hdf5").exists()


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

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        )

    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


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
    (image(b"neither"), f"{LINE}: it is not a JPEG (no start marker)"),
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
        "own/labels.csv has no column 'path'; it needs path, client, label; it has 'file'",
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
    refused(LISTED, "line 3 has the split 'tset'; there are train, val, validation, test", capsys)
    text = Path("own/labels.csv").read_text().replace("tset", "train")
    Path("own/labels.csv").write_text(text.replace(",train", ",test"))
    refused(LISTED, "there is no image for training: is the split called train?", capsys)


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
    (f"hf --source=own {OUT}", "required: --client_column"),
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
        "cannot be used, own: it is not a JPEG (no start marker)",
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
    convert(f"folder --images=own {more}", Path("out.hdf5"))
    assert len(shown(Path("out.hdf5"))) == 27
    with DataFile(Path("out.hdf5")) as file:
        assert [one["image_id"] for one in file.provenance["skipped_images"]] == ["bob/cat/x.jpg"]
        assert file.provenance["users_without_images"] == 1


def leaf(change: Callable[[dict[str, Any]], object]) -> Callable[[], None]:
    def write() -> None:
        data = {user: leaf_user(range(k, k + 3)) for user, k in (("a", 1), ("b", 4), ("c", 7))}
        content = json.loads(write_leaf(Path("own/a.json"), data).read_text())
        change(content)
        Path("own/a.json").write_text(json.dumps(content))

    return write


def x_of(value: Any) -> Callable[[dict[str, Any]], object]:
    """Another first sample of user b."""
    return lambda c: c["user_data"]["b"]["x"].__setitem__(1, value)


def text(content: str) -> Callable[[], None]:
    def write() -> None:
        Path("own").mkdir()
        Path("own/a.json").write_text(content)

    return write


def same_users() -> None:
    leaf(lambda content: None)()
    Path("own/b.json").write_bytes(Path("own/a.json").read_bytes())


def not_utf8() -> None:
    Path("own").mkdir()
    Path("own/a.json").write_bytes(b'{"users": "\xff"}')


B = "own/a.json, user 'b', sample 1"
LEAVES: list[tuple[Callable[[], None], str]] = [
    (leaf(x_of("img.jpg")), f"{B} is 'img.jpg': give the folder of such files with --images"),
    (leaf(x_of([0.1] * 5)), f"{B} has 5 numbers, which are no image of one or three channels"),
    (leaf(x_of([[0.1, 0.2], [0.3]])), f"{B} is no image: it holds other things than numbers"),
    (leaf(x_of([])), f"{B} is no image"),
    (leaf(x_of(None)), f"{B} is no image"),
    (leaf(x_of([True] * 4)), f"{B} is no image"),
    (leaf(x_of([1.5] * 4)), f"{B} has the number 1.5, which is out of range"),
    (leaf(x_of([-0.5] * 4)), f"{B} has the number -0.5, which is out of range"),
    (leaf(x_of([7] * 4)), f"{B} has whole numbers above 1"),
    (leaf(x_of([10**30] * 4)), f"{B} is no image"),
    (leaf(lambda c: c["user_data"]["b"]["y"].__setitem__(1, -1)), f"{B} has the label -1, which is out"),
    (leaf(lambda c: c["user_data"]["b"]["y"].__setitem__(1, 1.5)), f"{B} has the label 1.5, which is no"),
    (leaf(lambda c: c["user_data"]["b"]["y"].__setitem__(1, 70_000)), f"{B} has the label 70000, which"),
    (leaf(lambda c: c["user_data"]["b"]["y"].append(1)), "user 'b' needs x and y, two lists of one length"),
    (leaf(lambda c: c["user_data"].__setitem__("b", 3)), "user 'b' needs x and y, two lists of one length"),
    (leaf(lambda c: c["num_samples"].__setitem__(1, 2)), "user 'b' has 3 samples, but 2 by num_samples"),
    (leaf(lambda c: c["users"].__setitem__(1, "a")), "users has a user twice"),
    (leaf(lambda c: c["users"].pop()), "needs users and num_samples, two lists of one length"),
    (leaf(lambda c: [c["users"].pop(), c["num_samples"].pop()]), "user 'c' has samples and is not one"),
    (leaf(lambda c: c["user_data"].pop("b")), "user_data has nothing of user 'b'"),
    (leaf(lambda c: [c["user_data"].update(b={"x": [], "y": []}), c["num_samples"].__setitem__(1, 0)]),
     "1 user has no image, b among them"),
    (text(""), "own/a.json: it has 'its end' in the place of {"),
    (text("[1]"), "own/a.json: it has '[' in the place of {"),
    (text('{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[0.1'), "it is damaged or cut off"),
    (text('{"users": ["a"]} x'), "there is text after its object"),
    (text('{"users": ["a"], "users": ["b"]}'), "it has 'users' twice"),
    (text('{"user_data": {"a": {"x": [], "y": []}, "a": {"x": [], "y": []}}}'), "it has 'a' twice"),
    (text('{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[NaN]], "y": [1]}}}'), "NaN is no"),
    (text('{"users": ' + "[" * 100_000), "own/a.json: it is nested too deeply"),
    (text('{"users": ["\\ud800"], "num_samples": [1], "user_data": {"\\ud800": {"x": [[0.1]], "y": [1]}}}'),
     "characters that cannot be shown in the client"),
    (same_users, "own/b.json: user 'a' has data in an earlier file of this split, too"),
    (not_utf8, "own/a.json is not UTF-8 text"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), LEAVES)
def test_leaf_json_that_is_wrong(
    change: Callable[[], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change()
    refused(f"{LEAF} --split_by=images --test_share=0.4", said, capsys)


def hdf5(change: Callable[[h5py.File], object]) -> Callable[[], None]:
    def write() -> None:
        write_tff(Path("own/a.h5"), {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]})
        with h5py.File("own/a.h5", "r+") as file:
            change(file)

    return write


def replace_leaf(name: str, value: Any, **more: Any) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[f"examples/b/{name}"]
        file["examples/b"].create_dataset(name, data=value, **more)

    return change


def external(file: h5py.File) -> None:
    with h5py.File("secret.h5", "w") as other:
        other["pixels"] = np.zeros((3, 32, 32), np.float32)
    del file["examples/b/pixels"]
    file["examples/b/pixels"] = h5py.ExternalLink("../secret.h5", "pixels")


def no_images(file: h5py.File) -> None:
    replace_leaf("pixels", np.zeros((0, 32, 32)))(file)
    replace_leaf("label", np.zeros(0, int))(file)


def raw_outside(file: h5py.File) -> None:
    Path("secret").write_bytes(bytes(3 * 32 * 32))
    del file["examples/b/pixels"]
    file["examples/b"].create_dataset(
        "pixels", (3, 32, 32), np.uint8, external=[("../secret", 0, 3 * 32 * 32)]
    )


GROUP = "own/a.h5, examples/b"
HDF5S: list[tuple[Callable[[], None], str]] = [
    (hdf5(lambda f: f.__delitem__("examples")), "examples is missing"),
    (hdf5(lambda f: f.__delitem__("examples/b/pixels")), f"{GROUP} has neither pixels nor image"),
    (hdf5(lambda f: f.__delitem__("examples/b/label")), "examples/b/label is missing"),
    (hdf5(replace_leaf("label", np.array([0, 1], np.int64))), f"{GROUP}/label is no list of 3 class numbers"),
    (hdf5(replace_leaf("label", np.array([0.0, 1, 2]))), f"{GROUP}/label is no list of 3 class numbers"),
    (hdf5(replace_leaf("label", np.array([0, -1, 2]))), f"{GROUP} has the label -1, which is out"),
    (hdf5(replace_leaf("pixels", np.full((3, 32, 32), 2.0))), f"{GROUP} has the number 2, which is"),
    (hdf5(replace_leaf("pixels", np.full((3, 32, 32), np.nan))), f"{GROUP} has the number nan"),
    (hdf5(replace_leaf("pixels", np.zeros((3, 7, 7, 2)))), f"{GROUP} has 7 x 7 x 2 numbers"),
    (hdf5(replace_leaf("pixels", np.array([b"a", b"b", b"c"]))), f"{GROUP}/pixels holds |S1, no pixels"),
    (hdf5(external), "examples/b/pixels lies in another file"),
    (hdf5(raw_outside), "examples/b/pixels keeps its data in other files"),
    (hdf5(replace_leaf("pixels", None, shape=(3, 9999, 9999), dtype="u1", chunks=True)),
     "examples/b/pixels declares"),
    (hdf5(no_images), "1 user has no image, b among them"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), HDF5S)
def test_hdf5_that_is_wrong(
    change: Callable[[], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change()
    refused(f"{TFF} --split_by=images --test_share=0.4", said, capsys)


def test_pixels_are_not_stored_as_jpegs(capsys: pytest.CaptureFixture[str]) -> None:
    hdf5(lambda f: None)()
    refused(f"{TFF} --storage=jpeg", "--storage jpeg is for image files, and this source has pixels", capsys)


def table(**columns: Any) -> Callable[[], None]:
    def write() -> None:
        Path("own").mkdir()
        jpeg = [{"bytes": draw(1).tobytes(), "path": None}] * 3
        rows = {"image": jpeg, "label": [0, 1, 2], "client": ["a", "b", "c"], **columns}
        kept = {name: column for name, column in rows.items() if column is not None}
        pq.write_table(pa.table(kept), "own/data.parquet")

    return write


ROW = "own/data.parquet, row 1"
TABLES: list[tuple[Callable[[], None], str]] = [
    (table(client=None), "it has no column 'client'"),
    (table(label=None), "own/data.parquet has no column 'label'"),
    (table(image=None), "it has no column 'image'"),
    (table(client=["a", None, "c"]), f"{ROW} has no client"),
    (table(client=["a", "", "c"]), f"{ROW} has an empty client"),
    (table(client=[1.0, 2.0, 3.0]), "row 0 has the client 1.0, which is neither text nor a whole number"),
    (table(client=[b"a", b"\xff", b"c"]), f"{ROW} has the client b'\\xff', which is not UTF-8 text"),
    (table(label=[0, None, 2]), f"{ROW} has no value in the column 'label'"),
    (table(label=[0, -1, 2]), f"{ROW} has the label -1, which is out"),
    (table(label=[[0], [1, None], [2]]), f"{ROW} has no value in the column 'label'"),
    (table(label=[0.5, 1.5, 2.5]), "row 0 has the label 0.5, which is neither text nor a whole number"),
    (table(image=[[1, 2], [3], [4]]), "the column 'image' holds list<"),
    (table(image=[{"bytes": b"x", "path": "/etc/passwd"}] * 3), "row 0: it is not a JPEG"),
    (
        table(image=[{"bytes": one, "path": ""} for one in (None, b"x", b"x")]),
        "row 0: it is listed, but its file is missing",
    ),
]


@pytest.mark.parametrize(("change", "said"), TABLES)
def test_parquet_that_is_wrong(
    change: Callable[[], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change()
    refused(HF, said, capsys)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("{", "own/state.json is no JSON of save_to_disk"),
        ("[]", "own/state.json is no JSON of save_to_disk"),
        ("{}", "own/state.json has no list of _data_files"),
        (
            '{"_data_files": [{"filename": "../secret.arrow"}]}',
            "names the file '../secret.arrow', which is none in",
        ),
        ('{"_data_files": [{"filename": 3}]}', "names the file 3, which is none in its folder"),
        (
            '{"_data_files": [], "_indices_data_files": [{}]}',
            "own has an index of its rows: call flatten_indices()",
        ),
        (
            '{"_data_files": [{"filename": "data.arrow"}]}',
            "own/data.arrow cannot be read as Arrow",
        ),
    ],
)
def test_what_save_to_disk_did_not_write(state: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("own").mkdir()
    Path("own/state.json").write_text(state)
    Path("own/data.arrow").write_text("no arrow")
    refused(HF, said, capsys)
