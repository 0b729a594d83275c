"""Every reader of the project behind one signature, with sound inputs to damage.

A target reads a file and raises ValueError or OSError for a damaged one, or reads it; where a format carries
checksums, `Target.same` says whether what it read is what was written.
"""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from safetensors.torch import save_file

from benchmarks.flair.config import FLAIR, parse
from benchmarks.flair.report import main as report
from benchmarks.sweep.command import training_words
from benchmarks.sweep.space import SWEEPS, read_sweep
from benchmarks.visual_classification.config import VISION
from dataset.cifar10 import preprocess as cifar_preprocess
from dataset.cifar10.download_preprocess import CIFAR10
from dataset.flair.download_preprocess import read_vocabulary
from dataset.flair.sources import local
from dataset.preprocess import Options, preprocess
from dataset.store import probe as probing
from dataset.store.hdf5 import DataFile
from dataset.store.images import decode, jpeg_size
from dataset.store.native import NativeReader, Storage
from dataset.store.validate import main as describe
from pfl_ext import checkpoint
from pfl_ext.models.classifier import build_backbone
from pfl_ext.models.config import ModelConfig
from tests.benchmarks.made_runs import make_run
from tests.campaigns.converters import converter_targets
from tests.campaigns.target import Target
from tests.dataset.drawn import (
    add_member,
    jpeg,
    png,
    records,
    write_files,
    write_metadata,
    write_parquet,
    write_predecessor,
)


def read_flair(path: Path) -> object:
    """All that a training reads of a file, unvalidated: index, labels, pixels, in blocks."""
    parts = []
    with DataFile(path) as file:
        parts.append(file.fingerprint)
        for name in file.splits:
            split = file.split(name)
            parts.append(f"{list(split.user_ids)[:5]} {list(split.image_ids)[:5]} {split.user_offsets[:5]}")
            for start in range(0, min(split.num_images, 200), 50):
                rows = np.arange(start, min(start + 50, split.num_images))
                parts.append(str(int(file.read_images(name, rows, 16).sum())))
                parts += [str(int(labels.dense(rows).sum())) for labels in split.labels.values()]
    return parts


def read_probed(path: Path) -> object:
    """As training opens a file."""
    probing.probe(path)
    return read_flair(path)


def validated(path: Path) -> object:
    """The command line's description, and the content that the file is then known to have."""
    describe([str(path)])
    with DataFile(path) as file:
        is_native = isinstance(file.reader, NativeReader)
    return read_flair(path) if is_native else None


def preprocessed(folder: Path, output: Path, storage: Storage = "jpeg") -> None:
    """A folder of one source through the whole preprocessing, unusable images left out."""
    options = Options(output, storage, image_size=16, on_bad_image="skip", workers=1, overwrite=True)
    preprocess(local(folder), options)


def as_source(
    name: str, rest: Callable[[Path], object] = lambda _: None, storages: Sequence[Storage] = ("jpeg",)
) -> Callable[[Path], object]:
    """Read a damaged file as one file of a source, of which ``rest`` makes the others."""

    def read(path: Path) -> object:
        folder = path.with_name("source")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        rest(folder)
        shutil.copy(path, folder / name)
        output = path.with_name("out.hdf5")
        output.unlink(missing_ok=True)
        for storage in storages:
            preprocessed(folder, output, storage)
        with DataFile(output) as file:
            return file.fingerprint

    return read


def read_jpeg(path: Path) -> object:
    """A JPEG as preprocessing and training take it."""
    data = path.read_bytes()
    size = jpeg_size(data)
    decode(data, 32)
    decode(data, None)
    return size


def read_weights(path: Path) -> object:
    """A weights file of a small network."""
    build_backbone(ModelConfig("squeezenet1_1"), 3, torch.Generator().manual_seed(0), path)
    return None


def as_part_of_run(whole: Path, name: str) -> Callable[[Path], object]:
    """Report a finished run with one file damaged; what is wrong with it is for the report to say."""

    def read(path: Path) -> object:
        folder = path.with_name("run")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        shutil.copy(path, folder / name)
        report([str(folder)])
        return None

    return read


def read_sweep_file(path: Path) -> object:
    """A sweep's YAML, as its command line reads it."""
    sweep, _, _ = read_sweep(str(path))
    return training_words(sweep, [])


