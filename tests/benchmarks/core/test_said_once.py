"""What several workers of a machine have to say in common is said by the first of them, or by who is left."""

from __future__ import annotations

import signal
import time

import pytest

from benchmarks.flair.train import main
from dataset.cli import RESUMABLE, Stopped, run

WRONG = ["--local.lerning_rate=1"]


def worker(monkeypatch: pytest.MonkeyPatch, local_rank: int) -> None:
    place = {"RANK": 2 + local_rank, "WORLD_SIZE": 4, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": 2}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))


def ended(seconds: float) -> None:
    """As by the launcher, because the first worker has ended."""
    raise Stopped(signal.SIGTERM)


def test_the_first_worker_of_a_machine_says_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time, "sleep", ended)
    worker(monkeypatch, 0)
    assert run(main, WRONG) == 2
    assert capsys.readouterr().err.startswith("error: there is no config key local.lerning_rate")
    worker(monkeypatch, 1)
    with pytest.raises(SystemExit) as left:
        run(main, WRONG)
    assert left.value.code == 2
    assert capsys.readouterr().err == ""


def test_a_worker_that_nobody_ends_says_its_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    worker(monkeypatch, 1)
    assert run(main, WRONG) == 2
    assert capsys.readouterr().err.startswith("error: there is no config key local.lerning_rate")


@pytest.mark.parametrize("local_rank", [0, 1])
def test_one_worker_says_that_a_signal_has_stopped_them(
    local_rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.flair.train.Flair.resolve", lambda argv: ended(0))
    worker(monkeypatch, local_rank)
    if local_rank:
        with pytest.raises(SystemExit) as left:
            run(main, [])
        assert left.value.code == RESUMABLE
    else:
        assert run(main, []) == RESUMABLE
    assert capsys.readouterr().err.count("stopped by SIGTERM; run the same command") == 1 - local_rank
