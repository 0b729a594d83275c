from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks.core.recorder import Recorder
from benchmarks.flair.train import main
from benchmarks.visual_classification.train import main as vision_main
from dataset.flair.mini import MiniSpec, write_mini
from dataset.store.hdf5 import DataFile
from dataset.store.index import TAXONOMIES, DatasetIndex
from dataset.store.writer import DataWriter
from pfl_ext.models.classifier import ImageClassifier
from tests.benchmarks.run_files import error_line, lines, results, timeless
from tests.benchmarks.sparing import run_into

TINY = MiniSpec(train_users=12, val_users=5, test_users=5, image_size=20, num_fine_labels=40)
COMMON = (
    "--model.arch=lenet",  # 16,000 parameters, so that training takes a quarter of a run
    "--model.input_size=18",
    "--data.image_size=20",
    "--runtime.checkpoint_every=1",
    "--runtime.keep_checkpoints=true",
    "--runtime.progress=false",
)
SMALL = (*COMMON, "--federated.num_rounds=3", "--federated.cohort_size=4", "--evaluation.every_rounds=1")
CENTRAL = (*COMMON, "--centralised.num_epochs=2", "--centralised.batch_size=16")
"""The same for settings that train on all images in one place."""

RESNET18 = ("--model.arch=resnet18", "--model.input_size=16")
"""Where the network of the paper matters."""
ONE_ROUND = ("--federated.num_rounds=1", "--evaluation.best_by=last")
"""Where the model that is saved must be a trained one, however little."""
VISION_COMMON = ("--data.image_size=20", "--model.input_size=16", "--runtime.progress=false")
VISION_SMALL = (
    *VISION_COMMON,
    "--federated.num_rounds=2",
    "--federated.cohort_size=4",
    "--local.batch_size=4",
    "--local.learning_rate=0.05",
    "--evaluation.every_rounds=1",
)
VISION_CENTRAL = (*VISION_COMMON, "--centralised.num_epochs=2")

Train = Callable[..., Path]
Refused = Callable[..., Path]


@pytest.fixture(scope="session")
def mini_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mini data set of a dozen users."""
    path = tmp_path_factory.mktemp("data") / "tiny.hdf5"
    write_mini(path, TINY)
    return path


@pytest.fixture(scope="session")
def classes_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mini data set of a dozen users, one label an image."""
    path = tmp_path_factory.mktemp("data") / "classes.hdf5"
    write_mini(path, replace(TINY, coarse_labels=1))
    return path


@pytest.fixture(scope="session")
def file_without_val(tmp_path_factory: pytest.TempPathFactory, classes_file: Path) -> Path:
    """The tiny data set as CIFAR's files are: with train and test only."""
    path = tmp_path_factory.mktemp("data") / "without-val.hdf5"
    with DataFile(classes_file) as file:
        splits = {name: file.split(name) for name in ("train", "test")}
        index = DatasetIndex(splits, {name: file.label_mapping(name) for name in TAXONOMIES}, {})
        size = file.image_size
        assert size is not None
        with DataWriter(path, index, storage="raw", image_size=size) as writer:
            for name, split in splits.items():
                rows = np.arange(split.num_images)
                writer.write(name, rows, file.read_images(name, rows, size))
    return path


def train_into(directory: Path, mini_file: Path, *argv: str, code: int = 0, draw: bool = False) -> Path:
    """Run the training command, which must end with this code, `sparingly`; the run directory."""
    small = CENTRAL if any(word.startswith("--config=c-") for word in argv) else SMALL
    words = ("--config=fl-r-17", f"--data_path={mini_file}", *small, *argv)
    return run_into(main, directory, *words, code=code, draw=draw)


@contextlib.contextmanager
def killed_at(step: int, recorded: bool = False) -> Iterator[None]:
    """Within, a run is broken off before this step is recorded, or right after it."""
    real = Recorder.step_done

    def die(self: Any, done: int, *rest: Any) -> None:
        if done != step or recorded:
            real(self, done, *rest)
        if done == step:
            raise KeyboardInterrupt

    with mock.patch.object(Recorder, "step_done", die):
        yield


@pytest.fixture
def train(mini_file: Path, tmp_path: Path) -> Train:
    """Run the training command on the tiny data set; the run directory."""

    def call(*argv: str, name: str = "run", code: int = 0, draw: bool = False) -> Path:
        return train_into(tmp_path / name, mini_file, *argv, code=code, draw=draw)

    return call


@pytest.fixture
def vision(classes_file: Path, tmp_path: Path) -> Train:
    """Run the training command of visual classification on `classes_file`; the run directory."""

    def call(
        *argv: str, name: str = "run", config: str = "cifar10-fedavgm", code: int = 0, draw: bool = False
    ) -> Path:
        small = VISION_CENTRAL if config.endswith("centralised") else VISION_SMALL
        words = (f"--config={config}", f"--data_path={classes_file}", *small, *argv)
        return run_into(vision_main, tmp_path / name, *words, code=code, draw=draw)

    return call


@pytest.fixture
def refused(train: Train, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run the training command, which must end with code 2 and one line that says this; the run directory."""

    def call(message: str, *argv: str, name: str = "run") -> Path:
        capsys.readouterr()  # what was said before
        directory = train(*argv, name=name, code=2)
        assert message in error_line(capsys)
        return directory

    return call


def killed_and_resumed(train: Train, step: int, *argv: str, draw: bool = False) -> tuple[Path, Path]:
    """Train a run, and the same run killed before this step is recorded and resumed, to the same end.

    Returns:
        The run directories of both.
    """
    whole = train(*argv, name="whole", draw=draw)
    with killed_at(step):
        directory = train(*argv, name="killed", code=130)
    assert step == 0 or len(lines(directory)) == step
    train(*argv, name="killed")
    assert timeless(directory) == timeless(whole)
    theirs = results(whole)
    for key in ("model_sha256", "val", "test", "last", "traffic"):
        assert results(directory).get(key) == theirs.get(key), key
    return whole, directory


@pytest.fixture
def scored_by_autocast(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each batch that was scored was scored by torch's autocast."""
    found, real = list[bool](), ImageClassifier.outputs

    def outputs(self: ImageClassifier, *batch: Any) -> Any:
        if not torch.is_grad_enabled():
            found.append(torch.is_autocast_enabled("cpu"))
        return real(self, *batch)

    monkeypatch.setattr(ImageClassifier, "outputs", outputs)
    return found
