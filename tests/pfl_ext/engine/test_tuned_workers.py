"""Workers that tune the engine together."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch

from pfl_ext.engine.plan import Arrangement
from tests.launching import command, run
from tests.pfl_ext.engine.setting import Setting, distance, rounding_of
from tests.pfl_ext.engine.tuning_worker import SIZES


def test_workers_that_would_choose_differently_choose_the_same(tmp_path: Path) -> None:
    """By the sum of their times, or by what the first one knows. Else a user was trained twice, or never."""
    launch = command("torchrun", 2, "tests.pfl_ext.engine.tuning_worker", str(tmp_path))
    theirs, rounding = Setting(SIZES).run(False)[0], rounding_of(Setting(SIZES))
    for known in (None, 1, 0):  # whose cache holds another choice
        if known is not None:
            (kept,) = (tmp_path / "cache 0").iterdir()
            other = json.loads(kept.read_text()) | asdict(Arrangement(1, False, 32))
            kept.unlink()
            (tmp_path / f"cache {known}").mkdir(exist_ok=True)
            (tmp_path / f"cache {known}" / kept.name).write_text(json.dumps(other))
        run(launch)
        first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
        assert first["chosen"] == second["chosen"]
        assert first["source"] == second["source"] == ("as timed before" if known == 0 else "timed")
        expected = Arrangement(1, False, 32) if known == 0 else Arrangement(1, True, 128)
        assert first["chosen"] == asdict(expected)
        assert distance(first["update"], theirs) <= rounding
