"""Command lines of ``--key value`` pairs."""

from __future__ import annotations

from collections.abc import Sequence


def arguments(argv: Sequence[str]) -> dict[str, str]:
    """``--key value`` and ``--key=value`` pairs, the last of each key.

    :raises ValueError: for anything else.
    """
    out: dict[str, str] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key:
            raise ValueError(f"cannot read the argument {word!r}: write --key value or --key=value")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"--{key} needs a value: write --{key} value or --{key}=value")
            value = rest.pop(0)
        out[key] = value
    return out
