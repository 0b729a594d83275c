"""COCO's outlines as masks: filled as by pycocotools, overlaps and groups void, hostile ones refused."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycocotools import mask as coco_mask

from dataset.coco.download_preprocess import COCO_2017
from dataset.fetch.annotated import Reading
from dataset.fetch.coco import read
from dataset.fetch.outlines import CROWD_CLASS, MAX_PIXELS, checked, drawn, mask_png, packed
from dataset.store.annotations import VOID, Masks, read_mask
from dataset.store.hdf5 import DataFile
from dataset.store.validate import validate
from dataset.street.download_preprocess import STREET
from tests.dataset.drawn import SIDE
from tests.dataset.fetch.made_layouts import (
    LAYOUTS,
    TRAIN,
    VAL,
    Photo,
    coco_folder,
    coco_json,
    make,
    photo,
    write_archive,
    write_images,
)
from tests.dataset.fetch.test_hostile_layouts import of_annotation, of_image

SIZE = (23, 17)  # width and height


def filled(value: Any, size: tuple[int, int] = SIZE) -> Any:
    return drawn(checked(packed(value), size, "here"), size, "here")


@given(st.integers(0, 9999))
def test_polygons_are_filled_as_pycocotools_fills_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    width, height = SIZE
    polygons = [
        ((3 * rng.random((n, 2)) - 1) * SIZE).round(2).ravel().tolist()
        for n in rng.integers(3, 9, rng.integers(1, 4))
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pycocotools knows no numpy 2
        expected = coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(polygons, height, width)))
    assert np.array_equal(filled(polygons), expected.astype(bool))


@pytest.mark.parametrize(
    "polygon, pixels",
    [
        ([-50, 50, 50, 0, 50, 100], 3750),
        ([50, -100, 150, 50, 50, 200, 40, 50], 5835),
        ([-1e8, 50, 50, -1e8, 50, 1e8], 5000),
        ([-1e8, -1e8, -1e7, -1e8, -1e8, -1e7], 0),
        ([-100, -100, 200, -100, 200, 200, -100, 200], 10_000),
        ([-500, 50, 50, -500, 600, 50, 50, 600], 10_000),
    ],
)
def test_a_polygon_is_filled_before_it_is_cut_off(polygon: list[float], pixels: int) -> None:
    assert filled([polygon], (100, 100)).sum() == pixels


@given(st.integers(0, 9999))
def test_runs_are_read_as_pycocotools_reads_them_from_numbers_and_from_its_text(seed: int) -> None:
    rng = np.random.default_rng(seed)
    inside = rng.random((SIZE[1], SIZE[0])) < rng.random()
    inside = inside.repeat(rng.integers(1, 30), 1)[:, : SIZE[0]]
    text = coco_mask.encode(np.asfortranarray(inside, np.uint8))
    ends = np.flatnonzero(np.diff(inside.T.ravel(), prepend=False))
    numbers = np.diff(ends, prepend=0, append=inside.size).tolist()
    for counts in (text["counts"].decode(), numbers):
        assert np.array_equal(filled({"size": [SIZE[1], SIZE[0]], "counts": counts}), inside)


def test_an_outline_beyond_the_image_is_cut_off_and_one_without_area_has_no_pixel() -> None:
    assert filled([[-5, -5, 40, -5, 40, 40, -5, 40]]).all()
    flats: list[Any] = [[], [[]], [[1, 1, 5, 5]], [[3, 3, 3, 3, 3, 3]]]
    for flat in flats:
        assert not filled(flat).any()


def square(left: int, right: int) -> Any:
    return packed([[left, 0, right, 0, right, 8, left, 8]])


def test_overlaps_of_classes_are_void_whatever_the_order_and_groups_are_void_where_no_object_is() -> None:
    objects = [
        (1, square(0, 4), ""),
        (2, square(3, 6), ""),
        (2, square(5, 8), ""),
        (CROWD_CLASS, square(7, 10), ""),
    ]
    for order in itertools.permutations(objects):
        mask = read_mask(mask_png(order, (12, 8)))
        assert (mask == [1, 1, 1, VOID, 2, 2, 2, 2, VOID, VOID, 0, 0]).all()


def expected_mask(one: Photo) -> Any:
    """Every second box is a group's."""
    mask, seen = np.zeros((SIDE, SIDE), int), np.zeros((SIDE, SIDE), int)
    group = np.zeros((SIDE, SIDE), bool)
    for k, (left, top, right, bottom), flagged in one.boxes:
        here = np.s_[top:bottom, left:right]
        if flagged:
            group[here] = True
            continue
        seen[here] |= 1 << k % 3
        mask[here] = k % 3 + 1
    mask[np.isin(seen, (3, 5, 6, 7))] = VOID
    mask[group & (mask == 0)] = VOID
    return mask


