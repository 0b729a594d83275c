"""Damaged inputs to every reader: each ends in one clear line, or is read rightly.

    python -m tests.campaigns.fuzz --inputs 10000 --state fuzz.json [--only jpeg] [--keep FOLDER]

Inputs are sound files after one to four accidents (`tests.campaigns.damage`). Each is read in a process that
may use 2 GB of memory beyond what it starts with, and a minute. What counts as a finding: an exception other
than ValueError and OSError, an error of several lines or none, a wish for more memory, a crash, a hang, and
for formats with checksums a damaged file that is read as something else than was written.

Input n of a target is a function of (seed, n) and the target's sound files. With ``--state`` the same command
goes on where it was broken off.
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
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from dataset.cli import run
from dataset.files import write_bytes, write_json
from dataset.store import probe as probing
from tests.campaigns.damage import damaged
from tests.campaigns.probe_server import ProbeServer
from tests.campaigns.readers import targets
from tests.campaigns.target import Target

MEMORY, SECONDS, BATCH = 2 << 30, 60.0, 40
KINDS = ("refused", "read", "finding")
TOO_MUCH = "there is not enough memory"
PAGE = os.sysconf("SC_PAGE_SIZE")


def make(target: Target, number: int, seed: int) -> bytes:
    """Input ``number`` of a target."""
    rng = np.random.default_rng([seed, number, *target.name.encode()])
    return damaged(target.seeds[number % len(target.seeds)], target.seeds, rng, target.text)


def judge(target: Target, content: bytes, folder: Path, sound: str | None) -> tuple[str, str]:
    """``("read" | "refused" | "finding", what)`` of one input; ``sound`` is what its seed is read as."""
    path = folder / f"input{target.suffix}"
    path.write_bytes(content)
    values: list[object] = []
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(lambda _: values.append(target.read(path)), [])
    except BaseException:
        return "finding", traceback.format_exc()
    lines = [line for line in err.getvalue().replace("\r", "\n").split("\n") if "error: " in line]
    if code == 0:
        if target.same and repr(values[0]) != sound and content not in target.seeds:
            return "finding", f"read as {values[0]!r}"[:400]
        return "read", ""
    if code != 2 or len(lines) != 1 or len(lines[0]) > 2000 or "Traceback" in err.getvalue():
        return "finding", f"exit code {code}: {err.getvalue()[-1000:]}"
    if TOO_MUCH in lines[0]:
        return "finding", f"asks for more than {MEMORY >> 30} GB: {lines[0]}"
    return "refused", lines[0]


def _work(target: Target, numbers: list[int], seed: int, folder: Path, pipe: int) -> None:
    """In the child: judge each input, and say so on the pipe, one JSON line before and one after."""
    used, resident = (int(pages) * PAGE for pages in Path("/proc/self/statm").read_text().split()[:2])
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    probing.probe = ProbeServer()
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
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - resident
        print(json.dumps([peak, "peak", ""]), file=report, flush=True)


def batch(
    target: Target, numbers: list[int], seed: int, folder: Path
) -> tuple[list[tuple[int, str, str]], int]:
    """What became of some inputs, those after a crash or a hang left out; bytes that they took at most."""
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
    begun, text, hung, peak = numbers[0], b"", False, 0
    while True:
        ready, _, _ = select.select([reading], [], [], SECONDS)  # the machine may be busy
        if not ready:
            os.kill(child, signal.SIGKILL)
            hung = True
        more = os.read(reading, 1 << 16)
        if not more:
            break
        *complete, text = (text + more).split(b"\n")
        for line in complete:
            number, kind, what = json.loads(line)
            if kind == "peak":
                peak = number
            elif kind == "begun":
                begun = number
            else:
                found.append((number, kind, what))
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if status != 0 or len(found) < len(numbers):
        how = "hang" if hung else f"crash, wait status {status}"
        found.append((begun, "finding", how))
    return found, peak


@dataclass
class Tally:
    """How far a campaign has come; kept in a file, so that one that was broken off goes on."""

    seed: int
    done: Counter[str] = field(default_factory=Counter)
    """Inputs of each target that have been tried."""
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    """What became of them."""
    findings: list[tuple[str, int, str]] = field(default_factory=list)
    """Target, number of the input, what happened."""
    seconds: float = 0.0
    peak: int = 0
    """Bytes that a process took beyond what it started with."""

    @classmethod
    def read(cls, path: Path, seed: int) -> Tally:
        """What an earlier campaign with this seed wrote, if it did."""
        if not path.exists():
            return cls(seed)
        kept = json.loads(path.read_text())
        if kept["seed"] != seed:
            raise ValueError(f"{path} is of --seed {kept['seed']}: give that, or another --state")
        counts = {name: Counter(count) for name, count in kept["counts"].items()}
        findings = [(name, number, what) for name, number, what in kept["findings"]]
        return cls(seed, Counter(kept["done"]), counts, findings, kept["seconds"], kept["peak"])

    def add(self, target: Target, outcomes: list[tuple[int, str, str]], peak: int, seconds: float) -> None:
        """What became of a batch."""
        count = self.counts.setdefault(target.name, Counter())
        for number, kind, what in outcomes:
            count[kind] += 1
            if kind == "finding":
                self.findings.append((target.name, number, what))
                print(f"{target.name} {number}: {what[-1500:]}", flush=True)
        self.done[target.name] = outcomes[-1][0] + 1
        self.peak, self.seconds = max(self.peak, peak), self.seconds + seconds

    def __str__(self) -> str:
        lines = [f"{'':30}{''.join(f'{kind:>9}' for kind in KINDS)}"]
        for name, count in self.counts.items():
            lines.append(f"{name:30}" + "".join(f"{count[kind]:9d}" for kind in KINDS))
        total = sum(self.counts.values(), Counter[str]())
        lines.append(f"{'together':30}" + "".join(f"{total[kind]:9d}" for kind in KINDS))
        lines.append(
            f"{total.total()} inputs in {self.seconds:.0f} s, at most {self.peak / 2**20:.0f} MB of memory "
            "beyond the start"
        )
        return "\n".join(lines)


def campaign(
    tally: Tally,
    inputs: int,
    *,
    only: str = "",
    minutes: float = 1e9,
    state: Path | None = None,
    keep: Path | None = None,
) -> None:
    """So many inputs, dealt to all targets in turn, or as many as the minutes allow.

    :param only: targets whose name contains this.
    :param state: a file for the tally, written after each batch.
    :param keep: a folder for the inputs that found something.
    """
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as place:
        chosen = [target for target in targets(Path(place)) if only in target.name]
        each = -(-inputs // len(chosen))
        while time.monotonic() < end:
            open_ones = [target for target in chosen if tally.done[target.name] < each]
            if not open_ones:
                return
            for target in open_ones:
                started, first = time.monotonic(), tally.done[target.name]
                numbers = list(range(first, min(first + BATCH, each)))
                outcomes, peak = batch(target, numbers, tally.seed, Path(place))
                tally.add(target, outcomes, peak, time.monotonic() - started)
                for number, kind, _ in outcomes:
                    if keep is not None and kind == "finding":
                        name = "".join(c if c.isalnum() else "_" for c in target.name)
                        write_bytes(keep / f"{name}-{number}", make(target, number, tally.seed))
                if state is not None:
                    write_json(state, vars(tally))


def main() -> int:
    """Run the campaign and say what was seen; 1 if there are findings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after this time")
    parser.add_argument("--only", default="", help="targets whose name contains this")
    parser.add_argument("--state", type=Path, help="a file by which the same command goes on")
    parser.add_argument("--keep", type=Path, help="a folder for the inputs that found something")
    given = parser.parse_args()
    torch.set_num_threads(1)
    tally = Tally(given.seed) if given.state is None else Tally.read(given.state, given.seed)
    campaign(
        tally,
        given.inputs,
        only=given.only,
        minutes=given.minutes,
        state=given.state,
        keep=given.keep,
    )
    print(tally)
    return 1 if tally.findings else 0


if __name__ == "__main__":
    sys.exit(main())
