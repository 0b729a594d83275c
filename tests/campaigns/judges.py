"""Which tests can see a fault: those that execute its line, by the coverage of one run of the whole suite.

A line that runs at import alone (a default, a constant, a decorator) is judged by the tests that execute
anything of the function, class or module around it. So is a line that no test executes in its own process.
A constant is judged as well by the tests that have its name, which may execute nothing of its module.
Tests that changed since the coverage was collected count as well: all tests of a changed file that executed
anything of the module, and of a new file that names it.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

try:
    from coverage import CoverageData
except ImportError:
    sys.exit("error: coverage is not installed: run .venv/bin/pip install pytest-cov==7.1.0")

COVERAGE, SECONDS, COMMIT = ".coverage", "cpu.txt", "commit"
"""A collection: who executed which line, the CPU seconds of each test, and the commit that was run."""
QUICK, SOME = 1.0, 8.0
"""CPU seconds of a test of the first stage, and of all tests of the second."""
KEEPS = re.compile(r"@(?:functools\.)?(?:lru_)?cache|scope=")
"""In a test file: a test may use what another test of the file has computed."""


def collect(root: Path, folder: Path) -> None:
    """Run the whole suite once and keep in ``folder`` what `Judges` needs.

    Raises ValueError if the working tree is not that of a commit, or if a test fails.
    """
    if _git(root, "status", "--porcelain"):
        raise ValueError("collect from a committed working tree")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "coveragerc").write_text("[run]\nrelative_files = True\n")
    roots = [f"--cov={name}" for name in ("pfl_ext", "dataset", "benchmarks")]
    options = ["--cov-context=test", "--cov-report=", f"--cov-config={folder / 'coveragerc'}", *roots]
    command = [sys.executable, "-m", "pytest", "-n", "auto", "--dist", "loadgroup", "--cpu-times", "99999"]
    environment = os.environ | {"COVERAGE_FILE": str(folder / COVERAGE)}
    with (folder / SECONDS).open("w") as said:
        if subprocess.run([*command, *options], cwd=root, env=environment, stdout=said).returncode:
            raise ValueError(f"the suite does not pass: see {folder / SECONDS}")
    (folder / COMMIT).write_text(_git(root, "rev-parse", "HEAD"))


@dataclass(frozen=True)
class Judgement:
    """The tests that judge a fault, as names of `seconds`, and files of which all other tests do as well."""

    seconds: dict[str, float]
    whole: frozenset[str] = frozenset()

    @property
    def files(self) -> list[str]:
        """All test files that are needed, from the quickest."""
        spent = dict.fromkeys(sorted(self.whole), 0.0)
        for test, seconds in self.seconds.items():
            spent[file_of(test)] = spent.get(file_of(test), 0.0) + seconds
        return sorted(spent, key=spent.__getitem__)

    def without(self, tests: Collection[str]) -> Judgement:
        """Less these tests, and the tests of these files."""
        left = {t: s for t, s in self.seconds.items() if t not in tests and file_of(t) not in tests}
        return Judgement(left, self.whole.difference(map(file_of, tests)))

    def stages(self, module: str) -> Iterator[Judgement]:
        """The quick tests of the module's own file and of changed ones; quick ones of others; the rest."""
        parts: list[dict[str, float]] = [{}, {}, {}]
        spent = 0.0
        for test, cost in self.seconds.items():
            file = file_of(test)
            if cost <= QUICK and (file in self.whole or Path(file).stem == f"test_{Path(module).stem}"):
                parts[0][test] = cost
            else:
                spent += cost
                parts[1 if spent <= SOME else 2][test] = cost
        stages = Judgement(parts[0], self.whole), *(Judgement(part) for part in parts[1:])
        yield from (stage for stage in stages if stage.files)


