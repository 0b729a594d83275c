"""Before the first round: how many lanes, and which users share a pass, chosen by timing users of that round.

The choice moves a round's sums by rounding. It is written into the run's folder, so that a run that goes on
after a stop adds up in the order in which it began. The user's cache folder keeps it for other runs of the
same network and training, with cohorts of about the same size, on the same processor.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pfl.internal.ops.selector import get_default_framework_module as get_ops

from dataset.files import write_json
from pfl_ext.data.federated_dataset import FederatedImageDataset, Member
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.engine.plan import Arrangement, dealt
from pfl_ext.engine.selfcheck import (
    cause,
    end_if_dead,
    fingerprint,
    is_alive,
    kept_folder,
    read_kept,
    this_process,
    write_kept,
)
from pfl_ext.engine.training import LocalTraining
from pfl_ext.privacy.central import ScalesUpdates
from pfl_ext.processor import processor_model
from pfl_ext.rules import Rule
from pfl_ext.workers.distributed import from_main, is_main

SECONDS = 30.0
"""Time after which no further choice is tried."""
SHORT = 0.5
"""Seconds of a pass over the users who are timed; the times of shorter passes are noise."""
FEW = 16
"""Users of each worker who are timed at first; four times as many until they take long enough."""
ATTEMPTS = 4
"""How often the engine's own arrangement is timed where memory is not enough for its lanes."""
GAIN = 0.95
"""A choice is taken if its time is at most this share of the engine's own."""
CHOICE = "engine_choice.json"
"""The file in a run's folder by which a resumed run adds up as it began."""
AS_BEGUN = "as this run began"
Timed = dict[Arrangement, float | None]
"""Seconds by choice, added up over workers; None where a choice failed."""


