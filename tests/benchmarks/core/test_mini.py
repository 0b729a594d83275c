"""Which file a command runs on, and what it says where that is the mini data set."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.core import mini
from benchmarks.core.mini import CLASSES_FILE, MINI_FILE
from benchmarks.flair.config import parse as parse_flair
from benchmarks.flair.train import SOURCE, Flair
from benchmarks.visual_classification.config import parse as parse_vision
from benchmarks.visual_classification.train import VisualClassification
from dataset.flair.mini import MiniSpec


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drawn; there is no file but those that a test makes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mini, "write_mini", lambda path, spec: path.touch())


@pytest.mark.parametrize(
    "argv, present, message",
    [
        ([], False, "no FLAIR file (make flair-data gets it): using the mini data set of synthetic images"),
        (["--data_path=mini"], True, "--data_path mini: using the mini data set of synthetic images"),
        ([], True, ""),
    ],
)
def test_the_reason_for_the_mini_set_is_said_once(
    argv: list[str], present: bool, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 17.22: ``--data_path mini`` said that there is no FLAIR file where there is one."""
    assert SOURCE.path is not None
    SOURCE.path.parent.mkdir()
    if present:
        SOURCE.path.touch()
    words, path = Flair.resolve_data(argv)
    Flair.ready_data(parse_flair(words), path)
    assert path == (MINI_FILE if message else SOURCE.path)
    assert capsys.readouterr().out == (f"{message}, {MINI_FILE}\n" if message else "")
    assert path.exists()


def test_two_trainings_at_once_draw_it_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = []

    def draw(path: Path, spec: MiniSpec) -> None:
        drawn.append(path)
        time.sleep(0.5)
        path.touch()

    monkeypatch.setattr(mini, "write_mini", draw)
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(SOURCE.ready, [None, None], [MINI_FILE, MINI_FILE])] == [None, None]
    assert drawn == [MINI_FILE]
    assert capsys.readouterr().err == f"waiting for another process that draws {MINI_FILE}\n"


def test_visual_classification_says_which_file_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    words, path = VisualClassification.resolve_data(["--config=cifar100-fedavg"])
    VisualClassification.ready_data(parse_vision(words), path)
    assert path == CLASSES_FILE
    assert capsys.readouterr().out.startswith("no data/cifar100.hdf5 (make vision-data DATASET=cifar100 ")


@pytest.mark.parametrize("resolve_data", [Flair.resolve_data, VisualClassification.resolve_data])
@pytest.mark.parametrize(
    "words, message",
    [(["--data_path=no.hdf5"], "--data_path no.hdf5: no such"), (["--data_path="], "--data_path is empty")],
)
def test_a_given_file_that_does_not_exist_is_an_error(
    resolve_data: object, words: list[str], message: str
) -> None:
    """Issue 17.39."""
    assert callable(resolve_data)
    with pytest.raises(ValueError, match=message):
        resolve_data(words)
