"""A training command with a change: interrupted in each round, or begun a rounding away.

``python -m benchmarks.check.changed interrupted benchmarks.flair.train WORDS...``
"""

from __future__ import annotations

import contextlib
import runpy
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.core import execute
from benchmarks.core.recorder import Recorder
from pfl_ext.randomness import torch_stream

ROUNDING = 2.0**-23
"""What the perturbed weights are changed by, relative to each."""


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """Within, a run is interrupted in each of its rounds or epochs but the last."""
    real = Recorder.step_done

    def stopping(self: Recorder, step: int, values: Mapping[str, Any], state: Any) -> None:
        if step + 1 < self.num_steps:
            self.held.number = signal.SIGTERM
        real(self, step, values, state)

    with mock.patch.object(Recorder, "step_done", stopping):
        yield


@contextlib.contextmanager
def perturbed() -> Iterator[None]:
    """Within, a run begins with weights that are one rounding greater or smaller, as drawn."""

    def of(real: Any) -> Any:
        def train(run: Any, store: Any, val: Any, module: nn.Module, *rest: Any) -> Any:
            draw = torch_stream(0, "perturbed weights")
            with torch.no_grad():
                for p in module.parameters():
                    signs = 2 * torch.randint(0, 2, p.shape, generator=draw) - 1
                    p.mul_((1 + ROUNDING * signs).to(p.device, p.dtype))
            return real(run, store, val, module, *rest)

        return train

    names = "train_federated", "train_centralised"
    changed = {name: of(getattr(execute, name)) for name in names}
    with mock.patch.multiple(execute, **changed):
        yield


CHANGES = {"interrupted": interrupted, "perturbed": perturbed}


if __name__ == "__main__":
    change = CHANGES[sys.argv[1]]
    del sys.argv[:2]
    with change():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
