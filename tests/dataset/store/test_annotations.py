"""Typed columns: what is written is read, damage is found, and old files stay readable."""

from __future__ import annotations

import gzip
import json
import shutil
import signal
import struct
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from dataset.arrays import ByteArray
from dataset.cli import Stopped, run
from dataset.fetch.archives import ArchiveSource
from dataset.fetch.source import Shard
from dataset.preprocess import Options, preprocess
from dataset.store.annotations import CROWD, DIFFICULT, VOID, Boxes, Kind, LabelMatrix, Masks, OneClass
from dataset.store.columns import FLAGGED_BOXES, schema
from dataset.store.hdf5 import DataFile
from dataset.store.index import DatasetIndex
from dataset.store.native import Storage
from dataset.store.validate import describe, main, validate
from dataset.store.writer import DataWriter
from tests.dataset.drawn import png, png_of
from tests.dataset.store.test_hdf5 import dataset_index, partitioned, write

KINDS: dict[str, Kind] = {"tags": "label set", "kind": "class", "mask": "mask", "objects": "boxes"}
NAMES = {"tags": ["x", "y"], "kind": ["zebra", "ape"], "mask": ["sky", "road"], "objects": ["cup", "ant"]}
SIZES = {"a0": (12, 20), "a1": (30, 16), "b0": (16, 16), "b1": (40, 8), "c0": (9, 9)}
"""Height and width of each image; its user is the first letter, c is of val."""


