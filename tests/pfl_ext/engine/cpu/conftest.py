from __future__ import annotations

from typing import Any

import pytest

from pfl_ext.engine.cpu.kernels import CpuKernels


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the compiled functions that the test calls."""
    names, call = list[str](), CpuKernels.call

    def noted(self: CpuKernels, name: str, tensors: Any, *numbers: float) -> Any:
        names.append(name)
        return call(self, name, tensors, *numbers)

    monkeypatch.setattr(CpuKernels, "call", noted)
    return names
