"""A command's own process: it looks for no garbage while it imports, and does not clear up before it ends.

Of the seconds that a command takes to start and end, these two are four in ten: each search goes through all
that has been imported so far, and at its end Python takes torch and all else apart, object by object.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys

MANY = 100_000
"""Objects that are made before the next search for garbage, while a command imports."""
_often = list[tuple[int, int, int]]()
"""The thresholds until `begin`."""
_codes = list[int]()
"""The exit code, when it is known."""


def begin() -> None:
    """Called before the imports, in a process that becomes one command."""
    if "torch" in sys.modules:
        return  # too late
    _often.append(gc.get_threshold())
    gc.set_threshold(MANY, 100, 100)
    atexit.register(_leave)  # what is registered first is called last


def imported() -> None:
    """From here on garbage is looked for as ever, though not among what is imported; after `begin` only."""
    if _often:
        gc.freeze()
        gc.set_threshold(*_often.pop())


def ends(code: int | None) -> None:
    """The exit code of this process, or None while nobody knows."""
    _codes[:] = [] if code is None else [code]


def _leave() -> None:
    """End at once. Without a code, as after a defect, or where output cannot be written, Python ends."""
    if _codes:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):  # its reader is gone, or it is closed
            pass
        else:
            os._exit(_codes[0])
    gc.unfreeze()  # or libraries report what is left at the end as leaks
