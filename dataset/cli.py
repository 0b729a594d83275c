"""The common base of every command: its arguments, its one-line errors, its exit codes, and signals.

Exit codes: 0: done. 2: an error in one line, ``error: ...``. 75: a signal stopped it, and the same command
continues. 130: interrupted. 141: its output is no longer read (``| head``), as for a process ended by
SIGPIPE.

Slurm sends SIGTERM (or the signal of ``--signal``, often SIGUSR1) before it takes a machine away. A command
stops at once if nothing is lost by that. Within `held` it notes the signal, finishes its step, and then
stops.
"""

from __future__ import annotations

import argparse
import io
import os
import select
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

from dataset import process

SIGNALS, RESUMABLE = process.SIGNALS, process.RESUMABLE
CLOSED_PIPE = 128 + signal.SIGPIPE
MAX_LINE = 1600
MAX_NAME_BYTES = 200
"""Most bytes of an output's name. File systems allow 255, but names of temporary files are longer."""


def run(main: Callable[[Sequence[str]], None], argv: Sequence[str] | None = None) -> int:
    """Call ``main(argv)``; turn a user's mistake (ValueError, OSError, too little memory) into one line and
    exit code 2, and SIGTERM, SIGINT or SIGUSR1 into one line and exit code 75.

    Anything else is a defect of ours and keeps its traceback. A stream that was closed before the start
    (``2>&-``) is None in Python; what is written to it is dropped.
    """
    process.imported()
    code = None
    try:
        code = _code(main, sys.argv[1:] if argv is None else argv)
    except SystemExit as left:  # after --help
        code = left.code if isinstance(left.code, int) else None
        raise
    finally:
        process.ends(code)
    return code


