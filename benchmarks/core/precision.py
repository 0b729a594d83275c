"""The arithmetic of local training that a run asks for and can have."""

from __future__ import annotations

import sys

import torch
from pfl.internal.ops.pytorch_ops import get_default_device

from benchmarks.core.config.benchmark import AnyRun
from pfl_ext.engine.cpu import tiny_maps
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.workers.distributed import is_main


def precision_of(run: AnyRun, module: ImageClassifier) -> torch.dtype | None:
    """The type of torch's autocast in training; None: float32, also for networks of `tiny_maps`."""
    tiny = _tiny(run, module)
    if tiny is None:
        return torch.bfloat16 if run.runtime.precision == "bf16" else None
    if is_main():
        print(
            f"{run.config.model.arch} is trained in float32: on a CPU, the bfloat16 gradient of torch "
            f"is wrong for its {tiny} on maps of only a few pixels; to use bf16, raise model.input_size",
            file=sys.stderr,
        )
    return None


def name_of(run: AnyRun, module: ImageClassifier) -> str:
    """``bf16`` or ``fp32``: in which of them the run is trained."""
    return "fp32" if _tiny(run, module) is not None else run.runtime.precision


def _tiny(run: AnyRun, module: ImageClassifier) -> str | None:
    if run.runtime.precision != "bf16" or get_default_device().type != "cpu":
        return None
    return tiny_maps.found_in(module)
