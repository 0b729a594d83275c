"""How much memory this machine has, for what is refused before it is asked for."""

from __future__ import annotations

import os


def physical_memory() -> int:
    """Bytes of main memory, in use or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
