"""What a run starts from, its weights file among it, and ran on: facts that explain why two runs differ."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
from collections import Counter
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch
from torchvision import models as zoo

from benchmarks.core.config.sections import TrainingConfig
from benchmarks.core.config.trees import Tree
from dataset.files import file_digest
from dataset.store.hdf5 import DataFile
from pfl_ext import checkpoint
from pfl_ext.models.classifier import ImageClassifier, probe_checksum

SomeConfig = TypeVar("SomeConfig", bound=TrainingConfig)


@lru_cache(maxsize=8)
def _sha256_of(path: Path, size: int, changed_ns: int) -> str:
    return file_digest(path)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal; a file that has not changed is read once."""
    state = path.stat()
    return _sha256_of(path.resolve(), state.st_size, state.st_mtime_ns)


def torchvision_name(arch: str) -> str | None:
    """The file name of torchvision's first ImageNet weights of an architecture; None where it has none.

    It ends with the first digits of the content's SHA-256: ``resnet18-f37072fd.pth``.
    """
    try:
        weights = zoo.get_model_weights(arch).__members__.get("IMAGENET1K_V1")
    except ValueError:
        return None
    return None if weights is None else PurePosixPath(weights.url).name


def is_torchvisions(arch: str, sha256: str) -> bool:
    """Whether this is the SHA-256 of torchvision's ImageNet weights of an architecture."""
    name = torchvision_name(arch)
    return name is not None and sha256.startswith(PurePosixPath(name).stem.rpartition("-")[2])


def with_weights(config: SomeConfig, file: Path | None) -> SomeConfig:
    """The config with the hash of the weights file that ``--weights`` names.

    Raises:
        ValueError: when the network starts from scratch, there is no such file, or the config asks for
            another one.
    """
    if file is None:
        return config
    if not config.model.pretrained:
        raise ValueError(
            "--weights is for fine-tuning settings: add --model.pretrained=true, or choose such a config"
        )
    if not file.is_file():
        raise ValueError(f"--weights {file}: no such file")
    sha256, wanted = sha256_of(file), config.model.weights_sha256
    found = None if is_torchvisions(config.model.arch, sha256) else sha256  # torchvision's own needs no name
    if wanted not in (None, found):
        raise ValueError(f"--weights {file} is not the file of the config, whose SHA-256 is {wanted}")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, weights_sha256=found))


def weights_facts(config: TrainingConfig, weights: Path | None) -> Tree | None:
    """Name, SHA-256 and, if the file itself says it, description of the weights that training began from.

    None from scratch. Without ``weights``, they are torchvision's, in torch's cache where it put them.
    """
    if not config.model.pretrained:
        return None
    if weights is None:
        name = torchvision_name(config.model.arch)
        assert name is not None, "the network was loaded from it"
        weights = Path(torch.hub.get_dir()) / "checkpoints" / name
    sha256 = sha256_of(weights)
    imagenet = is_torchvisions(config.model.arch, sha256)
    return {
        "file": weights.name,
        "sha256": sha256,
        "description": "torchvision's ImageNet weights" if imagenet else _description(weights),
        "imagenet": imagenet,
    }


def _description(weights: Path) -> str | None:
    """What a safetensors file of `pfl_ext.checkpoint.save` says of itself under ``description``."""
    if weights.suffix != ".safetensors":
        return None
    try:
        description = checkpoint.load(weights)[1].get("description")
    except ValueError:  # weights that others wrote
        return None
    return None if description is None else str(description)


@torch.no_grad()
def start_facts(config: TrainingConfig, module: ImageClassifier, weights: Path | None) -> Tree:
    """Of a network before its first step: weights, size, normalisation, and what it says to a fixed batch."""
    norms = Counter(type(m).__name__ for m in module.modules() if "Norm" in type(m).__name__)
    return {
        "weights": weights_facts(config, weights),
        "parameters": sum(p.numel() for p in module.parameters()),
        "trainable_parameters": sum(p.numel() for p in module.parameters() if p.requires_grad),
        "input": {
            "mean": module.mean.tolist(),
            "std": module.std.tolist(),
            "padding": module.framing.padding,
        },
        "norm": ", ".join(f"{count} {kind}" for kind, count in norms.most_common()) or "none",
        "start_probe": probe_checksum(module),
    }


def dataset_facts(file: DataFile) -> Tree:
    """Where the data came from, and the number of users and images of each split."""
    provenance: dict[str, Any] = file.provenance
    splits = {name: file.split(name) for name in file.splits}
    return {
        "source": provenance.get("source"),
        "content_sha256": file.fingerprint,
        "users": {name: split.num_users for name, split in splits.items()},
        "images": {name: split.num_images for name, split in splits.items()},
    }


def hardware() -> str:
    """The processor and, if there is one, the GPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    name = f"{len(os.sched_getaffinity(0))} x {model}"
    return name + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "")


def commit() -> str | None:
    """The commit of this checkout, with ``+`` where tracked files differ from it; None outside git."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
