"""What is seen of a run under way: a bar, the scores beside it, and how long the rest will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from tqdm import tqdm

from benchmarks.core.config.benchmark import AnyRun
from pfl_ext.workers.distributed import is_main

LONG_S = 600.0
"""A run that will take longer than this says so, in seconds."""


def duration(seconds: float) -> str:
    """``25 min``, ``3.5 h`` or ``2.1 days``."""
    minutes = seconds / 60
    if minutes < 120:
        return f"{minutes:.0f} min"
    return f"{minutes / 60:.1f} h" if minutes < 48 * 60 else f"{minutes / 1440:.1f} days"


class Progress:
    """The clock and the progress bar of one process. Only worker 0 prints."""

    def __init__(self, run: AnyRun) -> None:
        self._run, self._config = run, run.config
        self._started = self._step_started = time.perf_counter()
        self._scoring_s, self._steps_here = 0.0, 0
        self._bar = tqdm(disable=True)
        self.earlier_s = 0.0
        """Seconds that the processes before this one spent on the run, up to the checkpoint."""

    @property
    def wall_clock(self) -> float:
        """Seconds of training and evaluation so far, over all resumptions."""
        return self.earlier_s + time.perf_counter() - self._started

    def open(self, step: int) -> None:
        """Show the bar, at ``step``."""
        self._bar = tqdm(
            total=self._config.num_steps,
            initial=step,
            unit=self._config.unit,
            file=sys.stderr,
            disable=not (self._run.runtime.progress and is_main()),
            mininterval=0.5 if sys.stderr.isatty() else 10,
            dynamic_ncols=True,
        )

    def close(self) -> None:
        """Leave the screen to what comes next, an error line perhaps."""
        self._bar.close()

    def timed(self, evaluation: Callable[[PyTorchModel], Metrics], model: PyTorchModel) -> Metrics:
        """The model's scores; how long the scoring took is kept for `_estimate`."""
        begin = time.perf_counter()
        metrics = evaluation(model)
        self._scoring_s = time.perf_counter() - begin
        return metrics

    def lap(self) -> float:
        """Seconds since the last call, or since the start."""
        now = time.perf_counter()
        seconds, self._step_started = now - self._step_started, now
        return seconds

    def step_done(self, done: int, seconds: float, scored: bool) -> None:
        """Move the bar; ``done`` counts from the start of the run, ``seconds`` may hold the time of a score.

        After this process's first step, say how long the rest will take if it is long.
        """
        self._bar.update(1)
        self._steps_here += 1
        if self._steps_here == 1 and is_main():
            self._estimate(done, seconds - (self._scoring_s if scored else 0.0))

    def _estimate(self, done: int, seconds: float) -> None:
        config, unit = self._config, self._config.unit
        steps = config.num_steps - done
        evaluations = -(-steps // config.every) + 1
        total = steps * seconds + evaluations * self._scoring_s
        if total > LONG_S:
            parts = f"{steps:,} {unit}s of {seconds:.2g} s and {evaluations:,} evaluations of "
            pace = f"at the pace of the first {unit}: {parts}{self._scoring_s:.2g} s"
            tqdm.write(f"about {duration(total)} to go {pace}", file=sys.stderr)

    def show(self, text: str) -> None:
        """Put the last scores beside the bar."""
        self._bar.set_postfix_str(text, refresh=False)