@pytest.mark.parametrize("as_archives", [True, False])
def test_coco_gives_masks_with_the_classes_of_its_boxes(as_archives: bool, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    if as_archives:
        for path, files in LAYOUTS["coco"][1].items():
            write_archive(folder / Path(path).name, files)
    else:
        write_images(coco_folder(folder, coco_json(TRAIN)))
    out = tmp_path / "f.hdf5"
    words = [f"--source={folder}", "--annotation=mask", "--val_as=test"]
    assert make(COCO_2017, out, *words) == 0
    validate(out)
    with DataFile(out) as file:
        assert list(file.label_mapping("mask")) == ["background", "person", "dog", "toothbrush"]
        assert set(file.splits) == {"train", "test"}
        assert file.provenance["category_ids"] == [1, 18, 90]
        seen = set()
        for split, ones in (("train", TRAIN), ("test", VAL)):
            index = file.split(split)
            masks = index.annotations["mask"]
            assert isinstance(masks, Masks)
            assert index.num_images == len(ones)
            for row, image in enumerate(index.image_ids):
                mask = masks.read(row)
                assert np.array_equal(mask, expected_mask(photo(int(image))))
                seen |= set(mask.flat)
        assert {0, 1, VOID} < seen


def runs(counts: Any, size: Any = (SIDE, SIDE)) -> Any:
    return {"counts": counts, "size": list(size)}


FAULTS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (of_annotation("segmentation", None), "has the segmentation 'None'; it must be polygons or run lengths"),
    (of_annotation("segmentation", "x" * 99), "it must be polygons or run lengths"),
    (of_annotation("segmentation", [1, 2, 3]), "has a polygon that is not a list of pairs of numbers"),
    (of_annotation("segmentation", [[1, 2, 3, 4, 5, 6, 7]]), "has a polygon that is not a list of pairs of"),
    (of_annotation("segmentation", [[1, 2, 3, 4, 5, "6"]]), "has a polygon that is not a list of pairs of"),
    (of_annotation("segmentation", [[1, 2, 3, 4, 5, True]]), "has a polygon that is not a list of pairs of"),
    (of_annotation("segmentation", [[1, 2, 3, 4, 5, 10**400]]), "has a polygon that is not a list of pairs"),
    (of_annotation("segmentation", [[1, 2, 3, 4, 5, 1e300]]), "has a polygon that is not a list of pairs"),
    (of_annotation("segmentation", [[[1, 2], [3, 4], [5, 6]]]), "has a polygon that is not a list of pairs"),
    (of_annotation("segmentation", [{"counts": [1], "size": [1, 1]}]), "has a polygon that is not a list"),
    (of_annotation("segmentation", runs([1024], (SIDE, 9))), "has run lengths (RLE) of the size [32, 9]"),
    (of_annotation("segmentation", {"counts": [1024]}), "has run lengths (RLE) of the size None, but"),
    (of_annotation("segmentation", runs([1, 2])), "whose sum is not the number of pixels, 1,024"),
    (of_annotation("segmentation", runs([1025])), "whose sum is not the number of pixels,"),
    (of_annotation("segmentation", runs([])), "whose sum is not the number of pixels,"),
    (of_annotation("segmentation", runs([1025, -1])), "that are not whole numbers from 0 to"),
    (of_annotation("segmentation", runs([MAX_PIXELS + 1])), "that are not whole numbers from 0 to"),
    (of_annotation("segmentation", runs([1.0, 1023])), "that are not whole numbers from 0 to"),
    (of_annotation("segmentation", runs(None)), "that are not whole numbers from 0 to"),
    (of_annotation("segmentation", runs("~")), "that pycocotools cannot have written"),
    (of_annotation("segmentation", runs("oooooooooooooooooo0")), "that pycocotools cannot have written"),
    (of_annotation("segmentation", runs("P")), "compressed run lengths (RLE) that are cut off"),
    (of_annotation("segmentation", runs("é")), "that pycocotools cannot have written"),
    (of_image("width", 1 << 40), "pixels; at most 67,108,864 are allowed"),
    *(
        (lambda content, name=name: content["categories"][0].update(name=name), f" is named {name}, but")
        for name in ("background", "Background", "_background_")
    ),
    (of_annotation("category_id", 2), "annotation 3 has the category 2, which is not in the list categories"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_a_hostile_outline_ends_in_one_line(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = FAULTS[number]
    change(content := coco_json(TRAIN))
    folder = coco_folder(tmp_path / "in", content)
    assert make(STREET, tmp_path / "f.hdf5", f"--source={folder}", "--annotation=mask") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {folder}: instances_")
    assert message in line


def test_damaged_json_ends_in_a_valueerror_or_in_masks() -> None:
    rng, whole = np.random.default_rng(2), json.dumps(coco_json(TRAIN)).encode()
    refused = 0
    for _ in range(300):
        content = bytearray(whole)
        for at in rng.integers(len(content), size=2):
            content[at] = rng.choice(list(b'0123456789-.,[]{}eE"tP'))
        try:
            found = read({"instances_train.json": bytes(content)}, "here", Reading("mask"))
        except ValueError:
            refused += 1
            continue
        assert all(read_mask(record["mask"]).size for record in found.records)
    assert refused > 50


@pytest.mark.parametrize(
    "words, message",
    [
        ("--annotation=mask --bad_boxes=fail", "--bad_boxes can be used only with --annotation boxes"),
        ("--annotation=outlines", "invalid choice: 'outlines'"),
        ("--first_pixel=0", "unrecognized arguments: --first_pixel=0"),
    ],
)
def test_bad_calls_end_in_one_line(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    assert make(COCO_2017, tmp_path / "f.hdf5", f"--source={tmp_path / 'in'}", *words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_polygons_without_area_are_counted(tmp_path: Path) -> None:
    content = coco_json(TRAIN)
    content["annotations"][0]["segmentation"] = [[1, 1, 2, 2], [0, 0, 4, 0, 4, 4]]
    folder = coco_folder(tmp_path / "in", content)
    write_images(folder)
    assert make(COCO_2017, tmp_path / "f.hdf5", f"--source={folder}", "--annotation=mask") == 0
    with DataFile(tmp_path / "f.hdf5") as file:
        assert file.provenance["polygons_without_area"] == 1


@pytest.mark.parametrize("empty", [[], [[]]])
def test_objects_without_an_outline_are_counted_and_refused_where_all_are(
    empty: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = coco_json(TRAIN)
    content["annotations"][0]["segmentation"] = empty
    folder = coco_folder(tmp_path / "in", content)
    write_images(folder)
    words = [f"--source={folder}", "--annotation=mask"]
    assert make(COCO_2017, tmp_path / "f.hdf5", *words) == 0
    assert "1 objects without an outline" in capsys.readouterr().err
    with DataFile(tmp_path / "f.hdf5") as file:
        assert file.provenance["objects_without_an_outline"] == 1
    for entry in content["annotations"]:
        entry["segmentation"] = empty
    coco_folder(folder, content)
    (folder / "instances_val.json").unlink()
    assert make(COCO_2017, tmp_path / "g.hdf5", *words) == 2
    assert "no object has a segmentation, so masks cannot be made: give" in capsys.readouterr().err