@dataclass(frozen=True)
class Round:
    """The round that users are timed for."""

    dataset: FederatedImageDataset
    members: Sequence[Member]
    local: LocalTraining
    weight_of: Callable[[Member], float]
    scaling: ScalesUpdates | None
    rule: Rule

    def some(self, number: int) -> Round:
        """So many users, from the one with the least work to the one with the most, at even distances."""
        by_work = sorted(self.members, key=lambda m: (m.num_passes, m.num_steps))
        number = min(number, len(by_work))
        return replace(
            self, members=[by_work[(2 * i + 1) * len(by_work) // (2 * number)] for i in range(number)]
        )

    @property
    def about(self) -> tuple[Any, ...]:
        """What the times depend on, but for the learning rate and one cohort's difference from another."""
        work = [1 + sum(counts) for counts in zip(*((m.num_passes, m.num_steps) for m in self.members))]
        sizes = [round(math.log2(total)) for total in work]
        return replace(self.local, learning_rate=1.0), type(self.scaling), len(self.members), sizes


class Tuner:
    """Chooses once in a process.

    Args:
        folder: the run's; None: nothing is written there.
        settings: what else the times depend on.
        kept: where choices are kept; None: the user's cache folder.
        clock: seconds, of which differences are taken.
    """

    def __init__(
        self,
        folder: Path | None = None,
        settings: str = "",
        kept: Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._choice = None if folder is None else folder / CHOICE
        self._settings, self._kept, self._clock = settings, kept or kept_folder(), clock
        self.outcome: dict[str, Any] | None = None
        """The entry of ``results.json``; None: there was nothing to choose."""

    def tune(self, engine: CohortEngine, job: Round) -> None:
        """Leave the engine as its fastest choice for this round; the same one on all workers.

        Raises:
            OSError: if the choice cannot be written into the run's folder.
        """
        if len(engine.arrangements()) == 1:
            if is_main():
                print(f"engine: {engine.arrangement}, as there is nothing else to try", file=sys.stderr)
            return
        device = torch.cuda.get_device_name() if engine.on_gpu else processor_model()
        threads, workers = torch.get_num_threads(), get_ops().distributed.world_size
        key = fingerprint(repr(engine.central), job.about, self._settings, device, threads, workers)
        place = self._kept / f"engine-choice-{key}.json"
        earlier = from_main(self._earlier(engine, place))
        if earlier:
            source, seconds = earlier["source"], earlier.get("seconds", [])
            found, as_is = arrangement_in(earlier) or engine.arrangement, engine.arrangement
            found = replace(found, fuse=as_is.fuse) if engine.on_gpu else replace(found, lanes=as_is.lanes)
        else:
            times = self._times(engine, job, place)
            found = _fastest(times)
            seconds = [{**asdict(c), "seconds": None if s is None else round(s, 4)} for c, s in times.items()]
            timed = len(times) > 1
            source = "timed" if timed else "as it was, since passes are too short or too long to compare"
        engine.arrange(found)
        self.outcome = {**asdict(found), "device": device, "source": source, "seconds": seconds}
        if is_main():
            if source == "timed":
                write_kept(place, self.outcome)
            if self._choice is not None and source != AS_BEGUN:
                write_json(self._choice, self.outcome)
            print(f"engine: {found} on {device}, {source}", file=sys.stderr)

    def _earlier(self, engine: CohortEngine, place: Path) -> dict[str, Any]:
        """What an earlier start chose, with its ``source``; empty if none did."""
        began = {} if self._choice is None else read_kept(self._choice)
        if arrangement_in(began) is not None:
            return {**began, "source": AS_BEGUN}
        known = read_kept(place)
        if "by" in known:
            broke_off = "since an earlier attempt to time others broke off"
            why = "while another run times others" if is_alive(known) else broke_off
            return {"source": f"as it was, {why}"}
        if arrangement_in(known) not in engine.arrangements():
            return {}
        return {**known, "source": "as timed before"}

    def _times(self, engine: CohortEngine, job: Round, place: Path) -> Timed:
        """The engine's own arrangement first, and others if passes take long enough but not too long."""
        workers = get_ops().distributed.world_size
        begin, number, attempts = self._clock(), FEW * workers, 0
        engine.readers.held = True
        try:
            while True:
                some = job.some(number)
                seconds = self._time(engine, engine.arrangement, some)
                attempts += 1
                if seconds is None and attempts < ATTEMPTS:
                    continue  # with the fewer lanes that a worker has kept
                if seconds is None or seconds >= SHORT * workers or number >= len(job.members):
                    break
                number *= 4
            times: Timed = {engine.arrangement: seconds}
            if seconds is not None and seconds < SHORT * workers:
                return times
            for words in from_main([asdict(choice) for choice in engine.arrangements()[1:]]):
                if from_main(self._clock() - begin) > SECONDS:
                    break
                if is_main():
                    write_kept(place, {"trying": words, "by": this_process()})
                choice = Arrangement(**words)
                times[choice] = self._time(engine, choice, some)
        except SystemExit:  # of a device that refuses all further work: the note stays
            raise
        except BaseException:
            _forget(place)  # the process lives: it was not the choice that ended it
            raise
        finally:
            engine.readers.held = False
        _forget(place)
        return times

    def _time(self, engine: CohortEngine, choice: Arrangement, job: Round) -> float | None:
        """The faster of two passes over these users, after one that reads their images and records graphs."""
        workers, passes, why = get_ops().distributed, list[float](), ""
        try:
            engine.arrange(choice)
            for _ in range(3):
                begin = self._clock()
                tasks = engine.tasks(job.members, job.local, job.scaling)
                mine = dealt(tasks, workers.world_size)[workers.global_rank]
                engine.train(job.dataset, mine, job.local, job.weight_of, job.scaling, job.rule)
                engine.take_losses()  # waits for the device
                passes.append(self._clock() - begin)
            if engine.arrangement.lanes < choice.lanes:
                why = "the device has no memory for so many lanes"
        except RuntimeError as fault:
            why = cause(fault)
            end_if_dead(why)
        if why:
            print(f"engine: {choice} is no choice here: {why}", file=sys.stderr)
        seconds = torch.tensor([math.inf if why else min(passes[1:])], dtype=torch.float64)
        if workers.world_size > 1:
            workers.all_reduce([seconds])
        return float(seconds) if math.isfinite(seconds) else None


def _fastest(times: Timed) -> Arrangement:
    """The fastest arrangement if it is faster enough than the first one, which is the engine's own."""
    as_is, *others = times
    found = min(others, key=lambda other: times[other] or math.inf, default=as_is)
    return found if (times[found] or math.inf) < (times[as_is] or math.inf) * GAIN else as_is


def arrangement_in(found: dict[str, Any]) -> Arrangement | None:
    """The arrangement of an outcome; None if there is none that makes sense."""
    lanes, fuse, images = (found.get(name) for name in ("lanes", "fuse", "images"))
    counts = all(isinstance(n, int) and n is not True and n > 0 for n in (lanes, images))
    return Arrangement(lanes, fuse, images) if counts and isinstance(fuse, bool) else None  # type: ignore[arg-type]


def _forget(place: Path) -> None:
    """Remove the first worker's note; a cache that cannot be written has none."""
    if is_main():
        with contextlib.suppress(OSError):
            place.unlink()
