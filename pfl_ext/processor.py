"""The processor, and the folder for what is built for it; found without torch."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path


def processor_model() -> str:
    """The processor's name, as the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def processor() -> str:
    """A description of the processor, on which ``-march=native`` depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    kept = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return platform.machine() + "".join(dict.fromkeys(kept))


def cache_folder() -> Path | None:
    """The folder in which compiled layers, Horovod's wheel and the engine's choices are kept for runs of
    this user to come; None where there is no home folder."""
    with contextlib.suppress(RuntimeError):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pfl_ext"
    return None
