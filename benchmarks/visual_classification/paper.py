"""The numbers of Hsu, Qi, Brown (ECCV 2020), Tables 1-5, by the name of the setting."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.core.config.digests import experiment
from benchmarks.core.config.trees import Tree
from benchmarks.core.weights import from_torchvision
from benchmarks.visual_classification.config import VISION, Config

ROUNDS = (1000, 2500, 5000)
BATCHES = (10_000, 25_000, 50_000)
RELATIVE = (10, 50, 90)
"""The places where the paper reads its curves: rounds, batches of the largest users, percent of
centralised accuracy."""

IMAGES = {
    "cifar10": {"train": 50_000, "test": 10_000},
    "cifar100": {"train": 50_000, "test": 10_000},
    "inaturalist": {"train": 120_300, "test": 35_641},
    "landmarks": {"train": 164_172, "test": 19_526},
}
"""The images of the paper's data sets (its Section 4 and Table 1), by which they are recognised."""


@cache
def rows() -> dict[str, Tree]:
    """Every setting that the paper has a row for."""
    read: dict[str, Any] = json.loads((Path(__file__).parent / "paper.json").read_text(encoding="utf-8"))
    return dict(read["rows"])


def centralised(setting: str) -> float | None:
    """Test accuracy in percent of centralised training on the same images, where the paper gives it."""
    row = rows().get(setting, {})
    name = row.get("centralised", setting)
    value = rows().get(name, {}).get("accuracy")
    return None if value is None else float(value)


@cache
def _shipped(setting: str) -> Tree:
    return experiment(asdict(VISION.parse(["--config", setting]).config), Config)


def reasons_against(config: Tree, results: Tree) -> tuple[str, ...]:
    """Why a run cannot be compared with the paper's row of its setting; empty where it can.

    Args:
        config: the run's, resolved.
        results: its results.json.
    """
    setting = str(results["setting"])
    if setting not in rows() or setting not in VISION.settings:
        return (f"the paper has no row {setting}",)
    out = []
    shipped, fields = _shipped(setting), experiment(config, Config)
    images = results.get("data", {}).get("images")
    if images != IMAGES[shipped["data.dataset"]]:
        out.append(f"the data are not the paper's {shipped['data.dataset']}")
    keys = [key for key in {**shipped, **fields} if shipped.get(key) != fields.get(key)]
    if keys:
        shown = ", ".join(f"{key}={fields.get(key)}" for key in keys[:4])
        out.append(f"config differs: {shown}{', ...' if keys[4:] else ''}")
    if fields.get("model.pretrained") and not from_torchvision(results.get("weights")):
        out.append("weights are not torchvision's ImageNet ones")
    return tuple(out)
