"""Processes that are killed with signal 9, at a moment in time or at a place in the code.

A life is a fork of the campaign, which has torch and the rest loaded already: it costs a tenth of a second
where a new interpreter costs five, and dies just as dead.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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

    def arm(self) -> None:
        """Put the trap into this process."""
        module, _, dotted = self.function.partition(":")
        owner: Any = importlib.import_module(module)
        *path, name = dotted.split(".")
        for part in path:
            owner = getattr(owner, part)
        real, calls = getattr(owner, name), 0

        def trapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == self.call and self.before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if calls == self.call:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, trapped)


def live(work: Callable[[], int], death: After | At | None, log: Path) -> int | None:
    """Run ``work`` in a process of its own; its exit code, or None if it was killed before its end.

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
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
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
