"""Tiny data sets in the layouts of other libraries, whose pixels say which image they are."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image

from dataset.arrays import ByteArray
from dataset.cli import run
from dataset.convert.__main__ import main
from dataset.store.hdf5 import DataFile
from tests.dataset.drawn import SIDE, draw, number_in

CLIENTS = ("007", "bob", "Zoë")
CLASSES = ("cat", "dog", "eel")


def encoded(number: int, form: str, side: int = SIDE) -> bytes:
    """An image file; WebP without loss."""
    buffer = io.BytesIO()
    more = {"quality": 90} if form == "JPEG" else {"lossless": True} if form == "WEBP" else {}
    Image.fromarray(draw(number, side)).save(buffer, form, **more)
    return buffer.getvalue()


def label_of(number: int) -> str:
    return CLASSES[number % 3]


def client_of(number: int) -> str:
    return CLIENTS[number // 3 % 3]


def write_image(path: Path, number: int) -> None:
    """PNG, WebP or JPEG, as its suffix says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    form = {".png": "PNG", ".webp": "WEBP"}.get(path.suffix, "JPEG")
    path.write_bytes(encoded(number, form))


def write_folder(root: Path, numbers: Sequence[int], split: str = "") -> Path:
    """``client/class/file``."""
    for number in numbers:
        suffix = (".png", ".webp", ".jpg")[number // 9 % 3]
        write_image(root / split / client_of(number) / label_of(number) / f"{number}{suffix}", number)
    return root


def write_csv(path: Path, rows: Sequence[Mapping[str, object]], encoding: str = "utf-8") -> Path:
    with open(path, "w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_listed(root: Path, numbers: Sequence[int], **more: str) -> Path:
    """``images/`` and ``labels.csv`` beside it."""
    rows = []
    for number in numbers:
        write_image(root / "images" / f"{number}.png", number)
        rows.append({"path": f"{number}.png", "client": client_of(number), "label": label_of(number), **more})
    return write_csv(root / "labels.csv", rows)


def leaf_user(numbers: Sequence[int], side: int = SIDE) -> dict[str, list[object]]:
    """Grey pixels from 0 to 1, as FEMNIST's."""
    pixels = [(draw(number, side)[:, :, 0].astype(float) / 255).ravel().tolist() for number in numbers]
    return {"x": list(pixels), "y": [number % 3 for number in numbers]}


def write_leaf(path: Path, data: Mapping[str, dict[str, list[object]]], **more: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(data),
        "num_samples": [len(user["y"]) for user in data.values()],
        "user_data": data,
        **more,
    }
    path.write_text(json.dumps(content))
    return path


def write_tff(
    path: Path, data: Mapping[str, Sequence[int]], leaf: str = "pixels", coarse: bool = False
) -> Path:
    """EMNIST's float32 grey pixels under ``pixels``, or CIFAR-100's uint8 colours under ``image``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for client, numbers in data.items():
            drawn = np.array([draw(number) for number in numbers], np.uint8).reshape(-1, SIDE, SIDE, 3)
            group = file.create_group(f"examples/{client}")
            grey = drawn[..., 0].astype(np.float32) / np.float32(255)
            group[leaf] = grey if leaf == "pixels" else drawn
            group["label"] = np.array([number % 3 for number in numbers], np.int32)
            if coarse:
                group["coarse_label"] = np.array([[number % 2] for number in numbers], np.int64)
    return path


def arrays_of(numbers: Sequence[int]) -> dict[str, Any]:
    """Images and labels, as MedMNIST has them."""
    labels = np.array([[number % 3] for number in numbers], np.uint8)
    return {"images": np.stack([draw(number) for number in numbers]), "labels": labels}


def write_npz(path: Path, **numbers: Sequence[int]) -> Path:
    """The arrays of each split, as ``train_images``."""
    found = {f"{split}_{held}": a for split, own in numbers.items() for held, a in arrays_of(own).items()}
    np.savez_compressed(path, **found)
    return path


def convert(words: str, output: Path, code: int = 0) -> Path:
    """Run the command with ``--output_file``."""
    assert run(main, [*words.split(), "--workers=1", f"--output_file={output}"]) == code
    return output


def shown(path: Path) -> dict[int, tuple[str, str, str]]:
    """Split, user and class of each image, by the number that its pixels show."""
    found: dict[int, tuple[str, str, str]] = {}
    with DataFile(path) as file:
        classes = list(file.label_mapping("labels"))
        for name in file.splits:
            split = file.split(name)
            for row, pixels in enumerate(file.read_own(name, np.arange(split.num_images))):
                number = number_in(pixels)
                assert number not in found
                user = split.user_ids[int(split.user_index[row])]
                labels = split.labels["labels"]
                held = labels.indices[labels.indptr[row] : labels.indptr[row + 1]]
                found[number] = name, user, "+".join(classes[k] for k in held.tolist())
    return found


def pixels_of(path: Path) -> dict[int, ByteArray]:
    """The stored pixels of each image, by the number that they show."""
    with DataFile(path) as file:
        every = [
            image
            for name in file.splits
            for image in file.read_own(name, np.arange(file.split(name).num_images))
        ]
    return {number_in(image): image for image in every}


def plain(user: str) -> str:
    """A user's name without that of a split."""
    return user.removeprefix("val-").removeprefix("test-")
