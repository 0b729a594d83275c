"""docs/own_data.md: every command in it works as it stands, in a folder with what it talks of."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest

from dataset.convert.__main__ import FORMATS
from dataset.store.annotations import encoded_mask
from tests.dataset.convert.made_sources import (
    label_of,
    leaf_user,
    write_csv,
    write_image,
    write_leaf,
    write_npz,
    write_tff,
)
from tests.dataset.convert.made_sqlite import write_sqlite
from tests.dataset.convert.test_formats import write_hf
from tests.dataset.drawn import SIDE
from tests.dataset.fetch.made_layouts import write_files
from tests.dataset.fetch.test_yolo import yolo_files
from tests.launching import environment, warmly

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "own_data.md"
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for line in block.splitlines()
]
USERS = [f"client-{number:02d}" for number in range(10)]


def write_all(folder: Path) -> None:
    """What the page's commands read."""
    rows, isic = [], []
    for number in range(60):
        suffix = ("jpg", "png", "webp")[number % 3]
        write_image(
            folder / "photos" / USERS[number % 10] / label_of(number) / f"{number:04d}.{suffix}", number
        )
        write_image(folder / "images" / "a" / f"{number}.jpg", number)
        split = "test" if number % 5 == 0 else "train"
        row = {"path": f"a/{number}.jpg", "client": USERS[number % 7], "label": label_of(number)}
        rows.append({**row, "split": split})
        write_image(folder / "isic" / "img" / f"ISIC_{number}.jpg", number)
        isic.append({"image": f"ISIC_{number}", "target": number % 8, "center": number % 6, "fold": split})
        write_image(folder / "celeba" / "img" / f"{number:06d}.jpg", number)
        write_image(folder / "fedscale" / "train" / f"{number}.png", number)
    write_csv(folder / "labels.csv", rows)
    write_csv(folder / "isic" / "train_test_folds.csv", isic)
    for split, start in (("train", 1), ("test", 41)):
        data = {user: leaf_user(range(start + k, start + k + 2)) for k, user in enumerate(USERS)}
        write_leaf(folder / "leaf" / "data" / split / "a.json", data)
        write_tff(
            folder / "tff" / f"fed_emnist_{split}.h5", {user: [start + k] for k, user in enumerate(USERS)}
        )
        more = {"writer_id": [USERS[n % 10] for n in range(start, start + 19)]}
        write_hf(
            folder / "hub" / f"{split}-0.parquet", range(start, start + 19), **more, character=["a"] * 19
        )
    writers = {f"all_{split}": {user: [k + 1] for k, user in enumerate(USERS)} for split in ("train", "test")}
    write_sqlite(folder / "emnist_all.sqlite", {**writers, "digits_only_train": {"a": [1]}})
    celebrities: dict[str, dict[str, list[object]]] = {
        user: {"x": [f"{6 * k + n:06d}.jpg" for n in range(6)], "y": [0.0, 1.0] * 3}
        for k, user in enumerate(USERS)
    }
    write_leaf(folder / "celeba" / "data" / "all_data.json", celebrities)
    write_files(folder / "yolo", yolo_files())
    write_files(folder / "lesions", lesions())
    write_cameras(folder / "cameras")
    write_npz(folder / "medmnist.npz", train=range(1, 31), val=range(31, 36), test=range(36, 41))
    table = [
        {"client_id": n % 9, "sample_path": f"{n}.png", "label_name": label_of(n), "label_id": n % 3}
        for n in range(60)
    ]
    (folder / "fedscale" / "client_data_mapping").mkdir()
    write_csv(folder / "fedscale" / "client_data_mapping" / "train.csv", table)


def write_cameras(folder: Path) -> None:
    """Photos of two cameras in one folder, with COCO's train and val beside it."""
    lines, size = ["image_id,user"], {"width": SIDE, "height": SIDE}
    for split, numbers in (("train", range(8)), ("val", range(8, 12))):
        names = {number: f"cam{number % 2}_{number}.jpg" for number in numbers}
        content = {
            "images": [{"id": n, "file_name": name, **size} for n, name in names.items()],
            "annotations": [
                {"id": n, "image_id": n, "category_id": 3, "bbox": [1, 1, 5, 5], "iscrowd": 0} for n in names
            ],
            "categories": [{"id": 3, "name": "car"}],
        }
        for number, name in names.items():
            write_image(folder / "images" / name, number)
            lines.append(f"{name},{name[:4]}")
        (folder / f"instances_{split}.json").write_text(json.dumps(content))
    (folder / "users.csv").write_text("\n".join(lines))


def lesions() -> dict[str, bytes]:
    """Grey PNGs of five hospitals, and their masks of 0 and 255."""
    files, lines = {"classes.txt": b"background\nlesion\n"}, ["image_id,user,partition"]
    mask = np.zeros((SIDE, SIDE), np.uint8)
    mask[4:8, 4:9] = 255
    for number, split in enumerate(("train", "train", "train", "val", "test")):
        lines.append(f"a{number},h{number},{split}")
        files[f"JPEGImages/a{number}.png"] = encoded_mask(mask // 2 + number)
        files[f"SegmentationClass/a{number}.png"] = encoded_mask(mask)
    return {**files, "users.csv": "\n".join(lines).encode()}


def spelt_out(command: str) -> list[str]:
    """What runs a command, `warmly`; make's is the one that it would run."""
    words = shlex.split(command)
    if words[0] == "make":
        asked = ["make", "-n", "-s", "-o", ".venv/.ready", "-C", str(ROOT), *words[1:]]
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        (line,) = [line for line in said.splitlines() if " -m benchmarks." in line]
        words = shlex.split(line)
    assert words[0] in ("python", ".venv/bin/python")
    assert words[1] == "-m"
    return warmly(*words[2:])


def test_every_command_of_the_page_works(tmp_path: Path) -> None:
    write_all(tmp_path)
    for command in COMMANDS:
        done = subprocess.run(
            spelt_out(command), cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("name", FORMATS)
def test_the_page_shows_every_format(name: str) -> None:
    assert any(f"dataset.convert {name} " in command for command in COMMANDS)
    assert f"| `{name}` |" in PAGE.read_text()
