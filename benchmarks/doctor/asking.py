"""Runs `benchmarks.doctor.child`, within a time for each stage, and hands on what it says."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from benchmarks.doctor.packages import REPOSITORY

SECONDS = {"imports": 240.0, "device": 90.0, "path": 330.0, "trial": 60.0, "horovod": 60.0}
"""The seconds that each stage may take; ``path`` compiles the layers where that has not been done."""
TAIL = 60
"""Lines of the child's output that a report keeps."""
Event = dict[str, Any]


@dataclass
class Answer:
    """How a child ended."""

    stage: str = ""
    """The one that it was in when it ended before its time; empty: it came to its end."""
    how: str = ""
    """The way in which it ended, in a few words."""
    output: list[str] = field(default_factory=list)
    """The last lines of what it printed."""


def ask(
    stages: Sequence[str], on_event: Callable[[Event], None], limits: dict[str, float] = SECONDS
) -> Answer:
    """Have a new process go through these stages; ``on_event`` gets each line that it says."""
    read, write = os.pipe()
    words = [sys.executable, "-m", "benchmarks.doctor.child", str(write), str(limits["trial"]), *stages]
    checkout = "" if str(REPOSITORY) == sysconfig.get_path("purelib") else str(REPOSITORY)
    paths = os.pathsep.join(filter(None, (checkout, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **({"PYTHONPATH": paths} if paths else {})}
    answer = Answer()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            words,
            pass_fds=(write,),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
        os.close(write)
        try:
            with os.fdopen(read, "rb", buffering=0) as pipe:
                answer.stage = stages[0]
                for event in _lines(pipe, lambda: limits[answer.stage], answer):
                    if event["event"] == "begin":
                        answer.stage = event["stage"]
                    on_event(event)
        finally:
            if answer.how or sys.exc_info()[0] is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        if not answer.how and code:
            name = signal.Signals(-code).name if code < 0 else ""
            answer.how = f"its process was ended by {name}" if name else f"its process ended with code {code}"
        if not answer.how:
            answer.stage = ""
        output.seek(0)
        answer.output = output.read().decode(errors="replace").splitlines()[-TAIL:]
    return answer


def _lines(pipe: BinaryIO | Any, seconds: Callable[[], float], answer: Answer) -> Iterator[Event]:
    """What the child says, until it ends or a stage takes longer than its time."""
    held, deadline = b"", time.monotonic() + seconds()
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            answer.how = f"it did not end within {seconds():.0f} s"
            return
        block = pipe.read(1 << 16)
        if not block:
            return
        *whole, held = (held + block).split(b"\n")
        for line in whole:
            event = json.loads(line)
            yield event
            if event["event"] == "begin":
                deadline = time.monotonic() + seconds()
