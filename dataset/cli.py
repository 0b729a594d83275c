"""How every command of the project ends.

0: done. 2: one line, ``error: ...``. 75: a signal stopped it, and the same command goes on. 130: interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from dataset.signals import RESUMABLE, Stopped, raised

MAX_LINE = 1600


def run(main: Callable[[Sequence[str]], None], argv: Sequence[str] | None = None) -> int:
    """Call ``main(argv)``; turn a user's mistake (ValueError, OSError, too little memory) into one line and
    exit code 2, and SIGTERM, SIGINT or SIGUSR1 into one line and exit code 75.

    Anything else is a defect of ours and keeps its traceback.
    """
    try:
        try:
            with raised():
                main(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()  # so that the line of the end is the last, also where both go to one file
    except Stopped as stop:
        print(f"{stop}; the same command goes on from here", file=sys.stderr)
        return RESUMABLE
    except MemoryError as mistake:
        print(f"error: there is too little memory for this: {_line(str(mistake))}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as mistake:
        print("error: " + _line(str(mistake)), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0


def _line(text: str) -> str:
    """One line of bounded length, whatever a damaged file has put into it."""
    line = " ".join(text.split())
    line = "".join(c if c.isprintable() else "?" for c in line)
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE // 2]} ... {line[-MAX_LINE // 2 :]}"
