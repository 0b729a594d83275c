"""A CSV of users says who owns what without any doubt, and linked folders are folders."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from dataset.fetch.listed import image_files, read_lists
from dataset.store.hdf5 import DataFile
from dataset.street.download_preprocess import STREET
from tests.dataset.fetch.made_layouts import TRAIN, coco_folder, coco_json, make, write_files, write_images
from tests.dataset.fetch.made_lists import TRAIN as LISTED
from tests.dataset.fetch.made_lists import author, landmark_csvs
from tests.dataset.fetch.test_annotated import owned, with_users
from tests.dataset.partitions.test_assignments import TEXT


def numbered(ids: dict[int, int], digits: int = 0) -> Any:
    """COCO's training annotations, with other ids."""
    content = coco_json(TRAIN, digits)
    for key, name in (("images", "id"), ("annotations", "image_id")):
        for entry in content[key]:
            entry[name] = ids.get(entry[name], entry[name])
    return content


@pytest.mark.parametrize("rows", ["1,a\n2,b\n", "1,a\n2,b\n77,c\n"])
def test_names_that_are_ids_of_other_images_are_refused(
    rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = coco_folder(tmp_path / "in", numbered({1: 2, 2: 1}))
    write_files(folder, {"users.csv": f"image_id,user_id\n{rows}".encode()})
    assert make(STREET, tmp_path / "f.hdf5", f"--source={folder}") == 2
    said = capsys.readouterr().err
    assert (
        "users.csv: it is not clear whether images are listed by file name or by the annotations'"
    ) in said
    assert "as well as the id of 2: rename the files" in said
    coco_folder(folder, numbered({}))
    assert make(STREET, tmp_path / "f.hdf5", f"--source={folder}") == 2, "there are no images"
    assert "may list" not in capsys.readouterr().err, "a file's name is its id"


@pytest.mark.parametrize("rows", ["{0},a\n102,b\n", "{0},a\n{1},a\n103,b\n", "{0},a\n102,b\n103,b\n"])
def test_rows_by_file_name_beside_rows_by_id_are_refused(
    rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = coco_folder(tmp_path / "in", numbered({one.number: 100 + one.number for one in TRAIN}))
    names = "1", "7"
    write_files(folder, {"users.csv": f"image_id,user_id\n{rows.format(*names)}".encode()})
    assert make(STREET, tmp_path / "f.hdf5", f"--source={folder}") == 2
    said = "users.csv lists some images by file name (1) and some by id (10"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("rows", ["1,a \n", "1, a\n", " 1,a\n"])
def test_white_space_is_refused(rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_users(tmp_path, f"image_id,user_id\n2,a\n{rows}")
    assert make(STREET, tmp_path / "f.hdf5", f"--source={folder}") == 2
    assert "users.csv, line 3 has white space around the " in capsys.readouterr().err
    csvs = landmark_csvs()
    name, first = "federated_train.csv", f"{author(LISTED[-1])},"
    write_files(tmp_path / "lists", {key: text.encode() for key, text in csvs.items()})
    spaced = csvs[name].replace(f"\n{first}", f"\n {first}", 1)
    write_files(tmp_path / "lists", {name: spaced.encode()})
    with pytest.raises(ValueError, match="line 2 has white space around the user_id ' "):
        read_lists(tmp_path / "lists")


def test_one_name_is_one_user_however_it_is_typed(tmp_path: Path) -> None:
    folder = with_users(tmp_path, "image_id,user_id\n1,Zo\u00eb\n2,Zoe\u0308\n3,b\n7,b\n9,b\n")
    assert make(STREET, tmp_path / "f.hdf5", f"--source={folder}") == 0
    assert set(owned(tmp_path / "f.hdf5").values()) == {"Zo\u00eb", "b"}


def test_images_of_nobody_are_counted_beside_the_users(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_users(tmp_path, "image_id,user_id\n1,a\n2,b\n7,NA\n4,a\n")
    assert make(STREET, tmp_path / "f.hdf5", f"--source={folder}") == 0
    said = capsys.readouterr().err
    assert "; 2 users by the column user_id of " in said, "a, who is val-a in val, and b"
    assert "; 5 images without a user belong to no-author and val-no-author\n" in said
    assert list(owned(tmp_path / "f.hdf5").values()).count("no-author") == 3
    with DataFile(tmp_path / "f.hdf5") as file:
        assert "5 images without a user" in file.provenance["users"]


def test_linked_folders_are_read_and_one_around_its_link_once(tmp_path: Path) -> None:
    folder = coco_folder(tmp_path / "in", coco_json(TRAIN))
    write_images(folder)
    shutil.move(folder / "train", tmp_path / "elsewhere")
    (folder / "train").symlink_to(tmp_path / "elsewhere")
    (folder / "val" / "around").symlink_to(folder)
    shutil.move(folder / "annotations", tmp_path / "more")
    (folder / "annotations").symlink_to(tmp_path / "more")
    assert make(STREET, tmp_path / "f.hdf5", f"--source={folder}") == 0
    assert set(owned(tmp_path / "f.hdf5")) == {one.number for one in TRAIN}


def test_two_files_of_one_name_may_be_two_photos(tmp_path: Path) -> None:
    write_files(tmp_path, {"train/x.jpg": b"1", "val/x.jpg": b"2"})
    with pytest.raises(ValueError, match=r"two files are named like image x, .*: if they are the same"):
        image_files(tmp_path, {"x"})
    (tmp_path / "val" / "x.jpg").unlink()
    (tmp_path / "val" / "link").symlink_to(tmp_path / "train")
    assert image_files(tmp_path, {"x"})["x"].samefile(tmp_path / "train" / "x.jpg")


def test_a_quoted_header_is_a_header(tmp_path: Path) -> None:
    quoted = TEXT.replace("user_id,image_id,class", '"user_id","image_id","class"')
    write_files(tmp_path, {"federated_train.csv": quoted.encode(), "test.csv": b"image_id,class\nq,1\n"})
    assert read_lists(tmp_path).partition_names == ["users"]
    write_files(tmp_path, {"federated_train.csv": b'"user_id,' + b"image_id,class\n" * 10_000})
    with pytest.raises(ValueError, match=r"federated_train.csv, line 1 is not valid CSV \(field larger than"):
        read_lists(tmp_path)