def _code(main: Callable[[Sequence[str]], None], argv: Sequence[str]) -> int:
    for name, kind in (("stdout", Output), ("stderr", Remarks)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _nowhere())
        elif stream is getattr(sys, f"__{name}__"):  # of a command's own process, and not replaced already
            setattr(sys, name, _text(kind, stream))
    try:
        try:
            with raised():
                main(argv)
        finally:
            sys.stdout.flush()  # so that the final line is last, if both go to one file
    except Stopped as stop:
        print(f"{stop}; run the same command again to continue", file=sys.stderr)
        return RESUMABLE
    except MemoryError as mistake:
        print(f"error: there is not enough memory for this command: {_line(str(mistake))}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as mistake:
        if isinstance(mistake, BrokenPipeError) and _unread():
            return CLOSED_PIPE
        print("error: " + _line(str(mistake)), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0


def _nowhere() -> TextIO:
    return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8", errors="backslashreplace")


def _unread() -> bool:
    """Whether the reader of standard output is gone; if so, the remaining output is dropped."""
    try:
        output = sys.stdout.fileno()
    except OSError:  # it is no file
        return False
    poll = select.poll()
    poll.register(output, 0)
    if not poll.poll(0):
        return False
    _drop(output)
    return True


def _drop(output: int) -> None:
    """Drop what is still written to this file."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, output)
    os.close(nowhere)


class Output(io.FileIO):
    """Standard output; an error says that it is the one that cannot be written, and what follows is dropped.

    A reader that is gone remains a BrokenPipeError.
    """

    def write(self, data: Any, /) -> int | None:  # type: ignore[override]  # None as FileIO says
        """Write bytes; how many were written, or None where the file would make the command wait."""
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as fault:
            _drop(self.fileno())
            raise OSError(f"standard output cannot be written: {fault.strerror}") from None


class Remarks(io.FileIO):
    """Standard error: progress and remarks, which are dropped where they cannot be written; work goes on."""

    def write(self, data: Any, /) -> int:
        """Write bytes, or drop them."""
        try:
            return super().write(data) or len(data)
        except OSError:
            _drop(self.fileno())
            return len(data)


def _text(kind: type[io.FileIO], stream: io.TextIOWrapper) -> TextIO:
    """A text stream to the same place that writes by this kind; what its encoding lacks becomes an escape."""
    stream.flush()
    raw = io.BufferedWriter(kind(stream.fileno(), "w", closefd=False))
    lines = stream.line_buffering or stream.write_through
    return io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=lines)


def _line(text: str) -> str:
    """The text as one line of bounded length, since a damaged file may have put anything into it."""
    line = " ".join(text.split())
    line = "".join(c if c.isprintable() else "?" for c in line)
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE // 2]} ... {line[-MAX_LINE // 2 :]}"


class OneLineParser(argparse.ArgumentParser):
    """Raises ValueError instead of printing a usage and exiting; `read` also refuses empty values."""

    def error(self, message: str) -> NoReturn:
        """Raise the message, with a pointer to the help."""
        raise ValueError(f"{message}; see {self.prog} --help")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Like `parse_args`, but an empty value is an error, since it would mean the current folder."""
        for before, word in zip(["", *argv], argv):
            option, _, value = word.partition("=")
            if not word or (word.startswith("--") and "=" in word and not value):
                self.error(f"{option or before or 'an argument'} is empty: give a value, or leave it out")
        return self.parse_args(argv)


def output_file(option: str, path: Path, overwrite: bool = True) -> Path:
    """The path, if a file can be written there.

    Args:
        option: the name of the option, for the error.
        path: its value.
        overwrite: whether the file may exist.

    Raises:
        ValueError: one line that names the option, when the path is a folder, its name is too long, or
            nothing can be written there.
    """
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; give the name of a file")
    if len(os.fsencode(path.name)) > MAX_NAME_BYTES:
        raise ValueError(f"{option}: the file name has more than {MAX_NAME_BYTES} bytes; give a shorter one")
    _writable(option, path, path.parent)
    if path.exists() and not overwrite:
        raise ValueError(f"{path} already exists; add --overwrite to replace it")
    return path


def output_folder(option: str, path: Path) -> Path:
    """The path, if it is a folder, or can become one, in which files can be written.

    Raises:
        ValueError: one line that names the option.
    """
    _writable(option, path, path)
    return path


def input_file(option: str, path: Path) -> Path:
    """The path, if it is a file that can be read.

    Raises:
        ValueError: one line that names the option.
    """
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; give a file")
    try:
        with open(path, "rb"):
            return path
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be read: {error.strerror}") from None


def is_address(place: str | None) -> bool:
    """Whether an argument is a server's address instead of a path."""
    return place is not None and place.startswith(("http://", "https://"))


def counted(number: int, one: str, more: str) -> str:
    """A number with what it counts: ``1 class``, ``2,000 classes``."""
    return f"{number:,} {one if number == 1 else more}"


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


CHECKOUT = (Path(__file__).parents[1] / "Makefile").exists()
"""Whether this is a checkout, and no installed package."""


def training_command(target: str, installed: str, data: Path, options: str) -> str:
    """The command that trains on a file.

    Args:
        target: in a checkout, such as ``make flair-fl``.
        installed: the words after ``fl-train`` where the package is installed.
        data: the file.
        options: of the run; may be empty.
    """
    place = shlex.quote(str(data))
    if CHECKOUT:
        return f"{target} DATA={place}" + (f' ARGS="{options}"' if options else "")
    return f"fl-train {installed} --data_path {place} {options}".rstrip()


def refuse_broken_link(option: str, path: Path) -> None:
    """Raise ValueError if a path is, or lies below, a link that leads nowhere, or to itself."""
    for place in (path, *path.parents):
        if place.is_symlink() and not place.exists():
            raise ValueError(
                f"{option} {path}: the target of the link {place} does not exist; choose another path"
            )


def _writable(option: str, path: Path, folder: Path) -> None:
    """Refuse a path if no file can be made in its folder, or in the nearest one above that exists."""
    try:
        refuse_broken_link(option, folder)
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise ValueError(f"{option} {path}: {folder} is a file, not a folder; choose another path")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"{option} {path} cannot be written: {error.strerror} in {folder}; choose another path"
        ) from None


class SourceError(OSError):
    """A source cannot be reached or read at present; a later call may continue."""


class Stopped(BaseException):
    """A signal asked the command to stop. Like KeyboardInterrupt, ``except Exception`` does not catch it.

    Args:
        number: the signal's number.
        detail: what is kept, for the final line of the command.
    """

    def __init__(self, number: int, detail: str = "") -> None:
        self.name = signal.Signals(number).name
        super().__init__(f"stopped by {self.name}" + (f", {detail}" if detail else ""))


class Held:
    """The signal that arrived while signals were held, if any."""

    def __init__(self) -> None:
        self.number: int | None = None


@contextmanager
def _handled(handler: object) -> Iterator[None]:
    """Handle signals by ``handler`` in this context, in the main thread (others cannot have handlers)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        for number in SIGNALS:
            signal.signal(number, handler)  # type: ignore[arg-type]
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def raised() -> Iterator[None]:
    """In this context a signal raises `Stopped` at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    with _handled(stop):
        yield


@contextmanager
def held(step: str) -> Iterator[Held]:
    """In this context a first signal is only noted, and `Stopped` raised at the end; a second raises at once.

    Args:
        step: the step that is finished first, for the line on stderr.
    """
    state = Held()

    def note(number: int, frame: FrameType | None) -> None:
        if state.number is not None:
            raise Stopped(number, f"the current {step} is lost")
        state.number = number
        name = signal.Signals(number).name
        print(
            f"{name}: stopping after this {step}; a second signal stops at once", file=sys.stderr, flush=True
        )

    with _handled(note):
        yield state
    if state.number is not None:
        raise Stopped(state.number)
