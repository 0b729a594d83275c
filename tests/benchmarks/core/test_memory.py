"""Freed memory stays with the process."""

from __future__ import annotations

import ctypes
import resource

import pytest
import torch

from benchmarks.core.memory import keep_freed_memory

SIZE = 256 << 20


def faults() -> int:
    """How often the system has given this process pages."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_a_large_block_that_was_freed_is_not_given_back_to_the_system() -> None:
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("this C library is not glibc")
    keep_freed_memory()
    for _ in range(20):  # glibc looks for a little more than an aligned block has, until it has such a hole
        torch.ones(SIZE, dtype=torch.uint8)
    before = faults()
    for _ in range(3):
        torch.ones(SIZE, dtype=torch.uint8)
    assert faults() - before < SIZE // (2 << 20), "not one for each huge page of a single pass"
