"""Before the first round: how many lanes, and which users share a pass, chosen by timing users of that round.

The choice moves a round's sums by rounding alone. It is written into the run's folder, so that a run that
goes on after a stop adds up in the order in which it began, and into the user's cache folder for other runs
of the same network and training on the same processor.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pfl.internal.ops.selector import get_default_framework_module as get_ops

from pfl_ext.data.federated_dataset import FederatedImageDataset, Member
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.engine.plan import Arrangement, dealt
from pfl_ext.engine.selfcheck import fingerprint, kept_in, read_kept, write_kept
from pfl_ext.engine.training import LocalTraining
from pfl_ext.privacy.central import ScalesUpdates
from pfl_ext.processor import processor_model
from pfl_ext.rules import Rule

SECONDS = 30.0
"""Time after which no further choice is tried."""
SHARE = 0.02
"""The least that a pass over the users who are timed must take, as a share of these seconds."""
FEW = 16
"""Users of each worker who are timed at first; four times as many until they take long enough."""
GAIN = 0.95
"""A choice is taken if its time is at most this share of the engine's own."""


class Tuner:
    """Chooses once in a process.

    Args:
        folder: of the run; None: nothing is written there.
        kept: where choices are kept; None: the user's cache folder.
        clock: seconds, of which differences are taken.
    """

    def __init__(
        self,
        folder: Path | None = None,
        kept: Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._own = None if folder is None else folder / "engine_choice.json"
        self._kept, self._clock = kept or kept_in(), clock
        self.outcome: dict[str, Any] | None = None
        """The entry of ``results.json``; None: there was nothing to choose."""

    def tune(
        self,
        engine: CohortEngine,
        dataset: FederatedImageDataset,
        members: Sequence[Member],
        local: LocalTraining,
        weight_of: Callable[[Member], float],
        scaling: ScalesUpdates | None,
        rule: Rule,
    ) -> None:
        """Leave the engine as its fastest choice for these users; the same one on all workers."""
        engine.readers.most = torch.get_num_threads() // len(engine.lanes) if engine.on_gpu else 0
        choices = engine.arrangements()
        if len(choices) == 1:
            return
        device = torch.cuda.get_device_name() if engine.on_gpu else processor_model()
        key = fingerprint(repr(engine.central), local.form, choices, device, get_ops().distributed.world_size)
        place = self._kept / f"engine-choice-{key}.json"
        found, source = self._known(choices, place)
        seconds: dict[Arrangement, float] = {}
        if found is None:
            seconds = self._times(engine, choices, dataset, members, local, weight_of, scaling, rule)
            found = min(seconds, key=lambda c: seconds[c] * (GAIN if c == choices[0] else 1.0))
            source = "timed"
        engine.arrange(found)
        self.outcome = {
            **asdict(found), "device": device, "source": source,
            "seconds": [{**asdict(c), "seconds": rounded(s)} for c, s in seconds.items()],
        }  # fmt: skip
        if get_ops().distributed.global_rank == 0:
            for each in (place, self._own):
                if each is not None:
                    write_kept(each, self.outcome)
            print(f"engine: {found} on {device}, {source}", file=sys.stderr)

    def _known(self, choices: Sequence[Arrangement], place: Path) -> tuple[Arrangement | None, str]:
        """What an earlier start chose, and which, as the first worker finds it."""
        found = torch.zeros(len(choices), 2)
        if get_ops().distributed.global_rank == 0:
            for column, path in enumerate((self._own, place)):
                earlier = {} if path is None else read_kept(path)
                for row, choice in enumerate(choices):
                    found[row, column] = asdict(choice).items() <= earlier.items() and not found.any()
        _summed(found)
        if not found.any():
            return None, ""
        row, column = found.nonzero()[0].tolist()
        return choices[row], ("as this run began", "as timed before")[column]

    def _times(
        self,
        engine: CohortEngine,
        choices: Sequence[Arrangement],
        dataset: FederatedImageDataset,
        members: Sequence[Member],
        *job: Any,
    ) -> dict[Arrangement, float]:
        """Seconds of each choice that was tried, added up over workers; infinite where it failed."""
        workers = get_ops().distributed.world_size
        number, begin = min(FEW * workers, len(members)), self._clock()
        first = self._time(engine, choices[0], dataset, spread(members, number), *job)
        while first < SHARE * SECONDS * workers and number < len(members):
            number = min(4 * number, len(members))
            first = self._time(engine, choices[0], dataset, spread(members, number), *job)
        seconds = {choices[0]: first}
        for choice in choices[1:]:
            if _summed(torch.tensor([self._clock() - begin])).item() > SECONDS * workers:
                break
            seconds[choice] = self._time(engine, choice, dataset, spread(members, number), *job)
        return seconds

    def _time(
        self,
        engine: CohortEngine,
        choice: Arrangement,
        dataset: FederatedImageDataset,
        members: Sequence[Member],
        local: LocalTraining,
        weight_of: Callable[[Member], float],
        scaling: ScalesUpdates | None,
        rule: Rule,
    ) -> float:
        """The faster of two passes over these users, after one that reads their images and records graphs."""
        workers, passes = get_ops().distributed, list[float]()
        try:
            engine.arrange(choice)
            for _ in range(3):
                begin = self._clock()
                tasks = engine.tasks(members, local, scaling)
                mine = dealt(tasks, workers.world_size)[workers.global_rank]
                engine.train(dataset, mine, local, weight_of, scaling, rule)
                engine.take_losses()  # waits for the device
                passes.append(self._clock() - begin)
            seconds = min(passes[1:])
            if len(engine.lanes) < choice.lanes:
                raise ValueError("the device has no memory for so many lanes")
        except (RuntimeError, ValueError) as fault:
            print(f"engine: {choice} is no choice here: {str(fault).splitlines()[0][:200]}", file=sys.stderr)
            seconds = float("inf")
        return float(_summed(torch.tensor([seconds], dtype=torch.float64)))


def spread(members: Sequence[Member], number: int) -> list[Member]:
    """So many members, from the one with the least work to the one with the most, at even distances."""
    by_work = sorted(members, key=lambda m: (m.num_passes, m.num_steps))
    return [by_work[(2 * place + 1) * len(by_work) // (2 * number)] for place in range(number)]


def rounded(seconds: float) -> float | None:
    """For a file; None where a choice failed."""
    return round(seconds, 4) if math.isfinite(seconds) else None


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over workers, in place."""
    if get_ops().distributed.world_size > 1:
        get_ops().distributed.all_reduce([tensor])
    return tensor
