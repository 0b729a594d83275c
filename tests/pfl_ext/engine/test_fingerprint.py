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


@pytest.mark.parametrize(
    "named, edited",
    [
        ("net_of_mine.py", "net_of_mine.py"),
        ("net_of_mine.py", "parts_of_mine.py"),
        ("nets_of_mine", "nets_of_mine/__init__.py"),
        ("nets_of_mine", "nets_of_mine/blocks.py"),
        ("nets_of_mine", "parts_of_mine.py"),
    ],
)
def test_ones_own_module_counts(
    named: str, edited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the rest of its package, and what it imports from its folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    first = fingerprint()
    texts = {
        "net_of_mine.py": "import parts_of_mine\n",
        "parts_of_mine.py": "WIDTH = 1\n",
        "nets_of_mine/__init__.py": "from nets_of_mine import blocks\n",
        "nets_of_mine/blocks.py": "import parts_of_mine\n",
    }
    (tmp_path / "nets_of_mine").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setenv(OWN, str(tmp_path / named))
    second = fingerprint()
    (tmp_path / edited).write_text(f"{texts[edited]}DEPTH = 2\n")
    assert len({first, second, fingerprint()}) == 3
    for name in ("net_of_mine", "parts_of_mine", "nets_of_mine", "nets_of_mine.blocks"):
        sys.modules.pop(name, None)


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
