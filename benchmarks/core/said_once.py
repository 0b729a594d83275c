"""A mistake, or a signal, that all workers of a machine meet is said by one of them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from dataset.cli import RESUMABLE, Stopped
from pfl_ext.workers.launch import find_launch
from pfl_ext.workers.watchdog import LEAVE_S

OTHERS_S = 0.6 * LEAVE_S
"""Seconds that a worker waits before it says a mistake itself; later, its watchdog would end it."""


@contextlib.contextmanager
def said_once() -> Iterator[None]:
    """In this context, the first worker of a machine says a mistake, and its launcher then ends the others,
    who say nothing. One that is not ended says it: perhaps it alone has met this mistake."""
    try:
        yield
    except (ValueError, Stopped) as fault:
        if not find_launch(os.environ).local_rank:
            raise
        if isinstance(fault, Stopped):
            raise SystemExit(RESUMABLE) from None
        try:
            time.sleep(OTHERS_S)
        except Stopped:
            raise SystemExit(2) from None
        raise
