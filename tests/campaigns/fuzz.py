"""Damaged inputs to every reader: each ends in one clear line, or is read rightly.

    python -m tests.campaigns.fuzz --inputs 10000 [--only jpeg] [--keep FOLDER]

Inputs are sound files after one to four accidents (`tests.campaigns.damage`). Each is read in a process that
may use 2 GB of memory beyond what it starts with and 20 s. What counts as a finding: an exception other than
ValueError, OSError and MemoryError, an error of several lines or none, a crash, a hang, and for formats with
checksums a damaged file that is read as something else than was written.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dataset.command_line import run
from dataset.flair import probe as probing
from tests.campaigns.damage import damaged
from tests.campaigns.readers import Target, targets

MEMORY, SECONDS, BATCH = 2 << 30, 20.0, 40


@dataclass(frozen=True)
class Finding:
    """An input that did not end as it should."""

    target: str
    number: int
    what: str
    content: bytes


def make(target: Target, number: int, seed: int) -> bytes:
    """Input ``number`` of a target."""
    rng = np.random.default_rng([seed, number, *target.name.encode()])
    return damaged(target.seeds[number % len(target.seeds)], target.seeds, rng, target.text)


def judge(target: Target, content: bytes, folder: Path, sound: str | None) -> tuple[str, str]:
    """``("read" | "refused" | "finding", what)`` of one input; ``sound`` is what its seed is read as."""
    path = folder / f"input{target.suffix}"
    path.write_bytes(content)
    told: list[object] = []
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(lambda _: told.append(target.read(path)), [])
    except BaseException:
        return "finding", traceback.format_exc()
    lines = [line for line in err.getvalue().replace("\r", "\n").split("\n") if "error: " in line]
    if code == 0:
        if target.same and repr(told[0]) != sound and content not in target.seeds:
            return "finding", f"read as {told[0]!r}"[:400]
        return "read", ""
    if code != 2 or len(lines) != 1 or len(lines[0]) > 2000 or "Traceback" in err.getvalue():
        return "finding", f"exit code {code}: {err.getvalue()[-1000:]}"
    return "refused", lines[0]


def forked_probe(path: Path) -> None:
    """`dataset.flair.probe.probe` without the cost of a new interpreter."""
    child = os.fork()
    if child == 0:
        probing.look(path)
        os._exit(0)
    end, done, status = time.monotonic() + SECONDS, 0, 0
    while not done and time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0 if done else 0.002)
    if not done:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not done or os.WIFSIGNALED(status):
        raise ValueError(f"{path} is damaged (the HDF5 library crashes or hangs on it); make it again")


def _work(target: Target, numbers: list[int], seed: int, folder: Path, pipe: int) -> None:
    """In the child: judge each input, and say so on the pipe, one JSON line before and one after."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    probing.probe = forked_probe
    os.fsync = lambda _: None  # type: ignore[assignment]  # no machine fails here
    with os.fdopen(pipe, "w") as report, open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
        sound: dict[int, str] = {}
        for number in numbers:
            origin = number % len(target.seeds)
            if target.same and origin not in sound:
                path = folder / f"input{target.suffix}"
                path.write_bytes(target.seeds[origin])
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    sound[origin] = repr(target.read(path))
            print(json.dumps([number, "begun", ""]), file=report, flush=True)
            kind, what = judge(target, make(target, number, seed), folder, sound.get(origin))
            print(json.dumps([number, kind, what]), file=report, flush=True)


def batch(target: Target, numbers: list[int], seed: int, folder: Path) -> list[tuple[int, str, str]]:
    """What became of some inputs; those after a crash or a hang are left out."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            _work(target, numbers, seed, folder, writing)
        except BaseException:
            traceback.print_exc()
            os._exit(71)
        os._exit(0)
    os.close(writing)
    found: list[tuple[int, str, str]] = []
    begun, text, hung = -1, b"", False
    while True:
        ready, _, _ = select.select([reading], [], [], SECONDS * 3)  # the machine may be busy
        if not ready:
            os.kill(child, signal.SIGKILL)
            hung = True
        more = os.read(reading, 1 << 16)
        if not more:
            break
        *complete, text = (text + more).split(b"\n")
        for line in complete:
            number, kind, what = json.loads(line)
            begun = number
            if kind != "begun":
                found.append((number, kind, what))
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if status != 0 or len(found) < len(numbers):
        how = "hang" if hung else f"crash, wait status {status}"
        found.append((begun if begun >= 0 else numbers[0], "finding", how))
    return found


def campaign(
    inputs: int, seed: int, only: str = "", minutes: float = 1e9
) -> tuple[dict[str, Counter[str]], list[Finding]]:
    """So many inputs, all targets in turn, or as many as the minutes allow; counts by target; findings."""
    end = time.monotonic() + 60 * minutes
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory() as place:
        chosen = [target for target in targets(Path(place)) if only in target.name]
        counts = {target.name: Counter[str]() for target in chosen}
        left = {target.name: list(range(-(-inputs // len(chosen)))) for target in chosen}
        while any(left.values()) and time.monotonic() < end:
            for target in (target for target in chosen if left[target.name]):
                done = batch(target, left[target.name][:BATCH], seed, Path(place))
                for number, kind, what in done:
                    counts[target.name][kind] += 1
                    if kind == "finding":
                        findings.append(Finding(target.name, number, what, make(target, number, seed)))
                        print(f"{target.name} {number}: {what[-1500:]}", flush=True)
                last = max(number for number, _, _ in done)
                left[target.name] = [number for number in left[target.name] if number > last]
    return counts, findings


def main() -> int:
    """Run the campaign and say what was seen; 1 if there are findings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after this time")
    parser.add_argument("--only", default="", help="targets whose name contains this")
    parser.add_argument("--keep", type=Path, help="where findings are written")
    given = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    counts, findings = campaign(given.inputs, given.seed, given.only, given.minutes)
    for name, count in counts.items():
        print(f"{name:28}" + "".join(f"{kind:>9} {number:6d}" for kind, number in sorted(count.items())))
    total = sum(counts.values(), Counter[str]())
    print(f"{total.total()} inputs: {dict(total)} ({time.monotonic() - started:.0f} s)")
    for one in findings:
        if given.keep:
            given.keep.mkdir(parents=True, exist_ok=True)
            name = "".join(c if c.isalnum() else "_" for c in one.target)
            (given.keep / f"{name}-{one.number}").write_bytes(one.content)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
