"""Folders in YOLO's layout: each image with its own boxes or outlines, and its own user."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dataset.fetch.annotated import Form, Reading
from dataset.fetch.yolo import YOLO
from dataset.store.annotations import Boxes, Masks
from dataset.store.hdf5 import DataFile
from dataset.store.validate import validate
from dataset.street.download_preprocess import STREET
from dataset.yolo.download_preprocess import FOLDER
from tests.dataset.drawn import SIDE, jpeg, number_in
from tests.dataset.fetch.made_layouts import (
    CATEGORIES,
    TRAIN,
    VAL,
    Files,
    coco_folder,
    coco_json,
    make,
    photo,
    write_files,
    write_images,
)

NAMES = [CATEGORIES[number] for number in sorted(CATEGORIES)]
DATA = f"train: ../train/images\nnc: {len(NAMES)}\nnames: {NAMES}\n".encode()
LAYOUTS = {
    "by kind": ("images/{split}/{name}.jpg", "labels/{split}/{name}.txt", "val"),
    "by split": ("{split}/images/{name}.jpg", "{split}/labels/{name}.txt", "valid"),
    "side by side": ("{split}/{name}.jpg", "{split}/{name}.txt", "validation"),
}
"""Where images and labels are, and what val is called."""
LABEL = "labels/train/000007.txt"


def words_of(box: list[int], outlines: bool) -> str:
    left, top, right, bottom = (value / SIDE for value in box)
    if outlines:
        return f"{left} {top} {right} {top} {right} {bottom} {left} {bottom}"
    return f"{(left + right) / 2} {(top + bottom) / 2} {right - left} {bottom - top}"


def yolo_files(layout: str = "by kind", outlines: bool = False) -> Files:
    """Images without objects have no text file, or an empty one."""
    image, label, val = LAYOUTS[layout]
    files = {"data.yaml": DATA, "labels/classes.txt": b"as LabelImg has it"}
    for one in (*TRAIN, *VAL):
        where = {"split": val if one.split == "val" else one.split, "name": one.image_id}
        files[image.format(**where)] = jpeg(one.number)
        lines = [f"{k % len(NAMES)} {words_of(box, outlines)}\n" for k, box, _ in one.boxes]
        if lines or one.number % 2:
            files[label.format(**where)] = "".join(lines).encode()
    return files


def made(tmp_path: Path, files: Files, *words: str) -> int:
    folder = write_files(tmp_path / "in", files)
    return make(FOLDER, tmp_path / "f.hdf5", f"--source={folder}", "--val_as=test", *words)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("outlines", [False, True])
def test_each_image_has_its_own_boxes(layout: str, outlines: bool, tmp_path: Path) -> None:
    assert made(tmp_path, yolo_files(layout, outlines)) == 0
    validate(tmp_path / "f.hdf5")
    with DataFile(tmp_path / "f.hdf5") as file:
        assert [*file.label_mapping("objects")] == NAMES
        assert {name: file.split(name).num_images for name in file.splits} == {"train": 5, "test": 3}
        for split in file.splits:
            index = file.split(split)
            boxes = index.annotations["objects"]
            assert isinstance(boxes, Boxes)
            for row, pixels in enumerate(file.read_own(split, np.arange(index.num_images))):
                one = photo(number_in(pixels))
                assert one.split == ("val" if split == "test" else split)
                assert index.image_ids[row] == one.image_id
                corners, classes = boxes.read(row)
                np.testing.assert_allclose(
                    corners.reshape(-1, 4), np.array([b for _, b, _ in one.boxes]).reshape(-1, 4), atol=1e-5
                )
                assert classes.tolist() == [k % len(NAMES) for k, _, _ in one.boxes]


def test_outlines_become_the_masks_that_cocos_become(tmp_path: Path) -> None:
    content = coco_json(TRAIN)
    for entry in content["annotations"]:
        entry |= {"iscrowd": 0}
        if isinstance(entry["segmentation"], dict):
            x, y, w, h = entry["bbox"]
            entry["segmentation"] = [[x, y, x + w, y, x + w, y + h, x, y + h]]
    folder = coco_folder(tmp_path / "coco", content)
    write_images(folder)
    (folder / "instances_val.json").unlink()
    assert make(STREET, tmp_path / "g.hdf5", f"--source={folder}", "--annotation=mask") == 0
    files = {name: data for name, data in yolo_files(outlines=True).items() if "/val/" not in name}
    folder = write_files(tmp_path / "in", files)
    assert make(FOLDER, tmp_path / "f.hdf5", f"--source={folder}", "--annotation=mask") == 0
    masks = []
    for name in ("f", "g"):
        with DataFile(tmp_path / f"{name}.hdf5") as file:
            found = file.split("train").annotations["mask"]
            assert isinstance(found, Masks)
            masks.append(np.stack([found.read(row) for row in range(len(TRAIN))]))
    assert np.array_equal(masks[0], masks[1])
    assert {*np.unique(masks[0])} > {0, 1}


def test_photos_that_exif_turns_are_labelled_upright(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = yolo_files() | {LABEL: b"0 0.5 0.25 1 0.5\n"}
    folder = write_files(tmp_path / "in", files)
    path, exif = folder / "images/train/000007.jpg", Image.Exif()
    exif[0x0112] = 6
    with Image.open(path) as image:
        image.resize((2 * SIDE, SIDE)).save(path, exif=exif)
    words = [f"--source={folder}", "--val_as=test"]
    assert make(FOLDER, tmp_path / "f.hdf5", *words) == 2
    assert "1 photos are rotated by their EXIF orientation, for example" in capsys.readouterr().err
    assert make(FOLDER, tmp_path / "f.hdf5", *words, "--upright") == 0
    with DataFile(tmp_path / "f.hdf5") as file:
        train = file.split("train")
        row = list(train.image_ids).index("000007")
        boxes = train.annotations["objects"]
        assert isinstance(boxes, Boxes)
        assert boxes.read(row)[0].tolist() == [[0, 0, SIDE, SIDE]], "of an image twice as high as wide"


def test_a_damaged_image_is_refused_or_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = yolo_files() | {"images/train/000007.jpg": b"\xff\xd8 no image"}
    assert made(tmp_path, files) == 2
    assert "000007" in capsys.readouterr().err.splitlines()[-1]
    assert made(tmp_path, files, "--on_bad_image=skip") == 0
    with DataFile(tmp_path / "f.hdf5") as file:
        assert "000007" not in file.split("train").image_ids


@pytest.mark.parametrize("suffix", ["", ".jpg"])
def test_splits_and_users_may_be_those_of_a_csv(suffix: str, tmp_path: Path) -> None:
    files = {name.replace("/train/", "/").replace("/val/", "/"): data for name, data in yolo_files().items()}
    lines = [f"{one.image_id}{suffix},{one.split},u{one.number % 2}\n" for one in (*TRAIN, *VAL)]
    files["users.csv"] = ("image_id,partition,user\n" + "".join(lines)).encode()
    assert made(tmp_path, files) == 0
    with DataFile(tmp_path / "f.hdf5") as file:
        assert sorted(file.split("train").user_ids) == ["u0", "u1"]
        assert file.split("test").num_images == len(VAL)


FAULTS: dict[str, tuple[dict[str, bytes | None], str]] = {
    "no names": ({"data.yaml": b"nc: 3\n"}, "data.yaml needs names: a list of different texts"),
    "names that are no text": ({"data.yaml": b"names: [yes, b, c]\n"}, "data.yaml needs names: a list"),
    "two equal names": ({"data.yaml": b"names: [a, a, b]\n"}, "needs names: a list of different texts"),
    "a gap": ({"data.yaml": b"names: {0: a, 2: b}\n"}, "or a mapping from the numbers 0, 1, 2, ... to texts"),
    "another number": ({"data.yaml": b"nc: 9\nnames: [a, b]\n"}, "but nc is another"),
    "no YAML": ({"data.yaml": b"names: [a\n"}, "data.yaml cannot be read (while parsing"),
    "no text": ({"data.yaml": b"\xff\xfe\xff"}, "data.yaml cannot be read ("),
    "code": ({"data.yaml": b"names: !!python/object/apply:os.system ['true']\n"}, "data.yaml cannot be read"),
    "too few words": ({LABEL: b"0 0.5 0.5 1\n"}, f"{LABEL} line 1 has '0 0.5 0.5 1'; it needs a class"),
    "a prediction": ({LABEL: b"\n0 .5 .5 1 1 .9\n"}, f"{LABEL} line 2 has '0 .5 .5 1 1 .9'; it needs"),
    "two points": ({LABEL: b"0 .1 .1 .5 .5 .9 .9 .2\n"}, "or a class number and three or more pairs x y"),
    "a name": ({LABEL: b"dog .5 .5 1 1\n"}, f"{LABEL} line 1 has 'dog .5 .5 1 1'"),
    "no number": ({LABEL: b"0 .5 .5 1 a\n"}, f"{LABEL} line 1 has '0 .5 .5 1 a'"),
    "nan": ({LABEL: b"0 nan .5 1 1\n"}, f"{LABEL} line 1 has '0 nan .5 1 1'"),
    "infinite": ({LABEL: b"0 1e999 .5 1 1\n"}, "line 1 has numbers that are too large: coordinates are"),
    "underscore": ({LABEL: b"0 1_0 .5 1 1\n"}, f"{LABEL} line 1 has '0 1_0 .5 1 1'"),
    "pixels": ({LABEL: b"0 16 16 8 8\n"}, f"{LABEL} line 1: the box (384, 384, 640, 640) is empty"),
    "empty box": ({LABEL: b"0 .5 .5 0 1\n"}, "is empty or reaches beyond the image of 32 x 32 pixels"),
    "class": ({LABEL: b"3 .5 .5 1 1\n"}, f"{LABEL} line 1 has the category 3, which is not in the list"),
    "blank name": ({"data.yaml": None, "classes.txt": b"a\n\nb\n"}, "classes.txt needs names: a list of"),
    "keypoints": ({"data.yaml": DATA + b"kpt_shape: [3, 2]\n"}, "has kpt_shape, but keypoints are not"),
    "mixed": ({LABEL: b"0 .1 .1 .5 .1 .5 .5\n"}, "has lines with boxes (labels/train/000001.txt line 1)"),
    "for example": ({"texts/000002.txt": b""}, "for example texts/000002.txt: the text file of an image"),
    "large letters": ({"Labels/train/000002.txt": b""}, "for example Labels/train/000002.txt: the text file"),
    "no text file": ({"test/x.jpg": jpeg(3)}, "no image of test has a text file of objects"),
    "is not a folder": ({"x.jpg": jpeg(3)}, "x.jpg cannot be used; it is not in a folder below --source"),
    "bytes": ({LABEL: b"\xff\xfe"}, f"{LABEL} is not UTF-8 text"),
    "lost": ({"labels/train/x.txt": b""}, "1 text files belong to no image"),
    "no split": ({"images/x.jpg": jpeg(3)}, "images/x.jpg belongs to no split, or to several: name exactly"),
    "two splits": ({"val/train/x.jpg": jpeg(3)}, "x.jpg belongs to no split, or to several: name exactly"),
    "one name": ({"images/val/000007.jpg": jpeg(3)}, "two files are named like image 000007"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_one_line(fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed, said = FAULTS[fault]
    files = {name: data for name, data in {**yolo_files(), **changed}.items() if data is not None}
    assert made(tmp_path, files) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert said in last
    assert not (tmp_path / "f.hdf5").exists()


def test_names_by_number_and_lists_of_names_are_one(tmp_path: Path) -> None:
    write_files(tmp_path, {"images/train/a.jpg": jpeg(1)})
    empty = {"images/train/a.txt": b""}
    by_number = "names:\n" + "".join(f"  {k}: {name}\n" for k, name in reversed([*enumerate(NAMES)]))
    for name, text in (("data.yaml", by_number), ("classes.txt", "\n".join(NAMES) + "\n\n")):
        found = YOLO.read({name: text.encode(), **empty}, str(tmp_path), Reading("boxes"))
        assert found.classes == NAMES
    with pytest.raises(ValueError, match=r"has none of data.yaml, data.yml, classes.txt"):
        YOLO.read({}, str(tmp_path), Reading("boxes"))


@pytest.mark.parametrize("form", ["boxes", "mask"])
def test_damaged_text_is_read_or_refused_in_a_line(form: Form, tmp_path: Path) -> None:
    write_files(tmp_path, {"images/train/000007.jpg": jpeg(7)})
    draws, outcomes = random.Random(0), set()
    sound = b"0 0.5 0.5 0.25 0.125\r\n1 5e-1 .5 .2 .3\n"
    if form == "mask":
        sound = b"2 0.1 0.1 0.9 0.1 0.9 0.9\n1 1e-1 .2 .3 .4 .5 .6\n"
    for _ in range(300):
        content = bytearray(sound)
        for _ in range(draws.randrange(1, 4)):
            place = draws.randrange(len(content))
            content[place : place + draws.randrange(2)] = draws.choice(
                [b"", b" ", b"\n", b"-", b"9", b"\xff", b"e9"]
            )
        outcome = "read"
        try:
            YOLO.read({"data.yaml": DATA, LABEL: bytes(content)}, str(tmp_path), Reading(form))
        except ValueError as fault:
            outcome = "refused" if "\n" not in str(fault) else str(fault)
        outcomes.add(outcome)
    assert outcomes == {"read", "refused"}
