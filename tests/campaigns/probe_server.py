"""`dataset.store.probe` for many files: each is looked at in a fork of this small process.

A fork of the campaign, which has torch in it, costs many times as much, a new interpreter more still.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from dataset.store.probe import look

SECONDS = 20.0
ROOT = Path(__file__).parents[2]


class ProbeServer:
    """Stands in for `dataset.store.probe.probe`; starts when it is first asked.

    A fork of the process that asks has a server of its own. Questions are numbered, since the asker may have
    been stopped before it read an answer.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None
        self._asker, self._asked = os.getpid(), 0
        self._inherited = list[subprocess.Popen[str]]()

    def __call__(self, path: Path) -> None:
        """Raise ValueError if the HDF5 library crashes or hangs."""
        if self.dies_of(path):
            raise ValueError(f"{path} is damaged (the HDF5 library crashes or hangs on it); make it again")

    def dies_of(self, path: Path) -> bool:
        """Whether a process that looks at a file dies, or never ends."""
        if self._server is not None and self._asker != os.getpid():
            self._inherited.append(self._server)
            self._server = None
        if self._server is None:
            self._asker = os.getpid()
            words = [sys.executable, "-m", "tests.campaigns.probe_server"]
            self._server = subprocess.Popen(
                words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._asked += 1
        print(self._asked, path.resolve(), file=self._server.stdin, flush=True)
        answers = (line.split() for line in self._server.stdout)
        return next((answer for number, answer in answers if int(number) == self._asked), "") != "survived"

    def close(self) -> None:
        """End its process."""
        if self._server is not None:
            self._server.communicate()
            self._server = None


def survives(path: Path) -> bool:
    """Whether the library is through with a file in time, and alive."""
    child = os.fork()
    if child == 0:
        look(path)
        os._exit(0)
    end, done, status = time.monotonic() + SECONDS, 0, 0
    while not done and time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0 if done else 0.001)
    if not done:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return bool(done) and not os.WIFSIGNALED(status)


if __name__ == "__main__":
    for line in sys.stdin:
        number, _, name = line.rstrip("\n").partition(" ")
        print(number, "survived" if survives(Path(name)) else "died", flush=True)
