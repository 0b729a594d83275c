"""Digests of configs stay what they were, and old runs' configs are read as they were meant."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from benchmarks.core.config.benchmark import Benchmark
from benchmarks.core.config.digests import config_tree, digest, experiment_digest
from benchmarks.core.config.sections import TrainingConfig
from benchmarks.core.config.trees import build
from benchmarks.fedcv.classification.config import CLASSIFICATION
from benchmarks.fedcv.detection.config import DETECTION
from benchmarks.fedcv.segmentation.config import SEGMENTATION
from benchmarks.flair.config import FLAIR, Config
from benchmarks.visual_classification.config import VISION
from tests.benchmarks.core.test_config import config


def test_the_digest_tells_configs_apart_and_nothing_else() -> None:
    assert digest(config("--seed=1")) != digest(config("--seed=2"))
    assert digest(config("--runtime.threads=1")) == digest(config())
    assert digest(build(Config, json.loads(json.dumps(dataclasses.asdict(config()))), "again")) == digest(
        config()
    )


@pytest.mark.parametrize("benchmark", [FLAIR, VISION, CLASSIFICATION, SEGMENTATION, DETECTION])
def test_a_copy_of_a_runs_config_is_that_config(benchmark: Benchmark[TrainingConfig], tmp_path: Path) -> None:
    """It came to other values where the benchmark's protocol has others than the sections."""
    path = tmp_path / "kept.yaml"
    for name in benchmark.settings:
        config = benchmark.parse(["--config", name, "--seed=7"]).config
        path.write_text(yaml.safe_dump(config_tree(config)))
        assert digest(benchmark.parse(["--config", str(path)]).config) == digest(config), name


def test_the_config_of_an_old_run_is_read_as_it_was_meant(tmp_path: Path) -> None:
    """Keys that were retired, fields without effect, values that are filled in today."""
    path = tmp_path / "run" / "config.yaml"
    path.parent.mkdir()
    tree = config_tree(VISION.parse(["--config=cifar10-fedavg", "--recipe=fedprox"]).config)
    tree["personal"] = {"num_epochs": 0, "split_seed": 0}
    tree["evaluation"] |= {"per_user": False, "few_shot_below": 20}
    tree["centralised"]["num_epochs"] = 5
    tree["federated"]["mu"] = None
    path.write_text(yaml.safe_dump({key: value for key, value in tree.items() if key != "seed"}))
    with pytest.raises(ValueError, match=r"there is no config key (personal|evaluation)"):
        VISION.parse([f"--config={path}"])  # no run leaves a key out
    path.write_text(yaml.safe_dump(tree))
    made = VISION.parse([f"--config={path}"]).config
    assert made == VISION.parse(["--config=cifar10-fedavg", "--recipe=fedprox"]).config
    assert made.federated.mu == 0.01


@pytest.mark.parametrize(
    "words", [["--config=fedavg"], ["--augment.label_smoothing=0"], ["--model.normalisation=imagenet"]]
)
def test_what_a_runs_file_leaves_out_is_not_what_the_protocol_has(words: list[str], tmp_path: Path) -> None:
    """FedCV's protocol has label smoothing and its own normalisation, which a config may be without."""
    made = CLASSIFICATION.parse(words).config
    path = tmp_path / "run" / "config.yaml"
    path.parent.mkdir()
    (path.parent / "metrics.jsonl").touch()
    path.write_text(yaml.safe_dump(config_tree(made)))
    assert CLASSIFICATION.read(config_tree(made), "config.yaml") == made
    assert CLASSIFICATION.parse([f"--config={path}"]).config == made


@pytest.mark.parametrize("benchmark", [FLAIR, VISION, CLASSIFICATION, SEGMENTATION, DETECTION])
def test_every_shipped_setting_is_read_from_its_runs_file_as_it_was(
    benchmark: Benchmark[TrainingConfig],
) -> None:
    for setting in benchmark.settings:
        made = benchmark.parse([f"--config={setting}"]).config
        assert benchmark.read(config_tree(made), "config.yaml") == made


DIGESTS = Path(__file__).with_name("config_digests.json")


GOLDEN: dict[str, dict[str, list[str]]] = json.loads(DIGESTS.read_text())
"""For command lines of each benchmark: the first digits of the digest and of the experiment's digest, as the
code of commit 8b11667 computed them."""


@pytest.mark.parametrize("name, benchmark", [("flair", FLAIR), ("visual_classification", VISION)])
def test_digests_stay_what_they_were(name: str, benchmark: Benchmark[TrainingConfig]) -> None:
    """A run directory of before goes on, and its repetitions are still merged with it."""
    assert {line[9:] for line in GOLDEN[name] if line.count("--") == 1} >= set(benchmark.settings)
    found = {}
    for line in GOLDEN[name]:
        made = benchmark.parse(line.split()).config
        found[line] = [digest(made)[:16], experiment_digest(config_tree(made), benchmark.kind)[:16]]
    assert found == GOLDEN[name]
