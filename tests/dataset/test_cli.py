"""How commands end."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dataset.cli import CLOSED_PIPE, counted, run
from dataset.flair.mini import MiniSpec, write_mini

LONG = "from dataset.cli import run; import sys; sys.exit(run(lambda argv: print('line\\n' * 10**6)))"


@pytest.mark.parametrize("command", [["-m", "dataset.store", "F"], ["-c", LONG]])
def test_a_command_whose_output_nobody_reads_ends_quietly(tmp_path: Path, command: Sequence[str]) -> None:
    """As with ``| head``: the pipe closes before the first line, or between two."""
    path = tmp_path / "f.hdf5"
    write_mini(path, MiniSpec(train_users=3, val_users=1, test_users=1, image_size=8))
    words = [str(path) if word == "F" else word for word in command]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([sys.executable, *words], stdout=writing, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (CLOSED_PIPE, "")


CLOSED = """
from dataset.cli import run; import os, sys
def main(argv):
    print("a line"); print("a line", file=sys.stderr, flush=True); sys.stderr.isatty()
    if argv: raise ValueError(argv[0])
sys.exit(10 + run(main, sys.argv[1:]))
"""


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("words, code", [([], 10), (["a mistake"], 12)])
def test_a_command_with_a_closed_stream_comes_to_its_end(closed: str, words: list[str], code: int) -> None:
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", CLOSED, *words]
    assert subprocess.run(shell, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == code


REMARKS = """
from dataset.cli import run; import sys
def main(argv):
    for number in range(9999): print("remark", number, file=sys.stderr)
    print("the result \xb1")
    if argv: raise ValueError(argv[0])
sys.exit(10 + run(main, sys.argv[1:]))
"""


@pytest.mark.parametrize("full", [True, False], ids=["full disk", "no reader"])
@pytest.mark.parametrize("words, code", [([], 10), (["a mistake"], 12)])
def test_remarks_that_cannot_be_written_do_not_end_the_work(full: bool, words: list[str], code: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        with Path("/dev/full").open("w") as device:
            error = device.fileno() if full else writing
            command = [sys.executable, "-c", REMARKS, *words]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=error, text=True)
    finally:
        os.close(writing)
    assert (done.returncode, done.stdout) == (code, "the result \xb1\n")


def test_output_that_cannot_be_written_is_an_error_that_says_so() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", CLOSED], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 12
    said = done.stderr.removeprefix("a line\n")  # missing with PYTHONUNBUFFERED, where the first print fails
    assert said == "error: standard output cannot be written: No space left on device\n"


def test_characters_that_the_output_lacks_are_escapes() -> None:
    words, ascii_only = [sys.executable, "-c", REMARKS], {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, capture_output=True, text=True, env=ascii_only)
    assert (done.returncode, done.stdout) == (10, "the result \\xb1\n")


def test_another_broken_pipe_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def main(argv: Sequence[str]) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    assert run(main, []) == 2
    assert capsys.readouterr().err == "error: [Errno 32] Broken pipe\n"


def test_reading_a_file_as_training_does_imports_no_pyarrow() -> None:
    """Importing it takes a fifth of a second of every start."""
    code = "import dataset.store.views, sys; print([name for name in sys.modules if 'pyarrow' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_one_thing_is_not_called_by_the_word_for_many() -> None:
    assert [counted(n, "class", "classes") for n in (0, 1, 2000)] == ["0 classes", "1 class", "2,000 classes"]
