"""A command's process starts and ends quickly, and says all that it would have said."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dataset import process

ROOT = Path(__file__).parents[2]
COMMAND = """
import atexit, gc, sys
from dataset import process
ever = gc.get_threshold()
process.begin()
assert gc.get_threshold() > ever
from dataset.cli import run

class Late:
    def __del__(self):
        print("taken apart")

late = Late()
atexit.register(print, "at exit")

def inner(argv):
    raise ValueError("inner")

def main(argv):
    assert gc.get_threshold() == ever, "as before the imports"
    assert gc.get_freeze_count() > 0
    print("a line without its end", end=",")
    run(inner)
    BODY

sys.exit(run(main, sys.argv[1:]))
"""


def ended(body: str) -> subprocess.CompletedProcess[str]:
    """A process whose command calls another one, which fails, and then does this."""
    command = [sys.executable, "-E", "-c", COMMAND.replace("BODY", body)]  # as PYTHONUNBUFFERED may be set
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("pass", 0, ""),
        ("raise OSError('outer')", 2, "error: outer\n"),
        ("raise KeyboardInterrupt", 130, "error: interrupted\n"),
        ("raise SystemExit(7)", 7, ""),
    ],
)
def test_it_ends_with_its_code_and_its_output_and_is_not_taken_apart(body: str, code: int, said: str) -> None:
    done = ended(body)
    assert done.returncode == code
    assert done.stdout == "a line without its end,at exit\n"
    assert done.stderr == "error: inner\n" + said


@pytest.mark.parametrize(
    ("body", "code", "said"), [("1 / 0", 1, "ZeroDivisionError"), ("raise SystemExit('words')", 1, "words")]
)
def test_what_is_no_command_s_end_is_pythons_own(body: str, code: int, said: str) -> None:
    done = ended(body)
    assert done.returncode == code, "not that of the command inside"
    assert done.stdout == "a line without its end,at exit\ntaken apart\n"
    assert said in done.stderr


@pytest.mark.parametrize("number", process.SIGNALS)
def test_a_signal_during_the_imports_ends_it_as_one_does_later(number: signal.Signals) -> None:
    code = f"import os; from dataset import process; process.begin(); os.kill(os.getpid(), {number:d})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert done.returncode == process.RESUMABLE
    assert done.stderr == f"stopped by {number.name}; run the same command again to continue\n"


def test_after_the_imports_signals_do_what_they_did() -> None:
    code = (
        "import signal; from dataset import process; old = signal.getsignal(15); process.begin(); "
        "assert signal.getsignal(15) != old; process.imported(); assert signal.getsignal(15) == old"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_training_command_is_such_a_process_and_an_import_is_none() -> None:
    code = "import atexit, gc, sys; sys.argv[0] = 'ARGV'; import benchmarks; print(gc.get_threshold()[0])"
    for argv, threshold in (("-m", "100000"), ("x.py", "700")):
        words = [sys.executable, "-S", "-c", code.replace("ARGV", argv)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == threshold
