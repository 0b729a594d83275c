"""FedCV's classification: its settings, and a run of each kind on a tiny file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.core.config.trees import read_yaml
from benchmarks.fedcv.classification.config import CLASSIFICATION, parse
from benchmarks.fedcv.classification.train import main
from dataset.flair.mini import write_mini
from tests.benchmarks.conftest import TINY
from tests.benchmarks.run_files import results
from tests.benchmarks.sparing import run_into

SMALL = ("--scale=mini", "--model.arch=lenet", "--data.image_size=20", "--model.input_size=20")
ROUND = ("--federated.num_rounds=1", "--federated.cohort_size=3")
EPOCH = ("--centralised.num_epochs=1", "--centralised.warmup_epochs=0")


@pytest.mark.parametrize("name", CLASSIFICATION.settings)
def test_every_setting_is_whole_alone_and_at_the_mini_scale(name: str) -> None:
    config = parse([f"--config={name}"]).config
    assert config.setting == name
    assert config.model.pretrained == ("-" in name and "-sfl" not in name)  # small ones are from scratch
    assert (config.mode == "centralised") == name.endswith("-c")
    assert parse([f"--config={name}", "--scale=mini"]).config.data.partition is None


def small_run(name: str, folder: Path, to: str, *words: str) -> Path:
    """A run of a setting on a tiny file in ``folder``; its directory."""
    data = folder / "classes.hdf5"
    if not data.exists():
        write_mini(data, replace(TINY, coarse_labels=1))
    words = (*SMALL, *(EPOCH if name.endswith("-c") else ROUND), *words)
    return run_into(main, folder / to, f"--config={name}", f"--data_path={data}", *words)


@pytest.mark.parametrize("name", ["cifar100-mobilenetv3-sfl-a0.1", "cifar100-efficientnet-c"])
def test_a_run_has_fedcvs_protocol_and_ends(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = small_run(name, tmp_path, "run")
    found = results(directory)
    assert 2 < found["test"]["loss"] < 4  # log(17) is 2.8
    assert read_yaml(directory / "config.yaml")["augment"]["label_smoothing"] == 0.1
    assert "test, last model" in capsys.readouterr().out
