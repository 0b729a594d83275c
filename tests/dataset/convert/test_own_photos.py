"""What is special about photos and lists of one's own: turned photos, class lists, spellings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dataset.cli import run
from dataset.partitions.__main__ import main as partitions
from dataset.partitions.drawn import read_name
from dataset.partitions.of_file import drawn_of
from dataset.store.hdf5 import DataFile
from dataset.store.index import PartitionIndex
from dataset.store.validate import validate
from dataset.store.views import SingleLabelView
from tests.dataset.convert.made_sources import (
    convert,
    encoded,
    label_of,
    plain,
    shown,
    write_csv,
    write_folder,
    write_image,
)
from tests.dataset.convert.test_formats import write_hf

NUMBERS = range(1, 13)
DEAL = "--split_by=images --val_share=0 --test_share=0.3"


def test_one_name_is_one_client_and_one_class_however_it_is_typed(tmp_path: Path) -> None:
    """As folders of macOS are beside those of others."""
    root = write_folder(tmp_path / "own", NUMBERS)
    for number, (client, label) in enumerate([("Zo\u00eb", "\u00e9"), ("Zoe\u0308", "e\u0301")]):
        write_image(root / client / label / f"new{number}.jpg", 20 + number)
    convert(f"folder --images {root} {DEAL}", tmp_path / "f.hdf5")
    found = shown(tmp_path / "f.hdf5")
    assert {plain(found[n][1]) for n in (20, 21)} == {"Zo\u00eb"}
    assert {found[n][2] for n in (20, 21)} == {"\u00e9"}


@pytest.mark.parametrize("splits", [("",), ("train", "test"), ("train", "dev")])
def test_a_folder_of_classes_has_one_user_a_split_whose_images_are_dealt(
    splits: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in splits:
        for number in NUMBERS:
            at = number + 100 * (split in ("test", "dev"))
            write_image(tmp_path / "own" / split / label_of(number) / f"{at}.jpg", at)
    (tmp_path / "own" / splits[0] / "empty").mkdir()
    convert(f"folder --images {tmp_path / 'own'}", tmp_path / "f.hdf5")
    said = capsys.readouterr().err
    assert "the source names no clients, so one user owns all images of a split" in said
    assert ("training needs test: repeat with --test_share" in said) == ("dev" in splits)
    (line,) = [line for line in said.splitlines() if " python -m dataset.partitions " in line]
    assert "give --data.partition lda-1-clients-10-seed-0 --federated.cohort_size 10; " in line
    words = line.split(" dataset.partitions ")[1].replace("lda-1-clients-10", "iid-clients-3").split()
    assert run(partitions, words) == 0, "that of so few images, as lda asks for more"
    check_one_user(tmp_path / "f.hdf5", len(NUMBERS) * len(splits))
    write_image(tmp_path / "own" / splits[0] / "cat" / "deeper" / "x.jpg", 99)
    convert(f"folder --images {tmp_path / 'own'}", tmp_path / "g.hdf5", 2)
    assert "images must be in client/class/, or all in class/" in capsys.readouterr().err


def test_label_sets_without_clients_are_dealt_iid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = [{"bytes": encoded(n, "PNG"), "path": None} for n in NUMBERS]
    table = pa.table({"image": images, "label": [[n % 3] for n in NUMBERS]})
    pq.write_table(table, tmp_path / "own.parquet")
    convert(f"hf --source {tmp_path / 'own.parquet'}", tmp_path / "f.hdf5")
    said = capsys.readouterr().err
    assert "split: to train, give --data.partition iid-clients-10-seed-0 --federated.cohort_size 10" in said


def check_one_user(path: Path, images: int) -> None:
    found = shown(path)
    assert len(found) == images
    assert all(label == label_of(number % 100) for number, (_, _, label) in found.items())
    assert {(split, user) for split, user, _ in found.values()} <= {
        ("train", "all"),
        ("val", "val-all"),
        ("test", "test-all"),
    }
    with DataFile(path) as file:
        dealt = SingleLabelView(file, partition="iid-clients-3-seed-0", dealt=drawn(file))
        assert len(dealt.split("train").user_ids) == 3


def drawn(file: DataFile) -> PartitionIndex:
    recipe = read_name("iid-clients-3-seed-0")
    assert recipe is not None
    return drawn_of(file, recipe)


def test_parquet_without_a_client_column_has_one_user_a_split(tmp_path: Path) -> None:
    write_hf(tmp_path / "own" / "train-0.parquet", NUMBERS)
    write_hf(tmp_path / "own" / "test-0.parquet", range(101, 113))
    convert(f"hf --source {tmp_path / 'own'}", tmp_path / "f.hdf5")
    found = shown(tmp_path / "f.hdf5")
    assert {found[number][:2] for number in NUMBERS} == {("train", "all")}
    assert {found[number][:2] for number in range(101, 113)} == {("test", "test-all")}


def test_labels_with_semicolons_are_pointed_to_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tags = ["top", "kids;top", "hat", "top;hat"] * 2
    table = listed(tmp_path, "tags", tags)
    words = f"folder --images {tmp_path / 'images'} --labels {table} --label_column tags"
    convert(words, tmp_path / "f.hdf5")
    assert (
        "2 class names contain a semicolon, such as 'kids;top': if each of them lists several"
        in capsys.readouterr().err
    )
    convert(f"{words} --several", tmp_path / "g.hdf5")
    assert "contain a semicolon" not in capsys.readouterr().err


def listed(folder: Path, column: str, labels: Sequence[object]) -> Path:
    """Images, each of its own client, and the CSV with their labels."""
    for number in range(len(labels)):
        write_image(folder / "images" / f"{number}.jpg", number)
    rows = [{"path": f"{n}.jpg", "client": f"u{n}", column: label} for n, label in enumerate(labels)]
    return write_csv(folder / "labels.csv", rows)


@pytest.mark.parametrize("given", [True, False])
def test_label_sets_keep_the_order_of_their_classes(given: bool, tmp_path: Path) -> None:
    names = ["dog", "cat", "ape"] if given else [str(number) for number in range(12)]
    labels = [";".join([names[n % len(names)], names[(n + 1) % len(names)]]) for n in range(12)]
    words = f"folder --images {tmp_path / 'images'} --labels {listed(tmp_path, 'labels', labels)}"
    if given:
        (tmp_path / "names.txt").write_text("dog\ncat\nape\n")
        words += f" --classes {tmp_path / 'names.txt'}"
    convert(words, tmp_path / "f.hdf5")
    validate(tmp_path / "f.hdf5")
    with DataFile(tmp_path / "f.hdf5") as file:
        assert file.label_mapping("labels") == {name: number for number, name in enumerate(names)}
    for number, (_, _, label) in shown(tmp_path / "f.hdf5").items():
        assert sorted(label.split("+")) == sorted(labels[number].split(";"))


def test_two_label_sets_keep_it_too(tmp_path: Path) -> None:
    """Which the oldest version of the file cannot."""
    table = listed(tmp_path, "labels", ["b;a"] * 6)
    lines = [
        f"{line},{'fine_labels' if line.startswith('path') else 'x'}" for line in table.read_text().split()
    ]
    table.write_text("\n".join(lines))
    (tmp_path / "names.txt").write_text("b\na\n")
    words = f"folder --images {tmp_path / 'images'} --labels {table} --classes {tmp_path / 'names.txt'}"
    convert(words, tmp_path / "f.hdf5")
    validate(tmp_path / "f.hdf5")
    with DataFile(tmp_path / "f.hdf5") as file:
        assert file.label_mapping("labels") == {"b": 0, "a": 1}
        assert file.annotation_names == ("labels", "fine_grained_labels")


@pytest.mark.parametrize("storage", ["jpeg", "raw --image_size=own"])
@pytest.mark.parametrize("upright", [False, True])
def test_photos_turned_by_exif_are_counted_or_stand_upright(
    upright: bool, storage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, exif = write_folder(tmp_path / "own", NUMBERS), Image.Exif()
    exif[0x0112] = 6
    photo = root / "bob" / "cat" / "turned.jpg"
    Image.fromarray(np.zeros((20, 40, 3), np.uint8)).save(photo, exif=exif)
    words = f"folder --images {root} {DEAL} --storage={storage}" + (" --upright" if upright else "")
    convert(words, tmp_path / "f.hdf5")
    said = capsys.readouterr().err
    assert ("1 images have an EXIF orientation" in said) == (not upright)
    assert ("; --upright rotates them" in said) == (not upright)
    assert ("1 JPEG, turned upright" in said) == upright
    with DataFile(tmp_path / "f.hdf5") as file:
        ((split, row),) = [
            (name, list(file.split(name).image_ids).index("bob/cat/turned.jpg"))
            for name in file.splits
            if "bob/cat/turned.jpg" in file.split(name).image_ids
        ]
        assert file.read_own(split, np.array([row]))[0].shape[:2] == ((40, 20) if upright else (20, 40))
        if storage == "jpeg" and not upright:
            assert bytes(file.reader.stored(split, np.array([row]))[0]) == photo.read_bytes()


@pytest.mark.parametrize("storage", ["jpeg", "raw"])
@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_images_of_16_bits_that_use_few_of_them_are_warned_of(
    form: str, storage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As cameras of 10 bits, and microscopes, write them."""
    for number in NUMBERS:
        levels = np.full((8, 8), 1000 + number, np.uint16)
        path = tmp_path / "own" / "bob" / label_of(number) / f"{number}.{form.lower()}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(levels).save(path, form)
    convert(f"folder --images {tmp_path / 'own'} {DEAL} --storage {storage}", tmp_path / "f.hdf5")
    said = capsys.readouterr().err
    assert f"12 {form} of 16 bits" in said
    (line,) = [line for line in said.splitlines() if line.startswith("WARNING: ")]
    assert "the 12 images of 16 bits use only the lowest 10 bits, so they are nearly black" in line
    assert "multiply their values by 64 and convert them again" in line
    Image.fromarray(np.full((8, 8), 65_535, np.uint16)).save(tmp_path / "own" / "bob" / "cat" / "white.tiff")
    convert(f"folder --images {tmp_path / 'own'} {DEAL} --storage {storage}", tmp_path / "g.hdf5")
    assert "WARNING" not in capsys.readouterr().err


def test_images_that_are_left_out_are_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_folder(tmp_path / "own", NUMBERS)
    for name in "abcd":
        (root / "bob" / "cat" / f"{name}.jpg").write_bytes(b"" if name == "a" else b"x")
    convert(f"folder --images {root} {DEAL} --on_bad_image skip", tmp_path / "f.hdf5")
    no_image = "it is not a JPEG, PNG, WebP, GIF, BMP or TIFF image"
    said = f"bob/cat/a.jpg (it is empty), bob/cat/b.jpg ({no_image}), bob/cat/c.jpg ({no_image}) and 1 more"
    assert f"\nleft out, since they cannot be used: 4 of 16 images: {said}\n" in capsys.readouterr().err
