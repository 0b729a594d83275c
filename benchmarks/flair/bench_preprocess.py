"""How fast FLAIR is preprocessed, in how much memory, beside what the predecessors do, on the same parquet.

    python -m benchmarks.flair.bench_preprocess --output bench_preprocess.json [--images 4000]

The parquet repeats a local folder of ``apple/flair``'s layout under new ids. The opponent, ``naive``, is one
process that decodes every image once and writes one HDF5 group of pixels per user, as pfl-research's script
does (which decodes twice), with the whole table in memory so that no random access slows it. Each contender
is a process of its own; seconds are its work without imports, up to data that is safe on the disk (fsync).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.core.commands import command_parser
from benchmarks.core.config.trees import Tree
from dataset.cli import run
from dataset.files import write_json
from dataset.flair import download_preprocess
from dataset.flair.mini import MiniSpec, mini_index
from dataset.store.hdf5 import DataFile
from dataset.store.index import TAXONOMIES
from dataset.store.writer import DataWriter

CONTENDERS = {
    "naive": [],
    "jpeg+header": ["--verify", "header"],
    "jpeg+full": ["--verify", "full"],
    "raw": ["--storage", "raw"],
}
TARGETS = {"jpeg+header": 10.0, "jpeg+full": 1.7, "raw": 1.5}


def repeat(folder: Path, images: int, target: Path) -> None:
    """Write one shard of ``images`` records: the folder's records again and again under new ids."""
    target.mkdir()
    table = pa.concat_tables(pq.read_table(path) for path in sorted(folder.rglob("*.parquet")))
    with pq.ParquetWriter(target / "train-00000-of-00001.parquet", table.schema) as writer:
        for done in range(0, images, len(table)):
            part = table.slice(0, min(len(table), images - done))
            users = pa.array([f"{user}-{done}" for user in part["user_id"].to_pylist()])
            ids = pa.array(np.arange(done, done + len(part)))
            part = part.set_column(part.schema.get_field_index("user_id"), "user_id", users)
            part = part.set_column(part.schema.get_field_index("image_id"), "image_id", ids)
            writer.write_table(part, row_group_size=100)


def naive(folder: Path, output: Path) -> None:
    """Decode every image and write one group per user."""
    table = pa.concat_tables(pq.read_table(path) for path in sorted(folder.glob("*.parquet")))
    columns = {name: table[name].to_pylist() for name in table.column_names if name != "image"}
    users: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for row, key in enumerate(zip(columns["partition"], columns["user_id"])):
        users[key].append(row)
    mappings = {
        name: {label: i for i, label in enumerate(sorted(set().union(*columns[name])))} for name in TAXONOMIES
    }
    with h5py.File(output, "w") as file:
        for (split, user), rows in users.items():
            images = [table["image"][row]["bytes"].as_py() for row in rows]
            pixels = np.stack([np.asarray(Image.open(io.BytesIO(image))) for image in images])
            group = file.create_group(f"{split}/{user}")
            group["image_ids"] = np.asarray([columns["image_id"][row] for row in rows], "S")
            for name, mapping in mappings.items():
                pairs = [(i, mapping[label]) for i, row in enumerate(rows) for label in columns[name][row]]
                group[f"{name}_row"], group[f"{name}_col"] = np.array(pairs, np.uint16).reshape(-1, 2).T
            group.create_dataset("images", data=pixels)
    with open(output, "rb") as written:
        os.fsync(written.fileno())


def measure_here(contender: str, folder: Path, output: Path, extra: Sequence[str]) -> None:
    """Run a contender in this process and print its seconds and peak memory as JSON."""
    start = time.perf_counter()
    if contender == "naive":
        naive(folder, output)
    else:
        arguments = ["--source", str(folder), "--output_file", str(output), *CONTENDERS[contender], *extra]
        download_preprocess.main(arguments)
    seconds = time.perf_counter() - start
    found = {"seconds": seconds, "peak_rss_mb": peak_rss_mb(), "output_mb": output.stat().st_size / 1e6}
    print(json.dumps(found))


