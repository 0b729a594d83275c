"""The table of clients: boxes are counted one by one, for users and for clients of a partition."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dataset.flair.mini import MiniSpec
from dataset.flair.mini_outlines import OBJECTS, write_boxed
from dataset.partitions import clients
from dataset.partitions.clients import write_clients
from dataset.store.annotations import Boxes
from dataset.store.hdf5 import DataFile
from dataset.store.index import PartitionIndex


def test_boxes_of_each_class_are_counted_by_client(tmp_path: Path) -> None:
    spec = MiniSpec(train_users=5, val_users=2, test_users=2, image_size=32, coarse_labels=2)
    write_boxed(tmp_path / "f.hdf5", spec)
    with DataFile(tmp_path / "f.hdf5") as file:
        index = file.split("train")
        rows = np.arange(index.num_images)[::-1].copy()
        new = {"two": PartitionIndex(("0", "1"), rows[:7], np.array([0, 3, 7]))}
        write_clients(file, OBJECTS, new, tmp_path / "clients.csv")
        classes, boxes = file.label_mapping(OBJECTS), index.annotations[OBJECTS]
    assert isinstance(boxes, Boxes)
    with (tmp_path / "clients.csv").open(encoding="utf-8", newline="") as text:
        found = {(row["split"], row["dealt by"], row["client"]): row for row in csv.DictReader(text)}
    owned = {
        ("train", "users", user): np.flatnonzero(index.user_index == number)
        for number, user in enumerate(index.user_ids)
    }
    owned |= {("train", "two", "0"): rows[:3], ("train", "two", "1"): rows[3:7]}
    assert {key for key in found if key[0] == "train"} == owned.keys()
    assert len(found) == len(owned) + 4
    for key, images in owned.items():
        counts = Counter(number for row in images.tolist() for number in boxes.read(row)[1].tolist())
        assert int(found[key]["images"]) == len(images)
        assert int(found[key]["boxes"]) == counts.total()
        assert {name: int(found[key][name]) for name in classes} == {
            name: counts[number] for name, number in classes.items()
        }


def test_many_classes_have_no_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_boxed(tmp_path / "f.hdf5", MiniSpec(train_users=2, val_users=2, test_users=2, coarse_labels=3))
    monkeypatch.setattr(clients, "MOST_CLASSES", 2)
    with DataFile(tmp_path / "f.hdf5") as file:
        write_clients(file, OBJECTS, {}, tmp_path / "clients.csv")
    head, *rows = (tmp_path / "clients.csv").read_text().splitlines()
    assert head == "split,dealt by,client,images,boxes"
    assert [row.count(",") for row in rows] == [4] * 6
