"""The doctor's stages on a GPU that is not there, sound and with a fault in the engine's path."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.doctor import child, findings, trial
from pfl_ext.backend import CentrallyEvaluatedBackend
from pfl_ext.engine.graphs import StepGraphs
from pfl_ext.engine.lane import Lane
from tests.card import REAL, card

pytestmark = [
    pytest.mark.skipif(REAL, reason="of the card that is not there"),
    pytest.mark.xdist_group("card"),
]
SMALL = (*trial.WORDS, "--model.arch=lenet", "--runtime.lanes=2")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "WORDS", SMALL)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 1))


def said(*stages: str, seconds: float = 60.0) -> list[dict[str, Any]]:
    """What the stages find; none of them trains a cohort."""
    with card(free=80 * 10**9), mock.patch.object(CentrallyEvaluatedBackend, "_train_cohort", None):
        return [event for event in child.events(list(stages), seconds) if event["event"] == "found"]


def outcomes(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if "begun" not in event]


def test_a_card_is_seen_and_runs_by_graphs_that_hold() -> None:
    device, path, *tried = said("device", "path", "trial")
    assert (device["gpus"][0]["name"], device["gpus"][0]["works"]) == ("H200 that is not there", True)
    assert device["gpus"][0]["free_gb"] == 80.0
    assert (path["device"], path["on_gpu"], path["lanes"]) == ("cuda:0", True, 2)
    report = {"driver": ["H200"], "device": device}
    lines, notes = findings.path(path, report)
    assert notes == []
    assert "device: cuda:0, as torch can use it" in lines
    found = outcomes(tried)
    assert [entry["case"] for entry in found] == [
        case.name for case in (trial.PLAIN, trial.PRIVATE, trial.BF16)
    ]
    for entry in found:
        assert entry["holds"], entry
        assert (entry["path"], entry["by"]) == (0, "CUDA graphs on several streams")
        assert findings.trial(entry)[1] == []


def test_a_graph_that_is_wrong_is_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    real = StepGraphs.run

    def run(self: StepGraphs, *job: Any) -> None:
        real(self, *job)
        if self._recorded:
            self._changed()[0].mul_(float("nan"))

    monkeypatch.setattr(StepGraphs, "run", run)
    monkeypatch.setattr(trial, "LAST_START", 0.0)
    monkeypatch.setattr(trial, "PLAIN", trial.PLAIN)
    with card(), trial.data_file() as file:
        entry = trial.compared(trial.PLAIN, file, 60.0)
    assert (entry["path"], entry["by"], entry["holds"]) == (1, "no CUDA graphs", True)
    assert "made" not in entry["engine_check"]
    _, (note,) = findings.trial(entry)
    assert str(note).startswith("hint: float32: runs take the slower way 'no CUDA graphs'")


def test_an_engine_that_is_wrong_on_every_path_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lane, "add", lambda *_: None)
    with card(), trial.data_file() as file:
        entry = trial.compared(trial.PLAIN, file, 60.0)
    assert not entry["holds"]
    lines, (note,) = findings.trial(entry)
    assert note.is_fault
    assert "train by pfl's loop, as runs do here by themselves" in note.text
    assert lines[0].startswith("float32: does not hold: it is off by more than rounding")


def test_a_card_that_refuses_work_is_told_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def eye(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: no kernel image is available\nmore")

    monkeypatch.setattr(torch, "eye", eye)
    (device,) = said("device")
    assert not device["gpus"][0]["works"]
    assert device["gpus"][0]["why"] == "RuntimeError: CUDA error: no kernel image is available"


def test_no_comparison_is_begun_when_the_time_is_over() -> None:
    found = outcomes(said("trial", seconds=0.0))
    assert [entry.get("left_out") for entry in found] == [True] * 3
    _, (note,) = findings.trial(found[0])
    assert not note.is_fault


def test_a_wrong_compiled_layer_leads_to_the_comparison_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU."""
    real = trial.compared

    def compared(case: trial.Case, file: Any, seconds: float) -> dict[str, Any]:
        entry = real(case, file, seconds)
        return {**entry, "holds": case is not trial.PLAIN}

    monkeypatch.setattr(trial, "compared", compared)
    monkeypatch.setattr(trial, "PRIVATE", trial.PLAIN)
    names = [entry["case"] for entry in trial.comparisons(60.0) if "begun" not in entry]
    assert names[:2] == [trial.PLAIN.name, trial.BY_TORCH.name]


def test_a_stage_that_raises_is_the_last_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(seconds: float) -> Any:
        raise OSError("a disk\nof glass")
        yield

    monkeypatch.setitem(child.STAGES, "path", broken)
    events = list(child.events(["path", "trial"], 1.0))
    assert [event["event"] for event in events] == ["begin", "found", "end"]
    _, (note,) = findings.failed(events[1])
    assert note.text.startswith("finding out how a run is computed failed (OSError: a disk)")
