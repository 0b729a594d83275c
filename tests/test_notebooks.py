"""The notebooks: what is tracked are their sources, executed; every cell runs under Jupyter's kernel."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest

from benchmarks.core.mini import MINI, MINI_FILE
from dataset.cli import run
from dataset.flair.mini import write_mini
from tests import kernel
from tests.shown import ROOT

HERE = ROOT / "docs" / "notebooks"
spec = importlib.util.spec_from_file_location("execute", HERE / "execute.py")
assert spec is not None
assert spec.loader is not None
execute: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(execute)

PICTURES = {"algorithm": 1, "explore": 3, "private": 2, "train": 1}
TRAINED = {"algorithm": 2, "explore": 0, "private": 3, "train": 2}
REAL_SOURCE = execute.source
SHORTER = {
    "cohorts = [200, 1_000, 5_000]": ("cohorts = [5_000]", ("private",)),
    '"--evaluation.every_rounds=5",': (
        '"--evaluation.every_rounds=5", "--model.arch=lenet",',
        ("algorithm", "private", "train"),
    ),
}
"""What the tests run in place of what stands in the notebooks, and in which."""
IN_JUPYTERS_OWN = "explore"
"""It imports the least; the others run in a kernel that has torch imported already."""


def test_every_notebook_is_listed_here() -> None:
    assert execute.NAMES == tuple(PICTURES) == tuple(TRAINED)
    assert {path.stem for path in HERE.glob("*.ipynb")} == set(PICTURES)


@pytest.mark.parametrize("name", execute.NAMES)
def test_what_is_tracked_is_the_source_with_outputs(name: str) -> None:
    tracked = nbformat.read(HERE / f"{name}.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(tracked)
    source = execute.source(name)
    assert [(c.cell_type, c.source) for c in tracked.cells] == [(c.cell_type, c.source) for c in source.cells]
    check_outputs(tracked, name)


def check_outputs(notebook: nbformat.NotebookNode, name: str) -> None:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == PICTURES[name]
    printed = "".join(output.get("text", "") for output in outputs)
    assert printed.count("run directory: runs/notebook-") == TRAINED[name]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a mini set is drawn once, of few users with few images."""
    folder = tmp_path_factory.mktemp("data")
    few = replace(MINI, train_users=20, val_users=4, test_users=4, max_user_images=2)
    write_mini(folder / MINI_FILE.name, few)
    return folder


def shortened(name: str) -> nbformat.NotebookNode:
    """A notebook that trains a small network, and calibrates the noise of two systems instead of six."""
    notebook: nbformat.NotebookNode = REAL_SOURCE(name)
    for old, (new, names) in SHORTER.items():
        cells = [cell for cell in notebook.cells if old in cell.source]
        assert len(cells) == (name in names)
        for cell in cells:
            cell.source = cell.source.replace(old, new)
    return notebook


@pytest.mark.xdist_group("notebooks")
@pytest.mark.parametrize("name", execute.NAMES)
def test_every_cell_runs(name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTEBOOK_ROUNDS", "1")
    if name != IN_JUPYTERS_OWN:
        kernel.chosen(tmp_path / "jupyter", monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("MPLBACKEND", raising=False)  # a kernel chooses its own, and heeds this one
    (tmp_path / "data").symlink_to(data)
    monkeypatch.setattr(execute, "source", shortened)
    check_outputs(execute.executed(name, tmp_path), name)
    assert len(list(tmp_path.glob("runs/*/results.json"))) == TRAINED[name]


def test_a_notebook_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(execute.main, ["explore2"]) == 2
    said = capsys.readouterr().err
    assert said == "error: there is no notebook explore2: choose any of algorithm, explore, private, train\n"
