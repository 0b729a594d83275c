"""Masks with pixels of 0 and 255, and masks from which nothing can be learnt, in a folder in VOC's layout."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dataset.arrays import ByteArray
from dataset.camvid.download_preprocess import CAMVID
from dataset.fetch.mask_values import numbered, values_of
from dataset.store.annotations import VOID, encoded_mask, read_mask
from dataset.store.hdf5 import DataFile
from dataset.store.validate import describe
from tests.dataset.fetch.made_layouts import make, write_files

LESION = np.array([[0, 0, 1], [1, 1, 0]], np.uint8)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def tiff(level: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((2, 3), 257 * level, np.uint16)).save(buffer, "TIFF")
    return buffer.getvalue()


def folder(root: Path, mask: ByteArray, classes: str = "background\nlesion\n") -> Path:
    """Images of 16 bits as TIFF, all with this mask."""
    files = {"classes.txt": classes.encode(), "users.csv": b"image_id,user\na,x\nb,x\n"}
    for split, image in (("train", "a"), ("test", "b")):
        files[f"ImageSets/Segmentation/{split}.txt"] = f"{image}\n".encode()
        files[f"JPEGImages/{image}.tif"] = tiff(100)
        files[f"SegmentationClass/{image}.png"] = encoded_mask(mask)
    return write_files(root, files)


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def test_masks_of_0_and_255_become_class_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before, 255 was no class in them, and a run scored 100 % by predicting background everywhere."""
    source, output = folder(tmp_path / "in", 255 * LESION), tmp_path / "f.hdf5"
    assert make(CAMVID, output, f"--source={source}") == 2
    line = last_line(capsys)
    assert "no mask has a pixel of a class other than background; pixels of the value 255 have no" in line
    assert line.endswith("if they are lesion, give --mask_values 0,255")
    assert make(CAMVID, output, f"--source={source}", "--mask_values=0,255") == 0
    with DataFile(output) as file:
        assert np.array_equal(file.split("train").annotations["mask"].read(0), LESION)  # type: ignore[union-attr]
        assert file.provenance["mask_values"] == [0, 255]
        assert file.read_own("train", np.array([0]))[0].tolist() == [[[100] * 3] * 3] * 2
        classes = describe(file).partition("content sha256")[0]
    assert "lesion: 1, 1" in classes
    assert "background" not in classes  # which is not counted


def test_splits_in_the_csv_may_name_images_with_their_suffix(tmp_path: Path) -> None:
    """As docs/own_data.md says of `image_id`; here the layout has no lists of its own."""
    source = folder(tmp_path / "in", LESION)
    for path in (source / "ImageSets" / "Segmentation").iterdir():
        path.unlink()
    (source / "users.csv").write_text("image_id,user,partition\na.tif,x,train\nb,y,test\n")
    assert make(CAMVID, tmp_path / "f.hdf5", f"--source={source}") == 0
    with DataFile(tmp_path / "f.hdf5") as file:
        found = {split: (*file.split(split).image_ids, *file.split(split).user_ids) for split in file.splits}
    assert found == {"train": ("a", "x"), "test": ("b", "test-y")}


@pytest.mark.parametrize(
    "mask, words, said",
    [
        (LESION, "0,255", "a.png: it has pixels of the value 1, which is not one of --mask_values 0,255"),
        (LESION, "0,1,2", "--mask_values has 3 values, but there are 2 classes (background, lesion)"),
        (LESION, "0,0", "--mask_values is '0,0'; give different numbers from 0 to 255"),
        (LESION, "0,x", "--mask_values is '0,x'; give different numbers from 0 to 255"),
        (LESION, "0,256", "--mask_values is '0,256'; give different numbers from 0 to 255"),
        (0 * LESION, "", "no mask has a pixel of a class other than background"),
    ],
)
def test_what_cannot_be_is_one_line(
    mask: ByteArray, words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [f"--mask_values={words}"] if words else []
    assert make(CAMVID, tmp_path / "f.hdf5", f"--source={folder(tmp_path / 'in', mask)}", *more) == 2
    assert said in last_line(capsys)


def test_a_list_of_one_class_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder(tmp_path / "in", 255 * LESION, "lesion\n")
    assert make(CAMVID, tmp_path / "f.hdf5", f"--source={source}") == 2
    assert "(list all classes in classes.txt, background first)" in last_line(capsys)


def test_classes_that_no_mask_has_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder(tmp_path / "in", np.where(LESION, LESION, VOID), "background\nlesion\nvessel\n")
    assert make(CAMVID, tmp_path / "f.hdf5", f"--source={source}") == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("WARNING")]
    assert line.endswith("no mask has a pixel of vessel; pixels of the value 255 have no class")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "RGB", "RGBA"])
def test_one_bit_and_grey_in_colour_channels_are_read_by_their_values(mode: str) -> None:
    data = png(Image.fromarray(255 * LESION).convert(mode))
    assert np.array_equal(read_mask(numbered(data, values_of("0, 255"))), LESION)
    if mode != "L":
        with pytest.raises(ValueError, match=rf"its mode is {mode}: it needs 8 bits"):
            read_mask(data)


def test_colours_are_no_values() -> None:
    red = np.stack([255 * LESION, 0 * LESION, 0 * LESION], 2)
    with pytest.raises(ValueError, match="it has colours: it needs grey levels, or a palette"):
        numbered(png(Image.fromarray(red)), (0, 255))
