"""What a run started from and ran on, into its results.json: facts that explain why two runs differ."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.core.config.sections import TrainingConfig
from benchmarks.core.config.trees import Tree
from benchmarks.core.weights import is_torchvisions, sha256_of, torchvision_name
from dataset.store.hdf5 import DataFile
from pfl_ext import checkpoint
from pfl_ext.models.classifier import ImageClassifier, probe_checksum


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


def norm_layers(module: torch.nn.Module) -> str:
    """The normalisation layers by kind, most frequent first: ``20 GroupNorm``."""
    kinds = Counter(type(m).__name__ for m in module.modules() if "Norm" in type(m).__name__)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "none"


@torch.no_grad()
def start_facts(config: TrainingConfig, module: ImageClassifier, weights: Path | None) -> Tree:
    """Of a network before its first step: weights, size, normalisation, and what it says to a fixed batch."""
    return {
        "weights": weights_facts(config, weights),
        "parameters": sum(p.numel() for p in module.parameters()),
        "trainable_parameters": sum(p.numel() for p in module.parameters() if p.requires_grad),
        "norm": norm_layers(module),
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
