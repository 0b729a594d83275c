"""Predictions by a network of the user's own: refused where its file was edited after the training."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.predict import trained
from benchmarks.predict.__main__ import main
from dataset.cli import run
from dataset.files import OWN, own_modules
from pfl_ext.models.small import NETWORKS
from tests.benchmarks.conftest import SMALL, train_into
from tests.benchmarks.run_files import error_line, results
from tests.benchmarks.sparing import run_into

NETWORK = """
from torch import nn
from pfl_ext.models.small import NETWORKS
from constants_to_predict import SIGN

class Net(nn.Module):
    def __init__(self, num_labels, input_size):
        super().__init__()
        self.fc = nn.Linear(3 * input_size**2, num_labels)

    def forward(self, images):
        return SIGN * self.fc(images.flatten(1))

NETWORKS.register("net_to_predict")(Net)
"""
BENCHMARK = """
from benchmarks.core.execute import main as train
from benchmarks.flair.train import Flair

class Mine(Flair):
    pass

def main(argv):
    train(Mine, argv, "", "other_to_predict")
"""
OWN_MODULES = ("net_to_predict", "constants_to_predict", "other_to_predict")


@pytest.fixture
def ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a network, and with what it imports."""
    NETWORKS.names()  # else those found in this test would be forgotten after it
    monkeypatch.setattr(NETWORKS, "_things", dict(NETWORKS._things))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "net_to_predict.py").write_text(NETWORK)
    (tmp_path / "constants_to_predict.py").write_text("SIGN = 1\n")
    (tmp_path / "other_to_predict.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(OWN, "net_to_predict")
    yield tmp_path
    for name in OWN_MODULES:
        sys.modules.pop(name, None)


def test_predictions_of_an_edited_network_are_refused(
    ones_own: Path, mini_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = train_into(ones_own / "run", mini_file, "--model.arch=net_to_predict")
    assert list(results(directory)["own_code"]) == ["net_to_predict", "constants_to_predict"]
    words = [str(directory), f"--output={ones_own / 'p.csv'}", "--overwrite"]
    assert run(main, words) == 0
    for file, text in (("constants_to_predict.py", "SIGN = -1\n"), ("net_to_predict.py", NETWORK + "\n")):
        kept = (ones_own / file).read_text()
        (ones_own / file).write_text(text)
        capsys.readouterr()
        assert run(main, words) == 2
        line = error_line(capsys)
        assert f"was trained with another version of {Path(file).stem} (FL_IMPORT)" in line
        assert "so predictions would differ: restore the old file, or train again" in line
        (ones_own / file).write_text(kept)
    monkeypatch.setenv(OWN, "net_to_predict,other_to_predict")
    assert run(main, words) == 0


def test_the_run_of_a_benchmark_of_ones_own_is_predicted_by_it_alone(
    ones_own: Path, mini_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its task may say what the network's outputs mean."""
    (ones_own / "other_to_predict.py").write_text(BENCHMARK)
    monkeypatch.setenv(OWN, "other_to_predict")
    mine = own_modules()[0]
    words = ("--config=fl-r-17", f"--data_path={mini_file}", *SMALL, "--model.arch=lenet")
    directory = run_into(mine.main, ones_own / "run", *words)
    assert trained(directory).experiment is mine.Mine
    output = [str(directory), f"--output={ones_own / 'p.csv'}", "--overwrite"]
    assert run(main, output) == 0
    monkeypatch.delenv(OWN)
    capsys.readouterr()
    assert run(main, output) == 2
    assert "was trained with other_to_predict: set FL_IMPORT to these files of yours" in error_line(capsys)


def test_the_config_of_a_run_trains_an_edited_network_with_a_warning(
    ones_own: Path, mini_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = train_into(ones_own / "run", mini_file, "--model.arch=net_to_predict")
    for edit, warned in (("", False), ("\n", True)):
        (ones_own / "net_to_predict.py").write_text(NETWORK + edit)
        capsys.readouterr()
        words = (f"--config={first / 'config.yaml'}", "--model.arch=net_to_predict")
        train_into(ones_own / f"again{warned}", mini_file, *words)
        warning = f"WARNING: --config {first / 'config.yaml'} is of another version of net_to_predict\n"
        assert (warning in capsys.readouterr().err) == warned


def test_a_run_without_code_of_the_users_predicts_whatever_was_edited(
    ones_own: Path, mini_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the record names modules that are not imported now."""
    directory = train_into(ones_own / "run", mini_file, "--model.arch=lenet")
    assert list(results(directory)["own_code"]) == ["net_to_predict", "constants_to_predict"]
    (ones_own / "net_to_predict.py").write_text(NETWORK + "\n")
    words = [str(directory), f"--output={ones_own / 'p.csv'}", "--overwrite"]
    assert run(main, words) == 0
    monkeypatch.setenv(OWN, "other_to_predict")
    assert run(main, words) == 0
    monkeypatch.delenv(OWN)
    assert run(main, words) == 0
