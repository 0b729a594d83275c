"""Training where an event loop runs already, as in every cell of Jupyter."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks.flair.train import main
from tests.benchmarks.conftest import SMALL, Train
from tests.benchmarks.sparing import sparingly

WORDS = {
    "pfl's loop of rounds": ["--federated.algorithm=fedavg"],
    "users one after another": ["--federated.algorithm=fedavg", "--runtime.engine=stock"],
    "a loop of its own": ["--federated.algorithm=hierarchical", "--federated.weighting=users"],
}


def scores(directory: Path) -> object:
    results = json.loads((directory / "results.json").read_text())
    return results["val"], results["test"]


@pytest.mark.parametrize("words", WORDS.values(), ids=list(WORDS))
def test_a_run_gives_the_same_numbers_there(
    words: list[str], mini_file: Path, tmp_path: Path, train: Train
) -> None:
    outside = train(*words)
    inside = tmp_path / "inside"

    async def cell() -> None:
        main([f"--data_path={mini_file}", "--config=fl-r-17", f"--run_dir={inside}", *SMALL, *words])
        await asyncio.sleep(0)  # the loop goes on

    with sparingly():
        asyncio.run(cell())
    assert scores(inside) == scores(outside)
    assert (inside / "model.safetensors").read_bytes() == (outside / "model.safetensors").read_bytes()
