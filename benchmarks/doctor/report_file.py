"""The file for an issue: all that was found, without the names of users, machines and folders."""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

from benchmarks.doctor.packages import REPOSITORY

NOBODY = frozenset(("", "root", "localhost"))
"""Names that say nothing of anybody."""


def hidden() -> list[tuple[re.Pattern[str], str]]:
    """Patterns of what a report must not hold, and what stands in their place; the longest paths first."""
    paths = {
        str(Path.cwd()): "<here>",
        str(REPOSITORY): "<project>",
        sys.prefix: "<environment>",
        os.environ.get("XDG_CACHE_HOME", ""): "<cache>",
        os.environ.get("TMPDIR", ""): "<temporary>",
    }
    homes = [os.environ.get("HOME", "")]
    names = {os.environ.get(name, ""): "<user>" for name in ("USER", "LOGNAME", "SUDO_USER")}
    try:
        homes.append(str(Path.home()))
        names[getpass.getuser()] = "<user>"
    except (OSError, KeyError, RuntimeError):  # an account without a name or a home
        pass
    names[socket.gethostname()] = "<machine>"
    paths |= dict.fromkeys(homes, "~")
    found = [
        (re.compile(re.escape(path.rstrip("/")) + r"(?![\w-])"), word)
        for path, word in sorted(paths.items(), key=lambda item: -len(item[0]))
        if len(path) > 1
    ]
    found.append((re.compile(r"/(?:home|Users)/[^/\s'\":,;]+"), "~"))
    found += [
        (re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])"), word)
        for name, word in names.items()
        if name not in NOBODY
    ]
    return found


def redacted(value: Any, patterns: list[tuple[re.Pattern[str], str]] | None = None) -> Any:
    """The same tree with every text, also within lists and mappings, free of `hidden`."""
    patterns = hidden() if patterns is None else patterns
    if isinstance(value, str):
        for pattern, word in patterns:
            value = pattern.sub(word, value)
        return value
    if isinstance(value, dict):
        return {key: redacted(item, patterns) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item, patterns) for item in value]
    return value if value is None or isinstance(value, bool | int) else _number(value)


def _number(value: Any) -> Any:
    """JSON has no infinity and no NaN."""
    return value if isinstance(value, float) and abs(value) < float("inf") else str(value)
