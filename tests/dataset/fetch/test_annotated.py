"""VOC, SBD and COCO from a server or a folder: each image with its own mask or boxes, and its own user."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dataset.camvid import download_preprocess as camvid
from dataset.cli import run
from dataset.fetch import http
from dataset.fetch.voc import CLASSES
from dataset.journal import only_downloader, only_writer
from dataset.store.annotations import BACKGROUND, CROWD, DIFFICULT, VOID, Boxes, Masks
from dataset.store.hdf5 import DataFile
from dataset.store.validate import validate
from dataset.street import download_preprocess as street
from tests.dataset.drawn import SIDE, number_in
from tests.dataset.fetch.faulty_server import FaultyServer, serving
from tests.dataset.fetch.made_layouts import (
    CATEGORIES,
    LAYOUTS,
    TEST,
    TRAIN,
    VAL,
    Photo,
    coco_folder,
    coco_json,
    make,
    palette_png,
    photo,
    served,
    voc_files,
    without_root,
    write_archive,
    write_files,
    write_images,
)
from tests.dataset.fetch.test_listed import QUICK

DATA = Path(__file__).parents[4] / "shared" / "data"
OF = {"voc2007": (TRAIN, VAL, TEST), "voc2012": (TRAIN, VAL), "sbd": (TRAIN, VAL), "coco": (TRAIN, VAL)}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    monkeypatch.setattr(http, "PATIENCE", QUICK)
    with serving(tmp_path / "served") as state:
        yield state


def owner_in_file(one: Photo, layout: str) -> str:
    if layout != "voc2007":
        return f"all-{one.split}"
    return ("" if one.split == "train" else f"{one.split}-") + (one.owner or "no-author")


def assert_paired(path: Path, layout: str, form: str) -> None:
    """Every image of the lists once, with its own pixels, annotation, split and user."""
    expected = [one for ones in OF[layout] for one in ones]
    if form == "mask" and layout != "sbd":
        expected = [one for one in expected if one.number % 2]
    found = []
    with DataFile(path) as file:
        names = [*file.label_mapping("mask" if form == "mask" else "objects")]
        coco = [CATEGORIES[k] for k in sorted(CATEGORIES)]
        assert names == (coco if layout == "coco" else [*([BACKGROUND] if form == "mask" else []), *CLASSES])
        for split in file.splits:
            index = file.split(split)
            (annotation,) = index.annotations.values()
            for row, pixels in enumerate(file.read_own(split, np.arange(index.num_images))):
                one = photo(number_in(pixels))
                found.append(one)
                assert one.split == split
                assert int(index.image_ids[row]) == one.number
                assert index.user_ids[index.user_index[row]] == owner_in_file(one, layout)
                if isinstance(annotation, Masks):
                    mask = annotation.read(row)
                    assert np.array_equal(mask[mask != VOID], one.mask[mask != VOID])
                    assert (mask == VOID).sum() == (0 if layout == "sbd" else 1)
                    continue
                assert isinstance(annotation, Boxes)
                corners, classes = annotation.read(row)
                assert corners.tolist() == [box for _, box, _ in one.boxes]
                assert classes.tolist() == [k % len(coco) if layout == "coco" else k for k, _, _ in one.boxes]
                flags = annotation.take(np.array([row])).flags & (CROWD if layout == "coco" else DIFFICULT)
                assert flags.astype(bool).tolist() == [flagged for _, _, flagged in one.boxes]
    assert sorted(one.number for one in found) == sorted(one.number for one in expected)


@pytest.mark.parametrize(
    "layout, form",
    [("voc2007", "mask"), ("voc2007", "boxes"), ("voc2012", "mask"), ("sbd", "mask"), ("coco", "boxes")],
)
def test_archives_of_a_server_give_what_their_folder_gives_and_leave_nothing(
    layout: str, form: str, tmp_path: Path, server: FaultyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, archives = LAYOUTS[layout]
    words = [f"--annotation={form}"] if len(spec.layout.forms) > 1 else []
    output = tmp_path / "f.hdf5"
    assert make(served(layout, server.root, server.url), output, *words) == 0
    said = capsys.readouterr().err
    assert ("photographers by the annotations" if layout == "voc2007" else "nobody is named who") in said
    validate(output)
    assert_paired(output, layout, form)
    assert {path.name for path in tmp_path.iterdir()} == {"served", "f.hdf5"}
    fetched = [path for path, _ in server.asked]
    assert sorted(fetched) == sorted(f"/{path}" for path in archives), "once, though each is read twice"
    folder = tmp_path / "folder"
    for files in archives.values():
        write_files(folder, files)
    assert make(spec, tmp_path / "g.hdf5", f"--source={folder}", *words) == 0
    for path, files in archives.items():
        write_archive(tmp_path / "packed" / Path(path).name, files)
    packed = f"--source={tmp_path / 'packed'}"
    assert make(spec, tmp_path / "h.hdf5", packed, *words) == 0
    prints = set()
    for place in (output, tmp_path / "g.hdf5", tmp_path / "h.hdf5"):
        with DataFile(place) as file:
            prints.add(file.fingerprint)
    assert len(prints) == 1
    first = f"{TRAIN[0].number:0{12 if layout == 'coco' else 6}d}"
    write_files(tmp_path / "packed", {"users.csv": f"image_id,user_id\n{first},zoe\n".encode()})
    assert make(spec, tmp_path / "i.hdf5", packed, *words) == 0
    with DataFile(tmp_path / "i.hdf5") as file:
        assert set(file.split("train").user_ids) == {"zoe", "no-author"}


def test_nothing_is_downloaded_for_a_file_that_another_process_writes(
    tmp_path: Path, server: FaultyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, output = served("voc2007", server.root, server.url), tmp_path / "f.hdf5"
    with only_writer(output):
        assert make(spec, output) == 2
    assert f"error: another process is writing {output}: wait until it ends" in capsys.readouterr().err
    assert server.asked == []
    assert {path.name for path in tmp_path.iterdir()} == {"served"}


def test_two_commands_do_not_share_a_download_folder(
    tmp_path: Path, server: FaultyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would cut off each other's half files, and the first to end would delete what the other reads."""
    spec, folder = served("voc2007", server.root, server.url), tmp_path / "down"
    with only_downloader(folder):
        assert make(spec, tmp_path / "f.hdf5", f"--download_folder={folder}") == 2
    assert f"error: another process is downloading into {folder}: wait until" in capsys.readouterr().err
    assert server.asked == []
    assert make(spec, tmp_path / "f.hdf5", f"--download_folder={folder}") == 0
    assert {path.name for path in tmp_path.iterdir()} == {"served", "f.hdf5"}