def grey_of_4_bits(height: int, width: int) -> bytes:
    """A PNG whose numbers Pillow multiplies by 17."""
    header = struct.pack(">IIBBBBB", width, height, 4, 0, 0, 0, 0)
    return png_of(header, (b"\0" + b"\x01" * (width // 2)) * height)


def mask_of(image_id: str) -> ByteArray:
    height, width = SIZES[image_id]
    mask = np.zeros((height, width), np.uint8)
    mask[height // 2 :] = 1
    mask[0, 0] = VOID
    return mask


def rows() -> list[dict[str, Any]]:
    return [
        {
            "user_id": image_id[0],
            "image_id": image_id,
            "partition": "val" if image_id[0] == "c" else "train",
            "tags": ["y", "x"][number % 3 :],
            "kind": NAMES["kind"][number % 2],
            "mask": png(mask_of(image_id)),
            "objects": [
                {"name": NAMES["objects"][k % 2], "corners": [k, 0, k + 2, SIZES[image_id][0]]}
                for k in range(number % 3)
            ],
        }
        for number, image_id in enumerate(SIZES)
    ]


def source(
    folder: Path, records: list[dict[str, Any]] | pa.Table, kinds: Mapping[str, Kind]
) -> ArchiveSource:
    """Images in a folder, and records that are held in memory."""
    table = pa.Table.from_pylist(records, schema(kinds)) if isinstance(records, list) else records
    listing = Shard("records", 0, lambda: folder, "records")
    return ArchiveSource(
        listing,
        lambda _: table,
        [],
        folder,
        schema=table.schema,
        num_images=len(records),
        image_bytes=0,
        provenance={"source": "drawn"},
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return draw_images(tmp_path)


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with every kind of annotation."""
    return make(draw_images(tmp_path_factory.mktemp("shared")), rows()).read_bytes()


@pytest.fixture
def path(content: bytes, tmp_path: Path) -> Path:
    """A copy of that file, which may be damaged."""
    (tmp_path / "f.hdf5").write_bytes(content)
    return tmp_path / "f.hdf5"


def draw_images(place: Path) -> Path:
    """An image of each size, smooth so that JPEG keeps it."""
    images = place / "images"
    images.mkdir()
    for number, (image_id, (height, width)) in enumerate(SIZES.items()):
        pixels = np.full((height, width, 3), 40 * number + 20, np.uint8)
        Image.fromarray(pixels).save(images / f"{image_id}.jpg", quality=95)
    return images


def make(folder: Path, records: list[dict[str, Any]], storage: Storage = "jpeg", **options: Any) -> Path:
    output = folder.parent / "f.hdf5"
    preprocess(source(folder, records, KINDS), Options(output, storage, vocabulary=NAMES, **options))
    return output


def of(file: DataFile, split: str, name: str, kind: type[Any]) -> Any:
    annotation = file.split(split).annotations[name]
    assert isinstance(annotation, kind)
    return annotation


@pytest.mark.parametrize("storage", ["jpeg", "raw"])
@pytest.mark.parametrize("side", [None, 16])
def test_every_kind_of_annotation_is_read_as_the_source_had_it(
    folder: Path, storage: Storage, side: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make(folder, rows(), storage, image_size=side)
    with DataFile(path) as file:
        assert file.annotation_names == tuple(KINDS)
        assert {name: found.kind for name, found in file.split("val").annotations.items()} == KINDS
        assert [list(file.label_mapping(name)) for name in KINDS] == [*NAMES.values()]
        for record in rows():
            split = file.split(record["partition"])
            row = list(split.image_ids).index(record["image_id"])
            size, at = SIZES[record["image_id"]], np.array([row])
            where = record["partition"]
            assert np.flatnonzero(split.labels["tags"].dense(at)[0]).tolist() == sorted(
                NAMES["tags"].index(name) for name in record["tags"]
            )
            one_class = of(file, where, "kind", OneClass)
            assert one_class.indices[row] == NAMES["kind"].index(record["kind"])
            masks = of(file, where, "mask", Masks)
            assert np.array_equal(masks.read(row), mask_of(record["image_id"]))
            small = masks.read(row, 4)
            assert small.shape == (4, 4)
            assert (small[-1] == 1).all()
            corners, classes = of(file, where, "objects", Boxes).read(row)
            assert corners.tolist() == [box["corners"] for box in record["objects"]]
            assert classes.tolist() == [NAMES["objects"].index(box["name"]) for box in record["objects"]]
            assert split.image_sizes is not None
            assert tuple(split.image_sizes[row]) == size
            (own,) = file.read_own(where, at)
            square = storage == "raw" and side
            assert own.shape == ((side, side, 3) if square else (*size, 3))
            assert abs(int(own.mean()) - (40 * [*SIZES].index(record["image_id"]) + 20)) <= 2
            assert file.read_images(where, at, 16).shape == (1, 16, 16, 3)
    assert run(main, [str(path)]) == 0
    said = capsys.readouterr().out
    assert "mask: 2, with masks in train, val\n  sky: 4, 1\n  road: 4, 1\n" in said
    assert "objects: 2, with objects in train, val" in said
    assert "flair" not in said.lower()


def flagged(flags: list[int]) -> pa.Table:
    """The records, whose boxes have these flags in order."""
    records, left = rows(), list(flags)
    for record in records:
        record["objects"] = [{**box, "flags": left.pop(0)} for box in record["objects"]]
    return pa.Table.from_pylist(records, schema({**KINDS, "objects": FLAGGED_BOXES}))


@pytest.mark.parametrize("flags, version", [([0, 0, 0, 0], 3), ([CROWD, 0, DIFFICULT, CROWD | DIFFICULT], 4)])
def test_flags_of_boxes_are_kept_and_cost_a_version_only_where_there_are_any(
    folder: Path, flags: list[int], version: int
) -> None:
    output = folder.parent / "f.hdf5"
    preprocess(source(folder, flagged(flags), KINDS), Options(output, vocabulary=NAMES))
    with h5py.File(output) as file:
        assert file.attrs["schema_version"] == version
        assert ("flags" in file["train/annotations/objects"]) == (version == 4)
    with DataFile(output) as file:
        split = file.split("train")
        boxes = of(file, "train", "objects", Boxes)
        of_row = [boxes.take(np.array([row])).flags.tolist() for row in range(len(boxes))]
        found = dict(zip(split.image_ids, of_row))
        assert found == {"a0": [], "a1": flags[:1], "b0": flags[1:3], "b1": []}
        assert boxes.take(np.array([2, 1])).flags.tolist() == [*flags[1:3], flags[0]]
        assert ("; 2 surround a crowd; 2 are difficult" in describe(file)) == (version == 4)
    validate(output)


def test_a_flag_that_is_unknown_is_found(folder: Path) -> None:
    output = folder.parent / "f.hdf5"
    with pytest.raises(ValueError, match="objects: a flag of a box is unknown"):
        preprocess(source(folder, flagged([0, 4, 0, 0]), KINDS), Options(output, vocabulary=NAMES))


def test_one_class_is_stored_once(path: Path) -> None:
    with h5py.File(path) as file:
        assert list(file["train/annotations/kind"]) == ["classes"]
        assert file["train/annotations/kind/classes"].shape == (4,)


@pytest.mark.parametrize(
    "change, fault",
    [
        ({"mask": png(np.zeros((3, 3), np.uint8))}, "its mask has 3 x 3 pixels, the image 20 x 12"),
        ({"mask": png(np.full((12, 20), 2, np.uint8))}, "its mask has the class 2, of 2"),
        ({"mask": b"no picture"}, "its mask cannot be used"),
        ({"mask": png(np.zeros((12, 20), np.uint8))[:-30]}, "its mask cannot be used"),
        ({"mask": grey_of_4_bits(12, 20)}, "it is grey of 4 bits: it needs 8, or a palette"),
        ({"mask": None}, "it has no annotation"),
        ({"mask": png(np.zeros((12, 20, 3), np.uint8))}, "its mask cannot be used (its mode is RGB"),
        ({"objects": [{"name": "cup", "corners": [0, 0, 21, 5]}]}, "its box (0, 0, 21, 5) is empty or not"),
        ({"objects": [{"name": "cup", "corners": [3, 0, 3, 5]}]}, "its box (3, 0, 3, 5) is empty or not"),
        ({"objects": [{"name": "cup", "corners": [0, float("nan"), 3, 5]}]}, "is empty or not within"),
    ],
)
def test_an_annotation_that_does_not_fit_its_image_is_named_or_left_out(
    folder: Path, change: dict[str, Any], fault: str
) -> None:
    records = [{**record, **(change if record["image_id"] == "a0" else {})} for record in rows()]
    with pytest.raises(ValueError, match="image a0 of user a cannot be used") as caught:
        make(folder, records)
    assert fault in str(caught.value)
    with DataFile(make(folder, records, on_bad_image="skip")) as file:
        assert list(file.split("train").image_ids) == ["a1", "b0", "b1"]
        assert len(of(file, "train", "mask", Masks)) == 3


def test_a_longer_list_of_classes_is_not_believed_to_have_the_faults_of_a_shorter_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it stands in the journal of what was stopped."""

    def stopped(*_: Any) -> None:
        raise Stopped(signal.SIGTERM)

    records = rows()
    for record in records[1:]:
        record["mask"] = png(np.zeros(SIZES[record["image_id"]], np.uint8))
    with monkeypatch.context() as patch:
        patch.setattr(DataWriter, "put_down", stopped)
        patch.setitem(NAMES, "mask", ["sky"])
        with pytest.raises(Stopped):
            make(folder, records, on_bad_image="skip")
    with DataFile(make(folder, records, on_bad_image="skip")) as file:
        assert file.provenance["skipped_images"] == []


@pytest.mark.parametrize("first", ["background", "Background", "_background_", "BACKGROUND"])
def test_background_is_no_object_however_it_is_spelt(
    first: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NAMES, "mask", [first, "road"])
    with DataFile(make(folder, rows())) as file:
        assert set(file.present("train", "mask").indices.tolist()) == {1}


@pytest.mark.parametrize("character", ["\0", "\0b"])
def test_an_id_with_a_character_0_is_refused(folder: Path, character: str) -> None:
    """At the end of an id it would be lost: the users "a" and "a\\0" would be one."""
    records = [{**record, "user_id": record["user_id"] + character} for record in rows()]
    with pytest.raises(ValueError, match="an id has the character with the code 0: check that this column"):
        make(folder, records)


def test_a_class_that_the_vocabulary_lacks_is_named(folder: Path) -> None:
    records = [{**record, "kind": "yak"} for record in rows()]
    with pytest.raises(ValueError, match="image a0 of user a has the label 'yak'"):
        make(folder, records)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("annotations/kind/classes", 7, "a label index of kind is out of range"),
        ("annotations/objects/corners", np.nan, "a corner is negative or no number"),
        ("annotations/objects/corners", 0, "a box is empty"),
        ("annotations/objects/classes", 9, "a label index of objects is out of range"),
        ("annotations/objects/indptr", 3, "does not rise from 0"),
        ("annotations/mask/offsets", 1, "do not rise from 0"),
        ("annotations/mask/png", 0, "does not match its checksum"),
        ("image_sizes", 0, "does not give each image a height and a width"),
        ("image_sizes", 1, "a box reaches beyond its image"),
    ],
)
def test_damage_to_an_annotation_is_found(path: Path, name: str, value: float, message: str) -> None:
    with h5py.File(path, "r+") as file:
        data = file[f"train/{name}"]
        data[...] = np.full(data.shape, value).astype(data.dtype)
    if "checksum" not in message:
        with pytest.raises(ValueError, match=message), DataFile(path) as file:
            file.split("train")
    with pytest.raises(ValueError, match="is damaged"):
        validate(path)


def test_own_sizes_that_contradict_the_pixels_are_refused(folder: Path) -> None:
    path = make(folder, rows(), "raw", image_size=None)
    with h5py.File(path, "r+") as file:
        file["train/image_sizes"][0] = (20, 13)
    with pytest.raises(ValueError, match="image_sizes contradict"), DataFile(path) as file:
        file.read_own("train", np.array([0]))


@pytest.mark.parametrize(
    "wrong",
    [7, [{"name": "kind"}], [{"name": "a", "kind": "smell", "classes": []}], {"name": 1}, [1]],
)
def test_metadata_that_list_no_annotations_are_refused(path: Path, wrong: Any) -> None:
    with h5py.File(path, "r+") as file:
        text = np.frombuffer(json.dumps(wrong).encode(), np.uint8)
        del file["metadata/annotations"]
        from dataset.store.native import checksum

        file.create_dataset("metadata/annotations", data=text).attrs["sha256"] = checksum(text)
    with pytest.raises(ValueError, match="does not list annotations"):
        DataFile(path)


@pytest.mark.parametrize(
    "name, storage, splits",
    [("version-1", "jpeg", lambda: dataset_index().splits), ("version-2", "raw", partitioned)],
)
def test_files_of_earlier_versions_are_read_and_written_as_before(
    tmp_path: Path, name: str, storage: Storage, splits: Callable[[], Any]
) -> None:
    """The files were written by the code of commit 59d7e39."""
    packed = Path(__file__).parent / "old" / f"{name}.hdf5.gz"
    with gzip.open(packed) as content, open(tmp_path / "old.hdf5", "wb") as file:
        shutil.copyfileobj(content, file)
    main([str(tmp_path / "old.hdf5")])
    with DataFile(tmp_path / "old.hdf5") as old:
        for split, expected in splits().items():
            found = old.split(split)
            assert list(found.image_ids) == list(expected.image_ids)
            assert list(found.partitions) == list(expected.partitions)
            every = np.arange(found.num_images)
            for taxonomy, labels in expected.labels.items():
                assert np.array_equal(found.labels[taxonomy].dense(every), labels.dense(every))
            assert old.read_images(split, every, 32).shape == (len(every), 32, 32, 3)
        with DataFile(write(tmp_path / "new.hdf5", storage, splits=splits())) as new:
            assert new.content_sha256() == old.content_sha256()


def test_splits_have_the_same_annotations(tmp_path: Path) -> None:
    index: DatasetIndex = dataset_index()
    labels = index.splits["val"].annotations["labels"]
    wrong = {**index.splits, "val": replace(index.splits["val"], annotations={"labels": labels})}
    with pytest.raises(ValueError, match="different annotations"):
        write(tmp_path / "f.hdf5", "raw", splits=wrong)


def test_the_labels_of_a_user_are_read_without_going_through_all_images() -> None:
    images = 1 << 20
    labels = LabelMatrix(np.arange(images + 1) * 2, np.tile(np.array([1, 4], np.uint16), images), 5)
    tracemalloc.start()
    dense = labels.dense(np.array([images - 1, 0, 7]))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert dense.tolist() == [[0, 1, 0, 0, 1]] * 3
    assert most < images // 8  # bytes; one number for each image are 8 << 20
