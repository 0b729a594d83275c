"""The shared library of the compiled layers, made on the machine where it runs.

It is compiled once by the machine's C++ compiler (seconds), into the user's cache folder, under a name that
holds the fingerprints of what it was made of (sources, compiler and its version, flags, processor) and of
itself: a file that was damaged is not loaded but compiled again.
The library is loaded by ctypes, so the compiler needs no headers of torch or Python.

torch's own loader (``torch.utils.cpp_extension.load``, torch 2.15) was tried in its place. It does not look
at the library before it loads it: with one byte changed in the cache, the changed function ran; a file of
garbage ended in an OSError and was not built again. Its cache key leaves out the compiler's version. Without
ninja it raises, and without a compiler its reason has six lines. What would remain of it is the call of the
compiler, which is one line.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dataset.files import file_digest

SOURCES = Path(__file__).parent
THREADED = "-fopenmp"  # without it, where a compiler does not know it, all work is done on one thread
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")


class Unavailable(Exception):
    """The reason, in one line."""


def compiler() -> str | None:
    """The C++ compiler that would be used: the one that CXX names, or else one of the usual names."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++") or shutil.which("c++")


def cache_folder() -> Path:
    """Where the library is kept.

    Raises:
        RuntimeError: where there is no home folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pfl_ext"


def compiled() -> Path:
    """The shared library for this machine, compiled unless it is there.

    Raises:
        Unavailable: without a compiler, or if it fails.
    """
    program = compiler()
    if program is None:
        raise Unavailable("no C++ compiler (g++ or clang++) was found")
    try:
        folder = cache_folder()
    except RuntimeError as error:
        raise Unavailable("there is no home folder to keep them in; set XDG_CACHE_HOME") from error
    try:
        texts = (path.read_text() for path in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]))
        version = _run([program, "--version"]).stdout
        identity = "\n".join([*texts, program, version, *FLAGS, processor()])
        name = f"cpu-kernels-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
        for path in sorted(folder.glob(f"{name}-*.so")):
            if path.stem == f"{name}-{_checksum(path)}":
                return path
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            print("compiling layers for this processor: some ten seconds, once", file=sys.stderr, flush=True)
            made = Path(place) / "made.so"
            command = [program, *FLAGS, "-shared", "-fPIC", str(SOURCES / "kernels.cpp"), "-o", str(made)]
            done = _run([*command, THREADED])
            if done.returncode:
                done = _run(command)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line]
                raise Unavailable(f"{program} failed: {(lines or ['no reason given'])[0][:200]}")
            path = folder / f"{name}-{_checksum(made)}.so"
            os.replace(made, path)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"{program} could not be used ({error})") from error
    return path


def _checksum(path: Path) -> str:
    return file_digest(path)[:16]


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def processor() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    kept = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return platform.machine() + "".join(dict.fromkeys(kept))
