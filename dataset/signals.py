"""SIGTERM, SIGINT and SIGUSR1 end a command in one line, at a moment of its choosing.

Slurm sends SIGTERM (or what ``--signal`` says, often SIGUSR1) before it takes a machine away. Where nothing
is lost by it, a command stops at once; within `held` it is told, finishes its step, and stops then.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

RESUMABLE = 75
"""Exit code (EX_TEMPFAIL of sysexits.h): stopped by a signal; what was done is kept, and it can go on."""


class Stopped(BaseException):
    """A signal has asked the command to stop; like KeyboardInterrupt, no ``except Exception`` holds it.

    :param detail: what is kept, for the one line that the command ends with.
    """

    def __init__(self, number: int, detail: str = "") -> None:
        self.name, self.detail = signal.Signals(number).name, detail
        super().__init__(f"stopped by {self.name}" + (f", {detail}" if detail else ""))


class Held:
    """Which signal has come while signals were held, if any."""

    def __init__(self) -> None:
        self.number: int | None = None

    def stop_if_asked(self, detail: str = "") -> None:
        """Raise `Stopped` if a signal has come: a step is done, nothing is lost."""
        if self.number is not None:
            raise Stopped(self.number, detail)


@contextmanager
def _handled(handler: object) -> Iterator[None]:
    """Have signals handled so within, in the main thread (elsewhere Python allows no handlers)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        for number in SIGNALS:
            signal.signal(number, handler)  # type: ignore[arg-type]
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def raised() -> Iterator[None]:
    """Within, a signal raises `Stopped` at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    with _handled(stop):
        yield


@contextmanager
def held(step: str) -> Iterator[Held]:
    """Within, the first signal is only noted, and `Stopped` is raised at the end; a second raises it at once.

    :param step: what is finished first, for the line on stderr.
    """
    state = Held()

    def note(number: int, frame: FrameType | None) -> None:
        if state.number is not None:
            raise Stopped(number, f"the {step} under way is lost")
        state.number = number
        name = signal.Signals(number).name
        print(f"{name}: stopping after this {step}; once more abandons it", file=sys.stderr, flush=True)

    with _handled(note):
        yield state
    state.stop_if_asked()
