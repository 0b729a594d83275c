"""The command by which a sweep says how its best trial is trained again."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.visual_classification.train import main as vision_main
from dataset.cli import run
from tests.benchmarks.conftest import VISION_SMALL
from tests.benchmarks.run_files import results
from tests.benchmarks.sparing import sparingly
from tests.benchmarks.sweep.conftest import SHORT
from tests.benchmarks.sweep.test_space import written
from tests.launching import environment, warmly

SAID = re.compile(
    r"to train the best trial again, with another seed and scored on test:\n  python -m (\S+) (.*)\n"
)
HELD_OUT = ("--data.scored=val", "--data.val_share=0.3", "--evaluation.best_by=accuracy")
LOCALLY = ("--local_privacy.epsilon=4", "--federated.weighting=users")


def swept(folder: Path, data: Path, rates: Sequence[float], *words: str, **more: Any) -> str:
    """What a sweep of these rates prints, in a process of its own, which forks its trials."""
    swept = {"local.learning_rate": {"values": [*rates]}, "seed": {"value": 3}}
    fixed = (f"--data_path={data}", f"--sweep_dir={folder / 'sweep'}", "--local=true")
    command = warmly("benchmarks.sweep", written(folder, swept, **more), *fixed, *words)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_trains_on_all_images_with_the_best_rate_and_scores_test(
    file_without_val: Path, tmp_path: Path
) -> None:
    small = [word for word in VISION_SMALL if "progress" not in word and "learning_rate" not in word]
    program = {"program": "benchmarks.visual_classification.train", "command": None}
    best = {"metric": {"name": "val/accuracy", "goal": "maximize"}}
    words = ("--config=cifar10-fedavg", *small, *HELD_OUT, "--runtime.accumulate=fp64")
    said = SAID.search(swept(tmp_path, file_without_val, (1e-6, 0.05), *words, **program, **best))
    assert said is not None
    assert said[1] == "benchmarks.visual_classification.train"
    assert "--runtime.accumulate fp64 " in said[2], "which its numbers depend on"
    first = (tmp_path / "sweep" / "table.csv").read_text().splitlines()[1].split(",")[-1]
    with sparingly(draw=False):
        assert run(vision_main, [*shlex.split(said[2]), f"--run_dir={tmp_path / 'again'}"]) == 0
    config = (tmp_path / "again" / "config.yaml").read_text()
    trial = (tmp_path / "sweep" / first / "config.yaml").read_text()
    rate = re.search(r"local:.*?learning_rate: (\S+)", trial, re.DOTALL)
    assert rate is not None
    assert f"learning_rate: {rate[1]}\n" in config
    assert "scored: test\n" in config
    found = results(tmp_path / "again")
    assert (found["seed"], found["dataset"]) == (4, str(file_without_val))


def test_a_private_sweep_offers_no_seed(mini_file: Path, tmp_path: Path) -> None:
    """Who gives a seed publishes the noise."""
    said = swept(tmp_path, mini_file, (0.05,), *SHORT, "--federated.num_rounds=1", *LOCALLY)
    assert "sweep directory: " in said
    assert SAID.search(said) is None
