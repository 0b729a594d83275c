"""An installed package's commands: ``fl-data``, ``fl-train``, ``fl-report``, ``fl-predict``, and more.

Each is the module that ``python -m`` runs from a checkout, found by its name: ``fl-train flair --config
fl-r-17`` is ``python -m benchmarks.flair.train --config fl-r-17``. Without a name they list what there is.
"""

from __future__ import annotations

import ast
import os
import runpy
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import benchmarks
import dataset
from dataset import process
from dataset.cli import run

ROOT, DATA = Path(benchmarks.__file__).parent, Path(dataset.__file__).parent
OTHER_DATA = {
    "browse": "dataset.browse",
    "convert": "dataset.convert",
    "partitions": "dataset.partitions",
    "validate": "dataset.store",
    "mini": "dataset.flair.mini",
}


def _found(root: Path, file: str) -> dict[str, str]:
    """The modules ``file`` of a folder and the folders below it, by name: ``fedcv-detection``."""
    folders = sorted(path.parent.relative_to(root).parts for path in root.glob(f"**/{file}.py"))
    return {"-".join(parts): ".".join((root.name, *parts, file)) for parts in folders}


def data_commands() -> Mapping[str, str]:
    """What ``fl-data`` runs."""
    return {**_found(DATA, "download_preprocess"), **OTHER_DATA}


def train_commands() -> Mapping[str, str]:
    """What ``fl-train`` runs; published rows, whose results are kept in a checkout, are run there."""
    return {name: module for name, module in _found(ROOT, "train").items() if name != "published"}


def report_commands() -> Mapping[str, str]:
    """What ``fl-report`` runs."""
    several = {"compare": "benchmarks.compare"}
    return {**several, **_found(ROOT, "report"), "published": "benchmarks.published.verify"}


def fl_data() -> int:
    """Bring a data set onto disk, deal it to users, or validate a file."""
    return _run("fl-data", data_commands())


def fl_train() -> int:
    """Train on a benchmark."""
    return _run("fl-train", train_commands())


def fl_report() -> int:
    """Tables of finished runs."""
    return _run("fl-report", report_commands())


def fl_sweep() -> int:
    """Run a sweep."""
    _start("benchmarks.sweep")
    return 0


def fl_predict() -> int:
    """Write down what a trained model says about images."""
    _start("benchmarks.predict")
    return 0


def fl_doctor() -> int:
    """Say what this machine has, how a run is computed on it, and test that."""
    _start("benchmarks.doctor")
    return 0


def _start(module: str) -> None:
    """As ``python -m`` does, with pictures that are files, whatever MPLBACKEND says."""
    os.environ["MPLBACKEND"] = "agg"
    process.begin()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _run(program: str, commands: Mapping[str, str]) -> int:
    """The command that the first word names, with the others; it ends the process itself."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(f"{program} NAME ...; {program} NAME --help says more\n")
        for known, module in commands.items():
            print(f"  {known:24} {_first_line(module)}")
        return 0
    if name not in commands:

        def refuse(_: object) -> None:
            raise ValueError(f"{program} {name}: choose one of {', '.join(commands)}")

        return run(refuse)
    sys.argv = [f"{program} {name}", *rest]
    _start(commands[name])
    return 0


def _first_line(module: str) -> str:
    """The first line of a module's docstring, read without importing the module."""
    spec = find_spec(module)
    assert spec is not None
    path = Path(str(spec.origin))
    path = path.with_name("__main__.py") if path.name == "__init__.py" else path
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
