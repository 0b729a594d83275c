"""The library is compiled once, checked, and done without where it cannot be had."""

from __future__ import annotations

import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dataset.files import locked
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.engine.cpu import build, check
from pfl_ext.engine.cpu import kernels as cpu_kernels
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.processor import cache_folder, processor
from pfl_ext.tasks.multi_label import MultiLabel
from tests.pfl_ext.engine.cpu.roundings import compiled
from tests.pfl_ext.engine.setting import (
    Setting,
    distance,
    rounding_of,
    wide_backbone,
)


def engine() -> CohortEngine:
    return CohortEngine(ImageClassifier(wide_backbone(), task=MultiLabel(), input_size=10), lanes=1)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with nothing in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_without_a_compiler_torchs_layers_are_used(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(empty_cache))
    assert engine().kernels is None
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "no C++ compiler" in message
    setting = Setting([3, 7], backbone=wide_backbone)
    assert distance(setting.run(True)[0], setting.run(False)[0]) <= rounding_of(setting)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'x.cpp:1: error: unknown type vec' >&2; exit 1", "unknown type vec"),
        ("exit 3", "no reason given"),
    ],
)
def test_a_compiler_that_fails_is_quoted(
    script: str,
    words: str,
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = empty_cache / "fake-compiler"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(fake.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("CXX", str(fake))
    assert engine().kernels is None
    begun, message = capsys.readouterr().err.splitlines()
    assert begun.startswith("compiling")
    assert words in message
    assert "fake-compiler" in message


@compiled
@pytest.mark.parametrize("place", ["a file", "nowhere"])
def test_without_a_place_to_keep_them_torchs_layers_are_used(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file") if place == "a file" else "")
    monkeypatch.setattr(Path, "home", homeless)
    assert engine().kernels is None
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert ("could not be used" if place == "a file" else "set XDG_CACHE_HOME") in message


@compiled
def test_the_library_is_compiled_once_and_again_for_another_source_or_version_of_the_compiler(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler is a script: what it makes is not looked at here."""
    compiler, begun = empty_cache / "compiler", empty_cache / "begun"
    monkeypatch.setenv("CXX", str(compiler))

    def compiled_by(version: str) -> tuple[Path, int]:
        """The library, and how often a compiler has run so far."""
        compiler.write_text(
            "#!/bin/sh\n"
            f'[ "$1" = --version ] && echo {version} && exit\necho >> {begun}\n'
            'while [ "$1" != -o ]; do shift; done; echo library > "$2"\n'
        )
        compiler.chmod(0o755)
        return build.compiled(), len(begun.read_text())

    first, _ = compiled_by("1.0")
    assert compiled_by("1.0") == (first, 1)
    assert [path for path in first.parent.iterdir() if path.suffix != ".lock"] == [first]
    first.write_bytes(first.read_bytes()[:-1] + b"?")
    assert compiled_by("1.0") == (first, 2), "a damaged file is made again"
    second, runs = compiled_by("1.1")
    assert (second != first, runs) == (True, 3)
    assert compiled_by("1.1") == (second, 3)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    third, runs = compiled_by("1.1")
    assert (third not in (first, second), runs) == (True, 4)
    text = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, **more: text(path, **more) + "/" * (path.suffix == ".h")
    )
    assert compiled_by("1.1")[1] == 5, "another source"


@compiled
@pytest.mark.parametrize("flags", [("-mavx2", "-mfma"), ("-msse4.2",)], ids=str)
def test_narrower_vectors_compute_the_same(
    flags: tuple[str, ...], empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not {flag[2:].replace(".", "_") for flag in flags} <= set(processor().split()):
        pytest.skip("this processor has other vectors")
    kept = [flag for flag in build.FLAGS if flag not in ("-march=native", "-O3")]
    monkeypatch.setattr(build, "FLAGS", (*kept, "-O0", *flags))  # compiled in a fifth of the time
    check.checked()  # which compares every function with torch's


def test_a_library_that_cannot_be_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged.so"
    damaged.write_text("no library")
    monkeypatch.setattr(cpu_kernels, "compiled", lambda: damaged)
    assert engine().kernels is None
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "damaged.so cannot be loaded" in message


@compiled
def test_a_library_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "TOLERANCE", 0.0)
    with pytest.raises(build.Unavailable, match="does not compute what torch computes"):
        check.checked()


@compiled
def test_of_two_processes_at_once_one_compiles_and_the_other_waits(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler, begun = empty_cache / "compiler", empty_cache / "begun"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\necho >> {begun}\n'
        'while [ "$1" != -o ]; do shift; done; sleep 0.2; echo library > "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: build.compiled(), range(2))
    assert first == second
    assert begun.read_text() == "\n"
    said = capsys.readouterr().err.splitlines()
    others = [line for line in said if not line.startswith("compiling layers")]
    assert len(others) == len(said) - 1  # in any order: one may wait before the other has said anything
    assert all("waiting for it" in line for line in others)


def failing(folder: Path) -> Path:
    """A compiler that notes each call and fails after a while."""
    compiler, begun = folder / "compiler", folder / "begun"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\necho >> {begun}\nsleep 0.3\n'
        "echo 'x: error: no such vector' >&2; exit 1\n"
    )
    compiler.chmod(0o755)
    return compiler


@compiled
def test_those_that_waited_for_a_compiler_that_failed_do_not_try_it_in_turn(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(failing(empty_cache)))

    def reason(_: int) -> str:
        with pytest.raises(build.Unavailable) as found:
            build.compiled()
        return str(found.value)

    with ThreadPoolExecutor(3) as pool:
        reasons = list(pool.map(reason, range(3)))
    assert all("no such vector" in text for text in reasons)
    assert (empty_cache / "begun").read_text() == "\n" * 2, "with threads, and without, by one of the three"
    folder = cache_folder()
    assert folder is not None
    (note,) = folder.glob(".*.failed")
    os.utime(note, (time.time() + 86400,) * 2)  # as if the clock had been set back since
    assert "no such vector" in reason(0)
    assert (empty_cache / "begun").read_text() == "\n" * 4, "a later process tries again"


@compiled
def test_a_process_that_holds_the_lock_for_ever_is_not_waited_for(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(failing(empty_cache)))
    monkeypatch.setattr(build, "WAIT_SECONDS", 0.05)
    with pytest.raises(build.Unavailable):
        build.compiled()
    folder = cache_folder()
    assert folder is not None
    (lock,) = folder.glob(".*.lock")
    with locked(lock, ""), pytest.raises(build.Unavailable, match="no such vector"):
        build.compiled()
    assert (empty_cache / "begun").read_text() == "\n" * 4
