"""The house: three roots, imports one way (docs/architecture.md)."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "dataset": ("dataset",),
    "pfl_ext": ("pfl_ext", "dataset.files", "dataset.arrays"),
    "benchmarks": ("benchmarks", "pfl_ext", "dataset"),
}
"""What each root imports of the project. ``dataset.files`` writes atomically for all, and
``dataset.arrays`` names types of arrays, so all import them."""


@functools.cache
def nodes(file: Path) -> list[ast.AST]:
    """All of a file's syntax that some test here looks at."""
    kinds = (ast.ImportFrom, ast.Import, ast.Call)
    return [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, kinds)]


@functools.cache
def imports(file: Path) -> list[str]:
    """The project's modules and names that a file imports, dotted."""
    found = []
    for node in nodes(file):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file} has a relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [name for name in found if name.partition(".")[0] in (*MAY_IMPORT, "tests", "docs")]


@pytest.mark.parametrize("root", MAY_IMPORT)
def test_imports_go_one_way(root: str) -> None:
    files = list((ROOT / root).rglob("*.py"))
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in imports(file)
        if not any(f"{name}.".startswith(f"{allowed}.") for allowed in MAY_IMPORT[root])
    ]
    assert len(files) > 10
    assert wrong == []


@pytest.mark.parametrize(
    "root, upwards",
    [
        ("dataset", "files store partitions fetch flair"),
        ("pfl_ext", "privacy data engine backend algorithms"),
    ],
)
def test_no_two_parts_of_a_root_need_each_other(root: str, upwards: str) -> None:
    """A part: a package, or a module that lies beside them."""
    needs: dict[str, set[str]] = {}
    for file in (ROOT / root).rglob("*.py"):
        own = file.relative_to(ROOT / root).with_suffix("").parts[0]
        named = [name.split(".")[1] for name in imports(file) if name.startswith(f"{root}.")]
        needs[own] = needs.get(own, set()) | set(named) - {own}
    below: dict[str, set[str]] = {}
    for part in TopologicalSorter(needs).static_order():  # raises an error that names the circle
        direct = needs.get(part, set())
        below[part] = direct.union(*(below[other] for other in direct))
    wrong = [pair for pair in combinations(upwards.split(), 2) if pair[1] in below[pair[0]]]
    assert wrong == []


BENCHMARKS_WORDS = ("flair", "landmarks", "inaturalist", "paper")


def names(file: Path) -> set[str]:
    """The identifiers of a file, and its strings that are choices of words, as ``Literal`` has them."""
    found = {file.stem}
    for node in ast.walk(ast.parse(file.read_text())):
        for field in ("id", "attr", "arg", "name", "asname"):
            found.add(str(getattr(node, field, "")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value if re.fullmatch(r"\w+", node.value) else "")
    return found


def test_no_identifier_of_pfl_ext_holds_a_benchmarks_name() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in (ROOT / "pfl_ext").rglob("*.py")
        for name in names(file)
        if any(word in name.lower() for word in BENCHMARKS_WORDS)
    ]
    assert wrong == []


MOST_LINES = 400


def test_a_file_is_read_in_one_sitting() -> None:
    lengths = {
        str(file.relative_to(ROOT)): len(file.read_text().splitlines())
        for root in (*MAY_IMPORT, "tests")
        for file in (ROOT / root).rglob("*.py")
    }
    assert {name: count for name, count in lengths.items() if count > MOST_LINES} == {}


@pytest.mark.parametrize("root", MAY_IMPORT)
def test_text_files_are_utf_8_whatever_the_locale(root: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in (ROOT / root).rglob("*.py")
        for node in nodes(file)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (node.func.attr == "write_text" or (node.func.attr == "read_text" and not node.args))
        and all(word.arg != "encoding" for word in node.keywords)
    ]
    assert wrong == []


def test_a_shipped_yaml_is_read_in_any_locale() -> None:
    (path, *_) = (p for p in (ROOT / "benchmarks").rglob("*.yaml") if not p.read_bytes().isascii())
    words = [
        sys.executable,
        "-c",
        f"from benchmarks.core.config.trees import *; read_yaml(Path({str(path)!r}))",
    ]
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(words, cwd=ROOT, env=os.environ | ascii_alone, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
