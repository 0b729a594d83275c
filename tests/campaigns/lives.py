"""Processes that are killed with signal 9, at a moment in time or at a place in the code.

A life is a fork of the campaign, which has torch and the rest loaded already: it costs a tenth of a second
where a new interpreter costs five, and dies just as dead.
"""

from __future__ import annotations

import functools
import importlib
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def found(function: str) -> tuple[Any, str]:
    """Where ``module:Class.name`` lies, and its last name."""
    module, _, dotted = function.partition(":")
    owner: Any = importlib.import_module(module)
    *path, name = dotted.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, name


START = "start-up"


class Phases:
    """Which part of its work a process is in, noted in shared memory, which outlives the process.

    :param functions: of each part, ``module:Class.name``; a part within another counts, not the other.
    :param path: of memory shared by processes that are not forked from this one.
    """

    def __init__(self, functions: Mapping[str, Sequence[str]], path: Path | None = None) -> None:
        self._functions = functions
        if path is None:
            self._now = mmap.mmap(-1, 1)
        else:
            with path.open("r+b" if path.exists() else "w+b") as file:
                file.truncate(1)
                self._now = mmap.mmap(file.fileno(), 1)

    def reset(self) -> None:
        """Nothing has begun."""
        self._now[0] = 0

    def begin(self) -> None:
        """Have the functions of this process say when they are called."""
        self.reset()
        for number, functions in enumerate(self._functions.values(), 1):
            for function in functions:
                owner, name = found(function)
                setattr(owner, name, self._telling(getattr(owner, name), number))

    def _telling(self, real: Callable[..., Any], number: int) -> Callable[..., Any]:
        @functools.wraps(real)
        def telling(*args: Any, **kwargs: Any) -> Any:
            before, self._now[0] = self._now[0], number
            try:
                return real(*args, **kwargs)
            finally:
                self._now[0] = before

        return telling

    @property
    def last(self) -> str:
        """Where the process is, or where it died."""
        return [START, *self._functions][self._now[0]]


@dataclass(frozen=True)
class After:
    """Die so many seconds after birth."""

    seconds: float

    def __str__(self) -> str:
        return "at a random time"


@dataclass(frozen=True)
class At:
    """Die at the n-th call of a function, ``module:Class.name``, say, before or after its work."""

    function: str
    call: int
    before: bool

    def __str__(self) -> str:
        return f"{'before' if self.before else 'after'} {self.function.split(':')[1]}"

    def arm(self, tell: Callable[[], object] = lambda: None) -> None:
        """Put the trap into this process; ``tell`` is called at the moment of death."""
        owner, name = found(self.function)
        real, calls = getattr(owner, name), 0

        def trapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == self.call and self.before:
                die()
            result = real(*args, **kwargs)
            if calls == self.call:
                die()
            return result

        def die() -> None:
            tell()
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, name, trapped)


def live(
    work: Callable[[], int], death: After | At | None, log: Path, phases: Phases | None = None
) -> int | None:
    """Run ``work`` in a process of its own; its exit code, or None if it was killed before its end.

    :param phases: where the process notes what it is at.
    :raises RuntimeError: when it ends by anything but an exit or this death, with the end of its log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for number, name in ((1, "stdout"), (2, "stderr")):  # which a test may have replaced
                os.dup2(descriptor, number)
                setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", buffering=1, closefd=False))
            if phases is not None:
                phases.begin()
            if isinstance(death, At):
                death.arm()
            code = work()
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    if isinstance(death, After):
        end = time.monotonic() + death.seconds
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.002)
        else:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
    else:
        _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and death is not None:
        return None
    if not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 70:
        raise RuntimeError(f"a process ended with {status}: ...{log.read_text()[-3000:]}")
    return os.WEXITSTATUS(status)


def as_two_workers(work: Callable[[], int]) -> int:
    """Do ``work`` in this process and in a fork of it, whom torch.distributed connects; an exit code."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    other = os.fork()
    rank = str(int(other == 0))
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    code = work()
    return code if other == 0 else code or os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])
