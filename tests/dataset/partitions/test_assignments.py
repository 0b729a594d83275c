"""CSVs of who owns what: read as they are, whatever their order; every fault named with its line."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import numpy as np
import pytest

from dataset.partitions import assignments
from dataset.partitions.assignments import (
    check_classes,
    csv_texts,
    deal,
    partition_name,
    partition_of,
    read_listing,
)

TEXT = "user_id,image_id,class\n10,a.jpg,3\n9,c,0\n10,b,1\nné,d,2\n"


def test_a_listing_is_read_with_ids_as_they_are() -> None:
    listing = read_listing(TEXT, "x.csv", {"user_id": "users"})
    assert listing.image_ids == ["a.jpg", "c", "b", "d"]
    assert listing.users == {"users": ["10", "9", "10", "né"]}
    assert listing.classes.tolist() == [3, 0, 1, 2]
    assert listing.labels is None
    with_labels = read_listing("class,label,image_id\n1,Acer rubrum,q\n", "t.csv", {})
    assert (with_labels.labels, with_labels.users) == (["Acer rubrum"], {})
    more = "image_id,class,user_id,user_note\nq,1,9, shy \n"
    assert read_listing(more, "x.csv", {"user_id": "users"}).users == {"users": ["9"]}


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "x.csv has no column 'image_id'; it needs image_id, class, user_id"),
        ("user_id,image,class\n1,2,3\n", "x.csv has no column 'image_id'"),
        ("image_id,class\n1,2\n", "x.csv has no column 'user_id'"),
        ("user_id,image_id,class\n", "x.csv has no image"),
        ("class,user_id,image_id,class\n1,u,e,2\n", "x.csv has two columns named 'class': remove or"),
        (TEXT + "\n9,e\n", "x.csv, line 7 has 2 cells, not 3"),
        (TEXT + "9,e\n", "x.csv, line 6 has 2 cells, not 3"),
        (TEXT + "9,e,1,1\n", "x.csv, line 6 has 4 cells, not 3"),
        (TEXT + "9,b,1\n", "x.csv, line 6 has image b a second time (line 4): remove one of the two"),
        (TEXT + ",e,1\n", "x.csv, line 6 has an empty id"),
        (TEXT + "9,,1\n", "x.csv, line 6 has an empty id"),
        (TEXT + "9,e,-1\n", "x.csv, line 6 has the class '-1', which is not a whole number of at least"),
        (TEXT + "9,e,one\n", "x.csv, line 6 has the class 'one'"),
        (TEXT + "9,e,²\n", "x.csv, line 6 has the class '²'"),
        (TEXT + f"9,e,{'9' * 5000}\n", "x.csv, line 6 has the class '99"),
        (
            TEXT + "9,e,65536\n",
            "x.csv, line 6 has the class 65536, but class numbers go from 0 to 65535: use",
        ),
        (TEXT + '9,"e"x,1\n', "x.csv, line 6 is not valid CSV"),
        (TEXT + '9,"e\n', "is not valid CSV (unexpected end of data)"),
    ],
)
def test_each_fault_is_named_with_its_line(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        read_listing(text, "x.csv", {"user_id": "users"})


def test_a_partition_does_not_depend_on_the_order_of_its_lines() -> None:
    row_of = {"a.jpg": 5, "b": 2, "c": 7, "d": 0}
    head, *lines = TEXT.splitlines()
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        text = "\n".join([head, *(lines[i] for i in order)])
        found = partition_of(read_listing(text, "x.csv", {"user_id": "users"}), "users", row_of)
        assert found.user_ids == ["9", "10", "né"]  # numbers by value
        assert found.rows.tolist() == [7, 2, 5, 0]
        assert found.offsets.tolist() == [0, 1, 3, 4]


def test_users_without_images_and_nobodys_images_are_left_out() -> None:
    text = "geo_100,user_120k,image_id,class\nNA,u,a,0\n4f,u,b,0\n5c,v,c,0\n"
    listing = read_listing(text, "x.csv", {"geo_100": "geo-100", "user_120k": "user-120k"})
    geo = partition_of(listing, "geo-100", {"a": 0, "b": 1, "c": 2})
    assert (geo.user_ids, geo.rows.tolist()) == (["4f", "5c"], [1, 2])
    users = partition_of(listing, "user-120k", {"a": 0, "b": 1})
    assert (users.user_ids, users.rows.tolist(), users.offsets.tolist()) == (["u"], [0, 1], [0, 2])
    with pytest.raises(ValueError, match=r"none of the images in x\.csv is in the data set; check that the"):
        partition_of(listing, "geo-100", {"z": 0})


def test_dealing_keeps_every_row_with_its_user() -> None:
    rng = np.random.default_rng(0)
    rows = rng.permutation(200)
    users = [f"u{row % 7}" for row in rows]
    dealt = deal(users, rows)
    for name, start, stop in zip(dealt.user_ids, dealt.offsets, dealt.offsets[1:]):
        assert dealt.rows[start:stop].tolist() == [row for row in range(200) if f"u{row % 7}" == name]


def test_a_class_that_is_not_the_images_is_found() -> None:
    listing = read_listing(TEXT, "x.csv", {"user_id": "users"})
    row_of = {"a.jpg": 0, "b": 1, "c": 2, "d": 3}
    check_classes(listing, row_of, np.array([3, 1, 0, 2]))
    with pytest.raises(ValueError, match=r"x\.csv says that image b has class 1, but its class is 2"):
        check_classes(listing, row_of, np.array([3, 2, 0, 2]))
    with pytest.raises(ValueError, match="has image d, which this data set does not have"):
        check_classes(listing, {"a.jpg": 0, "b": 1, "c": 2}, np.array([3, 1, 0]))


def test_names_of_partitions_are_those_of_their_files() -> None:
    assert partition_name("federated_train_alpha_0.50.csv") == "alpha-0.50"
    assert partition_name("federated_train_user_120k.csv") == "user-120k"
    assert partition_name("federated_train.csv") == "users"


def test_csvs_come_from_folders_and_archives_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "a.csv").write_text("é", encoding="utf-8-sig")
    (tmp_path / "in" / "b.txt").write_text("no")
    with zipfile.ZipFile(tmp_path / "f.zip", "w") as archive:
        archive.writestr("deep/a.csv", "é")
        archive.writestr("__MACOSX/deep/a.csv", "\0")
    assert csv_texts(tmp_path / "in") == csv_texts(tmp_path / "f.zip") == {"a.csv": "é"}
    (tmp_path / "in" / "a.csv").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"has two files named a\.csv"):
        csv_texts(tmp_path / "in")
    (tmp_path / "in" / "deep" / "a.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"a\.csv is not UTF-8 text"):
        csv_texts(tmp_path / "in" / "deep")
    monkeypatch.setattr(assignments, "MAX_CSV_BYTES", 1)
    with pytest.raises(ValueError, match=r"a\.csv has 2 bytes; a list of images may have at most 1"):
        csv_texts(tmp_path / "f.zip")
