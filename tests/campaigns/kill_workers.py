"""Kill -9 in a job of two workers under torchrun, go on each time until it ends, and compare.

    python -m tests.campaigns.kill_workers --kills 10 --rounds 30 --kind fl

In turn: one worker at a random place (in the sum over workers, say), one worker at a random time of training,
the whole job with its launcher at such a time, as when a machine is lost. A job that lost a worker must end
by itself, with no process left. Runs that come to their end are compared with one by two workers that was
never killed, as `tests.campaigns.kill_training` does, of which this is the form for workers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np

from benchmarks.flair.train import main as train
from dataset.cli import run
from dataset.flair.mini import write_mini
from tests.campaigns.kill_training import PHASES, PLACES, compare, outcome, tell
from tests.campaigns.kinds import COMMON, KINDS, SPEC
from tests.campaigns.lives import START, At, Phases
from tests.launching import ROOT, alive, command, environment

WORKERS = 2
TIMEOUT_S = 8.0
"""After which workers notice that one is lost."""
ENDS_S = 90.0
"""After which a job that lost a worker has ended: torchrun gives one that does not end 30 s more."""

How = Literal["never", "place", "worker", "job"]
HOWS: tuple[How, ...] = ("place", "worker", "job")
WORKER_KINDS = ("fl", "momentum", "pfl")
AT_WORK = {**PHASES, "reduction over workers": ("pfl_ext.workers.distributed:Workers.all_reduce",)}
OF_ANY_WORKER = (
    *PLACES["evaluation"],
    *PLACES["reduction"],
    "pfl_ext.workers.distributed:Workers.all_reduce",
    "pfl_ext.workers.distributed:Workers._agree",
    "pfl_ext.workers.distributed:Workers.broadcast",
    "pfl_ext.workers.transport:_TorchTransport.sum_",
    "benchmarks.core.recorder:Recorder.restore",
)
OF_WORKER_0 = (*PLACES["save"], "benchmarks.core.recorder:Recorder._write_line")


def worker(folder: Path, argv: list[str]) -> NoReturn:
    """One of the workers: train, and die where the campaign says; ``folder`` is how they talk."""
    rank = os.environ["RANK"]
    Phases(AT_WORK, folder / f"phase-{rank}").begin()
    trap = json.loads((folder / "traps.json").read_text()).get(rank)
    if trap is not None:
        At(**trap).arm((folder / "dead").touch)
    sys.exit(run(train, argv))


class Job:
    """One life of a run: a launcher and its workers, whose output goes to a file."""

    def __init__(self, folder: Path, argv: list[str], traps: dict[int, At]) -> None:
        self._dead, self._log, self.pids = folder / "dead", folder / "log.txt", list[int]()
        self._dead.unlink(missing_ok=True)
        (folder / "traps.json").write_text(json.dumps({rank: vars(trap) for rank, trap in traps.items()}))
        words = ("tests.campaigns.kill_workers", "--worker", str(folder), *argv)
        with self._log.open("w") as output:
            self._process = subprocess.Popen(
                command("torchrun", WORKERS, *words),
                cwd=ROOT,
                env=environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """So far."""
        return self._log.read_text()

    def meet(self, phases: list[Phases]) -> None:
        """Wait until the workers have said who they are and have begun to train, or the end."""
        while self._process.poll() is None and (not self.pids or START in {p.last for p in phases}):
            found = dict(re.findall(r"worker (\d): .* process (\d+)\n", self.output))
            if len(found) == WORKERS:
                self.pids = [int(found[str(rank)]) for rank in range(WORKERS)]
            time.sleep(0.01)

    def kill(self, after: float, ranks: list[int], launcher: bool) -> None:
        """Kill these workers, and the launcher too, after so many seconds, unless the job ends before."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(after)
        if self._process.poll() is None:
            self._dead.touch()
            self._end([*([self._process.pid] if launcher else []), *(self.pids[rank] for rank in ranks)])

    def end(self) -> int:
        """Wait for the launcher's exit code; a job in which nobody is dead may take its time.

        :raises RuntimeError: when a job that lost a worker does not end by itself, or leaves a worker.
        """
        until = float("inf")
        while self._process.poll() is None or any(map(alive, self.pids)):
            if until == float("inf") and (self._dead.exists() or self._process.poll() is not None):
                until = time.monotonic() + ENDS_S
            if time.monotonic() > until:
                raise RuntimeError(f"a job that lost a worker does not end: {self.output[-3000:]}")
            time.sleep(0.05)
        if self._process.returncode != 0 and not self._dead.exists():
            raise RuntimeError(f"a job failed that nobody killed: {self.output[-3000:]}")
        return int(self._process.returncode)

    def clear(self) -> None:
        """Leave no process."""
        self._end([self._process.pid, *self.pids])
        self._process.wait()

    def _end(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Campaign:
    """Kills of one kind of run by two workers, in one folder."""

    def __init__(self, kind: str, rounds: int, folder: Path, seed: int) -> None:
        self._folder, self._rng = folder, np.random.default_rng([seed, *kind.encode()])
        self._argv = [
            *COMMON,
            *KINDS[kind],
            f"--federated.num_rounds={rounds}",
            f"--data_path={folder / 'mini.hdf5'}",
            f"--runtime.worker_timeout_s={TIMEOUT_S}",
            "--runtime.threads=1",
        ]
        folder.mkdir()
        self._phases = [Phases(AT_WORK, folder / f"phase-{rank}") for rank in range(WORKERS)]
        write_mini(folder / "mini.hdf5", SPEC)
        self._seconds, self._at = 0.0, ""
        assert self._live("whole", "never") is None
        self._whole = outcome(folder / "whole")

    def _live(self, name: str, how: How) -> str | None:
        """One life; what killed it, or None if it came to its end."""
        rank, random = int(self._rng.integers(WORKERS)), float(self._rng.uniform(0, 0.7 * self._seconds))
        trap = self._trap(rank)
        job = Job(
            self._folder, [*self._argv, f"--run_dir={self._folder / name}"], trap if how == "place" else {}
        )
        try:
            job.meet(self._phases)
            began = time.monotonic()
            if how == "worker":
                job.kill(random, [rank], launcher=False)
            elif how == "job":
                job.kill(random, list(range(WORKERS)), launcher=True)
            code = job.end()
        finally:
            job.clear()
        if code == 0:
            self._seconds = self._seconds or time.monotonic() - began
            return None
        self._at = self._phases[rank].last
        at_random = {"worker": f"worker {rank}", "job": "the whole job"}
        return f"worker {rank} {trap[rank]}" if how == "place" else f"{at_random[how]} at a random time"

    def _trap(self, rank: int) -> dict[int, At]:
        place = str(self._rng.choice(OF_ANY_WORKER if rank else (*OF_ANY_WORKER, *OF_WORKER_0)))
        return {rank: At(place, int(self._rng.integers(1, 7)), bool(self._rng.random() < 0.5))}

    def kill(self, kills: int) -> tuple[int, Counter[str], Counter[str]]:
        """Kill so often; how many runs came to their end, what the dead were at, and what killed them.

        :raises RuntimeError: when a job fails or stays, or a run ends otherwise than the one never killed.
        """
        runs, phases, deaths = 0, Counter[str](), Counter[str]()
        while runs == 0 or deaths.total() < kills:
            name = f"run{runs}"
            while True:
                how = HOWS[deaths.total() % len(HOWS)] if deaths.total() < kills else "never"
                death = self._live(name, how)
                if death is None:
                    break
                deaths[death] += 1
                phases[self._at] += 1
            compare(name, outcome(self._folder / name), self._whole)
            left = [str(path) for path in (self._folder / name).rglob("*.partial")]
            if left:
                raise RuntimeError(f"left behind: {left}")
            shutil.rmtree(self._folder / name)
            runs += 1
        return runs, phases, deaths


def main() -> None:
    """Run the campaign and say what was seen."""
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--kind", choices=("all", *WORKER_KINDS), default="all")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for kind in WORKER_KINDS if given.kind == "all" else (given.kind,):
            started = time.monotonic()
            campaign = Campaign(kind, given.rounds, Path(folder, kind), given.seed)
            runs, phases, deaths = campaign.kill(given.kills)
            print(
                f"{kind}, {WORKERS} workers: {deaths.total()} kills over {runs} runs of {given.rounds} "
                f"rounds, each equal to the run never killed ({time.monotonic() - started:.0f} s)"
            )
            tell(phases, deaths)


if __name__ == "__main__":
    main()
