"""What Horovod's build is given; `make horovod` itself ends with a sum over two processes."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pfl_ext.workers import build_horovod
from pfl_ext.workers.build_horovod import build_environment


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """NCCL as torch's wheels bring it: no ``libnccl.so``, by which a linker would look for it."""
    for name in ("include/nccl.h", "lib/libnccl.so.2"):
        path = tmp_path / "package" / name
        path.parent.mkdir(parents=True)
        path.write_text(name)
    return tmp_path / "package"


def test_horovod_is_linked_with_torchs_own_nccl(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_horovod, "nccl_home", lambda: package)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    build_environment(tmp_path / "cuda")
    environment = build_environment(tmp_path / "cuda")
    assert environment["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert environment["HOROVOD_CUDA_HOME"] == environment["CUDA_HOME"] == str(tmp_path / "cuda")
    home = Path(environment["HOROVOD_NCCL_HOME"])
    assert home.is_relative_to(tmp_path / "environment"), "the library that is built names it"
    for name in ("libnccl.so", "libnccl.so.2"):
        assert (home / "lib" / name).read_text() == "lib/libnccl.so.2"
    assert (home / "include" / "nccl.h").read_text() == "include/nccl.h"
    assert environment["HOROVOD_NCCL_LINK"] == "SHARED"


def test_without_a_toolkit_nothing_is_said_of_gpus(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_horovod, "nccl_home", lambda: package)
    environment = build_environment(None)
    assert environment["HOROVOD_WITH_GLOO"] == "1"
    assert not any(name.startswith(("HOROVOD_NCCL", "HOROVOD_GPU", "HOROVOD_CUDA")) for name in environment)


def test_the_systems_nccl_is_taken_where_torch_brings_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_horovod, "nccl_home", lambda: None)
    environment = build_environment(tmp_path)
    assert environment["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert "HOROVOD_NCCL_HOME" not in environment


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `main` does in an environment without Horovod, by a pip whose wheels say "whole"."""
    done = list[str]()

    def run(command: Sequence[str], what: str, *_: object) -> None:
        done.append(what.split(" /")[0])
        if "wheel" in command:
            Path(command[command.index("--wheel-dir") + 1]).mkdir()
            Path(command[command.index("--wheel-dir") + 1], "horovod.whl").write_text("whole")
        if what.startswith("installing /") and Path(command[-1]).read_text() != "whole":
            raise ValueError("it cannot be read")

    monkeypatch.setattr(build_horovod, "run", run)
    monkeypatch.setattr(build_horovod, "fetch", lambda folder: folder)
    monkeypatch.setattr(build_horovod, "repair", lambda *_: None)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(build_horovod, "cuda_home", lambda *_: None)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "horovod" else find(name))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return done


def test_without_a_compiler_nothing_is_installed(steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="built from source and there is no "):
        build_horovod.main([])
    assert steps == []


def test_a_second_environment_takes_the_wheel_that_was_built(
    steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = ["installing what Horovod's build needs", "building Horovod", "installing Horovod"]
    kept = ["installing what Horovod needs", "installing"]
    proof = ["the all-reduce over two processes under horovodrun"]
    for words, wheel, expected in (
        ([], "whole", [*built, *proof]),
        ([], "whole", [*kept, *proof]),
        (["--force"], "whole", [*built, *proof]),
        ([], "damaged", [*kept, *built, *proof]),
        ([], "whole", [*kept, *proof]),
    ):
        steps.clear()
        for path in tmp_path.glob("cache/pfl_ext/horovod-*/horovod.whl"):
            path.write_text(wheel)
        build_horovod.main(words)
        assert steps == expected, (words, wheel)
    monkeypatch.setattr(build_horovod, "cuda_home", lambda *_: tmp_path)
    steps.clear()
    build_horovod.main([])
    assert steps == [*built, *proof], "a wheel for CUDA names files of its own environment"
