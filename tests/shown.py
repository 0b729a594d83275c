"""The commands that pages show, as the words that a program gets.

A command of make is run with programs that only write down their words, so that nothing starts.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCED = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
OF_VENV = "python torchrun horovodrun ruff mypy uv codespell check-jsonschema"
INLINE = re.compile(r"`((?:make|python -m|fl-\w+) [^`]+)`")
OUTSIDE = ("git", "cd", "docker", "pip", "sbatch", "srun", "pre-commit")
"""Programs that are not the project's; what they hand on to the project is found within their words."""
RECORDER = """#!/bin/sh
printf '%s\\0' "$#" "$0" "$@" >> {log}
"""
"""Appends how many words it was given, its path and the words; in a shell, which starts at once."""


@dataclass(frozen=True)
class Shown:
    """A command on a page: its words, and its line as it stands there.

    A mention stands within a sentence and may leave out what the program needs.
    """

    words: tuple[str, ...]
    line: str
    is_mention: bool


def commands(text: str) -> list[Shown]:
    """What a page shows of the project's own commands, in fenced blocks and within sentences."""
    lines = [(line, False) for kind, body in FENCED.findall(text) if kind == "sh" for line in _lines(body)]
    lines += [(" ".join(line.split()), True) for line in INLINE.findall(FENCED.sub("", text))]
    found = []
    for line, is_mention in lines:
        for words in _calls(line):
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words.pop(0)
            if words and words[0] in OUTSIDE:
                words = words[words.index("make") :] if "make" in words else []
            if words:
                found.append(Shown(tuple(words), line, is_mention))
    return found


def _calls(line: str) -> list[list[str]]:
    """The words of each command of a line, without comments."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&")
    lexer.whitespace_split = True
    calls: list[list[str]] = [[]]
    for word in lexer:
        if word in (";", "&&"):
            calls.append([])
        else:
            calls[-1].append(word)
    return calls


def _lines(block: str) -> list[str]:
    """A block's commands, continued lines as one, with the block's own variables put in."""
    found, open_line = [], ""
    variables: dict[str, str] = {}
    for line in re.sub(r"\\\n\s*", " ", block).splitlines():
        line = f"{open_line}\n{line}" if open_line else line
        for name, value in variables.items():
            line = re.sub(rf"\${name}\b", value, line)
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quotation that goes on
            open_line = line
            continue
        open_line = ""
        assigned = re.fullmatch(r"([A-Z_]+)=(.*)", words[0], re.DOTALL) if len(words) == 1 else None
        if assigned:
            variables[assigned[1]] = assigned[2]
        elif words:
            found.append(line)
    return found


def recorded(words: tuple[str, ...], folder: Path) -> list[list[str]]:
    """What ``make ...`` calls: the words of each program, in order.

    Raises:
        subprocess.CalledProcessError: if make refuses.
    """
    log = folder / "log"
    (folder / "bin").mkdir(exist_ok=True)
    for name in OF_VENV.split():
        path = folder / "bin" / name
        path.write_text(RECORDER.format(log=shlex.quote(str(log))))
        path.chmod(0o755)
    for name in (".ready", ".horovod"):
        (folder / name).touch()
    log.unlink(missing_ok=True)
    others = [word for name in ("peers", "opacus") for word in ("-o", f".venv-{name}/.ready")]
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "DATA"))}
    call = ["make", f"VENV={folder}", *others, *words[1:]]
    subprocess.run(call, cwd=ROOT, env=outside, capture_output=True, text=True, check=True)
    parts, calls = log.read_text().split("\0")[:-1] if log.exists() else [], []
    while parts:
        end = int(parts[0]) + 2
        calls.append(parts[1:end])
        parts = parts[end:]
    return calls
