"""Start real workers, by the real launchers, in processes that have torch imported already (`tests.warm`)."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent

needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None,
    reason="Horovod is not installed here: make horovod builds it",
)
LAUNCHERS = ["torchrun", pytest.param("horovod", marks=needs_horovod)]


def command(launcher: str, workers: int, module: str, *words: str, fresh: bool = False) -> list[str]:
    """What starts ``python -m module words...`` as so many workers on this machine; with `environment`.

    Args:
        launcher: of `LAUNCHERS`.
        workers: how many.
        module: what each of them runs.
        words: its arguments.
        fresh: each worker is an interpreter of its own, with its own seed of string hashes and its own
            imports.
    """
    worker = [sys.executable, "-m", module, *words] if fresh else warmly(module, *words)
    if launcher == "torchrun":
        launch = warmly("torch.distributed.run", "--standalone", f"--nproc_per_node={workers}")
        return [*launch, *worker[1:]]
    return [*warmly("horovod.runner.launch", "--gloo", "-np", str(workers)), *worker]


def warmly(module: str, *words: str) -> list[str]:
    """``python -m module words...`` without the seconds of its imports; with `environment`."""
    return [sys.executable, warm.__file__, module, *words]


def fresh_environment(**more: str) -> dict[str, str]:
    """Without what pytest or an outer launcher left; one thread a worker; with some ``more`` variables."""
    own = (
        "PYTEST_",
        "PYTHONHASHSEED",
        "HOROVOD_",
        "TORCHELASTIC_",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "MASTER_",
        "PFL_",
        "KMP_DUPLICATE_LIB_OK",  # set by sklearn, as is the next
        "KMP_INIT_AT_FORK",
        "GOMP_SPINCOUNT",  # set by benchmarks, whose processes set it themselves, as is the next
        "OPENBLAS_NUM_THREADS",
    )
    kept = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    paths = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return {**kept, **paths, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


def environment(**more: str) -> dict[str, str]:
    """`fresh_environment`, with the server of `warmly`, which is started if there is none."""
    served = {warm.SERVER: warm.server(fresh_environment()), warm.ACCOUNT: str(warm.account())}
    return {**fresh_environment(**more), **served}


def start(words: Sequence[str], **more: str) -> subprocess.Popen[str]:
    """A process of its own group, with its output in one pipe."""
    return subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 550) -> str:
    """Its output, at its end; no worker outlives this."""
    try:
        return process.communicate(timeout=seconds)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def run(words: Sequence[str], code: int = 0, **more: str) -> str:
    """The output of a command that must end with this code; ``more``: environment variables."""
    process = start(words, **more)
    output = finish(process)
    assert process.returncode == code, output
    return output


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
