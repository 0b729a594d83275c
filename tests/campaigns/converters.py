"""The readers of ``python -m dataset.convert``: sound sources, one file of each damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataset.convert.__main__ import main
from dataset.store.hdf5 import DataFile
from tests.campaigns.target import Target
from tests.dataset.convert.made_sources import (
    arrays_of,
    client_of,
    encoded,
    label_of,
    leaf_user,
    write_csv,
    write_folder,
    write_image,
    write_leaf,
    write_listed,
    write_tff,
)
from tests.dataset.convert.made_sqlite import write_sqlite

NUMBERS = range(1, 19)


def as_part(whole: Path, name: str, words: str) -> Callable[[Path], object]:
    """Convert a copy of a source with the damaged file as ``name``; ``SOURCE`` in ``words`` is the copy."""

    def read(path: Path) -> object:
        folder, output = path.with_name("source"), path.with_name("out.hdf5")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        shutil.copy(path, folder / name)
        output.unlink(missing_ok=True)
        common = ["--workers=1", "--on_bad_image=skip", "--on_empty_user=skip", f"--output_file={output}"]
        main([*words.replace("SOURCE", str(folder)).split(), *common])
        with DataFile(output) as file:
            return file.fingerprint

    return read


def converter_targets(folder: Path) -> list[Target]:
    """A target for each format; the sound sources are made in ``folder``."""

    def target(form: str, name: str, words: str, text: bool = False) -> Target:
        whole = folder / form
        seeds = [(whole / name).read_bytes()]
        return Target(f"convert {form}, {name}", seeds, as_part(whole, name, words), text=text)

    write_leaf(folder / "leaf" / "train" / "a.json", {"u1": leaf_user([1, 2, 3]), "u2": leaf_user([4, 5])})
    write_tff(folder / "tff" / "emnist_train.h5", {"a": [1, 2], "b": [3, 4, 5]})
    write_tff(folder / "tff" / "emnist_test.h5", {"a": [6], "b": [7]})
    write_sqlite(folder / "sqlite" / "own.sqlite", {"train": {"a": [1, 2], "b": [3, 4]}, "test": {"a": [5]}})
    (folder / "npz").mkdir()
    np.savez(folder / "npz" / "own.npz", **arrays_of(NUMBERS))
    write_listed(folder / "folder", NUMBERS)
    write_folder(folder / "tree", NUMBERS)
    columns = {"writer": [client_of(n) for n in NUMBERS], "label": [label_of(n) for n in NUMBERS]}
    images = [{"bytes": encoded(n, "PNG"), "path": f"{n}.png"} for n in NUMBERS]
    (folder / "hf").mkdir(parents=True)
    pq.write_table(pa.table({"image": images, **columns}), folder / "hf" / "train.parquet")
    rows = []
    for number in NUMBERS:
        write_image(folder / "flamby" / "img" / f"ISIC_{number:07d}.jpg", number)
        rows.append(
            {"image": f"ISIC_{number:07d}", "target": number % 3, "center": number % 2, "fold": "train"}
        )
    write_csv(folder / "flamby" / "table.csv", rows)
    table = []
    for number in NUMBERS:
        write_image(folder / "fedscale" / "train" / f"{number}.png", number)
        kind = number % 3
        table.append(
            {
                "client_id": number % 4,
                "data_path": f"{number}.png",
                "label_name": f"kind {kind}",
                "label_id": kind,
            }
        )
    (folder / "fedscale" / "client_data_mapping").mkdir()
    write_csv(folder / "fedscale" / "client_data_mapping" / "train.csv", table)
    listed = "folder --images SOURCE/images --labels SOURCE/labels.csv"
    tree = next((folder / "tree").rglob("*.webp")).relative_to(folder / "tree").as_posix()
    return [
        target("leaf", "train/a.json", "leaf --source SOURCE", text=True),
        target("tff", "emnist_train.h5", "tff --source SOURCE"),
        target("sqlite", "own.sqlite", "tff --source SOURCE/own.sqlite"),
        target("npz", "own.npz", "npz --source SOURCE/own.npz"),
        target("folder", "labels.csv", listed, text=True),
        target("folder", "images/3.png", listed),
        target("tree", tree, "folder --images SOURCE"),
        target("hf", "train.parquet", "hf --source SOURCE --client_column writer"),
        target("flamby", "table.csv", "flamby --images SOURCE/img --labels SOURCE/table.csv", text=True),
        target(
            "fedscale",
            "client_data_mapping/train.csv",
            "fedscale --images SOURCE --labels SOURCE/client_data_mapping",
            text=True,
        ),
    ]
