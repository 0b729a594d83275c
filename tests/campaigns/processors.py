"""The suite as on other processors: with older instructions, without a compiler, with one core.

    python -m tests.campaigns.processors
    python -m tests.campaigns.processors --only default no-compiler -- tests/pfl_ext -m "not slow"

Each variation is a run of pytest with its environment, one after another. A processor without AVX-512 still
takes the paths of older ones, which round otherwise. What follows ``--`` goes to pytest. At the end is a
table of variation, seconds and pytest's last line. The exit code is 1 if a variation failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPILERS = ("c++", "g++", "clang++", "gcc", "cc", "clang")
VARIATIONS: dict[str, dict[str, str]] = {
    "as-it-is": {},
    "default": {"ATEN_CPU_CAPABILITY": "default"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "libraries-sse4": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "libraries-avx2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "no-compiler": {},
    "one-core": {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
}


def path_without_compilers(folder: Path) -> str:
    """A PATH to links to all commands of this one's but compilers, whatever their version."""
    for directory in reversed(os.environ["PATH"].split(os.pathsep)):
        for command in Path(directory).glob("*"):
            if not command.name.rpartition("-linux-gnu-")[2].startswith(COMPILERS):
                link = folder / command.name
                link.unlink(missing_ok=True)
                link.symlink_to(command.absolute())
    return str(folder)


def run(name: str, words: list[str]) -> tuple[int, str]:
    """pytest's exit code and last line under a variation."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **VARIATIONS[name]}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
        if name == "no-compiler":
            environment["PATH"] = path_without_compilers(Path(folder))
            environment["XDG_CACHE_HOME"] = f"{folder}/cache"  # nothing compiled earlier
            environment.pop("CXX", None)
        if name == "one-core":
            command = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), *command]
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            last = ""
            for line in process.stdout:
                sys.stdout.write(line)
                last = line.strip() or last
        return process.returncode, last


def main() -> int:
    """All variations that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=VARIATIONS, default=list(VARIATIONS))
    parser.add_argument("pytest", nargs="*", help="words for pytest, after --")
    given = parser.parse_args()
    if "one-core" in given.only and shutil.which("taskset") is None:
        parser.error("one-core needs the command taskset (package util-linux); leave it out with --only")
    rows = []
    for name in given.only:
        started = time.monotonic()
        code, last = run(name, given.pytest or ["-n", "auto", "--dist", "loadgroup"])
        rows.append((name, code, time.monotonic() - started, last))
    for name, code, seconds, last in rows:
        print(f"{name:15} {'failed' if code else 'passed'} {seconds:6.0f} s  {last}")
    return int(any(code for _, code, _, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
