"""Build and install Horovod 0.28.1, its last release, against the torch of this environment.

    make horovod            (or: python -m pfl_ext.workers.build_horovod)

The published source does not build with a current torch. Only the following is repaired, in the order of
`REPAIRS`:

1. C++ standard. Horovod asks for C++14 in two places; torch's headers need C++17 since 2.1 and C++20 since
   2.10. Upstream's change (horovod pull request 3998) was never released.
2. CUDA. Horovod's `FindPytorch.cmake` builds CUDA kernels whenever torch has CUDA and an nvcc is found, and
   fails if that is not a complete toolkit. It gets the toolkit that this script found instead (`cuda_home`).
   Without one Horovod is built for CPU with Gloo, and `pfl_ext.workers.distributed` computes sums on the CPU.
3. ``distutils``, which Python 3.12 no longer has: two uses, replaced by ``sysconfig`` and ``shutil``.
4. Debug information, which nobody reads here and which is a third of the compiler's work, is left out.
5. Without CUDA, Horovod's own 40 sources are compiled eight at a time, as one (CMake's unity build): each of
   them alone reads the same headers. That saves 40 % of the compiler's work. With CUDA it is not tried.

It needs a C++ compiler and make; cmake is installed by pip if it is missing. It takes 2 to 6 minutes on two
cores. A wheel built for CPU is kept in the user's cache, so that the next environment needs seconds. At the
end an all-reduce over two processes under ``horovodrun`` proves that it works here.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dataset.files import file_digest, write_bytes
from pfl_ext.processor import cache_folder, processor

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
CMAKE = "cmake==3.31.6"
BUILDING = ("setuptools<=84.2.1", "wheel<=0.45.1")  # newer ones have not been tried
RUNTIME = ("cloudpickle", "psutil", "cffi", "packaging", "PyYAML")
CXX_STANDARD = "20"

REPAIRS: tuple[tuple[str, str, str], ...] = (
    ("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", f"set(CMAKE_CXX_STANDARD {CXX_STANDARD})"),
    (
        "horovod/torch/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        f"set(CMAKE_CXX_STANDARD {CXX_STANDARD})\nset(CMAKE_UNITY_BUILD {{together}})",
    ),
    (
        "cmake/Modules/FindPytorch.cmake",
        "print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)",
        "print({cuda})",
    ),
    (
        "horovod/torch/CMakeLists.txt",
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_path('include'))",
    ),
    (
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable",
        "from shutil import which as find_executable",
    ),
    ("setup.py", "else 'RelWithDebInfo'", "else 'Release'"),
)

PROOF = """
import horovod.torch as hvd, torch
hvd.init()
total = hvd.allreduce(torch.full((3,), hvd.rank() + 1.0), op=hvd.Sum)
assert hvd.size() == 2 and total.tolist() == [3.0] * 3, total
hvd.shutdown()
"""


def run(
    command: Sequence[str], what: str, env: Mapping[str, str] | None = None, log: Path | None = None
) -> None:
    """Run a command to its end.

    Raises:
        ValueError: with what was being done, the last lines of the output, and the path of all output.
    """
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if log is not None:
        log.write_text(done.stdout, encoding="utf-8")
    if done.returncode:
        faults = [line for line in done.stdout.splitlines() if "error" in line.lower()] or ["no word of why"]
        where = f"; all of its output is in {log}" if log else ""
        raise ValueError(f"{what} failed: {' | '.join(faults[:3])}{where}")


def pip(*words: str) -> list[str]:
    """A pip command of this environment."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *words]


