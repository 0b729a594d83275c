"""A trial as a process: a fork of the sweep's, in which torch and the training program are imported already.

It starts at once, leaves nothing behind for the next trial, and harms no other trial, however it dies.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

import torch

from dataset.cli import SIGNALS, run
from pfl_ext.checkpoint import sole_owner

POLL_SECONDS, GRACE_SECONDS = 0.1, 30.0
LAUNCHER_GRACE_SECONDS = 60.0
"""Torchrun kills its workers 30 seconds after it was asked to stop. They have sessions of their own, and
train on if torchrun itself is killed before."""


class TrialProcess:
    """The training of a trial into `run_dir`, by one process or several workers; `log` has what it prints."""

    def __init__(
        self, module: str, words: Sequence[str], run_dir: Path, log: Path, num_processes: int = 1
    ) -> None:
        self.log, self._deadline, self._several = log, math.inf, num_processes > 1
        self._log_begins = log.stat().st_size if log.exists() else 0
        self._metrics, self._seen = run_dir / "metrics.jsonl", 0
        log.parent.mkdir(parents=True, exist_ok=True)
        words = [*words, f"--run_dir={run_dir}"]
        job = (module, words, run_dir, log, num_processes)
        self._process = get_context("fork").Process(target=_train, args=job, daemon=True)
        self._process.start()

    def is_alive(self) -> bool:
        """Whether it still runs; what does not stop in time is killed here."""
        if time.monotonic() > self._deadline:
            self._process.kill()
        return self._process.is_alive()

    def has_news(self) -> bool:
        """Whether its metrics have changed since this was asked last."""
        size = self._metrics.stat().st_size if self._metrics.exists() else 0
        seen, self._seen = self._seen, size
        return size != seen

    def stop(self) -> None:
        """Ask it to finish its round, write a checkpoint and stop."""
        if not self.stopping:
            self._process.terminate()
            grace = LAUNCHER_GRACE_SECONDS if self._several else GRACE_SECONDS
            self._deadline = time.monotonic() + grace

    @property
    def stopping(self) -> bool:
        """Whether it was asked to stop."""
        return self._deadline < math.inf

    def fault(self) -> str | None:
        """Why a process that has ended failed; None for one that did not."""
        code = self._process.exitcode or 0
        said = code == 2 or (code == 1 and self._several)  # torchrun makes 1 of a worker's 2
        content = self.log.read_bytes()[self._log_begins :] if said else b""
        lines = content.decode(errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        end = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return errors[-1] if errors else f"{end}, see {self.log}" if code else None


def _train(module: str, words: Sequence[str], run_dir: Path, log: Path, num_processes: int) -> None:
    """Train in the new process, or become the launcher of the workers that do.

    It is stopped when the sweep dies, however it dies (Linux's PR_SET_PDEATHSIG), but not by what a terminal
    sends to the sweep, which stops its trials itself. Where the sweep has used CUDA after all, which a fork
    cannot do then, the trial gets a new interpreter.
    """
    os.setsid()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    while run_dir.exists():  # a trial whose sweep was killed finishes its round
        try:
            with sole_owner(run_dir):
                break
        except ValueError:
            time.sleep(POLL_SECONDS)
    if num_processes > 1 or (torch.cuda._is_in_bad_fork() and torch.cuda.device_count()):
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}", "-m"]
        python = [sys.executable, "-m", *(launcher if num_processes > 1 else [])]
        os.execv(sys.executable, [*python, module, *words])
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.exit(run(importlib.import_module(module).main, words))
