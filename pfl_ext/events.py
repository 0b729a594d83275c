"""Lets pfl, which uses an asyncio event loop, run in a thread that has a running loop, as in Jupyter."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def no_running_loop() -> Iterator[None]:
    """Set the thread's running event loop aside, if there is one. In this context another loop can run."""
    running = asyncio._get_running_loop()
    if running is None:
        yield
        return
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        asyncio._set_running_loop(None)
        asyncio.set_event_loop(loop)
        try:
            yield
        finally:
            asyncio.set_event_loop(running)
            asyncio._set_running_loop(running)
