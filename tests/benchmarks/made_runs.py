"""Run directories made without training, for tests of reports and figures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.core.config.digests import config_tree, digest
from benchmarks.flair import paper
from benchmarks.flair.config import parse
from benchmarks.flair.paper import FLAIR_IMAGES, FLAIR_USERS
from pfl_ext.tasks.multi_label_scores import COLUMNS

FLAIR = {"source": "https://huggingface.co/apple/flair", "content_sha256": "f1", "users": FLAIR_USERS,
         "images": FLAIR_IMAGES}  # fmt: skip
IMAGENET = {"file": "resnet18-f37072fd.pth", "sha256": "f37072fd" + "0" * 56, "imagenet": True}


def make_run(
    directory: Path,
    setting: str = "fl-r-17",
    *argv: str,
    seed: int = 0,
    shift: float = 0.0,
    data: Mapping[str, Any] = FLAIR,
    finished: bool = True,
    **more: Any,
) -> Path:
    """A run whose test columns are the paper's plus ``shift`` points."""
    config = parse(["--config", setting, *argv, f"--seed={seed}"]).config
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(config_tree(config), sort_keys=False))
    unit = "epoch" if config.mode == "centralised" else "round"
    lines: list[dict[str, Any]] = [{unit: step, "seconds": 1.0} for step in range(4)]
    for step, c_ap in ((0, 10.0), (2, 20.0 + shift)):
        lines[step]["val"] = {"loss": 0.5, "C-AP": c_ap, "O-AP": 2 * c_ap}
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if config.privacy is not None:
        (directory / "privacy.json").write_text(json.dumps(PRIVACY))
    if config.local_privacy is not None:
        (directory / "privacy.json").write_text(json.dumps(LOCAL_PRIVACY))
    if not finished:
        return directory
    row = paper.row(config.setting) or dict.fromkeys(COLUMNS, 50.0)
    columns = {name: value + shift for name, value in row.items()}
    columns |= {f"{name}-binned200": columns[name] for name in ("C-AP", "O-AP")}
    columns |= {name: columns[name] + 1 for name in ("C-AP", "O-AP")}  # exact is not what the paper gives
    model = f"model of {setting} {seed} {shift}".encode()
    (directory / "model.safetensors").write_bytes(model)
    results = {
        "setting": config.setting, "dataset": "flair.hdf5", "seed": seed, "rounds": 4, "unit": unit,
        "val": columns, "test": columns, "best_step": 2, "data": dict(data),
        "weights": IMAGENET if config.model.pretrained else None, "parameters": 11, "norm": "20 GroupNorm",
        "start_probe": "ab", "wall_clock_s": 9.0, "hardware": "a machine", "commit": "c" * 40,
        "config_sha256": digest(config), "model_sha256": hashlib.sha256(model).hexdigest(),
        "per_class_ap": {"animal": 40.0 + shift, "food": 60.0, "fire": 5.0},
        "prevalence": {"animal": 0.2, "food": 0.3, "fire": 0.007},
        **more,
    }  # fmt: skip
    (directory / "results.json").write_text(json.dumps(results))
    return directory


PRIVACY = {
    "delta": 8.4e-6,
    "is_simulation": True,
    "simulated_system": {"epsilon_spent": 1.9987},
    "as_executed": {"epsilon_spent": 4.712},
    "by_round": {"signal-to-noise ratio": [0.1, 0.2, 0.3, 0.2]},
}
LOCAL_PRIVACY = {
    "kind": "local",
    "delta": 1e-6,
    "is_simulation": False,
    "epsilon_of_one_participation": 8.0,
    "participations_at_most": {"so_far": 12, "at_end": 12},
    "epsilon_spent": 61.25,
    "by_round": {"signal-to-noise ratio": [0.1, 0.2, 0.3, 0.2]},
}
LOCALLY = ("--privacy=none", "--federated.weighting=users", "--local_privacy.epsilon=8")
"""What makes a run one with local privacy, of whatever setting."""
