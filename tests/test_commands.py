"""Every command that a page shows: the program that it names reads all of its words, and stops."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest

from benchmarks import console
from benchmarks.core.experiment import Experiment
from benchmarks.flair.train import Flair
from benchmarks.published import train as published
from pfl_ext.algorithms.algorithm import ALGORITHMS
from pfl_ext.models.small import NETWORKS
from tests.dataset.convert.made_sources import convert, write_csv, write_folder
from tests.shown import ROOT, Shown, commands, recorded

LISTED = subprocess.run(["git", "-C", str(ROOT), "ls-files", "*.md"], capture_output=True, text=True).stdout
PAGES = [ROOT / name for name in LISTED.split()] or sorted(ROOT.glob("*.md"))
CONFIGS = sorted(ROOT.glob("benchmarks/**/configs/*.yaml"))
ELSEWHERE = {"pytest", "mkdocs", "pip", "pytorch.train"}
"""Modules of other software, whose words are its own."""

WORDLESS = {"tests.benchmarks.core.quadratics", "tests.campaigns.scaffold_toy"}
"""Programs that read no words and start at once."""

READ = re.compile(
    r"no such file|is no directory|is not a folder|is not there|no wandb key|outside the band",
    re.IGNORECASE,
)
"""What a program says of files and accounts once it has read its words."""


class Read(Exception):
    """The program has read its words."""


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs stop when they have read their words."""
    parse = argparse.ArgumentParser.parse_known_args

    def resolve_data(cls: type[Experiment[Any]], argv: Sequence[str]) -> NoReturn:
        words = cls.benchmark.words(argv)
        cls.benchmark.parse([f"--{k}={v}" for k, v in words.items() if k not in ("data_path", "weights")])
        raise Read

    def parse_args(self: argparse.ArgumentParser, *words: Any) -> argparse.Namespace:
        found: argparse.Namespace
        found, rest = parse(self, *words)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        if self.prog.endswith("table1"):
            return found  # and goes on to `resolve_data`
        raise Read

    def parse_known(self: argparse.ArgumentParser, *words: Any) -> tuple[argparse.Namespace, list[str]]:
        found, rest = parse(self, *words)
        if self.prog.endswith("bench_workers"):
            Flair.resolve_data(rest)
        return found, rest

    for name in ("resolve", "resolve_data"):
        monkeypatch.setattr(Experiment, name, classmethod(resolve_data))
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known)


def read(module: str, words: Sequence[str], patch: pytest.MonkeyPatch) -> None:
    """Have a module of the project read the words of a command."""
    if module == "benchmarks.published.train":
        published._asked(words)
    elif module in WORDLESS:
        assert not words
        assert find_spec(module)
    elif module not in ELSEWHERE:
        patch.setattr(sys, "argv", [module, *words])
        with contextlib.suppress(Read), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            runpy.run_module(module, run_name="__main__", alter_sys=True)


def programs(words: tuple[str, ...], folder: Path) -> list[tuple[str, list[str]]]:
    """The modules that a command runs, each with its words."""
    if words[0] == "make":
        called = [call for call in recorded(words, folder) if "-m" in call]
    elif words[0].startswith("fl-"):
        modules = getattr(console, words[0].removeprefix("fl-") + "_commands")()
        return [(modules[words[1]], list(words[2:]))]
    else:
        called = [list(words)]
    calls = [call[call.index("-m") + 1 :] for call in called]
    return [(module, rest) for module, *rest in calls]


@pytest.mark.usefixtures("stops")
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_of_a_page_are_read_by_their_programs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page.read_text()
    if "FL_IMPORT=confident" in text:  # the example of docs/extending.md, in a file of one's own
        monkeypatch.setenv("FL_IMPORT", "confident")
        monkeypatch.syspath_prepend(str(ROOT / "tests" / "dropped" / "algorithms"))
        monkeypatch.setattr(ALGORITHMS, "_things", dict(ALGORITHMS._things))
        monkeypatch.setattr(ALGORITHMS, "_is_complete", False)
    if "python -m traffic" in text:  # another one
        monkeypatch.syspath_prepend(str(ROOT / "tests" / "dropped"))
        NETWORKS.names()
        monkeypatch.setattr(NETWORKS, "_things", dict(NETWORKS._things))
    said = (refused(command, tmp_path, monkeypatch, capsys) for command in commands(text))
    faults = [fault for fault in said if fault]
    for name in ("confident", "traffic"):
        sys.modules.pop(name, None)
    assert not faults, "\n".join(faults)


