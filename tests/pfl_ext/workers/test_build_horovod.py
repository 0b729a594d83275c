"""What Horovod's build is given; `make horovod` itself ends with a sum over two processes."""

from __future__ import annotations

import sys
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