def test_a_download_goes_on_where_it_broke_and_is_checked(
    tmp_path: Path, server: FaultyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = served("coco", server.root, server.url)
    annotations, train, _ = (f"/{archive.path}" for archive in spec.archives)
    server.faults[train[1:]] = ["short", 404]
    assert make(spec, tmp_path / "f.hdf5") == 2, "it gives up within the images, with the annotations there"
    server.faults[train[1:]] = ["flipped"]
    server.asked.clear()
    assert make(spec, tmp_path / "f.hdf5") == 2
    assert "was damaged in the download (MD5" in capsys.readouterr().err
    assert make(spec, tmp_path / "f.hdf5") == 0
    asked = [(path, wanted is not None) for path, wanted in server.asked]
    assert (annotations, False) not in asked
    assert asked[0] == (train, True), "only the rest was asked for"
    assert_paired(tmp_path / "f.hdf5", "coco", "boxes")


def test_png_images_become_jpegs_and_keep_their_masks(tmp_path: Path) -> None:
    one = TRAIN[0]
    files = {
        "ImageSets/Segmentation/trainval.txt": f"\n {one.image_id} \n".encode(),
        f"JPEGImages/{one.image_id}.png": palette_png(one.mask),
        f"SegmentationClass/{one.image_id}.png": palette_png(one.mask),
    }
    assert make(camvid.CAMVID, tmp_path / "f.hdf5", f"--source={write_files(tmp_path / 'in', files)}") == 0
    with DataFile(tmp_path / "f.hdf5") as file:
        masks = file.split("train").annotations["mask"]
        assert isinstance(masks, Masks)
        assert np.array_equal(masks.read(0), one.mask)
        assert file.provenance["transcoded"]["images"] == {"PNG": 1}


def test_boxes_are_cut_off_where_that_is_asked_for_and_it_is_counted(tmp_path: Path) -> None:
    content = coco_json(TRAIN)
    first = [at for at, entry in enumerate(content["annotations"]) if entry["image_id"] == 3]
    for at, box in zip(first, ([-2, 1, 10, 50], [32, 0, 5, 5], [1, 1, 31.005, 3])):
        content["annotations"][at]["bbox"] = box
    folder = coco_folder(tmp_path / "in", content)
    write_images(folder)
    assert make(street.STREET, tmp_path / "f.hdf5", f"--source={folder}", "--bad_boxes=cut") == 0
    with DataFile(tmp_path / "f.hdf5") as file:
        row = [int(image) for image in file.split("train").image_ids].index(3)
        boxes = file.split("train").annotations["objects"]
        assert isinstance(boxes, Boxes)
        corners, _ = boxes.read(row)
        assert corners.tolist() == [[0, 1, 8, SIDE], [1, 1, SIDE, 4]]
        assert (file.provenance["boxes_cut_off"], file.provenance["boxes_left_out"]) == (1, 1)
        assert file.provenance["category_ids"] == [1, 18, 90]


@pytest.mark.parametrize("turned", [False, True])
def test_boxes_of_another_size_are_refused_unless_it_is_that_of_the_upright_photo(
    turned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = coco_json(TRAIN)
    next(image for image in content["images"] if image["id"] == 9)["width"] = 2 * SIDE
    folder = coco_folder(tmp_path / "in", content)
    write_images(folder)
    path, exif = folder / "train" / "000000000009.jpg", Image.Exif()
    exif[0x0112] = 6 if turned else 1
    with Image.open(path) as image:
        image.resize((SIDE, 2 * SIDE)).save(path, exif=exif)
    words = [f"--source={folder}", "--workers=1"]
    assert make(street.STREET, tmp_path / "f.hdf5", *words) == 2
    assert (
        "1 images do not have the size that their annotations say, for example 000000000009 "
        "(32 x 64, not 64 x 32 pixels): give the images that were annotated, or see --upright "
        "if"
    ) in capsys.readouterr().err.splitlines()[-1]
    assert make(street.STREET, tmp_path / "f.hdf5", *words, "--upright") == (0 if turned else 2)
    if turned:
        assert "1 images become JPEGs of quality 95: 1 JPEG, turned upright" in capsys.readouterr().err
        validate(tmp_path / "f.hdf5")


ONE = "000000000001"
USERS = "image_id,partition,user_20,user_5\n1,train,a,x\n2,train,b,x\n3,train,,y\n7,train,a,\n4,val,a,x\n"


def with_users(tmp_path: Path, text: str) -> Path:
    """The training images of COCO in a folder, and users by the ids of its JSON."""
    write_images(tmp_path / "in")
    write_files(tmp_path / "in", {"users.csv": text.encode()})
    return coco_folder(tmp_path / "in", coco_json(TRAIN))


def owned(path: Path, split: str = "train", partition: str = "") -> dict[int, str]:
    with DataFile(path) as file:
        index = file.split(split)
        rows, users, owner = np.arange(index.num_images), list(index.user_ids), index.user_index
        if partition:
            dealt = index.partitions[partition]
            rows, users = dealt.rows, list(dealt.user_ids)
            owner = np.repeat(np.arange(len(users)), np.diff(dealt.offsets)).astype(np.int32)
        return {int(index.image_ids[row]): users[k] for row, k in zip(rows.tolist(), owner.tolist())}


def test_users_come_from_a_csv_and_its_other_columns_become_partitions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = with_users(tmp_path, USERS), tmp_path / "f.hdf5"
    assert make(street.STREET, out, f"--source={folder}") == 0
    assert owned(out) == {1: "a", 2: "b", 3: "no-author", 7: "a", 9: "no-author"}
    assert owned(out, "val") == {4: "val-a", 5: "val-no-author", 10: "val-no-author"}
    assert owned(out, partition="user-5") == {1: "x", 2: "x", 3: "y"}
    assert make(street.STREET, out, f"--source={folder}", "--users=user_5", "--overwrite") == 0
    assert owned(out) == {1: "x", 2: "x", 3: "y", 7: "no-author", 9: "no-author"}
    assert owned(out, partition="user-20") == {1: "a", 2: "b", 7: "a"}
    (tmp_path / "other.csv").write_text("image_id,user_id\n000000000009,z\n77,q\n")
    words = [f"--source={folder}", f"--users_csv={tmp_path / 'other.csv'}", "--overwrite"]
    assert make(street.STREET, out, *words) == 0
    assert owned(out)[9] == "z"
    assert set(owned(out, "val").values()) == {"all-val"}
    assert "other.csv, which also lists 1 images that are not" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, words, message",
    [
        ("image_id,user_id\n99,a\n", "", "for example '99': list images of this source, as '000000000001'"),
        (f"image_id,user\n{ONE},a\n{ONE}.jpg,b\n", "", f"lists the image {ONE} 2 times: keep one line of it"),
        ("image_id,partition,user_id\n1,val,a\n", "", "says that image 1 is in val, but the annotations"),
        ("image_id,partition,user_id\n1,dev,a\n", "", "line 2 has the partition 'dev'; it must be one of"),
        ("image_id,user_id\n,a\n", "", "line 2 has an empty image_id"),
        ("image_id,user_id\n1,a\n1,b\n", "", "line 3 has image 1 a second time"),
        ("image_id,user_id\n", "", "users.csv has no image"),
        ("image_id,owner\n1,a\n", "", "needs columns of users: their names must begin with user, differ"),
        ("image_id,user id\n1,a\n", "", "it has image_id, user id"),
        (
            "image_id,user_5,user-5\n1,a,b\n",
            "",
            "needs columns of users: their names must begin with user, differ, and",
        ),
        (
            "image_id,partition,user,partition\n1,val,a,val\n",
            "",
            "has two columns named 'partition': remove or rename one",
        ),
        ("user_id\na\n", "", "has no column 'image_id'"),
        ("image_id,user_id\n1\n", "", "line 2 has 1 cells, not 2"),
        (USERS, "--users=frame", "--users is 'frame'; the columns of users are user_20, user_5"),
        (USERS, "--users_csv={none}", "--users_csv {none} cannot be read"),
        ("\xff", "", "users.csv is not UTF-8 text"),
    ],
)
def test_a_csv_of_users_that_is_wrong_ends_in_one_line(
    text: str, words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = coco_folder(tmp_path / "in", coco_json(TRAIN))
    write_files(folder, {"users.csv": text.encode("latin-1")})
    none = tmp_path / "none"
    more = [words.format(none=none)] if words else []
    assert make(street.STREET, tmp_path / "f.hdf5", f"--source={folder}", *more) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message.format(none=none) in line


def test_first_pixel_0_takes_boxes_as_they_stand(tmp_path: Path) -> None:
    files = without_root(voc_files("2012", {"train": TRAIN}))
    folder = write_files(tmp_path / "in", files)
    words = [f"--source={folder}", "--annotation=boxes", "--first_pixel=0"]
    assert make(LAYOUTS["voc2012"][0], tmp_path / "f.hdf5", *words) == 0
    with DataFile(tmp_path / "f.hdf5") as file:
        boxes = file.split("train").annotations["objects"]
        assert isinstance(boxes, Boxes)
        row = [int(image) for image in file.split("train").image_ids].index(2)
        assert boxes.read(row)[0].tolist() == [
            [box[0] + 1, box[1] + 1, *box[2:]] for _, box, _ in photo(2).boxes
        ]


needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"the real data {DATA} are not on this machine")


def some_of(name: str, folder: Path) -> list[dict[str, str]]:
    """Every twentieth row of a real data set's ``users.csv``, which is in the folder, too."""
    text = (DATA / name / "users.csv").read_text().splitlines(keepends=True)
    folder.mkdir()
    (folder / "users.csv").write_text("".join([text[0], *text[1::20]]))
    return list(csv.DictReader([text[0], *text[1::20]]))


def linked(folder: Path, path: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / path.name).symlink_to(path)


@needs_data
def test_camvid_keeps_its_masks_and_drives(tmp_path: Path) -> None:
    place, folder, output = DATA / "camvid", tmp_path / "in", tmp_path / "camvid.hdf5"
    rows = some_of("camvid", folder)
    for one in rows:
        linked(folder / "JPEGImages", place / "JPEGImages" / f"{one['image_id']}.jpg")
        linked(folder / "SegmentationClass", place / "SegmentationClass" / f"{one['image_id']}.png")
    linked(folder, place / "classes.txt")
    assert run(camvid.main, [f"--source={folder}", f"--output_file={output}", "--workers=1"]) == 0
    validate(output)
    with DataFile(output) as file:
        assert file.label_mapping("mask")["bicyclist"] == 10
        assert set(file.split("train").user_ids) == {"0016E5", "0001TP", "0006R0"}
        assert set(file.split("test").user_ids) == {"test-Seq05VD", "test-0001TP"}
        for one in rows:
            split = file.split(one["partition"])
            row = list(split.image_ids).index(one["image_id"])
            masks = split.annotations["mask"]
            assert isinstance(masks, Masks)
            with Image.open(folder / "SegmentationClass" / f"{one['image_id']}.png") as image:
                assert np.array_equal(masks.read(row), np.asarray(image))


@needs_data
def test_street_keeps_its_boxes_and_cameras(tmp_path: Path) -> None:
    place, folder, output = DATA / "street", tmp_path / "in", tmp_path / "street.hdf5"
    rows, expected = some_of("street", folder), {}
    names: list[str] = []
    for split in ("train", "test"):
        content = json.loads((place / "annotations" / f"instances_{split}.json").read_text())
        names = [one["name"] for one in content["categories"]]
        listed = {int(one["image_id"]): one["user_5"] for one in rows if one["partition"] == split}
        for key, name in (("images", "id"), ("annotations", "image_id")):
            content[key] = [one for one in content[key] if one[name] in listed]
        (folder / f"instances_{split}.json").write_text(json.dumps(content))
        for one in content["images"]:
            linked(folder / split, place / split / one["file_name"])
            mine = [box for box in content["annotations"] if box["image_id"] == one["id"]]
            corners = [[x, y, x + w, y + h] for x, y, w, h in (box["bbox"] for box in mine)]
            user = listed[one["id"]] if split == "train" else "all-test"
            expected[split, Path(one["file_name"]).stem] = user, corners, [box["category_id"] for box in mine]
    words = [f"--source={folder}", f"--output_file={output}", "--users=user_5", "--workers=1"]
    assert run(street.main, words) == 0
    validate(output)
    with DataFile(output) as file:
        assert list(file.label_mapping("objects")) == names
        for (split, image_id), (user, corners, kinds) in expected.items():
            index = file.split(split)
            row = list(index.image_ids).index(image_id)
            boxes = index.annotations["objects"]
            assert isinstance(boxes, Boxes)
            found, classes = boxes.read(row)
            assert found.tolist() == corners
            assert (classes + 1).tolist() == kinds
            assert index.user_ids[index.user_index[row]] == user
