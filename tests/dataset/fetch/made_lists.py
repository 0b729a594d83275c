"""The layouts of iNaturalist and Landmarks on few images, each of which shows its own number.

Image n has an id of 16 hexadecimal digits, some of which end in what ``rstrip('.jpg')`` would cut off.
"""

from __future__ import annotations

import dataclasses
import hashlib
import tarfile
import zipfile
from pathlib import Path

import numpy as np

from dataset.fetch.listed import Archive, ListedSet
from dataset.inaturalist.download_preprocess import INATURALIST
from dataset.landmarks.download_preprocess import LANDMARKS
from dataset.store.hdf5 import DataFile
from dataset.store.views import SingleLabelView
from tests.dataset.drawn import add_member, jpeg, number_in

TRAIN, TEST = range(1, 41), range(41, 53)
OTHERS = range(60, 75)  # in the archives, and in no list
CLASSES = 12


def image_id(number: int) -> str:
    return f"{number * 2654435761 % 2**64:014x}{'jpg'[number % 3]}{'gp'[number % 2]}"


def class_of(number: int) -> int:
    return number * 5 % CLASSES


def author(number: int) -> str:
    return f"{number * 3 % 7 + 8}"


def cell(number: int) -> str:
    """An image's cell in the geographic partition; NA: it is in none."""
    return ("NA", "4c", "89d", "54", "4c")[number % 5]


def write_archives(
    folder: Path, archives: tuple[Archive, ...], without: tuple[int, ...] = ()
) -> tuple[Archive, ...]:
    """Archives with all images in nested folders; returns them with their MD5s, or writes these beside."""
    numbers = [n for n in (*TRAIN, *OTHERS, *TEST) if n not in without]
    made = []
    for position, archive in enumerate(archives):
        path = folder / archive.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
            add_member(tar, "train/README.txt", b"not an image")
            for number in numbers[position :: len(archives)]:
                add_member(tar, f"train/{number % 3}/{image_id(number)}.jpg", jpeg(number))
        digest = hashlib.md5(path.read_bytes()).hexdigest()
        if archive.md5_path:
            (folder / archive.md5_path).parent.mkdir(parents=True, exist_ok=True)
            (folder / archive.md5_path).write_text(f"{digest}  {path.name}\n")
            made.append(archive)
        else:
            made.append(dataclasses.replace(archive, md5=digest))
    return tuple(made)


def landmark_csvs() -> dict[str, str]:
    train = [f"{author(n)},{image_id(n)},{class_of(n)}" for n in reversed(TRAIN)]
    test = [f"{image_id(n)},{class_of(n)}" for n in TEST]
    return {
        "federated_train.csv": "\n".join(["user_id,image_id,class", *train, ""]),
        "test.csv": "\n".join(["image_id,class", *test, ""]),
    }


def inaturalist_csvs() -> dict[str, str]:
    train = [f"{author(n)},{image_id(n)},{class_of(n)},{cell(n)}" for n in reversed(TRAIN)]
    test = [f"{image_id(n)},{class_of(n)}" for n in TEST]
    return {
        "iNaturalist_train.csv": "\n".join(["user_120k,image_id,class,geo_100", *train, ""]),
        "iNaturalist_test.csv": "\n".join(["image_id,class", *test, ""]),
    }


def google_inaturalist_csvs() -> dict[str, str]:
    """As in inaturalist-user-120k.zip and inaturalist-geo.zip, put together."""
    users = [f"{author(n)},{image_id(n)},{class_of(n)},species {class_of(n)}" for n in TRAIN]
    placed = [n for n in TRAIN if cell(n) != "NA"]
    cells = [f"{cell(n)},{image_id(n)},{class_of(n)},species {class_of(n)}" for n in placed]
    test = [f"{image_id(n)},{class_of(n)},species {class_of(n)}" for n in TEST]
    head = "user_id,image_id,class,label"
    return {
        "federated_train_user_120k.csv": "\n".join([head, *users, ""]),
        "federated_train_geo_100.csv": "\n".join([head, *cells, ""]),
        "test.csv": "\n".join(["image_id,class,label", *test, ""]),
    }


def served(
    spec: ListedSet, root: Path, url: str, csvs: dict[str, str], **options: tuple[int, ...]
) -> ListedSet:
    """Everything on a server; returns the spec that points there, with three archives at most."""
    archives = write_archives(root, spec.archives[:3], **options)
    if spec.splits[0].path.endswith(".zip"):
        with zipfile.ZipFile(root / spec.splits[0].path, "w") as archive:
            for name, text in csvs.items():
                archive.writestr(f"lists/{name}", text)
    else:
        for name, text in zip((one.path for one in spec.splits), csvs.values()):
            (root / name).write_text(text)
    splits = tuple(
        dataclasses.replace(one, md5=hashlib.md5((root / one.path).read_bytes()).hexdigest())
        for one in spec.splits
    )
    return dataclasses.replace(spec, splits_base=url, splits=splits, images_base=url, archives=archives)


def assert_paired(path: Path, without: tuple[int, ...] = ()) -> None:
    """Every listed image once, with its own pixels, class, split and author."""
    number_of = {image_id(n): n for n in (*TRAIN, *TEST)}
    found: list[int] = []
    with DataFile(path) as file:
        for split in ("train", "test"):
            store, index = SingleLabelView(file, image_size=32).split(split), file.split(split)
            assert store.num_images == index.num_images
            images, _ = store.read(np.arange(store.num_images))
            owner = np.repeat(np.array(store.user_ids), np.diff(store.user_offsets))
            for row in range(store.num_images):
                number = number_of[index.image_ids[row]]
                found.append(number)
                assert number_in(images[row]) == number
                assert int(store.classes[row]) == class_of(number)
                assert number in (TRAIN if split == "train" else TEST)
                assert owner[row] == (author(number) if split == "train" else "all-test")
    assert sorted(found) == [n for n in (*TRAIN, *TEST) if n not in without]


__all__ = ["INATURALIST", "LANDMARKS"]