def read_words(path: Path) -> object:
    """A command line, one word a line."""
    words = path.read_text(errors="surrogateescape").split("\n")
    return parse([word for word in words if word])


def _images() -> list[bytes]:
    rng = np.random.default_rng(0)
    smooth = np.linspace(0, 255, 48 * 40 * 3).reshape(48, 40, 3).astype(np.uint8)
    noise = rng.integers(0, 256, (40, 56, 3), np.uint8)
    found = []
    for pixels, options in (
        (smooth, {}),
        (noise, {"progressive": True}),
        (smooth[..., 0], {}),
        (noise, {"restart_marker_blocks": 1}),
    ):
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", **options)
        found.append(buffer.getvalue())
    buffer = io.BytesIO()
    Image.fromarray(np.dstack([noise, noise[..., :1]]), "CMYK").save(buffer, "JPEG")
    return [*found, buffer.getvalue(), jpeg(7)]


def as_cifar(name: str, whole: Path) -> Callable[[Path], object]:
    """Read a damaged file as one file of CIFAR's folder, with splits."""

    def read(path: Path) -> object:
        folder, output = path.with_name("cifar"), path.with_name("cifar.hdf5")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        shutil.copy(path, folder / name)
        output.unlink(missing_ok=True)
        cifar_preprocess.main(CIFAR10, [f"--source={folder}", f"--output_file={output}"])
        with DataFile(output) as file:
            return file.fingerprint

    return read


