"""How the C library hands memory out: what a pass of a network has freed stays for the next pass."""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Names of `mallopt`: ``man mallopt``."""
LARGE = (1 << 31) - 1  # bytes


def keep_freed_memory() -> None:
    """Have glibc keep large blocks that were freed; other C libraries are left as they are.

    By itself glibc gives each block of more than 32 MB back to the system when it is freed, and the system
    clears every page of the next one. The maps of EfficientNet-Lite0 for 128 images of 128 pixels are larger
    than that, and clearing them took two thirds of a pass.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # no shared C library, or not glibc
        return
    for name in (MMAP_THRESHOLD, TRIM_THRESHOLD):
        mallopt(name, LARGE)