def cuda_home(nvcc: str | None, torch_cuda: str | None) -> Path | None:
    """The toolkit's folder if it is complete and of torch's CUDA release; else None, to build for CPU.

    It is complete if it has what Horovod needs: nvcc, the runtime's header and library, and a header of NCCL,
    from the system or from torch's nvidia-nccl package. ``nvcc`` may be a script that calls it.
    """
    if nvcc is None or torch_cuda is None:
        return None
    steps = subprocess.run(
        [nvcc, "--dryrun", "-", "-x", "cu"], input="", capture_output=True, text=True
    ).stderr
    tops = [line.partition("TOP=")[2].strip() for line in steps.splitlines() if "TOP=" in line]
    home = Path(tops[0]).resolve() if tops else Path(nvcc).resolve().parent.parent
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    if f"release {torch_cuda}" not in version:
        return None
    has_runtime = (home / "include/cuda_runtime.h").is_file() and any(home.glob("lib*/libcudart*"))
    has_nccl = nccl_home() is not None or Path("/usr/include/nccl.h").is_file()
    return home if has_runtime and has_nccl else None


def nccl_home() -> Path | None:
    """The folder of torch's own NCCL package, if it has the header."""
    found = importlib.util.find_spec("nvidia")
    places = list(found.submodule_search_locations or []) if found else []
    return next((Path(p) / "nccl" for p in places if (Path(p) / "nccl/include/nccl.h").is_file()), None)


