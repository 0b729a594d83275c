"""Run FLAIR's training command on a disk of so many bytes that this process alone sees.

    small_disk DISK SIZE DIRECTORY ARGUMENTS...

``DISK`` is an empty folder, on which the disk is mounted. What the run has written there is copied to
``DIRECTORY`` at the end.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pfl_ext as pfl_ext  # before pfl, see there

# isort: split
from benchmarks.flair.train import main
from dataset.cli import run
from tests.benchmarks.sparing import sparingly

NO_MOUNTS = 99
"""Exit code where this machine allows no private mounts."""
OWN_USERS_AND_MOUNTS = 0x10000000 | 0x00020000
"""Linux's CLONE_NEWUSER and CLONE_NEWNS."""


def on_a_small_disk(disk: Path, size: str, saved: Path, argv: Sequence[str]) -> int:
    """Mount, train and copy; the exit code."""
    ids = {"setgroups": "deny", "uid_map": f"0 {os.getuid()} 1", "gid_map": f"0 {os.getgid()} 1"}
    if ctypes.CDLL(None).unshare(OWN_USERS_AND_MOUNTS):
        return NO_MOUNTS
    for name, content in ids.items():
        Path("/proc/self", name).write_text(content)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(disk)]
    if subprocess.run(mount, check=False).returncode:
        return NO_MOUNTS
    with sparingly(), mock.patch("benchmarks.core.disk.free", return_value=1 << 40):  # others fill it later
        code = run(main, [*argv, f"--run_dir={disk / 'run'}"])
    shutil.copytree(disk / "run", saved)
    return code


if __name__ == "__main__":
    sys.exit(on_a_small_disk(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:]))
