"""The memory of this machine, so that runs which would need more are refused before they start."""

from __future__ import annotations

import os


def physical_memory() -> int:
    """Bytes of main memory, in use or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
