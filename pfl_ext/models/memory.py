"""The memory of this machine, so that runs which would need more are refused before they start."""

from __future__ import annotations

import os


def physical_memory() -> int:
    """Bytes of main memory, in use or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def refuse_beyond_memory(need: float, what: str, instead: str) -> None:
    """Refuse a run that needs more memory than this machine has.

    Args:
        need: bytes.
        what: what takes them, as the beginning of a sentence.
        instead: what to do instead.

    Raises:
        ValueError: one line.
    """
    there = physical_memory()
    if need > there:
        raise ValueError(
            f"{what}, which needs up to {need / 1e9:,.1f} GB of memory, but there are only "
            f"{there / 1e9:,.1f} GB: {instead}"
        )
