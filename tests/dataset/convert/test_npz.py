"""numpy's .npz: MedMNIST's and Keras' arrays, and files that are wrong."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataset.convert import npz
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
    (lambda: Path("own.npz").write_bytes(b"no archive"), "own.npz is no whole .npz file"),
    (broken, "own.npz"),
    (arrays(train_images=None), "own.npz has no array of images: it needs such names as train_images"),
    (arrays(train_labels=None), "own.npz, train_images has no array of labels beside it"),
    (arrays(y_train=np.zeros(12, int)), "own.npz, y_train is a second array of labels, after train_labels"),
    (arrays(x=np.zeros((12, 4, 4)), y=np.zeros(12, int)), "some arrays name their split"),
    (arrays(train_labels=np.zeros(11, int)), "own.npz, train_labels has 11 rows, and train_images 12"),
    (
        arrays(train_labels=np.zeros(12)),
        "own.npz, train_labels holds float64 of shape (12,): class numbers are whole",
    ),
    (arrays(train_labels=np.full((12, 2), 2)), "row 0 has other numbers than 0 and 1"),
    (arrays(train_labels=np.zeros((12, 2, 2), int)), "own.npz, train_labels holds int64 of shape (12, 2, 2)"),
    (arrays(train_labels=np.full(12, -1)), "the label -1, which is out of range"),
    (arrays(train_clients=np.zeros(12)), "own.npz, train_clients holds float64 of shape (12,)"),
    (arrays(train_images=np.array(["a"] * 12)), "own.npz, train_images holds <U1 of shape (12,), no images"),
    (arrays(train_images=np.zeros((12, 28, 28, 28), np.uint8)), "28 x 28 x 28 numbers, which are no image"),
    (arrays(train_images=np.full((12, 4, 4), 256)), "the number 256, which is out of range"),
    (arrays(train_images=np.zeros((12, 4, 4), np.uint8)), "no number but 0 and 1"),
    (arrays(train_images=np.asfortranarray(arrays_of(range(1, 13))["images"])), "is in Fortran's order"),
    (arrays(train_labels=np.array([None] * 12)), "own.npz, train_labels"),
    (member(b"no array"), "own.npz, train_labels.npy is no array of numpy"),
    (member(header_of("(12,)")), "own.npz, train_labels is damaged: 0 bytes are no array of shape (12,)"),
    (member(header_of("(1 << 60,)")), "own.npz, train_labels.npy is no array of numpy"),
    (member(header_of("(-12,)")), "own.npz, train_labels"),
    (member(header_of("(12, 0)")), "own.npz, train_labels"),
    (
        arrays(val_images=np.zeros((3, 4, 4)), val_labels=np.zeros((3, 5), int)),
        "own.npz, val_labels has 5 columns, and train_labels others",
    ),
    (
        arrays(
            train_clients=np.zeros(12, int), val_images=np.ones((3, 4, 4)), val_labels=np.zeros((3, 1), int)
        ),
        "own.npz, val_images: one split has an array of clients, and another has none",
    ),
]


@pytest.mark.parametrize(("change", "said"), REFUSALS)
def test_a_file_that_is_wrong_is_named(
    change: Callable[[], Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change()
    refused("npz --source=own.npz --output_file=out.hdf5 --workers=1", said, capsys)


def test_names_of_classes_that_are_too_few_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arrays(train_labels=np.zeros((12, 3), int))()
    Path("names.txt").write_text("a\nb\n")
    words = "npz --source=own.npz --classes=names.txt --output_file=out.hdf5 --workers=1"
    refused(words, "--classes has 2 names, and own.npz, train_labels 3 columns", capsys)


def test_an_array_is_read_from_any_row_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "BATCH", 5)
    (split,) = npz.splits_of(write_npz(Path("a.npz"), train=range(1, 13)))
    for start in range(13):
        blocks = list(split.arrays["images"].blocks(start))
        assert sum(len(block) for block in blocks) == 12 - start
        if blocks:
            assert np.array_equal(np.concatenate(blocks), arrays_of(range(1, 13))["images"][start:])
