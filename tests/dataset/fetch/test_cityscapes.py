"""Cityscapes: masks of train ids, cities or sequences as users, folders and archives, hostile ones."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataset.arrays import ByteArray
from dataset.cityscapes import download_preprocess as cityscapes
from dataset.cityscapes.download_preprocess import SCENES
from dataset.cityscapes.source import CLASSES, NUM_IDS, mask_png, read
from dataset.cli import run
from dataset.fetch.annotated import Reading
from dataset.store.annotations import VOID, Masks, read_mask
from dataset.store.hdf5 import DataFile
from dataset.store.validate import validate
from tests.dataset.drawn import SIDE, draw, png
from tests.dataset.fetch.made_layouts import (
    LAYOUTS,
    TEST,
    TRAIN,
    VAL,
    Files,
    make,
    voc_files,
    without_root,
    write_files,
)
from tests.dataset.fetch.test_annotated import owned
from tests.dataset.fetch.test_hostile_layouts import changed

SCENES_OF = {
    "train": [
        "aachen_000000_000019",
        "aachen_000001_000019",
        "bad-honnef_000000_000019",
        "ulm_000000_000007",
    ],
    "val": ["munster_000000_000019", "munster_000000_000020"],
    "test": ["bonn_000000_000019"],
}
MASK = "_gtFine_labelIds.png"
FIRST = "gtFine/train/aachen/aachen_000000_000019" + MASK
IMAGE = "leftImg8bit/train/aachen/aachen_000000_000019_leftImg8bit.png"


def label_ids(number: int) -> ByteArray:
    """The mask of a scene, in which all ids occur."""
    return ((np.arange(SIDE * SIDE) + number) % NUM_IDS).astype(np.uint8).reshape(SIDE, SIDE)


def numbered() -> dict[str, tuple[int, str]]:
    """A number and the split of each scene."""
    pairs = [(scene, split) for split, scenes in SCENES_OF.items() for scene in scenes]
    return {scene: (number, split) for number, (scene, split) in enumerate(pairs)}


def scene_files() -> Files:
    """With what lies beside the masks in the published archives."""
    files: Files = {"README": b"text", "license.txt": b"text"}
    for scene, (number, split) in numbered().items():
        place = f"{split}/{scene.partition('_')[0]}/{scene}"
        files[f"gtFine/{place}{MASK}"] = png(label_ids(number))
        files[f"gtFine/{place}_gtFine_instanceIds.png"] = b"not read"
        files[f"gtFine/{place}_gtFine_color.png"] = b"not read"
        files[f"gtFine/{place}_gtFine_polygons.json"] = b"{"
        files[f"leftImg8bit/{place}_leftImg8bit.png"] = png(draw(number))
    return files


def zipped(folder: Path, files: Files) -> Path:
    """As the two archives."""
    folder.mkdir()
    for name in ("gtFine", "leftImg8bit"):
        with zipfile.ZipFile(folder / f"{name}_trainvaltest.zip", "w") as archive:
            for path, content in files.items():
                if path.startswith((f"{name}/", "README")):
                    archive.writestr(path, content)
    return folder


def test_a_folder_and_its_archives_give_masks_of_train_ids_by_city(tmp_path: Path) -> None:
    folder, out = write_files(tmp_path / "in" / "deeper", scene_files()), tmp_path / "f.hdf5"
    words = ["--workers=1", f"--output_file={out}"]
    assert run(cityscapes.main, [f"--source={folder}", *words]) == 0
    validate(out)
    known = {number: k for k, number in enumerate(CLASSES)}
    with DataFile(out) as file:
        assert list(file.label_mapping("mask")) == [*CLASSES.values()]
        assert len(CLASSES) == 19
        assert set(file.splits) == {"train", "test"}
        assert set(file.split("train").user_ids) == {"aachen", "bad-honnef", "ulm"}
        assert set(file.split("test").user_ids) == {"test-munster"}
        assert set(file.split("train").partitions) == {"sequence"}
        for split in file.splits:
            index = file.split(split)
            masks = index.annotations["mask"]
            assert isinstance(masks, Masks)
            for row, image in enumerate(index.image_ids):
                number, published = numbered()[image.removesuffix("_leftImg8bit")]
                assert split == {"train": "train", "val": "test"}[published]
                expected = np.vectorize(lambda value: known.get(value, VOID))(label_ids(number))
                assert np.array_equal(masks.read(row), expected)
        print_of_folder = file.fingerprint
    packed = zipped(tmp_path / "packed", scene_files())
    assert make(SCENES, tmp_path / "g.hdf5", f"--source={packed}") == 0
    with DataFile(tmp_path / "g.hdf5") as file:
        assert file.fingerprint == print_of_folder


def test_sequences_are_users_where_they_are_asked_for_and_val_keeps_its_name(tmp_path: Path) -> None:
    folder, out = write_files(tmp_path / "in", scene_files()), tmp_path / "f.hdf5"
    assert make(SCENES, out, f"--source={folder}", "--users=sequence", "--val_as=val") == 0
    with DataFile(out) as file:
        assert set(file.splits) == {"train", "val"}
        train, val = file.split("train"), file.split("val")
        assert set(train.user_ids) == {
            "aachen_000000", "aachen_000001", "bad-honnef_000000", "ulm_000000"
        }  # fmt: skip
        assert set(val.user_ids) == {"val-munster_000000"}
        assert sorted(train.partitions["city"].user_ids) == ["aachen", "bad-honnef", "ulm"]
    write_files(folder, {"users.csv": b"image_id,user_id\naachen_000000_000019,zoe\n"})
    assert make(SCENES, tmp_path / "g.hdf5", f"--source={folder}") == 0
    with DataFile(tmp_path / "g.hdf5") as file:
        assert set(file.split("train").user_ids) == {"zoe", "no-author"}


def with_id(number: int) -> bytes:
    mask = label_ids(0)
    mask[3, 4] = number
    return png(mask)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no mask": (
        {name: None for name in scene_files() if name.endswith(MASK)},
        "holds no gtFine/train/CITY/*_gtFine_labelIds.png: give the folder that holds gtFine and leftImg8bit",
    ),
    "no training mask": (
        {name: None for name in scene_files() if name.startswith("gtFine/train")},
        "holds no gtFine/train/CITY/",
    ),
    "no image": ({IMAGE: None}, "image aachen_000000_000019_leftImg8bit of user aachen cannot be used"),
    "another city": (
        {FIRST: None, "gtFine/train/ulm/aachen_000000_000019" + MASK: with_id(1)},
        "is not named after its folder's city, a sequence and a frame, as ulm_000000_000019",
    ),
    "no sequence": (
        {"gtFine/train/ulm/ulm" + MASK: with_id(1)},
        "ulm/ulm_gtFine_labelIds.png is not named after its folder's city",
    ),
    "two splits": (
        {"gtFine/val/aachen/aachen_000000_000019" + MASK: with_id(1)},
        "scene aachen_000000_000019 is in another split, too; keep one of them",
    ),
    "two masks": ({"b/" + FIRST: with_id(2)}, "has two different files train/aachen/"),
    "empty": ({FIRST: b""}, f"{FIRST}: its mask cannot be used"),
    "no png": ({FIRST: b"GIF89a" * 9}, f"{FIRST}: its mask cannot be used"),
    "cut off": ({FIRST: lambda content: content[:-40]}, f"{FIRST}: its mask cannot be used"),
    "colours": ({FIRST: png(draw(1))}, "its mode is RGB: it needs 8 bits for each pixel"),
    "an id": ({FIRST: with_id(NUM_IDS)}, f"{FIRST} has the label id 34; there are 0 to 33"),
    "train ids": ({FIRST: with_id(255)}, f"{FIRST} has the label id 255; there are 0 to 33"),
    "size": ({FIRST: png(label_ids(0)[:9])}, "its mask has 32 x 9 pixels, the image 32 x 32"),
    "large": ({FIRST: bytes((1 << 24) + 1)}, "is too large"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_hostile_folder_ends_in_one_line(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, message = FAULTS[fault]
    folder = write_files(tmp_path / "in", changed(scene_files(), changes))
    assert make(SCENES, tmp_path / "f.hdf5", f"--source={folder}") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    assert message in line
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


@pytest.mark.parametrize(
    "words, message",
    [
        (["--source=http://127.0.0.1:1/"], "give a folder (cityscapes-dataset.com gives its archives out"),
        (["--source=nowhere"], "--source nowhere is not a folder"),
        (
            ["--source={in}", "--users=camera"],
            "--users is 'camera'; it must be city or sequence",
        ),
        (["--source={in}", "--val_as=train"], "argument --val_as: invalid choice: 'train'"),
        (["--source={in}", "--annotation=mask"], "unrecognized arguments: --annotation=mask"),
        ([], "the following arguments are required: --source"),
    ],
)
def test_bad_calls_end_in_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    given_words = [word.replace("{in}", str(tmp_path / "in")) for word in words]
    assert make(SCENES, tmp_path / "f.hdf5", *given_words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@given(st.lists(st.integers(0, 255), min_size=1, max_size=12))
def test_any_mask_is_refused_or_has_train_ids(ids: list[int]) -> None:
    mask = np.array([ids], np.uint8)
    if mask.max() >= NUM_IDS:
        with pytest.raises(ValueError, match="here has the label id"):
            mask_png(png(mask), "here")
        return
    out = read_mask(mask_png(png(mask), "here"))
    assert out.shape == mask.shape
    for before, after in zip(mask.flat, out.flat):
        assert after == (list(CLASSES).index(int(before)) if before in CLASSES else VOID)


@pytest.mark.parametrize("harm", ["flip", "cut", "name"])
def test_damaged_files_end_in_a_valueerror_or_in_masks(harm: str) -> None:
    rng, whole = np.random.default_rng(0), png(label_ids(0))
    damage: dict[str, Callable[[], tuple[str, bytes]]] = {
        "flip": lambda: ("ulm_0_0", _flipped(rng, whole)),
        "cut": lambda: ("ulm_0_0", whole[: rng.integers(len(whole))]),
        "name": lambda: ("".join(rng.choice(list("ulm_01-. \n\\"), 7)), whole),
    }
    for _ in range(200):
        name, content = damage[harm]()
        with contextlib.suppress(ValueError):
            found = read({f"train/ulm/{name}{MASK}": content}, "here", Reading("mask"))
            assert read_mask(found.records[0]["mask"]).shape[1] > 0


def _flipped(rng: np.random.Generator, content: bytes) -> bytes:
    out = bytearray(content)
    out[rng.integers(len(out))] ^= 1 << rng.integers(8)
    return bytes(out)


def test_val_becomes_test_alone_where_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = LAYOUTS["voc2007"][0]
    files = without_root(voc_files("2007", {"train": TRAIN, "val": VAL}))
    folder = write_files(tmp_path / "in", files)
    assert make(spec, tmp_path / "f.hdf5", f"--source={folder}", "--annotation=boxes", "--val_as=test") == 0
    with DataFile(tmp_path / "f.hdf5") as file:
        assert set(file.splits) == {"train", "test"}
        assert {int(image) for image in file.split("test").image_ids} == {one.number for one in VAL}
    assert set(owned(tmp_path / "f.hdf5", "test").values()) == {
        "test-Fried Camels",
        "test-Jo?",
    }
    write_files(folder, without_root(voc_files("2007", {"test": TEST})))
    capsys.readouterr()
    assert make(spec, tmp_path / "g.hdf5", f"--source={folder}", "--annotation=boxes", "--val_as=test") == 2
    assert "--val_as test cannot be used, because there already are images of" in capsys.readouterr().err
