"""What a run starts from and ran on: facts that explain why two runs differ."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.core.config.sections import TrainingConfig
from benchmarks.core.config.trees import Tree
from benchmarks.core.weights import weights_facts
from dataset.cli import cores
from dataset.store.hdf5 import DataFile
from pfl_ext.models.classifier import ImageClassifier, probe_checksum
from pfl_ext.models.positions import resized_in
from pfl_ext.models.weights import drawn_in
from pfl_ext.processor import processor_model


@torch.no_grad()
def start_facts(config: TrainingConfig, module: ImageClassifier, weights: Path | None) -> Tree:
    """Facts of a network before its first step: weights, size, normalisation, a checksum of its outputs.

    ``weights`` also says from and to which images a position embedding was interpolated, and which
    parameters are not in the weights.
    """
    begun, resized = weights_facts(config, weights), resized_in(module)
    if begun is not None and resized is not None:
        begun["position_embedding"] = resized.facts
    if begun is not None and (drawn := drawn_in(module)):
        begun["newly_drawn"] = drawn
    norms = Counter(type(m).__name__ for m in module.modules() if "Norm" in type(m).__name__)
    return {
        "weights": begun,
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
    """The source of the data, the numbers of users and images of each split, and COCO's ids of classes."""
    provenance: dict[str, Any] = file.provenance
    ids = provenance.get("category_ids")
    splits = {name: file.split(name) for name in file.splits}
    return {
        "source": provenance.get("source"),
        "content_sha256": file.fingerprint,
        "users": {name: split.num_users for name, split in splits.items()},
        "images": {name: split.num_images for name, split in splits.items()},
        **({"category_ids": ids} if ids else {}),
    }


def hardware() -> str:
    """The processor and, if there is one, the GPU."""
    name = f"{cores()} x {processor_model()}"
    return name + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "")