@pytest.mark.usefixtures("stops")
def test_the_command_in_the_head_of_a_config_is_read_and_names_that_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in CONFIGS:
        head = path.read_text().partition("\nsetting:")[0]
        shown = re.search(r"^# Command: (.*(?:\\\n# .*)*)", head, re.MULTILINE)
        assert shown, path
        found = commands("```sh\n" + shown[1].replace("\n# ", "\n") + "\n```\n")
        assert path.stem in found[-1].line, path
        for command in found:
            assert refused(command, tmp_path, monkeypatch, capsys) is None, path


OF_A_FILE = {
    "benchmarks.predict": "run",
    "benchmarks.predict.export": "run",
    "benchmarks.bench.peers": "",
    "benchmarks.bench.growth": "",
    "benchmarks.flair.bench": "",
    "dataset.browse": "f.hdf5",
}
"""Commands whose option for the file that they write is ``--output``, each with the words that it needs."""


@pytest.mark.usefixtures("stops")
@pytest.mark.parametrize("module", OF_A_FILE)
def test_every_command_takes_output_file(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the commands that make data files and weights do."""
    read(module, [*OF_A_FILE[module].split(), "--output_file=out"], monkeypatch)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("checkout", [False, True])
def test_the_command_that_a_made_file_is_trained_by_is_read(
    several: bool,
    checkout: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setattr("dataset.cli.CHECKOUT", checkout)
    root = write_folder(tmp_path / "own", range(54))
    words = f"folder --images {root} --val_share=0.2 --test_share=0.2 --split_by=images"
    if several:
        rows = [
            {"path": p.relative_to(root), "client": p.parts[-3], "labels": "cat;dog"}
            for p in root.rglob("*.*")
        ]
        words += f" --labels {write_csv(tmp_path / 'labels.csv', rows)} --several"
    convert(words, tmp_path / "f.hdf5")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "train on it: " in line]
    command = line.partition("train on it: ")[2]
    assert command.startswith("make " if checkout else "fl-train ")
    request.getfixturevalue("stops")
    for shown in commands(f"```sh\n{command}\n```\n"):
        assert refused(shown, tmp_path, monkeypatch, capsys) is None


def refused(
    command: Shown, folder: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str | None:
    """What is wrong with a command, if anything."""
    capsys.readouterr()  # what commands before this one said
    try:
        if command.words[:2] == ("python", "-c"):
            exec(command.words[2], {})
            return None
        for module, words in programs(command.words, folder):
            if command.is_mention and ("--" not in command.line or "..." in command.line):
                assert module in ELSEWHERE or find_spec(module), module
            else:
                read(module, words, patch)
    except (Exception, SystemExit) as end:
        said = capsys.readouterr().err or f"{end!r} {getattr(end, 'stderr', '')}"
        is_done = isinstance(end, SystemExit) and not end.code
        if not is_done and not READ.search(said):
            return f"{command.line}: {said}"
    return None


@pytest.mark.parametrize(
    "start",
    [
        ["-m", "dataset.partitions.figures"],
        ["-c", "from benchmarks.console import _start; _start('dataset.partitions.figures')"],
    ],
    ids=["python -m", "installed"],
)
def test_a_command_draws_whatever_mplbackend_says(start: list[str]) -> None:
    """Importing matplotlib, as this module does, raises ValueError where the variable names no backend."""
    draws = {**os.environ, "MPLBACKEND": "foo"}
    done = subprocess.run([sys.executable, *start], cwd=ROOT, env=draws, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