def nccl_to_link(package: Path, folder: Path) -> Path:
    """Provide torch's NCCL for a linker, since the package has ``libnccl.so.2`` but no ``libnccl.so``.

    Args:
        package: the result of `nccl_home`.
        folder: gets links to the header and the library. Horovod's library refers to it, so it must stay.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "lib").mkdir(parents=True)
    (folder / "include").symlink_to(package / "include")
    for name in ("libnccl.so", "libnccl.so.2"):
        (folder / "lib" / name).symlink_to(package / "lib" / "libnccl.so.2")
    return folder


def build_environment(cuda: Path | None) -> dict[str, str]:
    """The environment variables that control the build of Horovod's setup.py."""
    out = {
        **os.environ,
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses the older one that Gloo names
        "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",  # by itself: eight compilers, 1 GB each
    }
    own_cmake = Path(sys.executable).parent / "cmake"
    if shutil.which("cmake") is None:
        out["HOROVOD_CMAKE"] = str(own_cmake)
    if cuda is not None:
        out |= {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_CUDA_HOME": str(cuda), "CUDA_HOME": str(cuda)}
        nccl = nccl_home()
        if nccl is not None:
            home = nccl_to_link(nccl, Path(sys.prefix) / "share" / "nccl")
            out |= {"HOROVOD_NCCL_HOME": str(home), "HOROVOD_NCCL_LINK": "SHARED"}
    return out


def check_tools() -> None:
    """Check that there are a compiler and make; install cmake if it is missing.

    Raises:
        ValueError: with the missing tool and the command that installs it.
    """
    for names, package in ((("c++", "g++", "clang++"), "g++"), (("make", "gmake"), "make")):
        if not any(map(shutil.which, names)):
            raise ValueError(
                f"Horovod is built from source and there is no {names[0]} here: apt-get install {package}, "
                "or train with LAUNCHER=torchrun, which needs no compiler"
            )
    if shutil.which("cmake") is None:
        run(pip("install", "--quiet", CMAKE), "installing cmake by pip")


def fetch(folder: Path) -> Path:
    """Download, check and unpack the published source.

    Raises:
        ValueError: when PyPI cannot be reached, or the checksum differs from the published one.
    """
    words = ("download", "--no-deps", "--no-build-isolation", "--no-binary=:all:", f"horovod=={VERSION}")
    run(pip(*words, "--dest", str(folder)), "downloading Horovod's source from PyPI")
    archive = folder / f"horovod-{VERSION}.tar.gz"
    if file_digest(archive) != SHA256:
        raise ValueError(
            f"{archive.name} is not the published file (its SHA-256 differs): check the pip index"
        )
    with tarfile.open(archive) as tar:
        # Python 3.11.2, as in Debian 12, knows no filters; what is unpacked has the checksum above.
        safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        tar.extractall(folder, **safely)
    return folder / f"horovod-{VERSION}"


def repair(source: Path, cuda: Path | None) -> None:
    """Apply `REPAIRS`; each must find exactly the text that it replaces."""
    for file, old, new in REPAIRS:
        path = source / file
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{file} holds {old!r} {text.count(old)} times"
        for name, value in (("cuda", cuda is not None), ("together", cuda is None)):
            new = new.replace(f"{{{name}}}", str(value))
        path.write_text(text.replace(old, new), encoding="utf-8")


def prove() -> None:
    """Run an all-reduce over two processes under horovodrun."""
    horovodrun = Path(sys.executable).parent / "horovodrun"
    command = [str(horovodrun), "--gloo", "-np", "2", sys.executable, "-c", PROOF]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    run(command, "the all-reduce over two processes under horovodrun", {**os.environ, "PATH": path})


def kept_wheels(torch_version: str) -> Path | None:
    """The folder for the wheel built for CPU here by these versions; None where there is no home folder.

    Only a wheel for CPU is kept: one for CUDA names files of its own environment.
    """
    parts = (Path(__file__).read_text(encoding="utf-8"), torch_version, sys.version, processor())
    name = f"horovod-{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:16]}"
    return cache / name if (cache := cache_folder()) else None


def installed(kept: Path) -> bool:
    """Install and prove the wheel that was kept, if there is one; whether it works here."""
    for wheel in kept.glob("*.whl"):
        try:
            run(pip("install", "--quiet", *RUNTIME), "installing what Horovod needs")
            run(pip("install", "--no-deps", str(wheel)), f"installing {wheel}")
            prove()
        except ValueError as reason:
            print(f"{wheel} is built again: {reason}", file=sys.stderr)
        else:
            print(f"Horovod {VERSION} works: {wheel} was built here before, for the same torch")
            return True
    return False


def build(cuda: Path | None, kept: Path | None, torch_version: str) -> None:
    """Build and install Horovod, and keep the wheel in ``kept``."""
    check_tools()  # before anything is installed
    run(pip("install", "--quiet", *BUILDING, *RUNTIME), "installing what Horovod's build needs")
    kind = f"NCCL, with {cuda}" if cuda else "Gloo on CPU (no whole CUDA toolkit of torch's release found)"
    print(f"building Horovod {VERSION} for torch {torch_version}: {kind}; some minutes", flush=True)
    log = Path(tempfile.gettempdir()) / f"horovod-build-{os.getuid()}.log"
    with tempfile.TemporaryDirectory(prefix="horovod-") as folder:
        source = fetch(Path(folder))
        repair(source, cuda)
        words = ("wheel", "--verbose", "--no-deps", "--no-build-isolation", "--wheel-dir", f"{folder}/built")
        run(pip(*words, str(source)), "building Horovod", build_environment(cuda), log)
        (wheel,) = Path(folder, "built").glob("*.whl")
        run(pip("install", "--no-deps", "--force-reinstall", str(wheel)), "installing Horovod")
        if kept:
            with contextlib.suppress(OSError):  # the next environment builds it again
                kept.mkdir(parents=True, exist_ok=True)
                write_bytes(kept / wheel.name, wheel.read_bytes())


def main(argv: Sequence[str]) -> None:
    """Build, install and prove Horovod, unless this environment has it already."""
    parser = argparse.ArgumentParser(prog="python -m pfl_ext.workers.build_horovod", description=main.__doc__)
    parser.add_argument(
        "--force", action="store_true", help="build again, after torch was changed for example"
    )
    force = parser.parse_args(argv).force
    if importlib.util.find_spec("torch") is None:
        raise ValueError("Horovod is built against torch, which is not installed here: run make setup first")
    import torch

    if force or importlib.util.find_spec("horovod") is None:
        cuda = cuda_home(shutil.which("nvcc"), torch.version.cuda)
        kept = None if cuda else kept_wheels(torch.__version__)
        if kept and not force and installed(kept):
            return
        build(cuda, kept, torch.__version__)
    prove()
    print(f"Horovod {VERSION} works: two processes under horovodrun summed a tensor")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as mistake:
        sys.exit(f"error: {mistake}")
