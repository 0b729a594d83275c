"""numpy's .npz: MedMNIST's and Keras' arrays, and files that are wrong."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataset.cli import run
from dataset.convert import npz
from dataset.convert.__main__ import main
from dataset.fetch import source
from dataset.store.hdf5 import DataFile
from tests.dataset.convert.made_sources import arrays_of, convert, label_of, pixels_of, shown, write_npz
from tests.dataset.convert.refused import refused
from tests.dataset.drawn import draw

SPLITS = {"train": range(1, 40), "val": range(40, 45), "test": range(45, 55)}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("block", [7, 1024])
def test_medmnists_arrays_keep_their_splits(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "BATCH", block)
    path = convert(f"npz --source {write_npz(Path('path.npz'), **SPLITS)}", Path("f.hdf5"))
    found = shown(path)
    of = {number: split for split, numbers in SPLITS.items() for number in numbers}
    assert {number: split for number, (split, _, _) in found.items()} == of
    assert {user for _, user, _ in found.values()} == {"all", "val-all", "test-all"}
    names = {label_of(number): str(number % 3) for number in range(3)}
    assert all(label == names[label_of(number)] for number, (_, _, label) in found.items())
    for number, pixels in pixels_of(path).items():
        assert np.array_equal(pixels, draw(number))


def test_keras_arrays_of_grey_shares_with_clients() -> None:
    """Without a split in the names, images are dealt."""
    arrays = arrays_of(range(1, 31))
    grey, whose = arrays["images"][..., 0] / np.float32(255), np.array(["a", "b", "c"] * 10)
    np.savez("own.npz", x=grey, y=arrays["labels"][:, 0].astype(np.int64), clients=whose)
    Path("names.txt").write_text("cat\ndog\neel\n")
    words = "npz --source own.npz --classes names.txt --split_by images --test_share 0.3"
    found = shown(convert(words, Path("f.hdf5")))
    assert sorted(found) == list(range(1, 31))
    assert {number: label for number, (_, _, label) in found.items()} == {
        number: label_of(number) for number in range(1, 31)
    }
    assert all(user.endswith("abc"[(number - 1) % 3]) for number, (_, user, _) in found.items())


def test_columns_of_0_and_1_are_several_labels() -> None:
    """As ChestMNIST's; an image may have none."""
    columns = np.array([[n % 2, 0, n % 3 == 0] for n in range(1, 31)], np.uint8)
    np.savez("chest.npz", train_images=arrays_of(range(1, 31))["images"], train_labels=columns)
    path = convert("npz --source chest.npz --split_by images --splits deal --test_share 0.3", Path("f.hdf5"))
    with DataFile(path) as file:
        assert list(file.label_mapping("labels")) == ["0", "1", "2"]
    wanted = {n: "+".join(k for k, held in zip("012", columns[n - 1]) if held) for n in range(1, 31)}
    assert {number: label for number, (_, _, label) in shown(path).items()} == wanted


def arrays(**changed: Any) -> Callable[[], None]:
    """Sound arrays of train with these in their place, without those that are None."""

    def write() -> None:
        held = {f"train_{name}": array for name, array in arrays_of(range(1, 13)).items()}
        np.savez("own.npz", **{k: v for k, v in {**held, **changed}.items() if v is not None})

    return write


def member(content: bytes, name: str = "train_labels.npy") -> Callable[[], None]:
    """Sound images, and a member of these bytes."""

    def write() -> None:
        arrays(train_labels=None)()
        with zipfile.ZipFile("own.npz", "a") as archive:
            archive.writestr(name, content)

    return write


def header_of(shape: str, dtype: str = "<i8", order: str = "False") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def broken() -> None:
    """A compressed member with bytes of another."""
    write_npz(Path("own.npz"), train=range(1, 13))
    content = bytearray(Path("own.npz").read_bytes())
    at = content.index(b"train_images.npy") + 60
    content[at : at + 40] = bytes(40)
    Path("own.npz").write_bytes(content)


