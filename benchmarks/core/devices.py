"""Where a run computes: threads, device, and the connection to other workers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from benchmarks.core.config.sections import Runtime
from pfl_ext.workers.distributed import connected

PFL_DEVICE = "PFL_PYTORCH_DEVICE"
"""The environment variable from which pfl takes its device."""


@contextlib.contextmanager
def pfl_device(name: str) -> Iterator[None]:
    """Have pfl use this device within; ``auto`` leaves the choice to pfl.

    Raises:
        ValueError: for a device that torch does not know or that this machine lacks.
    """
    before = os.environ.get(PFL_DEVICE)
    try:
        if name != "auto":
            torch.empty(0, device=name)
            os.environ[PFL_DEVICE] = name
    except (RuntimeError, AssertionError) as fault:
        raise ValueError(f"runtime.device is {name!r}: {str(fault).splitlines()[0]}") from fault
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(PFL_DEVICE, None)
        else:
            os.environ[PFL_DEVICE] = before


@contextlib.contextmanager
def started(runtime: Runtime) -> Iterator[None]:
    """Threads, device and the connection to the other workers, if a launcher started some."""
    if runtime.threads is not None:
        torch.set_num_threads(runtime.threads)
    workers = connected(
        runtime.device,
        threads=runtime.threads,
        timeout=runtime.worker_timeout_s,
        compress=runtime.reduce == "bf16",
    )
    with workers as device, pfl_device(device):
        yield
