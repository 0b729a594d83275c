"""The shared bottom: files that appear whole or not at all, locks, checksums, work read ahead, imports."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import pkgutil
import secrets
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

HALF_WRITTEN = (".*.partial", ".tmp??????")
"""Patterns of files that are being written: by `replacing`, and by the safetensors library."""
_NO_LOCKS = frozenset((errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL))
_BLOCK = 1 << 20
OWN = "FL_IMPORT"
"""The environment variable with the names, or paths, of a user's own modules, separated by commas."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextlib.contextmanager
def written(path: Path) -> Iterator[None]:
    """Name the file in an error of the operating system, such as a full disk.

    Raises:
        OSError: one clause with the path.
    """
    try:
        yield
    except OSError as fault:
        raise OSError(f"{path} cannot be written: {fault.strerror or fault}") from fault


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Give the path of a temporary file, which takes the name ``path`` when the block ends.

    The name always holds the old content or all of the new. If the block raises, the temporary file goes.

    Args:
        path: the file.
        mode: who may read and write it; the process's umask, or a default of the folder, takes rights away.

    Raises:
        OSError: one clause with the path.
    """
    with written(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        allowed = stat.S_IMODE(os.fstat(handle).st_mode)
        os.close(handle)
        try:
            yield temporary
            sync(temporary)
            os.chmod(temporary, allowed)  # who writes the file may have put another in its place
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file by `replacing`."""
    with replacing(path, mode) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, content: Any) -> None:
    """`write_bytes` of indented JSON; NaN is refused."""
    write_bytes(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path, refusal: str, wait: float = 0.0) -> Iterator[None]:
    """Hold a lock file within the block. A killed process holds nothing.

    A file system without locks grants every lock.

    Args:
        path: the lock file, which stays when the lock is released.
        refusal: what is said when another process holds the lock.
        wait: print that, and wait for the lock, for so many seconds at most.

    Raises:
        ValueError: the refusal.
        TimeoutError: after the wait.
    """
    from filelock import FileLock, Timeout  # here, so that the rest needs nothing that is installed

    lock = FileLock(path, blocking=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        if not wait:
            raise ValueError(refusal) from None
        print(refusal, file=sys.stderr, flush=True)
        lock.acquire(timeout=-1 if math.isinf(wait) else wait, blocking=True)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    try:
        yield
    finally:
        lock.release()


def utf8(content: bytes, where: str) -> str:
    """A file's bytes as text, without the mark that Windows may put before it.

    Raises:
        ValueError: that names ``where``.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{where} is not UTF-8 text") from None


def state_of(path: Path) -> str:
    """Size and time of a file: another state of it has others."""
    found = path.stat()
    return f"{found.st_size} {found.st_mtime_ns}"


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    """The digest of a file's bytes in hexadecimal, by an algorithm of `hashlib`."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def prefetched(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    ahead: int,
    threads: int,
    begin: Callable[[], None] | None = None,
) -> Iterator[Result]:
    """Yield ``work(item)`` in the order of ``items``; other threads work ahead of need.

    Args:
        ahead: the most results beyond the one in use. With 0, everything runs in the calling thread.
        threads: how many threads work.
        begin: is called first by each thread.

    Raises:
        Exception: of ``work``, where its result would have been yielded; work that has not begun is dropped.
    """
    if ahead < 1:
        yield from map(work, items)
        return
    source = iter(items)
    pool = ThreadPoolExecutor(threads, "prefetch", begin)
    try:
        waiting: deque[Future[Result]] = deque(pool.submit(work, item) for item in islice(source, ahead))
        while waiting:
            result = waiting.popleft().result()
            waiting.extend(pool.submit(work, item) for item in islice(source, 1))
            yield result
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def imported(name: str) -> ModuleType:
    """Import a module that may come from anybody.

    Raises:
        ValueError: one line that names the module, if importing it raises any exception.
    """
    try:
        return importlib.import_module(name)
    except Exception as fault:
        text = f"{type(fault).__name__}: {fault}"
        raise ValueError(f"{name} cannot be imported ({text}): repair the file, or move it away") from fault


def needed(module: str, extra: str) -> ModuleType:
    """Import a module of an optional package.

    Args:
        module: the module.
        extra: the extra of this distribution that installs the package.

    Raises:
        ValueError: one line that says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as fault:
        raise ValueError(
            f"{fault.name} is not installed: pip install 'flair-on-pfl[{extra}]', or pip install {fault.name}"
        ) from None


def import_all(package: str) -> None:
    """Import every module of a package, and `own_modules`, so that each registers what it holds.

    Raises:
        ValueError: as `imported`.
    """
    for module in pkgutil.iter_modules(imported(package).__path__):
        imported(f"{package}.{module.name}")
    own_modules()


def module_in_execution() -> str:
    """The name of the innermost module that is being imported or run: who registers something."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def own_modules() -> list[ModuleType]:
    """The user's modules that the environment variable `OWN` names, imported from the current folder or the
    path of modules; a name with a slash or with ``.py`` is the path of a file, or of the folder of a package.

    Raises:
        ValueError: one line that names the module, if importing it raises anything, or if another module has
            the name of a file.
    """
    names = [name.strip() for name in os.environ.get(OWN, "").split(",") if name.strip()]
    paths = [Path(name).absolute() if name.endswith(".py") or os.sep in name else None for name in names]
    folders = [*(path.parent for path in paths if path), *([Path.cwd()] if names else [])]
    sys.path += [place for place in dict.fromkeys(map(str, folders)) if place not in sys.path]
    found = []
    for name, path in zip(names, paths):
        plain = path.stem if path else name
        try:
            found.append(_as_command(plain) or importlib.import_module(plain))
        except (Exception, SystemExit) as fault:
            raise ValueError(
                f"{OWN} names {name}, which cannot be imported{'' if path else ' from here or PYTHONPATH'} "
                f"({type(fault).__name__}: {fault}): repair it, or unset {OWN}"
            ) from fault
        place = _place_of(found[-1], path) if path else None
        if path and not (place and path.exists() and place.samefile(path)):
            raise ValueError(
                f"{OWN} names {name}, but Python imports {place} under the name {path.stem}: rename yours"
            )
    return found


def _as_command(name: str) -> ModuleType | None:
    """The module that runs as a command, if it is the one of this name, which must not run a second time."""
    file = getattr(main := sys.modules["__main__"], "__file__", None)
    spec = importlib.util.find_spec(name) if file and name not in sys.modules else None
    return main if spec and spec.origin and file and Path(spec.origin) == Path(file).absolute() else None


def _place_of(module: ModuleType, path: Path) -> Path | None:
    """The folder of a module where ``path`` is one, else its file; None for one that has neither."""
    folder = next(iter(getattr(module, "__path__", ())), None) if path.is_dir() else None
    place = folder or getattr(module, "__file__", None)
    return Path(place) if place else None
