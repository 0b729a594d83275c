"""How every command of the project ends: 0, or one line ``error: ...`` and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence


def run(main: Callable[[Sequence[str]], None], argv: Sequence[str] | None = None) -> int:
    """Call ``main(argv)``; turn a user's mistake (ValueError, OSError) into one line and exit code 2.

    Anything else is a defect of ours and keeps its traceback.
    """
    try:
        main(sys.argv[1:] if argv is None else argv)
    except (ValueError, OSError) as mistake:
        print("error: " + " ".join(str(mistake).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0
