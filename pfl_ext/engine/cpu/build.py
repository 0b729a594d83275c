"""The shared library of the compiled layers, built on the machine where it runs.

The machine's C++ compiler compiles it once, in seconds, into the user's cache folder. Its name holds a
fingerprint of its inputs (sources, compiler and version, flags, processor) and a checksum of the file itself:
a damaged file is compiled again instead of loaded. ctypes loads the library, so the compiler needs no headers
of torch or Python.

torch's own loader (``torch.utils.cpp_extension.load``, torch 2.15) was tried instead. It does not check the
library before loading it: with one byte changed in the cache, the changed function ran; a file of garbage
raised an OSError and was not built again. Its cache key leaves out the compiler's version. It raises without
ninja, and without a compiler its message has six lines. Only the call of the compiler could be used, and that
is one line.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dataset.files import file_digest, locked, write_bytes
from pfl_ext.processor import cache_folder, processor

SOURCES = Path(__file__).parent
WAIT_SECONDS = 600.0
"""Longest wait for another process that compiles; it may have been suspended."""
THREADED = "-fopenmp"  # a compiler that does not know this flag builds for one thread
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")


class Unavailable(Exception):
    """The compiled layers cannot be used; the message is the reason, in one line."""


def compiler() -> str | None:
    """The C++ compiler to use: the one named by CXX, or else the first of the usual names that exists."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++") or shutil.which("c++")


def compiled() -> Path:
    """The path of the shared library for this machine, which is compiled unless it exists.

    Raises:
        Unavailable: when there is no compiler, or it fails.
    """
    program = compiler()
    if program is None:
        raise Unavailable("no C++ compiler (g++ or clang++) was found")
    if (folder := cache_folder()) is None:
        raise Unavailable("there is no home folder to keep them in; set XDG_CACHE_HOME")
    try:
        texts = (
            path.read_text(encoding="utf-8")
            for path in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")])
        )
        version = _run([program, "--version"]).stdout
        identity = "\n".join([*texts, program, version, *FLAGS, processor()])
        name = f"cpu-kernels-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
        if (path := _found(folder, name)) is None:
            folder.mkdir(parents=True, exist_ok=True)
            path = _one_builds(program, folder, name)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"{program} could not be used ({error})") from error
    return path


def _one_builds(program: str, folder: Path, name: str) -> Path:
    """Compile the library, or wait for the process that does; where it fails, those that waited fail, too."""
    busy = "another process compiles layers for this processor: waiting for it"
    failure = folder / f".{name}.failed"
    before = _version(failure)
    try:
        with locked(folder / f".{name}.lock", busy, wait=WAIT_SECONDS):
            if (path := _found(folder, name)) is not None:
                return path
            if _version(failure) not in (None, before):
                raise Unavailable(failure.read_text(encoding="utf-8"))
            try:
                return _built(program, folder, name)
            except (Unavailable, OSError, subprocess.SubprocessError) as error:
                write_bytes(failure, f"{program} failed in another process ({error})".encode())
                raise
    except TimeoutError:  # a process that was suspended
        return _found(folder, name) or _built(program, folder, name)


def _version(path: Path) -> tuple[int, int] | None:
    """What differs after a file was replaced, whatever the clock says; None where there is no file."""
    with contextlib.suppress(FileNotFoundError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    return None


def _found(folder: Path, name: str) -> Path | None:
    """The library of this name whose content is the one that its name says."""
    paths = sorted(folder.glob(f"{name}-*.so"))
    return next((path for path in paths if path.stem == f"{name}-{_checksum(path)}"), None)


def _built(program: str, folder: Path, name: str) -> Path:
    """Compile the library."""
    print("compiling layers for this processor: about ten seconds, only once", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        compiled = Path(place) / "made.so"
        command = [program, *FLAGS, "-shared", "-fPIC", str(SOURCES / "kernels.cpp"), "-o", str(compiled)]
        done = _run([*command, THREADED])
        if done.returncode:
            done = _run(command)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line]
            raise Unavailable(f"{program} failed: {(lines or ['no reason given'])[0][:200]}")
        path = folder / f"{name}-{_checksum(compiled)}.so"
        os.replace(compiled, path)
    return path


def _checksum(path: Path) -> str:
    return file_digest(path)[:16]


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300)
