"""TensorFlow Federated's SQLite: EMNIST, CIFAR-100 and CelebA in small, and what is refused of such files."""

from __future__ import annotations

import contextlib
import lzma
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dataset.convert.examples import parse
from dataset.fetch import source
from dataset.store.hdf5 import DataFile
from dataset.store.validate import validate
from tests.dataset.convert.made_sources import CLASSES, convert, pixels_of, plain, shown
from tests.dataset.convert.made_sqlite import EXAMPLE, celeba, cifar100, emnist, serialised, write_sqlite
from tests.dataset.convert.refused import refused
from tests.dataset.drawn import draw, number_in

TRAIN = {"f0000_14": range(1, 6), "f0001_41": range(6, 12)}
TEST = {"f0000_14": range(12, 14), "f0001_41": range(14, 17)}
OUT = "--output_file=out.hdf5 --workers=1"


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "BATCH", 4)


def test_emnist_has_its_pixels_classes_writers_and_splits(tmp_path: Path) -> None:
    """The set of splits that was asked for is read; a writer is in both of its splits."""
    splits = {"all_train": TRAIN, "all_test": TEST, "digits_only_train": {"f0000_14": range(20, 21)}}
    path = write_sqlite(tmp_path / "emnist_all.sqlite", splits)
    output = convert(f"tff --source {path} --prefix all", tmp_path / "f.hdf5")
    validate(output)
    found = {number: (split, plain(user), label) for number, (split, user, label) in shown(output).items()}
    assert found == {
        number: (split, client, str(number % 3))
        for split, clients in (("train", TRAIN), ("test", TEST))
        for client, numbers in clients.items()
        for number in numbers
    }
    for number, pixels in pixels_of(output).items():
        assert np.array_equal(pixels, draw(number))


def test_cifar100_has_colours_and_coarse_classes(tmp_path: Path) -> None:
    path = write_sqlite(tmp_path / "cifar100.sqlite", {"train": TRAIN, "test": TEST}, cifar100)
    output = convert(f"tff --source {path}", tmp_path / "f.hdf5")
    assert {number: label for number, (_, _, label) in shown(output).items()} == {
        number: str(number % 3) for number in range(1, 17)
    }
    for number, pixels in pixels_of(output).items():
        assert np.array_equal(pixels, draw(number))
    with DataFile(output) as file:
        assert file.annotation_names == ("labels", "coarse_labels")
        coarse = file.split("test").labels["coarse_labels"].indices.tolist()
        numbers = [number_in(image) for image in file.read_own("test", np.arange(5))]
        assert coarse == [number % 2 for number in numbers]


def test_the_attributes_of_celeba_are_labels(tmp_path: Path) -> None:
    path = write_sqlite(tmp_path / "celeba.sqlite", {"split_by_clients_train": TRAIN}, celeba)
    words = f"tff --source {path} --split_by=images --val_share=0.3 --test_share=0.3"
    output = convert(words, tmp_path / "f.hdf5")
    with DataFile(output) as file:
        assert list(file.label_mapping("labels")) == ["cat", "dog", "eel", "old"]
    assert {number: label for number, (_, _, label) in shown(output).items()} == {
        number: "+".join([CLASSES[number % 3], *(["old"] if number % 2 else [])]) for number in range(1, 12)
    }


def test_numbers_of_every_size_are_read() -> None:
    values = [0, 1, 127, 128, 255, 300, 2**31, 2**62, -1, -(2**63)]
    found = parse(serialised(many=values, one=7, shares=[0.5, -1.5], jpeg=b"abc"), "here")
    assert found["many"].tolist() == values
    assert found["one"].tolist() == [7]
    assert found["shares"].tolist() == [0.5, -1.5]
    assert "jpeg" not in found
    assert parse(b"", "here") == {}
    unpacked = b"".join(bytes([8]) + encoded for encoded in (b"\x05", b"\xac\x02"))  # field 1, varints
    feature = bytes([26, len(unpacked)]) + unpacked
    entry = bytes([10, 1]) + b"a" + bytes([18, len(feature)]) + feature
    features = bytes([10, len(entry)]) + entry
    assert parse(bytes([10, len(features)]) + features, "here")["a"].tolist() == [5, 300]


@pytest.mark.parametrize("seed", range(20))
def test_no_damage_ends_in_another_error(seed: int) -> None:
    """Google's library refuses what it cannot read, too, but reads numbers that are cut into other ones."""
    rng, whole = np.random.default_rng(seed), bytearray(cifar100(5))
    for _ in range(50):
        data = bytearray(whole[: rng.integers(1, len(whole))] if rng.random() < 0.3 else whole)
        for _ in range(rng.integers(1, 4)):
            data[rng.integers(min(60, len(data)))] = rng.integers(256)
        with contextlib.suppress(ValueError):
            parse(bytes(data), "here")


