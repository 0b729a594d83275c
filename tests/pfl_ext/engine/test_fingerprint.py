"""The key of the engine's check changes with everything that the compared sums depend on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import pfl_ext
from dataset.files import OWN
from pfl_ext.engine import selfcheck
from pfl_ext.engine.selfcheck import CODE, ROOT, code_digest, fingerprint


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    code_digest.cache_clear()
    yield
    code_digest.cache_clear()


def test_all_code_of_the_package_counts() -> None:
    assert Path(str(pfl_ext.__file__)).parent == ROOT
    inside = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.suffix in CODE}
    needed = {"engine/cpu/joining.py", "engine/cpu/kernels.cpp", "models/classifier.py", "privacy/central.py"}
    assert needed < inside


@pytest.mark.parametrize(
    "changed", ["engine/lane.py", "engine/cpu/joining.py", "tasks/own.py", "engine/cpu/a.h"]
)
def test_a_changed_file_is_another_key(changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "ROOT", tmp_path)
    for name in ("engine/lane.py", "engine/cpu/joining.py", "tasks/own.py", "engine/cpu/a.h", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    first = fingerprint("word")
    (tmp_path / "README.md").write_text("after")
    code_digest.cache_clear()
    assert fingerprint("word") == first
    (tmp_path / changed).write_text("after")
    code_digest.cache_clear()
    assert fingerprint("word") != first


def test_ones_own_module_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    first = fingerprint()
    module = tmp_path / "network_of_the_fingerprint.py"
    module.write_text("WIDTH = 1\n")
    monkeypatch.setenv(OWN, str(module))
    second = fingerprint()
    module.write_text("WIDTH = 2\n")
    assert len({first, second, fingerprint()}) == 3
    del sys.modules[module.stem]


@pytest.mark.parametrize("part", ["name", "driver", "CUDA", "cuDNN", "Triton"])
def test_the_gpu_and_the_libraries_count(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(value: str) -> str:
        of = SimpleNamespace(
            **dict.fromkeys(("name", "driver", "CUDA", "cuDNN", "Triton"), "1") | {part: value}
        )
        (tmp_path / "driver").write_text(of.driver)
        monkeypatch.setattr(selfcheck, "DRIVER", tmp_path / "driver")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: of.name)
        monkeypatch.setattr(torch.version, "cuda", of.CUDA)
        installed = {"triton": of.Triton, "nvidia-cudnn-cu13": of.cuDNN}
        monkeypatch.setattr(selfcheck, "version_of", installed.get)
        return fingerprint()

    assert key("1") == key("1")
    assert key("1") != key("2")
