"""How long a trial's process may take to stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.sweep import process
from benchmarks.sweep.process import POLL_SECONDS, TrialProcess


def test_a_launcher_has_the_time_to_stop_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun was killed first, and its workers trained on."""
    ready = tmp_path / "ready"

    def launched(python: str, words: Sequence[str]) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        ready.touch()
        signal.sigwait([signal.SIGTERM])
        time.sleep(0.4)  # as long as its workers take
        os._exit(5)

    monkeypatch.setattr(os, "execv", launched)
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.0)
    trial = TrialProcess("no.module", [], tmp_path / "run", tmp_path / "log", num_processes=2)
    deadline = time.monotonic() + 120
    while not ready.exists():
        assert time.monotonic() < deadline
        time.sleep(POLL_SECONDS)
    trial.stop()
    while trial.is_alive():
        assert time.monotonic() < deadline
        time.sleep(POLL_SECONDS)
    assert trial.fault() == f"exit code 5, see {tmp_path / 'log'}"
    assert process.LAUNCHER_GRACE_SECONDS > 30 + 15, "torchrun's own, and what it needs after"
