"""A sweep whose trials take no time, and what its tests share."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest

from benchmarks.core.config.trees import Tree
from benchmarks.flair import train as flair_train
from benchmarks.flair.config import FLAIR
from benchmarks.sweep.local import LocalSweep, Options
from benchmarks.sweep.report import draw_trials
from benchmarks.sweep.space import read_sweep
from pfl_ext.tasks.ranking import Diverged
from tests.benchmarks.conftest import SMALL
from tests.benchmarks.sweep.test_space import written

RATES = {"local.learning_rate": {"values": [0.01, 0.3]}}
SHORT = [word for word in SMALL if "num_rounds" not in word and "progress" not in word]
SEEN: list[float] = []
"""What a trial leaves behind in its process."""


def double(
    words: Sequence[str],
    pause: float,
    fails: float,
    dies: float,
    together: int,
    diverges: float = math.inf,
) -> None:
    """A training that takes no time: its metric is a hundred times its learning rate, plus the round.

    It waits until as many trials as go ``together`` were started; of four, the last three then wait for the
    first to end. The learning rates ``fails`` and ``dies``
    end badly at their first attempt, and those from ``diverges`` on after their last round.
    """
    values = FLAIR.words(words)
    rate, here = float(values["local.learning_rate"]), Path(values["run_dir"])
    here.mkdir(parents=True, exist_ok=True)
    SEEN.append(rate)
    with (here / "started").open("a") as file:
        file.write(f"{values['runtime.device']} {time.time()} {os.getppid()} {SEEN}\n")
    if len((here / "started").read_text().splitlines()) == 1:
        if rate == fails:
            raise ValueError("no luck today")
        if rate == dies:
            os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 120
    while len(list(here.parent.glob("*/started"))) < together:
        assert time.monotonic() < deadline, "no other trial was started"
        time.sleep(0.01)
    while together == 4 and rate < 0.4 and not list(here.parent.glob("000*/ended")):
        time.sleep(0.01)
    (here / "metrics.jsonl").unlink(missing_ok=True)
    for step in range(8):
        with (here / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"round": step, "val": {"C-AP": 100 * rate + step}}) + "\n")
        time.sleep(pause)
    if rate >= diverges:
        raise Diverged("round 8 ended with numbers that are not finite")
    (here / "ended").write_text(str(time.time()))
    (here / "results.json").write_text(json.dumps({"test": {"C-AP": 1.5}, "wall_clock_s": 2}))


@pytest.fixture
def doubled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LocalSweep]:
    """A local sweep whose trials are `double`: what is tested is which are run, when and on what.

    Nothing is drawn: `killed_sweep` has the pictures.
    """
    undrawn = create_autospec(draw_trials, return_value=False)
    monkeypatch.setattr("benchmarks.sweep.local.draw_trials", undrawn)

    def make(
        parameters: Tree,
        pause: float = 0.0,
        fails: float = -1.0,
        dies: float = -1.0,
        diverges: float = math.inf,
        together: int = 1,
        **changes: Any,
    ) -> LocalSweep:
        ends: dict[str, Any] = {"fails": fails, "dies": dies, "diverges": diverges}
        trial = functools.partial(double, pause=pause, together=together, **ends)
        monkeypatch.setattr(flair_train, "main", trial)
        known = {item.name for item in dataclasses.fields(Options)}
        options = Options(**{key: changes.pop(key) for key in list(changes) if key in known})
        sweep, tree, _ = read_sweep(written(tmp_path, parameters, **changes))
        (tmp_path / "sweep").mkdir(exist_ok=True)
        return LocalSweep(sweep, tree, ["--config=fl-r-17"], tmp_path / "sweep", options)

    return make
