"""Plain words: archaisms and fragments that pages, docstrings, comments and names must not have."""

from __future__ import annotations

import ast
import io
import os
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shown import ROOT

INSTEAD = {
    "anew": "again",
    "mend": "repair",
    "mended": "repaired",
    "told": "given, said, or what it is",
    "hence": "so",
    "thereof": "of it",
    "wherein": "in which",
    "whilst": "while",
    "lest": "so that not",
    "upon": "on",
    "forthwith": "at once",
    "disbelieved": "checked",
}
WORDS = re.compile(rf"(?<![\w`])({'|'.join(INSTEAD)})(?![\w`])", re.IGNORECASE)
OF = re.compile(r"Of [a-z]")
FOLDERS = ("benchmarks", "dataset", "docs", "pfl_ext", "tests")
PYTHON = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [*sorted(ROOT.glob("*.md")), *(path for f in FOLDERS for path in sorted((ROOT / f).rglob("*.md")))]


def prose(source: str) -> Iterator[tuple[int, str]]:
    """The comments of a module, and its docstrings, those of attributes too; each with its line."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield node.lineno, node.value.value
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id


def faults_of(path: Path) -> list[str]:
    """Where a file has a word or a fragment that it must not have."""
    text, where = path.read_text(), os.path.relpath(path, ROOT)
    if not WORDS.search(text) and not OF.search(text):
        return []  # in no line, so in no comment and no name either; to read these takes most of the time
    lines = list(enumerate(text.splitlines(), 1)) if path.suffix == ".md" else list(prose(text))
    hits = [(n, m[1]) for n, t in lines for m in WORDS.finditer(t)]
    found = [f"{where}:{n}: {word}; write: {INSTEAD[word.lower()]}" for n, word in hits]
    if path.suffix == ".py":
        found += [f"{where}:{n}: begins with Of" for n, t in lines if OF.match(t.removeprefix("# "))]
    return found


@pytest.mark.parametrize("folder", [*FOLDERS, "pages"])
def test_words_are_plain(folder: str) -> None:
    paths = PAGES if folder == "pages" else [p for p in PYTHON if p.relative_to(ROOT).parts[0] == folder]
    assert paths
    faults = [fault for path in paths if path.name != "test_words.py" for fault in faults_of(path)]
    assert not faults, "\n".join(faults)


def test_a_word_is_found_in_a_comment_a_docstring_and_a_name(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text('told = 1  # begin anew\n"""Of the table."""\nprint("anew is a value")\n')
    faults = [fault.partition("a.py:")[2] for fault in faults_of(path)]
    assert faults == ["1: anew; write: again", f"1: told; write: {INSTEAD['told']}", "2: begins with Of"]