def _cifar_targets(folder: Path) -> list[Target]:
    """Images of CIFAR-10 in both forms, and who owns them as CSV and as a zip archive of it."""
    rng, count = np.random.default_rng(3), 20
    pixels, classes = rng.integers(0, 256, (count, 32, 32, 3), np.uint8), np.arange(count) % 10
    binary, parquet, zipped = folder / "binary", folder / "images", folder / "zipped"
    for place in (binary, parquet, zipped):
        place.mkdir(parents=True)
    rows = np.concatenate([classes[:, None], pixels.transpose(0, 3, 1, 2).reshape(count, -1)], 1)
    batches = [name for names in CIFAR10.members.values() for name in names]
    for number, name in enumerate(batches):
        (binary / name).write_bytes(rows[number::6].astype(np.uint8).tobytes())
    known = np.concatenate([classes[number::6] for number in range(5)])
    listed = "".join(f"{row % 3},{row},{known[row]}\n" for row in range(len(known)))
    csv = ("user_id,image_id,class\n" + listed).encode()
    (binary / "federated_train_alpha_1.00.csv").write_bytes(csv)
    for name, start in (("train", 0), ("test", len(known))):
        images = [png(one) for one in pixels[start : start + len(known)]]
        labels = known if name == "train" else classes[start:]
        table = pa.table({"img": [{"bytes": one} for one in images], "label": labels})
        pq.write_table(table, parquet / f"{name}-0.parquet")
    (parquet / "federated_train.csv").write_bytes(csv)
    for path in (parquet / "train-0.parquet", parquet / "test-0.parquet"):
        shutil.copy(path, zipped / path.name)
    with zipfile.ZipFile(zipped / CIFAR10.splits_archive, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("splits/federated_train_alpha_1.00.csv", csv)
    kinds = (
        ("batch", binary, batches[0], False),
        ("csv", binary, "federated_train_alpha_1.00.csv", True),
        ("parquet", parquet, "train-0.parquet", False),
        ("zip", zipped, CIFAR10.splits_archive, False),
    )
    return [
        Target(f"cifar, {kind}", [(place / name).read_bytes()], as_cifar(name, place), text=text)
        for kind, place, name, text in kinds
    ]


def _run_targets(folder: Path) -> list[Target]:
    """What the reports and sweeps read."""
    run = make_run(folder / "whole", "pfl-r-17")
    parts = ("config.yaml", "metrics.jsonl", "results.json", "privacy.json")
    sweeps = [path.read_bytes() for path in SWEEPS.values()]
    return [
        *(
            Target(f"report, {name}", [(run / name).read_bytes()], as_part_of_run(run, name), text=True)
            for name in parts
        ),
        Target("sweep", sweeps, read_sweep_file, ".yaml", text=True),
    ]


def targets(folder: Path) -> list[Target]:
    """All of them; seeds are made in ``folder``."""
    rows = records(12)
    parquet = write_parquet(folder / "parquet", rows, shards=1)
    files = write_files(folder / "files", rows)

    def flair(storage: Storage, grouped: bool) -> bytes:
        path = folder / f"{storage}-{grouped}.hdf5"
        preprocess(local(parquet), Options(path, storage, image_size=16, grouped=grouped, workers=1))
        return path.read_bytes()

    native = [flair(storage, grouped) for storage in ("jpeg", "raw") for grouped in (True, False)]
    foreign = [
        write_predecessor(folder / f"{maker}-{grouped}.hdf5", rows, maker, grouped).read_bytes()
        for maker in ("pfl", "ml-flair")
        for grouped in (True, False)
    ]
    with tarfile.open(folder / "a.tar.gz", "w:gz") as archive:
        for one in rows:
            add_member(archive, f"small_images/{one.image_id}.jpg", one.image or b"")
    with tarfile.open(folder / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        for one in rows:
            add_member(archive, f"{'long' * 40}/é/{one.image_id}.jpg", one.image or b"")
    checkpoint.save(folder / "c.safetensors", {"a": torch.arange(20.0), "b": torch.ones(3, 2)}, {"step": 3})
    network = build_backbone(ModelConfig("squeezenet1_1", init="keras"), 3, torch.Generator())
    torch.save(network.state_dict(), folder / "w.pth")
    save_file(network.state_dict(), folder / "w.safetensors")
    weights = [(folder / name).read_bytes() for name in ("w.pth", "w.safetensors")]
    vocabulary = {"labels": sorted({n for one in rows for n in one.labels}), "fine_grained_labels": {"a": 1}}
    configs = [path.read_bytes() for path in sorted(FLAIR.directory.glob("*.yaml"))]
    words = [
        "--config=pfl-r-17",
        "--seed",
        "1",
        "--local.learning_rate=0.1",
        "--privacy.epsilon=2",
        "--scale=mini",
        "--data.binary_label=dog",
        "--runtime.threads=1",
        "--resume=auto",
        "--local.max_grad_norm",
        "none",
    ]

    def listed(place: Path) -> None:
        write_metadata(place, rows)

    def unpacked(place: Path) -> None:
        shutil.copytree(files / "small_images", place / "small_images")

    metadata = (files / "labels_and_metadata.json").read_bytes()
    tar = [(folder / "a.tar").read_bytes()]
    rows_of = [next(parquet.rglob("*.parquet")).read_bytes()]
    return [
        Target("hdf5, validated", native, validated, ".hdf5", same=True),
        Target("hdf5, read", native, read_probed, ".hdf5"),
        Target("hdf5 of predecessors", foreign, validated, ".hdf5"),
        Target("hdf5 of predecessors, read", foreign, read_probed, ".hdf5"),
        Target("parquet", rows_of, as_source("t.parquet", storages=("jpeg", "raw"))),
        Target("tar.gz", [(folder / "a.tar.gz").read_bytes()], as_source("a.tar.gz", listed), same=True),
        Target("tar", tar, as_source("a.tar", listed)),
        Target("metadata", [metadata], as_source("labels_and_metadata.json", unpacked), text=True),
        Target("jpeg", _images(), read_jpeg),
        Target("label mapping", [json.dumps(vocabulary).encode()], read_vocabulary, ".json", text=True),
        Target("config", configs, lambda path: parse([f"--config={path}"]), ".yaml", text=True),
        Target(
            "config, vision",
            [path.read_bytes() for path in sorted(VISION.directory.glob("*.yaml"))],
            lambda path: VISION.parse([f"--config={path}"]),
            ".yaml",
            text=True,
        ),
        Target("command line", ["\n".join(words).encode()], read_words, text=True),
        Target(
            "checkpoint",
            [(folder / "c.safetensors").read_bytes()],
            checkpoint.load,
            ".safetensors",
            same=True,
        ),
        Target("weights .pth", weights[:1], read_weights, ".pth"),
        Target("weights .safetensors", weights[1:], read_weights, ".safetensors"),
        Target(
            "results.json",
            [json.dumps({"a": [1, {"b": 2}]}).encode()],
            checkpoint.read_json,
            ".json",
            text=True,
        ),
        *_run_targets(folder),
        *_cifar_targets(folder / "cifar-sound"),
        *converter_targets(folder / "convert"),
    ]
