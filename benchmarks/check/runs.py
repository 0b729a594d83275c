"""Trainings by one command, and whether they came to the same."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from benchmarks.core.recorder import BEST
from benchmarks.core.secret import statement_path
from dataset.cli import RESUMABLE
from pfl_ext import checkpoint
from pfl_ext.algorithms.user_vectors import PLACES

MOST, TIMES_A_ROUNDING = 0.01, 10
"""Largest difference of states: as a share of what training changed after the first round, or as a multiple
of what a rounding of all first weights changes, whichever is larger."""
WHEN = ("wall_clock_s", "commit")
"""The keys of results.json that differ between equal runs; somebody may commit while they run."""
PLAIN = ()
INTERRUPTED, PERTURBED = (("benchmarks.check.changed", change) for change in ("interrupted", "perturbed"))
TWO_WORKERS = ("torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m")
WITHOUT_ENGINE = ("--runtime.engine=stock",)


class Refused(ValueError):
    """A training ended with an error of its own."""


class Runs:
    """Trainings by one command, each in a folder of its own.

    Args:
        command: the module that trains, and its words.
        folder: for the runs.
    """

    start: ClassVar[tuple[str, ...]] = (sys.executable, "-m")

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self.command, self.folder = command, folder

    def train(self, name: str, *more: str, by: Sequence[str] = PLAIN) -> bool:
        """Train in processes of its own; False if the training was interrupted and can go on.

        Raises:
            Refused: the error of the training.
        """
        where = (f"--run_dir={self.folder / name}", "--runtime.keep_checkpoints=true")
        words = [*self.start, *by, *self.command, *where, *more]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode == RESUMABLE:
            return False
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
            errors = [line for line in lines if line.startswith("error: ")]
            raise Refused((errors or lines)[-1].removeprefix("error: "))
        return True

    def state(self, name: str) -> dict[str, Tensor]:
        """The tensors of a run's last checkpoint, without the best model, which was the last one once, and
        where in a file users' numbers lie."""
        tensors, _ = checkpoint.load(self.folder / name / "checkpoint" / "last.safetensors")
        return {
            key: tensor
            for key, tensor in tensors.items()
            if not key.startswith(BEST) and key.rpartition("/")[2] not in PLACES
        }

    def results(self, name: str) -> dict[str, Any]:
        """What a run found, without `WHEN`."""
        found = checkpoint.read_json(self.folder / name / "results.json")
        return {key: value for key, value in found.items() if key not in WHEN}


def different(runs: Runs, name: str) -> str:
    """What differs between a run and the run ``whole``, bit for bit; empty if nothing does."""
    (one, other), (found, others) = map(runs.state, ("whole", name)), map(runs.results, ("whole", name))
    states = [key for key in sorted({*one, *other}) if _bytes(one.get(key)) != _bytes(other.get(key))]
    results = [key for key in sorted({*found, *others}) if found.get(key) != others.get(key)]
    parts = (("in the checkpoint", states), ("in results.json", results))
    return "; ".join(
        f"{', '.join(keys[:4])}{', ...' if len(keys) > 4 else ''} {where}" for where, keys in parts if keys
    )


def _bytes(tensor: Tensor | None) -> object:
    """What equal tensors have alike; NaN equals itself."""
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.contiguous().numpy().tobytes())


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The norm of the difference of two states, over all that is not counted in whole numbers; infinite for
    states of other tensors."""
    if {name: t.shape for name, t in one.items()} != {name: t.shape for name, t in other.items()}:
        return math.inf
    names = [name for name, tensor in one.items() if tensor.is_floating_point()]
    return float(sum((one[name].double() - other[name].double()).square().sum() for name in names) ** 0.5)


def check(runs: Runs, say: Callable[[str], None]) -> bool:
    """Train in every way, and say what was found; whether all is kept.

    Args:
        runs: of the command.
        say: gets a line for each way.

    Raises:
        Refused: by the command itself.
        ValueError: for a private run, and one of a single round.
    """
    runs.train("whole")
    if statement_path(runs.folder / "whole").exists():
        raise ValueError(
            "a private run's noise is secret, so no two are equal: check the command without privacy"
        )
    runs.train("again")
    faults, first = [different(runs, "again")], None
    say(f"trained again: {_in_words(faults[-1])}")
    while not runs.train("stopped", by=INTERRUPTED):
        first = first or runs.state("stopped")
    if first is None:
        raise ValueError("the run has a single round, and cannot be stopped before its end: give it more")
    faults.append(different(runs, "stopped"))
    say(f"stopped after each round, and gone on with: {_in_words(faults[-1])}")
    whole, rounding = runs.state("whole"), 0.0
    if not faults[0]:  # else a difference may be that of two equal runs
        runs.train("perturbed", by=PERTURBED)
        rounding = distance(whole, runs.state("perturbed"))
    kept = [name for name in whole if name in first and whole[name].shape == first[name].shape]
    moved = distance(*({name: state[name] for name in kept} for state in (whole, first)))
    if math.isinf(rounding):  # a rounding has changed which tensors there are, which is no measure
        rounding = 0.0
    allowed = max(MOST * moved, TIMES_A_ROUNDING * rounding)
    for way, more, by in (
        ("by pfl's own loop", WITHOUT_ENGINE, PLAIN),
        ("by two workers", (), TWO_WORKERS),
    ):
        try:
            runs.train(way, *more, by=by)
        except Refused as why:
            say(f"{way}: refused: {why}")
            continue
        apart = distance(whole, runs.state(way))
        share = f"{apart / moved:.2g} of what training changed" if moved else f"{apart:.2g}"
        if rounding:
            share += f", {apart / rounding:.2g} times what a rounding of the first weights changes"
        faults.append("" if apart <= allowed else f"the states differ by {share}")
        say(f"{way}: {_in_words(faults[-1], f'equal up to {share}' if apart else 'equal')}")
    return not any(faults)


def _in_words(fault: str, otherwise: str = "equal, bit for bit") -> str:
    return f"NOT EQUAL: {fault}" if fault else otherwise
