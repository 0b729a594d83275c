"""What seeds of one experiment are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.flair.config import FLAIR
from benchmarks.reporting.runs import check_seeds, finished_run
from tests.benchmarks.made_runs import make_run


@pytest.mark.parametrize(
    "stages, are_seeds",
    [(("a", "a"), True), (("a", "b"), False), ((None, None), False), (("a", None), False)],
)
def test_each_seed_may_begin_with_a_model_of_its_own_of_one_experiment(
    stages: tuple[str | None, str | None], are_seeds: bool, tmp_path: Path
) -> None:
    """As where the head is trained first, and then all layers."""
    runs = []
    for seed, stage in enumerate(stages):
        weights: dict[str, Any] = {"file": "model.safetensors", "sha256": str(seed) * 64, "imagenet": False}
        weights |= {} if stage is None else {"experiment_sha256": stage}
        own = ("--model.pretrained=true", f"--model.weights_sha256={weights['sha256']}")
        directory = make_run(tmp_path / str(seed), "fl-f-17", *own, seed=seed, weights=weights)
        runs.append(finished_run(directory, FLAIR, {"test": ["C-AP"]}))
    if are_seeds:
        check_seeds(runs)
        return
    with pytest.raises(ValueError, match=r"are not seeds of the same experiment.*model\.weights_sha256"):
        check_seeds(runs)