def test_a_sound_example_is_read_as_googles_library_reads_it() -> None:
    data = cifar100(5)
    theirs = EXAMPLE.FromString(data)
    ours = parse(data, "here")
    for entry in theirs.features.feature:
        assert ours[entry.key].tolist() == list(entry.value.int64_list.value)


def changed(command: str, *values: object) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path)) as database, database:
            database.execute(command, values)

    return change


def packed(path: Path) -> None:
    path.with_name("a.sqlite.lzma").write_bytes(lzma.compress(path.read_bytes(), lzma.FORMAT_ALONE))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:9000])


def proto(**features: object) -> Callable[[Path], object]:
    data = serialised(**features)
    return changed("UPDATE examples SET serialized_example_proto = ? WHERE rowid = 3", data)


GREY = np.zeros((4, 4), np.float32)
FAULTS: list[tuple[Callable[[Path], object], str, str]] = [
    (packed, "a.sqlite.lzma", "--source a.sqlite.lzma is compressed: unpack it with xz --decompress --keep"),
    (cut, "a.sqlite", "a.sqlite is damaged, or is not an SQLite file of TensorFlow Federated:"),
    (changed("DROP TABLE examples"), "a.sqlite", "of TensorFlow Federated: no such table: examples"),
    (changed("DELETE FROM examples"), "a.sqlite", "a.sqlite has no example"),
    (changed("UPDATE examples SET split_name = 'mine'"), "a.sqlite", "has the split 'mine', whose name"),
    (
        changed("UPDATE examples SET split_name = 'digits_only_test' WHERE rowid = 1"),
        "a.sqlite",
        "a.sqlite has splits with the prefixes 'all', 'digits_only': choose one with",
    ),
    (
        changed("UPDATE examples SET split_name = 'train'"),
        "a.sqlite --prefix=all",
        "the splits of a.sqlite have no prefix: leave --prefix out",
    ),
    (lambda _: None, "a.sqlite --prefix=some", "splits with the prefixes 'all', not some: choose one"),
    (
        changed("UPDATE examples SET client_id = CAST(x'ff' AS TEXT)"),
        "a.sqlite",
        "a.sqlite, row 1 of split all_test, client_id is not UTF-8 text: b'\\xff'",
    ),
    (
        changed("UPDATE examples SET serialized_example_proto = x'0aff' WHERE rowid = 3"),
        "a.sqlite",
        "client 'f0000_14', example 2 is not a serialised tf.train.Example",
    ),
    (
        changed("UPDATE examples SET serialized_example_proto = 7 WHERE rowid = 3"),
        "a.sqlite",
        "client 'f0000_14', example 2 is not a serialised tf.train.Example",
    ),
    (proto(pixels=GREY), "a.sqlite", "example 2 needs exactly one whole number as 'label'"),
    (proto(pixels=GREY, label=1.5), "a.sqlite", "example 2 needs exactly one whole number as 'label'"),
    (proto(label=1), "a.sqlite", "example 2 has no numbers in pixels or image"),
    (proto(pixels=b"jpeg", label=1), "a.sqlite", "example 2 has no numbers in pixels or image"),
    (proto(pixels=GREY.ravel()[:15], label=1), "a.sqlite", "example 2 has the shape 15, which is not an"),
    (proto(pixels=GREY + 2, label=1), "a.sqlite", "example 2 has the number 2, which is out of range"),
    (proto(pixels=GREY, label=-1), "a.sqlite", "example 2 has the label -1"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "words", "said"), FAULTS, ids=[said[-40:] for _, _, said in FAULTS])
def test_a_wrong_file_is_refused_in_one_line(
    fault: Callable[[Path], object],
    words: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    fault(write_sqlite(tmp_path / "a.sqlite", {"all_train": TRAIN, "all_test": TEST}))
    refused(f"tff --source={words} {OUT}", said, capsys)


@pytest.mark.parametrize(
    ("words", "of", "said"),
    [
        ("--classes=names.txt", celeba, "--classes gives names to class numbers, but a.sqlite, split"),
        ("", lambda number: serialised(image=draw(number)), "has neither the feature label nor other"),
        (
            "",
            lambda number: serialised(image=draw(number), old=number),
            "has the attribute 'old' with 2, which is neither 0 nor 1",
        ),
    ],
)
def test_attributes_that_are_none_are_refused(
    words: str,
    of: Callable[[int], bytes],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("names.txt").write_text("a\nb\n")
    write_sqlite(Path("a.sqlite"), {"all_train": TRAIN}, of)
    refused(f"tff --source=a.sqlite {words} {OUT}", said, capsys)


def test_a_prefix_is_for_sqlite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(f"tff --source=. --prefix=all {OUT}", "--prefix can be used only with SQLite files, but", capsys)


def test_emnist_writes_what_it_says() -> None:
    """The made examples have the features that TensorFlow Federated's parser asks for."""
    assert set(parse(emnist(1), "here")) == {"pixels", "label"}
