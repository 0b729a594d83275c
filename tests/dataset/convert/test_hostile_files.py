"""LEAF's JSON, HDF5, parquet and Arrow that are wrong end in one line with the file and the row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataset.store import probe
from tests.dataset.convert.made_sources import leaf_user, write_leaf, write_tff
from tests.dataset.convert.refused import refused
from tests.dataset.drawn import draw

OUT = "--output_file=out.hdf5 --workers=1"
LEAF = f"leaf --source=own {OUT}"
TFF = f"tff --source=own/a.h5 {OUT}"
HF = f"hf --source=own --client_column=client {OUT}"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probe, "probe", lambda path: None)


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
    (leaf(x_of("img.jpg")), f"{B} is 'img.jpg': if this is a file name, give the folder of the files with"),
    (leaf(x_of([0.1] * 5)), f"{B} has the shape 5, which is not an image with one or three channels"),
    (leaf(x_of([[0.1, 0.2], [0.3]])), f"{B} is not an image: it has values that are not numbers"),
    (leaf(x_of([])), f"{B} is not an image"),
    (leaf(x_of(None)), f"{B} is not an image"),
    (leaf(x_of([True] * 4)), f"{B} is not an image"),
    (leaf(x_of([1.5] * 4)), f"{B} has the number 1.5, which is out of range"),
    (leaf(x_of([-0.5] * 4)), f"{B} has the number -0.5, which is out of range"),
    (leaf(x_of([7] * 4)), f"{B} has whole numbers above 1"),
    (leaf(x_of([10**30] * 4)), f"{B} is not an image"),
    (leaf(lambda c: c["user_data"]["b"]["y"].__setitem__(1, -1)), f"{B} has the label -1, which is out"),
    (leaf(lambda c: c["user_data"]["b"]["y"].__setitem__(1, 1.5)), f"{B} has the label 1.5, which is no"),
    (leaf(lambda c: c["user_data"]["b"]["y"].__setitem__(1, 70_000)), f"{B} has the label 70000, which"),
    (leaf(lambda c: c["user_data"]["b"]["y"].append(1)), "user 'b' needs x and y, two lists of the same"),
    (leaf(lambda c: c["user_data"].__setitem__("b", 3)), "user 'b' needs x and y, two lists of the same"),
    (leaf(lambda c: c["num_samples"].__setitem__(1, 2)), "user 'b' has 3 samples, but num_samples says 2"),
    (leaf(lambda c: c["users"].__setitem__(1, "a")), "users has a user twice"),
    (leaf(lambda c: c["users"].pop()), "needs users and num_samples, two lists of the same length, as in"),
    (leaf(lambda c: [c["users"].pop(), c["num_samples"].pop()]), "user 'c' has samples but is not in the"),
    (leaf(lambda c: c["user_data"].pop("b")), "user 'b' is in the list users but not in user_data: remove"),
    (leaf(lambda c: [c["user_data"].update(b={"x": [], "y": []}), c["num_samples"].__setitem__(1, 0)]),
     "1 user has no image, for example b: remove such users from the source"),
    (text(""), "own/a.json: it has 'its end' where { is expected"),
    (text("[1]"), "own/a.json: it has '[' where { is expected"),
    (text('{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[0.1'), "it is damaged or cut off"),
    (text('{"users": ["a"]} x'), "there is text after the JSON value"),
    (text('{"users": ["a"], "users": ["b"]}'), "it has 'users' twice"),
    (text('{"user_data": {"a": {"x": [], "y": []}, "a": {"x": [], "y": []}}}'), "it has 'a' twice"),
    (text('{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[NaN]], "y": [1]}}}'),
     "has the number nan, which is out of range"),
    (text('{"users": ' + "[" * 100_000), "own/a.json: it is nested too deeply"),
    (text('{"users": ["\\ud800"], "num_samples": [1], "user_data": {"\\ud800": {"x": [[0.1]], "y": [1]}}}'),
     "has characters that cannot be printed: remove them"),
    (same_users, "own/b.json: user 'a' also has data in an earlier file of this split: keep only"),
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
    (hdf5(lambda f: f.__delitem__("examples/b/pixels")), f"{GROUP} has none of pixels, image"),
    (hdf5(lambda f: f.__delitem__("examples/b/label")), "examples/b/label is missing"),
    (hdf5(replace_leaf("label", np.array([0, 1], np.int64))), f"{GROUP}/label is not a list of 3 class"),
    (hdf5(replace_leaf("label", np.array([0.0, 1, 2]))), f"{GROUP}/label is not a list of 3 class numbers"),
    (hdf5(replace_leaf("label", np.array([0, -1, 2]))), f"{GROUP} has the label -1, which is out"),
    (hdf5(replace_leaf("pixels", np.full((3, 32, 32), 2.0))), f"{GROUP} has the number 2, which is"),
    (hdf5(replace_leaf("pixels", np.full((3, 32, 32), np.nan))), f"{GROUP} has the number nan"),
    (hdf5(replace_leaf("pixels", np.zeros((3, 7, 7, 2)))), f"{GROUP} has the shape 7 x 7 x 2"),
    (hdf5(replace_leaf("pixels", np.array([b"a", b"b", b"c"]))), f"{GROUP}/pixels has the type |S1, which"),
    (hdf5(external), "examples/b/pixels is in another file"),
    (hdf5(raw_outside), "examples/b/pixels has its data in other files"),
    (hdf5(replace_leaf("pixels", None, shape=(3, 9999, 9999), dtype="u1", chunks=True)),
     "examples/b/pixels declares"),
    (hdf5(no_images), "1 user has no image, for example b: remove such users from the source"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), HDF5S)
def test_hdf5_that_is_wrong(
    change: Callable[[], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change()
    refused(f"{TFF} --split_by=images --test_share=0.4", said, capsys)


@pytest.mark.parametrize("form", ["leaf", "tff"])
def test_whole_numbers_0_and_1_are_no_pixels(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    if form == "leaf":
        leaf(lambda c: [user.update(x=[[0, 1, 1, 0]] * len(user["x"])) for user in c["user_data"].values()])()
    else:
        hdf5(whole_numbers)()
    words = f"{LEAF if form == 'leaf' else TFF} --split_by=images --test_share=0.4"
    refused(words, "has only the whole numbers 0 and 1, so all images would be black: save them as", capsys)


def whole_numbers(file: h5py.File) -> None:
    for group in file["examples"].values():
        pixels = np.array(group["pixels"])
        del group["pixels"]
        group["pixels"] = (pixels > 0.5).astype(np.uint8)


def test_pixels_are_not_stored_as_jpegs(capsys: pytest.CaptureFixture[str]) -> None:
    hdf5(lambda f: None)()
    refused(f"{TFF} --storage=jpeg", "--storage jpeg is for image files, but this source has", capsys)


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
    (table(client=[b"a", b"\xff", b"c"]), f"{ROW}: the client b'\\xff' is not UTF-8 text"),
    (table(label=[0, None, 2]), f"{ROW} has no value in the column 'label'"),
    (table(label=[0, -1, 2]), f"{ROW} has the label -1, which is out"),
    (table(label=[[0], [1, None], [2]]), f"{ROW} has no value in the column 'label'"),
    (table(label=[0.5, 1.5, 2.5]), "row 0 has the label 0.5, which is neither text nor a whole number"),
    (table(image=[[1, 2], [3], [4]]), "the column 'image' has the type list<"),
    (table(image=[{"bytes": b"x", "path": "/etc/passwd"}] * 3), "row 0: it is not a JPEG, PNG, "),
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
        ("{", "own/state.json is not a JSON file of save_to_disk"),
        ("[]", "own/state.json is not a JSON file of save_to_disk"),
        ("{}", "own/state.json has no list _data_files: save the data set again with"),
        (
            '{"_data_files": [{"filename": "../secret.arrow"}]}',
            "names the file '../secret.arrow', which is not the name of a file in",
        ),
        ('{"_data_files": [{"filename": 3}]}', "names the file 3, which is not the name of a file in its"),
        (
            '{"_data_files": [], "_indices_data_files": [{}]}',
            "own stores an index of its rows, which is not read: call",
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
