"""Ends the job on every worker, with a message that names the culprit, if a worker dies or is stuck.

Each worker has a thread that writes a sign of life to a store which all can reach. The thread also watches
the worker before it in the ring, and checks whether a fault was reported. Within ``timeout`` it notices

* a worker that is gone, or stopped (for example by SIGSTOP): its signs of life stop, and the next worker in
  the ring reports that;
* a worker that does nothing while the others wait for it: its main thread's Python stack does not change and
  the process uses almost no CPU. A user's local training may take as long as it needs.
* a worker that ends with an error, which it reports itself.

Then every worker prints that one line and exits, with a non-zero code, from within the thread, since its main
thread may wait in a reduction that will never complete. Files are written atomically, so those on disk stay
complete. Collectives alone do not do this (horovod issue 1442, pytorch issue 97191): they wait, or fail
without naming a worker.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

IDLE = 0.02
"""Share of one core. A process that uses less, and whose main thread does not move, counts as stuck."""
LEAVE_S = 5.0  # seconds for an orderly exit after a worker's own error
EXIT_CODE = 2


class Watchdog:
    """The thread of one worker.

    Args:
        store: a torch ``Store`` that only this thread uses.
        names: the workers' names by rank.
        timeout: seconds of silence after which a worker counts as lost.
        end_process: ends the process with this exit code, from a thread that is not the main one. The
            watchdog's thread is over when this returns.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        names: list[str],
        timeout: float,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._store, self._rank, self._names, self._timeout = store, rank, names, timeout
        self._end_process = end_process
        self._interval = min(1.0, timeout / 10)
        self._before = (rank - 1) % len(names)
        self._waiting, self._stop, self._own_fault = False, threading.Event(), False
        self._main = threading.main_thread().ident
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the watchdog's thread and report nothing."""
        self._stop.set()
        self._thread.join()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """In this context the main thread may stand still, because it waits for the others."""
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False

    def report(self, fault: str) -> None:
        """Report to the others that this worker ends, and why; exit soon, whatever the main thread does."""
        self._own_fault = True
        with contextlib.suppress(RuntimeError):
            self._store.set("fault", f"{self._names[self._rank]}: {fault}")

    def linger(self) -> None:
        """Wait after a main thread's failed reduction: watchdogs find who is lost and end this process."""
        with self.waiting():
            time.sleep(2 * self._timeout)

    def _watch(self) -> None:
        beat, stack, moved, cpu = 0, 0, time.monotonic(), time.process_time()
        heard, heard_at = b"", time.monotonic()
        while not self._stop.wait(self._interval):
            if self._own_fault:
                time.sleep(LEAVE_S)
                self._end_process(EXIT_CODE)
                return
            now, last, stack = time.monotonic(), stack, self._stack()
            if stack != last or self._waiting or time.process_time() - cpu > IDLE * self._timeout:
                moved, cpu = now, time.process_time()
            try:
                if now - moved > self._timeout:
                    self._store.set("fault", self._lost(self._rank, "has made no progress"))
                beat += 1
                self._store.set(f"beat/{self._rank}", str(beat))
                word = self._store.get(f"beat/{self._before}") if self._has(f"beat/{self._before}") else b""
                if word != heard:
                    heard, heard_at = word, now
                elif now - heard_at > self._timeout and not self._has("fault"):
                    self._store.set("fault", self._lost(self._before, "has not been heard of"))
                if self._has("fault"):
                    self._leave(self._store.get("fault").decode())
                    return
            except RuntimeError as broken:  # the store is with worker 0 or its launcher
                if not self._stop.is_set():
                    self._leave(f"{self._names[0]} or its launcher is gone ({str(broken).splitlines()[0]})")
                return

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _lost(self, rank: int, what: str) -> str:
        return f"{self._names[rank]} {what} for {self._timeout:g} s"

    def _stack(self) -> int:
        """A number that changes when the main thread proceeds."""
        frame = sys._current_frames().get(self._main or 0)
        places = []
        while frame is not None:
            places.append((id(frame), frame.f_lasti))
            frame = frame.f_back
        return hash(tuple(places))

    def _leave(self, fault: str) -> None:
        line = " ".join(fault.split())
        remedy = "all workers stop; run the same command again to continue from the last checkpoint"
        os.write(2, f"\nerror: {line}; {remedy}\n".encode())  # a progress bar may be open
        self._end_process(EXIT_CODE)