def peak_rss_mb() -> float:
    """Peak resident memory of this process (getrusage would count the parent's before exec, too)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6


def measure(contender: str, folder: Path, images: int, extra: Sequence[str] = ()) -> Tree:
    """Run a contender in a process of its own on ``folder``; its output is deleted."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", __spec__.name, "--one", contender, "--source", str(folder)]
        command += ["--output", str(Path(scratch) / "out.hdf5"), *extra]
        os.sync()  # what an earlier contender left to be written is not this one's to wait for
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
        result: Tree = json.loads(done.stdout)
    result["images_per_s"] = images / result["seconds"]
    print(f"{contender:>12} {images:>6} images: {result}", file=sys.stderr)
    return result


def opening(users: int, folder: Path) -> Tree:
    """Seconds to open a file with so many users of FLAIR's shape and read its index."""
    index, path = mini_index(MiniSpec(train_users=users, val_users=1, test_users=1)), folder / "opening.hdf5"
    with DataWriter(path, index, storage="raw", image_size=1) as writer:
        for name, split in index.splits.items():
            writer.write(name, np.arange(split.num_images), np.zeros((split.num_images, 1, 1, 3), np.uint8))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        with DataFile(path) as file:
            images = file.split("train").num_images
        times.append(time.perf_counter() - start)
    return {
        "users": users,
        "images": images,
        "seconds": min(times),
        "worst_of_5_s": max(times),
        "target_s": 0.2,
    }


def memory(source: Path, counts: Sequence[int], scratch: Path) -> Tree:
    """Peak memory of two ways to store, for each of these numbers of images, and its growth."""
    folders = {images: scratch / f"memory-{images}" for images in counts}
    for images, folder in folders.items():
        repeat(source, images, folder)
    report = {}
    for name, words in {"jpeg+full": (), "raw": ("--image_size", "64")}.items():
        peaks = [measure(name, folder, images, words)["peak_rss_mb"] for images, folder in folders.items()]
        report[name] = {"images": list(counts), "peak_rss_mb": peaks, "ratio": peaks[-1] / peaks[0]}
    return report


def main(argv: Sequence[str]) -> None:
    """The command line."""
    parser = command_parser("flair.bench_preprocess", __doc__)
    parser.add_argument("--output", "--output_file", type=Path, required=True, help="JSON to write")
    parser.add_argument("--source", type=Path, default=Path("../shared/data/clothing-flair"))
    parser.add_argument("--images", type=int, default=4000, help="number of images for the comparison")
    parser.add_argument("--memory_images", type=int, nargs=2, default=(2000, 20000))
    parser.add_argument("--folder", type=Path, help="folder for scratch files (the system's)")
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    options, extra = parser.parse_known_args(argv)
    if options.one:
        measure_here(options.one, options.source, options.output, extra)
        return
    if not options.source.is_dir():
        raise ValueError(f"--source {options.source} is not a folder; give one with parquet as apple/flair's")
    report: Tree = {"cores": os.cpu_count(), "machine": platform.platform(), "images": options.images}
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch) / "speed"
        repeat(options.source, options.images, folder)
        report["speed"] = {name: measure(name, folder, options.images) for name in CONTENDERS}
        speeds = {name: found["images_per_s"] for name, found in report["speed"].items()}
        report["times_naive"] = {
            name: {"measured": speeds[name] / speeds["naive"], "target": target}
            for name, target in TARGETS.items()
        }
        report["memory"] = memory(options.source, options.memory_images, Path(scratch))
        report["opening"] = opening(41_131, Path(scratch))
    write_json(options.output, report)
    print(json.dumps({key: report[key] for key in ("times_naive", "memory", "opening")}, indent=1))


if __name__ == "__main__":
    sys.exit(run(main))