REFUSALS: list[tuple[Callable[[], Any], str]] = [
    (lambda: Path("own.npz").write_bytes(b"no archive"), "own.npz is not a complete .npz file"),
    (broken, "own.npz"),
    (arrays(train_images=None), "own.npz has no array of images: name the arrays, for example"),
    (arrays(train_labels=None), "own.npz, train_images has no array of labels for it: add one"),
    (arrays(y_train=np.zeros(12, int)), "own.npz, y_train and train_labels are both read as labels of the"),
    (arrays(x=np.zeros((12, 4, 4)), y=np.zeros(12, int)), "has no split (train, val, test) in its name"),
    (arrays(train_labels=np.zeros(11, int)), "own.npz, train_labels has 11 rows, but train_images has 12"),
    (
        arrays(train_labels=np.zeros(12)),
        ("own.npz, train_labels has the type float64 and the shape (12,): give one whole number"),
    ),
    (arrays(train_labels=np.full((12, 2), 2)), "row 0 has numbers other than 0 and 1: for several labels"),
    (
        arrays(train_labels=np.zeros((12, 2, 2), int)),
        "own.npz, train_labels has the type int64 and the shape (12, 2, 2)",
    ),
    (arrays(train_labels=np.full(12, -1)), "the label -1, which is out of range"),
    (arrays(train_clients=np.zeros(12)), "own.npz, train_clients has the type float64 and the shape (12,)"),
    (arrays(train_images=np.array(["a"] * 12)), "own.npz, train_images has the type <U1 and the shape"),
    (arrays(train_images=np.zeros((12, 28, 28, 28), np.uint8)), "the shape 28 x 28 x 28, which is not an"),
    (arrays(train_images=np.full((12, 4, 4), 256)), "the number 256, which is out of range"),
    (arrays(train_images=np.zeros((12, 4, 4), np.uint8)), "has only the whole numbers 0 and 1, so all"),
    (arrays(train_images=np.asfortranarray(arrays_of(range(1, 13))["images"])), "is stored in Fortran"),
    (
        arrays(train_labels=np.array([None] * 12)),
        "own.npz, train_labels.npy has the type object, not numbers",
    ),
    (arrays(train_clients=np.array([""] * 12)), "own.npz, train_labels, row 0 has an empty client"),
    (arrays(train_clients=np.frombuffer(b"\xff" * 48, "<U1")), "own.npz, train_clients is damaged ("),
    (
        arrays(train_labels=np.eye(3, dtype=int)[[0, 1, 2] * 4]),
        "each image has exactly one label, given as columns of 0 and 1: save",
    ),
    (arrays(train_labels=np.zeros((12, 1 << 16), np.uint8)), "has 65,536 columns; give at most 65,535"),
    (
        arrays(val_labels=np.zeros(3, int)),
        "own.npz, val_labels has no array of",
    ),
    (arrays(test_clients=np.zeros(3, int)), "own.npz, test_clients has no array of images for it: add one"),
    (arrays(clients=np.zeros(12, int)), "own.npz, clients has no split (train, val, test) in its name"),
    (arrays(x=np.ones((3, 4, 4)), y=np.zeros(3, int)), "own.npz, x has no split (train, val, test) in its"),
    (
        arrays(
            val_images=np.full((3, 4, 4), 9), val_labels=np.zeros(3, int), train_images=np.ones((12, 4, 4))
        ),
        ("own.npz, val_images has whole numbers above 1, but own.npz, train_images has numbers from 0 to 1"),
    ),
    (member(header_of("(12,")), "own.npz, train_labels.npy is not a numpy array"),
    (member(header_of("(12,)", "', '")), "own.npz, train_labels.npy is not a numpy array"),
    (member(b"\x93NUMPY\x01\x00\x08\x00  x\n y\n"), "own.npz, train_labels.npy is not a numpy array"),
    (
        member(b"\x93NUMPY\x01\x00\x0c\x00{1: 2, 'a':3}"[:22]),
        "own.npz, train_labels.npy is not a numpy array",
    ),
    (member(b"no array"), "own.npz, train_labels.npy is not a numpy array"),
    (member(header_of("(12,)")), "own.npz, train_labels is damaged: 0 bytes do not fit an array of shape"),
    (member(header_of("(1 << 60,)")), "own.npz, train_labels.npy is not a numpy array"),
    (member(header_of("(-12,)")), "own.npz, train_labels"),
    (member(header_of("(12, 0)")), "own.npz, train_labels"),
    (
        arrays(val_images=np.zeros((3, 4, 4)), val_labels=np.zeros((3, 5), int)),
        "own.npz, val_labels has 5 columns, but train_labels has",
    ),
    (
        arrays(
            train_clients=np.zeros(12, int), val_images=np.ones((3, 4, 4)), val_labels=np.zeros((3, 1), int)
        ),
        "own.npz, val_images: one split has an array of clients, but another has none: add it",
    ),
]


