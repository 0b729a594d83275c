"""A training command that stops after the round or epoch that it makes next, as if it were interrupted there.

python -m benchmarks.check.interrupted benchmarks.flair.train WORDS...
"""

from __future__ import annotations

import contextlib
import runpy
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.core.recorder import Recorder


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """Within, a run is interrupted in each of its steps but the last."""
    real = Recorder.step_done

    def stopping(self: Recorder, step: int, values: Mapping[str, Any], state: Any) -> None:
        if step + 1 < self.num_steps:
            self.held.number = signal.SIGTERM
        real(self, step, values, state)

    Recorder.step_done = stopping  # type: ignore[method-assign]
    try:
        yield
    finally:
        Recorder.step_done = real  # type: ignore[method-assign]


if __name__ == "__main__":
    del sys.argv[0]
    with interrupted():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
