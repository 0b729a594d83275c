"""A command's own process: garbage collection is rare during its imports, and it ends without clearing up.
A signal during the imports ends it as one does later.

Collecting and clearing up take time. Each collection goes through all that was imported so far, and when
Python ends, it deletes the objects of torch and of all other modules one by one. A command with a mistake in
its words took 7.0 s of CPU time with both, and takes 4.4 s without.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What asks a command to stop."""
RESUMABLE = 75
"""Exit code (EX_TEMPFAIL of sysexits.h): a signal stopped it; the work is kept, and it can continue."""

MANY = 100_000
"""New objects before the next garbage collection, during the imports."""
_after_imports = contextlib.ExitStack()
"""What `imported` undoes: `begin` changed garbage collection, and what signals do."""
_codes = list[int]()
"""The exit code, when it is known."""


def begin() -> None:
    """To be called before the imports, in a process that runs one command."""
    if "torch" in sys.modules:
        return  # too late
    _after_imports.callback(gc.set_threshold, *gc.get_threshold())
    _after_imports.callback(gc.freeze)
    gc.set_threshold(MANY, 100, 100)
    atexit.register(_leave)  # what is registered first is called last
    for number in SIGNALS:
        _after_imports.callback(signal.signal, number, signal.signal(number, _stop))


def imported() -> None:
    """After `begin`: signals as before it, and garbage collection, but not among what was imported since."""
    _after_imports.close()


def _stop(number: int, frame: FrameType | None) -> None:
    """Say so and end: nothing is begun during the imports."""
    line = f"stopped by {signal.Signals(number).name}; run the same command again to continue\n"
    with contextlib.suppress(OSError):
        os.write(2, line.encode())
    os._exit(RESUMABLE)


def ends(code: int | None) -> None:
    """Set the exit code of this process; None: it is not known."""
    _codes[:] = [] if code is None else [code]


def _leave() -> None:
    """End at once. Without a code, or if the output cannot be written, Python ends the process as usual."""
    if _codes:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):  # its reader is gone, or it is closed
            pass
        else:
            os._exit(_codes[0])
    gc.unfreeze()  # or libraries report what is left at the end as leaks
