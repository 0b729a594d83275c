"""A trial that was compared with others and given up, after an interruption."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.core.config.trees import Tree
from benchmarks.sweep.local import LocalSweep
from dataset.cli import Stopped

RULE = {"type": "hyperband", "min_iter": 2, "eta": 4}
FALLING: Tree = {"local.learning_rate": {"values": [0.4, 0.3]}}


def test_a_trial_given_up_before_an_interruption_does_not_go_on(
    doubled: Callable[..., LocalSweep], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on past the place at which it was given up."""
    sweep = doubled(FALLING, pause=0.15, workers=1, early_terminate=RULE)
    real = LocalSweep._end

    def interrupted(self: LocalSweep, trial: Any, process: Any) -> None:
        if process.stopping:
            raise Stopped(15)
        real(self, trial, process)

    monkeypatch.setattr(LocalSweep, "_end", interrupted)
    with pytest.raises(Stopped):
        sweep.run()
    assert [row.status for row in sweep.rows()] == ["finished", "running"]
    monkeypatch.setattr(LocalSweep, "_end", real)
    again = doubled(FALLING, pause=0.15, workers=1, early_terminate=RULE)
    assert [row.status for row in again.run()] == ["finished", "stopped"]
    started = [(again.run_dir(trial) / "started").read_text().splitlines() for trial in again.trials()]
    assert [len(lines) for lines in started] == [1, 1]