class Judges:
    """The tests of a collection (`collect`), as they are in the working tree ``root``."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root = root
        self._data = CoverageData(str(folder / COVERAGE))
        self._data.read()
        self._commit = (folder / COMMIT).read_text().strip()
        times = re.findall(r"^ *([\d.]+) s  (tests/\S+::.*)$", (folder / SECONDS).read_text(), re.MULTILINE)
        self.seconds = {_without_group(test): float(seconds) for seconds, test in times}
        paths = (root / "tests").rglob("test_*.py")
        self._files = {path.relative_to(root).as_posix() for path in paths}
        untracked = _git(root, "ls-files", "--others", "tests").splitlines()
        changed = _git(root, "diff", "--name-only", self._commit, "--", "tests").splitlines()
        self._changed = self._files.intersection([*changed, *untracked])
        self._known: dict[str, dict[int, set[str]]] = {}

    def of(self, module: str, line: int, budget: float) -> Judgement:
        """The judges of a fault in this line, from the quickest test, of ``budget`` CPU seconds together."""
        lines = self._tests_of_lines(module)
        tree = ast.parse((self._root / module).read_text())
        around = levels(tree, line)
        everyone = set[str]().union(*lines.values())
        direct = next(
            filter(None, (set[str]().union(*(lines.get(n, ()) for n in level)) for level in around)), everyone
        )
        direct = direct | self._tests_with(constants(tree, line))
        files = {file_of(test) for test in everyone}
        candidates = self._changed if files else self._files
        whole = {name for name in candidates if name in files or self._names(name, module)}
        mates = {file_of(test) for test in direct}
        mates = {name for name in mates if KEEPS.search((self._root / name).read_text())} | whole
        beside = {test for test in self.seconds if file_of(test) in mates} - direct
        chosen, spent = dict[str, float](), 0.0
        for tests in (direct, beside):
            for test in sorted(tests, key=lambda test: (self.seconds.get(test, 0.0), test)):
                spent += self.seconds.get(test, 0.0)
                if spent <= budget or not chosen:
                    chosen[test] = self.seconds.get(test, 0.0)
        return Judgement(chosen, frozenset(whole))

    def _tests_with(self, names: Collection[str]) -> set[str]:
        """The tests in whose code one of these names stands."""
        found = set[str]()
        for file in self._files if names else ():
            text = (self._root / file).read_text()
            if any(name in text for name in names):
                for node in ast.parse(text).body:
                    if isinstance(node, _FUNCTIONS) and words_of(node).intersection(names):
                        found.add(f"{file}::{node.name}")
        return {test for test in self.seconds if test.partition("[")[0] in found}

    def _names(self, test_file: str, module: str) -> bool:
        """Whether a test file imports a module."""
        package, _, name = module.removesuffix(".py").replace("/", ".").rpartition(".")
        imports = rf"{package}\.{name}\b|from {package} import .*\b{name}\b"
        return re.search(imports, (self._root / test_file).read_text()) is not None

    def _tests_of_lines(self, module: str) -> dict[int, set[str]]:
        """Who executes a line, by the line's number today."""
        if module in self._known:
            return self._known[module]
        old = subprocess.run(
            ["git", "show", f"{self._commit}:{module}"], cwd=self._root, capture_output=True, text=True
        ).stdout.splitlines()
        new = (self._root / module).read_text().splitlines()
        today = {
            block.a + i + 1: block.b + i + 1
            for block in difflib.SequenceMatcher(None, old, new, False).get_matching_blocks()
            for i in range(block.size)
        }
        self._known[module] = {
            today[line]: {
                test
                for test in (_without_group(context.rpartition("|")[0]) for context in contexts)
                if file_of(test) in self._files
            }
            for line, contexts in self._data.contexts_by_lineno(module).items()
            if line in today
        }
        return self._known[module]


def levels(tree: ast.Module, line: int) -> Iterator[set[int]]:
    """Lines whose execution may show a fault in ``line``: its statement's, then those of what is around."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.stmt, ast.excepthandler)) and line in _whole(node)
    ]
    if any(isinstance(node, _FUNCTIONS) and line in _body(node) for node in around):
        inner = around[-1]
        body = getattr(inner, "body", None)
        end = body[0].lineno - 1 if body else inner.end_lineno or inner.lineno
        yield set(range(inner.lineno, max(end, inner.lineno) + 1))
    for node in reversed([tree, *around]):
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Module)):
            yield set[int]().union(
                *(_body(inner) for inner in ast.walk(node) if isinstance(inner, _FUNCTIONS))
            )


def constants(tree: ast.Module, line: int) -> set[str]:
    """The names that a statement of the module assigns in this line."""
    return {
        node.id
        for statement in tree.body
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and line in _whole(statement)
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def words_of(tree: ast.AST) -> set[str]:
    """All names and attributes in the code."""
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _whole(node: ast.stmt | ast.excepthandler) -> range:
    decorators = [decorator.lineno for decorator in getattr(node, "decorator_list", [])]
    return range(min([node.lineno, *decorators]), (node.end_lineno or node.lineno) + 1)


def _body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> range:
    return range(function.body[0].lineno, (function.end_lineno or function.lineno) + 1)


def file_of(test: str) -> str:
    """A test's file; a file's own name."""
    return test.partition("::")[0]


def _without_group(test: str) -> str:
    """A test's name without the group that xdist appends."""
    return re.sub(r"@[\w-]+$", "", test)


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, check=True, text=True).stdout
