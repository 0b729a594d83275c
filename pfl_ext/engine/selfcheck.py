"""Compares the engine with pfl's own loop before the first round on a GPU.

Both train a few users of the round. The weighted and clipped sums of what the users send are compared as one
vector. If the fast path fails, hangs or differs by more than rounding, the engine tries the next of `PATHS`.
After the last of them pfl's loop trains the users. Private runs clip in both, so that a path with wrong
clipping is refused.

The outcome is kept in the user's cache folder, for the same GPU, versions, code and network. Each attempt is
noted there before it starts, so that a path that ended the process is not tried again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from dataset.files import own_modules, write_json
from pfl_ext.processor import cache_folder

PATHS = ("CUDA graphs on several streams", "no CUDA graphs", "one stream", "torch's own layers")
"""From fast to slow. Each path also avoids what the paths before it avoid."""
LIMIT = 1e-3
"""Largest distance between the two sums, relative to pfl's, in float32. In a shorter type, twice the distance
of pfl's own sum from its float32 sum is added, since two such computations may differ by that."""
CPU_LIMIT = 5e-3
"""`LIMIT` on a CPU. Compiled convolutions have larger rounding errors than torch's, so more ReLUs switch:
6e-4 was seen with ResNet-18 and a user of one image."""
SECONDS = 180.0
"""Time limit of one path, with the compilation of its kernels. A path that takes longer is said to hang."""
AGAIN = 75
"""Exit code of a run that continues when the same command is started again (`dataset.cli`)."""
ROOT, CODE = Path(__file__).parents[1], {".py", ".h", ".cpp"}
"""The folder of pfl_ext, and the suffixes of its code."""
LIBRARIES = ("torch", "torchvision", "triton", "pfl", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
DRIVER = Path("/proc/driver/nvidia/version")
Sums = Mapping[str, Tensor]


def fingerprint(*words: Any) -> str:
    """A hash of what the compared sums depend on, and of these words.

    These sums depend on all code of pfl_ext, the user's own modules (`FL_IMPORT`) with what they import from
    their folders, the GPU with its driver and CUDA, and the versions of `LIBRARIES`.
    """
    contents = [Path(path).read_bytes() for path in _own_files()]
    code = code_digest(ROOT), hashlib.sha256(b"".join(contents)).hexdigest()
    gpu = None
    if torch.cuda.is_available():
        driver = DRIVER.read_bytes() if DRIVER.is_file() else b""
        gpu = torch.cuda.get_device_name(), driver, torch.version.cuda
    versions = [version_of(library) for library in LIBRARIES]
    return hashlib.sha256(repr((code, gpu, versions, words)).encode()).hexdigest()[:16]


def _own_files() -> list[str]:
    """The files of the user's own modules, and all others in their folders that have been imported."""
    own = own_modules()
    tops = [sys.modules[module.__name__.partition(".")[0]] for module in own]
    places = [next(iter(getattr(top, "__path__", ())), None) or top.__file__ or "" for top in tops]
    folders = tuple(f"{Path(place).parent}{os.sep}" for place in places)
    known = {getattr(module, "__file__", None): module for module in sys.modules.values()}
    return sorted(
        path
        for path, module in known.items()
        if path and (module in own or (path.startswith(folders) and not path.startswith(sys.prefix)))
    )


@cache
def code_digest(folder: Path) -> str:
    """SHA-256 over the Python and C++ files in a folder, at any depth; computed once in a process."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in CODE):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def version_of(library: str) -> str | None:
    """The installed version of a library, None if it is not installed."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def distance(ours: Sums, theirs: Sums) -> float:
    """Distance of two sums, relative to the norm of the second; not finite if either sum is not."""
    gap = torch.stack([(ours[n].double() - theirs[n].double()).square().sum() for n in theirs]).sum()
    size = torch.stack([t.double().square().sum() for t in theirs.values()]).sum()
    return float((gap / size.clamp(min=1e-60)).sqrt())


def allowed(expected: Sums, exact: Callable[[], Sums] | None, limit: float = LIMIT) -> float:
    """The largest distance from pfl's sum that rounding explains.

    Args:
        expected: the sum by pfl's loop.
        exact: computes pfl's sum in float32; None: ``expected`` is in float32.
        limit: `LIMIT` or `CPU_LIMIT`.
    """
    return limit if exact is None else limit + 2 * distance(expected, exact())


class SelfCheck:
    """Finds a path that trains as pfl's loop does, once in a process.

    Args:
        folder: the run's folder, in which ``engine_check.json`` says what failed.
        private: whether the run is private; deviations depend on users' images and are not disclosed then.
        kept: the folder of outcomes; None: the user's cache folder.
        seconds: the time limit of one path.
        end: ends a process that hangs.
    """

    on_cpu: ClassVar[bool] = False
    """Whether the engine is also checked on a CPU."""

    def __init__(
        self,
        folder: Path | None = None,
        private: bool = False,
        kept: Path | None = None,
        seconds: float = SECONDS,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._folder, self._kept, self._seconds, self._end = folder, kept or kept_folder(), seconds, end
        self._private, self._traceback = private, ""
        self.outcome: dict[str, Any] | None = None
        """The entry of ``results.json``; None: nothing was checked."""

    def path(
        self,
        key: str,
        ours: Callable[[int], Sums],
        theirs: Callable[[], Sums],
        exact: Callable[[], Sums] | None,
        users: int,
    ) -> int:
        """The index in `PATHS` of the first path that passes, or ``len(PATHS)`` if none does.

        Args:
            key: the key of the kept outcome.
            ours: computes the sum by the path of an index.
            theirs: computes the sum by pfl's loop.
            exact: does so in float32; None: ``theirs`` does.
            users: the number of users that are trained, for the printed line.
        """
        place = self._kept / f"engine-check-{key}-{torch.cuda.current_device()}.json"
        known = read_kept(place)
        if "path" in known:
            self.outcome = known
            self._say(known, " before")
            return int(known["path"])
        failures = list(known.get("failures", ()))
        if "trying" in known and not is_alive(known):
            failures.append(
                {"path": known["trying"], "why": "it took the process with it, or was interrupted"}
            )
        expected = theirs()
        limit = allowed(expected, exact)
        for number in range(len(PATHS)):
            if any(failure["path"] == number for failure in failures):
                continue
            write_kept(place, {"trying": number, "failures": failures, "by": this_process()})
            deviation, why = self._tried(number, limit, ours, expected)
            if why is None:
                break
            failures.append({"path": number, "why": why, "deviation": deviation})
            print(f"engine: {PATHS[number]} cannot be relied on here: {why}", file=sys.stderr)
            self._report(failures)
        else:
            number, deviation = len(PATHS), None
        gpu = torch.cuda.get_device_name()
        reported = None if self._private else limit
        self.outcome = {
            "device": gpu, "users": users, "path": number, "deviation": deviation, "limit": reported,
            "failures": failures,
        }  # fmt: skip
        write_kept(place, self.outcome)
        self._say(self.outcome)
        return number

    def _tried(
        self, number: int, limit: float, ours: Callable[[int], Sums], expected: Sums
    ) -> tuple[float | None, str | None]:
        """The deviation of a path, and the reason if it does not pass."""
        with self._watched(number):
            try:
                deviation = distance(ours(number), expected)
            except Exception as fault:  # devices, compilers and torch raise many types
                why = cause(fault)
                self._traceback = traceback.format_exc()
                end_if_dead(why)
                return None, why
        reported = None if self._private or not math.isfinite(deviation) else deviation
        if not deviation <= limit:
            far = "" if self._private else f" by {deviation:.1e} of the sum of updates, over {limit:.0e}"
            return reported, f"it is off by more than rounding{far}"
        return reported, None

    @contextlib.contextmanager
    def _watched(self, number: int) -> Iterator[None]:
        def hung() -> None:
            print(
                f"engine: {PATHS[number]} hangs on this machine; start the same command again, which "
                "does not use it",
                file=sys.stderr,
                flush=True,
            )
            self._end(AGAIN)

        timer = threading.Timer(self._seconds, hung)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _report(self, failures: list[dict[str, Any]]) -> None:
        if self._folder is None or not self._folder.is_dir():
            return
        about = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "failures": [{**failure, "path": PATHS[failure["path"]]} for failure in failures],
            "last_traceback": self._traceback.splitlines(),
        }
        write_json(self._folder / "engine_check.json", about)

    @staticmethod
    def _say(outcome: Mapping[str, Any], when: str = "") -> None:
        number = outcome["path"]
        if number == len(PATHS):
            print(
                "engine: pfl's own loop trains the users, because no faster way passed its check here",
                file=sys.stderr,
            )
            return
        deviation = outcome["deviation"]
        off = "within rounding" if deviation is None else f"{deviation:.0e}"
        print(
            f"engine checked{when} on {outcome['device']}: {outcome['users']} users, deviation {off}, "
            f"{PATHS[number]}",
            file=sys.stderr,
        )


class CheckOnCpu(SelfCheck):
    """The comparison for an engine on a CPU, which has one path. Nothing is kept.

    ``path`` of its outcome is 0 if the engine passes.
    """

    on_cpu = True

    def path(
        self,
        key: str,
        ours: Callable[[int], Sums],
        theirs: Callable[[], Sums],
        exact: Callable[[], Sums] | None,
        users: int,
    ) -> int:
        """0, or ``len(PATHS)`` if the engine's sum differs from that of pfl's loop."""
        expected = theirs()
        limit = allowed(expected, exact, CPU_LIMIT)
        deviation, why = self._tried(0, limit, ours, expected)
        number = 0 if why is None else len(PATHS)
        failures = [] if why is None else [{"path": 0, "why": why, "deviation": deviation}]
        self.outcome = {
            "device": "CPU", "users": users, "path": number, "deviation": deviation, "limit": limit,
            "failures": failures,
        }  # fmt: skip
        return number


def cause(fault: Exception) -> str:
    """An error in one line."""
    return f"{type(fault).__name__}: {(str(fault).splitlines() or [''])[0][:200]}"


def end_if_dead(why: str) -> None:
    """Exit if the GPU refuses all further work of this process, as it does after an illegal access.

    Raises:
        SystemExit: with code 75; the same command then continues by another path.
    """
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as fault:
        print(f"engine: {why}; start the same command again, which does not use it", file=sys.stderr)
        raise SystemExit(AGAIN) from fault


def this_process() -> list[str | int]:
    """The machine and the number of this process, for the ``by`` of an attempt."""
    return [socket.gethostname(), os.getpid()]


def is_alive(attempt: Mapping[str, Any]) -> bool:
    """Whether another process of this machine is still trying a path."""
    host, process = attempt["by"]
    if host != socket.gethostname() or process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True


def kept_folder() -> Path:
    """The user's cache folder; without a home folder, a path at which no file can be kept."""
    return cache_folder() or Path(os.devnull)


def read_kept(place: Path) -> dict[str, Any]:
    """The content of a kept file; empty if it cannot be read."""
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_kept(place: Path, content: Mapping[str, Any]) -> None:
    """Write a kept file. If that fails nothing is kept, and a later run checks again."""
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_json(place, content)
