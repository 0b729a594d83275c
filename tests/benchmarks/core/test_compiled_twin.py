"""Users who train in pfl's loop do so in compiled layers, to the result of torch's up to rounding."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import torch

from pfl_ext.algorithms.personal_parts import FILE
from pfl_ext.engine.cpu import build
from pfl_ext.engine.cpu.twin import CompiledTwin
from tests.benchmarks.conftest import Train
from tests.benchmarks.run_files import results, weights

RUN = ("--federated.num_rounds=1", "--federated.cohort_size=4", "--local.learning_rate=0.02")
OPTION = "--federated.options."
CASES = {
    "fedrep": (f"{OPTION}personal_epochs=2",),
    "ditto": (),
    "pfedme": (f"{OPTION}personal_steps=2", f"{OPTION}personal_learning_rate=0.02"),
    "moon": (f"{OPTION}mu=5", f"{OPTION}held_out=0.25"),
}


def kept(directory: Path) -> torch.Tensor:
    """What the cohort's four users have at the end, a row each."""
    content = np.fromfile(directory / "checkpoint" / FILE, "<f4")
    return torch.from_numpy(content.reshape(4, -1))


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("name", CASES)
def test_compiled_layers_change_a_run_by_rounding_alone(
    name: str, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users differ by a hundred times what is allowed, so that rounding hides no other update."""
    entered: list[bool] = []
    in_place = CompiledTwin.in_place

    def counted(self: CompiledTwin) -> AbstractContextManager[None]:
        entered.append(self.arithmetic is not None)
        return in_place(self)

    monkeypatch.setattr(CompiledTwin, "in_place", counted)
    words = (f"--federated.algorithm={name}", *CASES[name], *RUN, "--runtime.keep_checkpoints=true")
    fast = train(*words, "--runtime.engine=fast", name="fast")
    assert set(entered) == {True}
    assert relative(kept(fast)[0], kept(fast)[1]) > 1e-3
    entered.clear()
    for engine in ("--runtime.engine=stock", "--runtime.cpu_kernels=false"):
        stock = train(*words, engine, name=engine[-5:])
        assert relative(kept(fast), kept(stock)) < 1e-5
        ours, theirs = (torch.from_numpy(weights(directory)) for directory in (fast, stock))
        assert relative(ours, theirs) < 1e-5
    assert set(entered) == {False}
    if name != "ditto":
        assert results(fast)["arithmetic"].startswith("float32: ")
        assert results(fast)["arithmetic"].endswith("in pfl's own loop")
        assert results(stock)["arithmetic"] == "float32, pfl's own loop"


@pytest.mark.parametrize("name", ("fedavg", "ditto", "moon"))
def test_without_a_compiler_torch_trains_and_one_line_says_so(
    name: str, train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine and the loop beside it ask for the same layers."""
    monkeypatch.setattr(build, "compiler", lambda: None)
    directory = train(f"--federated.algorithm={name}", *RUN)
    said = capsys.readouterr()
    assert said.err.count("no C++ compiler (g++ or clang++) was found") == 1
    assert "compiled" not in results(directory)["arithmetic"]
    assert f"training is computed in {results(directory)['arithmetic']}" in said.out