@pytest.mark.parametrize(("change", "said"), REFUSALS)
def test_a_file_that_is_wrong_is_named(
    change: Callable[[], Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change()
    refused("npz --source=own.npz --output_file=out.hdf5 --workers=1", said, capsys)


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, zipfile.ZIP_STORED])
def test_a_damaged_member_is_refused_however_it_is_compressed(
    compression: int, capsys: pytest.CaptureFixture[str]
) -> None:
    write_npz(Path("sound.npz"), train=range(1, 13))
    with zipfile.ZipFile("sound.npz") as sound, zipfile.ZipFile("own.npz", "w", compression) as own:
        for name in sound.namelist():
            own.writestr(name, sound.read(name))
    content = bytearray(Path("own.npz").read_bytes())
    at = content.index(b"train_images.npy") + 40
    content[at : at + 200] = bytes(200)
    Path("own.npz").write_bytes(content)
    refused("npz --source=own.npz --output_file=out.hdf5 --workers=1", "own.npz", capsys)


def test_a_header_with_any_byte_changed_is_read_or_refused() -> None:
    """The member is long, so that its checksum comes long after its header. Some ended in a traceback."""
    np.savez("long.npz", train_images=np.ones((200, 28, 28), np.uint8), train_labels=np.arange(200))
    content, draws = Path("long.npz").read_bytes(), np.random.default_rng(0)
    start = content.index(b"NUMPY")
    for place in range(start, start + 100):
        damaged = bytearray(content)
        damaged[place] = int(draws.integers(256)) if place % 2 else damaged[place] ^ 1 << place // 2 % 8
        Path("own.npz").write_bytes(damaged)
        with contextlib.suppress(ValueError):
            npz.splits_of(Path("own.npz"))


def test_arrays_that_are_not_read_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    arrays(train_mean=np.zeros(3), x_y_train=np.zeros(3))()
    npz.splits_of(Path("own.npz"))
    assert capsys.readouterr().err == "own.npz: these arrays are not read: train_mean.npy, x_y_train.npy\n"


def test_the_source_is_not_written_over(capsys: pytest.CaptureFixture[str]) -> None:
    content = write_npz(Path("own.npz"), train=range(1, 13)).read_bytes()
    assert run(main, ["npz", "--source=own.npz", "--output_file=own.npz", "--overwrite"]) == 2
    assert "--output_file own.npz is the source file: choose another file name" in capsys.readouterr().err
    assert Path("own.npz").read_bytes() == content


def test_names_of_classes_that_are_too_few_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arrays(train_labels=np.zeros((12, 3), int))()
    Path("names.txt").write_text("a\nb\n")
    words = "npz --source=own.npz --classes=names.txt --output_file=out.hdf5 --workers=1"
    refused(words, "--classes has 2 names, but own.npz, train_labels has 3 columns", capsys)


def test_an_array_is_read_from_any_row_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "BATCH", 5)
    (split,) = npz.splits_of(write_npz(Path("a.npz"), train=range(1, 13)))
    for start in range(13):
        blocks = list(split.arrays["images"].blocks(start))
        assert sum(len(block) for block in blocks) == 12 - start
        if blocks:
            assert np.array_equal(np.concatenate(blocks), arrays_of(range(1, 13))["images"][start:])
