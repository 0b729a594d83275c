"""Wrong folders in the layouts of VOC, SBD and COCO: one line that names file and fault, exit code 2."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataset.fetch.voc import MAX_XML_BYTES
from dataset.sbd.matlab import byte_matrix
from dataset.sbd.source import mask_png
from dataset.street.download_preprocess import STREET
from tests.dataset.fetch.made_layouts import (
    LAYOUTS,
    TRAIN,
    VAL,
    Files,
    coco_folder,
    coco_json,
    make,
    matlab,
    voc_files,
    without_root,
    write_files,
)

XML, LIST = "Annotations/000007.xml", "ImageSets/Main/{}.txt"
VAL_LIST = LIST.format("val")
DOCTYPE = b'<!DOCTYPE a [<!ENTITY b "bb"><!ENTITY c "&b;&b;">]><annotation>&c;</annotation>'
MAX = "<xmax>32"


def instead(old: str, new: str) -> Callable[[bytes], bytes]:
    return lambda content: content.replace(old.encode(), new.encode())


VOC_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no list": (dict.fromkeys(map(LIST.format, ("train", "val"))), "does not say which images are for"),
    "no annotation": ({XML: None}, "image 000007 of train has no annotation in Annotations/*.xml"),
    "entities": ({XML: DOCTYPE}, f"{XML} is not valid XML (it has a document type"),
    "cut off": ({XML: lambda xml: xml[:-20]}, f"{XML} is not valid XML (unclosed token"),
    "no XML": ({XML: b"\xff\xfe\x00"}, f"{XML} is not valid XML ("),
    "deep": ({XML: b"<a>" * 99 + b"</a>" * 99}, "XML (its elements are nested more than 16"),
    "encoding": ({XML: b'<?xml version="1.0" encoding="utf-99"?><a/>'}, f"{XML} is not valid XML ("),
    "large": ({XML: b" " * (MAX_XML_BYTES + 1)}, "is too large"),
    "class": ({XML: instead("<name>cat", "<name>kite")}, "has an object of the class 'kite', which is not"),
    "size": ({XML: instead("width>", "w>")}, "size/width is ''"),
    "number": ({XML: instead(MAX, "<xmax>1e9")}, "bndbox/xmax is '1e9'; it must be a number"),
    "nan": ({XML: instead(MAX, "<xmax>nan")}, "bndbox/xmax is 'nan'; it must be"),
    "beyond": ({XML: instead(MAX, "<xmax>33")}, "is empty or reaches beyond the image of 32"),
    "counts from 0": ({XML: instead("<xmin>2", "<xmin>0")}, "; if the boxes count pixels from 0, give"),
    "empty": ({XML: instead(MAX, "<xmax>0")}, "(0, 0, 0, 2) is empty or reaches beyond"),
    "twice": ({VAL_LIST: b"000007\n"}, "val.txt lists image 000007, which is already in train: remove one"),
    "path": ({VAL_LIST: b"../../etc/x\n"}, "has the line '../../etc/x'; each line must be one image id"),
    "words": ({VAL_LIST: b"000007 1\n"}, "has the line '000007 1'; each line must be one image id"),
    "text": ({VAL_LIST: b"\xff"}, "val.txt is not UTF-8 text"),
    "classes": ({"classes.txt": b"a\na\n"}, "classes.txt needs 1 to 255 different names, one on each line"),
    "two": ({"b/ImageSets/Main/val.txt": b"000001\n"}, "has two different files ImageSets/val.txt: give a"),
    "no image": ({"JPEGImages/000007.jpg": None}, "image 000007 of user Fried Camels cannot be used"),
}  # fmt: skip


def changed(files: Files, changes: dict[str, Any]) -> Files:
    """Without the files that are None, and with what the others become."""
    out = {**files}
    for name, change in changes.items():
        content = change(files[name]) if callable(change) else change
        assert content != files.get(name), "it changes something"
        if content is None:
            del out[name]
        else:
            out[name] = content
    return out


@pytest.mark.parametrize("fault", VOC_FAULTS)
def test_a_hostile_voc_folder_ends_in_one_line(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, message = VOC_FAULTS[fault]
    files = changed(without_root(voc_files("2007", {"train": TRAIN, "val": VAL})), changes)
    folder = write_files(tmp_path / "in", files)
    words = [f"--source={folder}", "--annotation=boxes"]
    assert make(LAYOUTS["voc2007"][0], tmp_path / "f.hdf5", *words) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    assert message in line
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


def of_annotation(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["annotations"][3].update({key: value})


def of_image(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["images"][0].update({key: value})


COCO_FAULTS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda content: [content], "is not a JSON object with images, annotations and categories"),
    (lambda content: content.pop("images") and None, "has no list of objects under 'images'"),
    (lambda content: content["images"].append(7), "has no list of objects under 'images'"),
    (lambda content: content["images"].append(content["images"][0]), "image 1 is there twice"),
    (of_image("id", "1"), "id is '1'; it must be a whole number of at least 0"),
    (of_image("id", -1), "id is '-1'; it must be a whole number of at least 0"),
    (of_image("width", 0.5), "image 1: width is '0.5'; it must be a whole number of at least 0"),
    (of_image("file_name", "../000001.jpg"), "has the file_name '../000001.jpg'; give a name without"),
    (of_image("file_name", "a\ud800.jpg"), "it must be text on one line"),
    (of_image("file_name", None), "image 1: file_name is 'None'; it must be text"),
    (of_annotation("image_id", 99), "belongs to image 99, which is not in the list images"),
    (of_annotation("category_id", 2), "annotation 3 has the category 2, which is not in the list categories"),
    (of_annotation("iscrowd", 2), "annotation 3 has iscrowd '2'; it must be 0 or 1"),
    (of_annotation("bbox", [0, 0, 1]), "has the bbox [0, 0, 1]; it must be four numbers"),
    (of_annotation("bbox", [0, 0, 1, 10**400]), "it must be four numbers"),
    (of_annotation("bbox", [0, 0, 1, True]), "it must be four numbers"),
    (of_annotation("bbox", [0, 0, float("nan"), 1]), "is not valid JSON (it has NaN"),
    (of_annotation("bbox", [0, 0, 33, 1]), "the box (0, 0, 33, 1) is empty or reaches beyond the image"),
    (of_annotation("bbox", [0, 0, 0, 1]), "the box (0, 0, 0, 1) is empty or reaches beyond"),
    (lambda content: content["categories"].append({"id": 1, "name": "b"}), "the name 'b' twice"),
    (lambda content: content["categories"].clear(), "has 0 categories; give 1 to 65,536"),
    (lambda content: content["categories"][0].update(name="bike"), "does not have the same categories as"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(COCO_FAULTS)))
def test_a_hostile_coco_folder_ends_in_one_line(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = COCO_FAULTS[number]
    content = coco_json(TRAIN)
    answer = change(content)
    folder = coco_folder(tmp_path / "in", answer if isinstance(answer, list) else content)
    assert make(STREET, tmp_path / "f.hdf5", f"--source={folder}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {folder}: instances_")
    assert message in line


@pytest.mark.parametrize("text", ["", "[" * 200_000, '{"images": [', "\xff", '{"a": 1' + "0" * 5000 + "}"])
def test_what_is_no_json_ends_in_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_files(tmp_path / "in", {"instances_train.json": text.encode("latin-1")})
    assert make(STREET, tmp_path / "f.hdf5", f"--source={folder}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "instances_train.json is not valid JSON" in line


HEADER = b"x" * 126 + b"IM"


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "it is not a MATLAB file of level 5"),
        (HEADER + b"\x0f\0\0\0\xff\0\0\0" + b"rubbish", "has no GTcls.Segmentation"),
        (matlab(np.zeros((4, 4), np.int32)), "(its field is not a matrix of bytes)"),
        (HEADER + b"\x0f\0\0\0\0\0\1\0" + zlib.compress(bytes(1 << 27)), "it has more than 67,108,864 bytes"),
        (matlab(np.zeros((4, 4), np.uint8))[:-40], "has no GTcls.Segmentation"),
    ],
    ids=["empty", "rubbish", "other numbers", "bomb", "cut off"],
)  # fmt: skip
def test_a_hostile_matlab_file_ends_in_one_line(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=r"here has no GTcls\.Segmentation") as caught:
        mask_png(content, "here")
    assert message in str(caught.value)


@pytest.mark.parametrize("shape", [(3, 5), (1, 2), (1, 1), (40, 7)])
@pytest.mark.parametrize("compressed", [True, False])
def test_a_matrix_is_read_as_scipy_wrote_it(shape: tuple[int, int], compressed: bool) -> None:
    mask = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    assert np.array_equal(byte_matrix(matlab(mask, compressed), "GTcls", "Segmentation"), mask)


def test_a_matrix_that_is_damaged_ends_in_a_valueerror_or_has_its_shape() -> None:
    """On such files SciPy's own reader ends the process."""
    rng, mask = np.random.default_rng(1), np.ones((6, 9), np.uint8)
    whole = matlab(mask, compressed=False)
    refused = 0
    for _ in range(3000):
        content = bytearray(whole)
        content[rng.integers(len(content))] = rng.integers(256)
        try:
            assert byte_matrix(bytes(content), "GTcls", "Segmentation").size == mask.size
        except ValueError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    "words, message",
    [
        ("--annotation=mask --bad_boxes=cut", "--bad_boxes can be used only with --annotation boxes: leave"),
        ("--annotation=mask --first_pixel=0", "--first_pixel can be used only with --annotation boxes"),
        ("--download_folder=d", "--download_folder can be used only if --source is an address: leave it"),
        ("--users=user_id", "--users can be used only with a users.csv, and there is none: add"),
        ("--source=nowhere", "--source nowhere is neither an existing folder nor an address (http...)"),
        ("--image_size=64", "--image_size needs --storage raw"),
        ("--annotation=outlines", "invalid choice: 'outlines'"),
    ],
)
def test_bad_calls_end_in_one_line(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    assert (
        make(LAYOUTS["voc2012"][0], tmp_path / "f.hdf5", f"--source={tmp_path / 'in'}", *words.split()) == 2
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
