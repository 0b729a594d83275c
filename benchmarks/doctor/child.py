"""What must be imported to be known, in a process of its own: whatever ends or stops it, the doctor goes on.

    python -m benchmarks.doctor.child DESCRIPTOR SECONDS STAGE...

Each stage writes a line of JSON when it begins and one when it has ended, onto an open file descriptor.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

from dataset import process

MODULES = ("numpy", "h5py", "torch", "torchvision", "pfl", "benchmarks.flair.train")
"""What a run imports, the first that can fail first."""
Facts = dict[str, Any]


def imports(seconds: float) -> Iterator[Facts]:
    """Every module that a run needs; the first that fails ends it."""
    begin = time.monotonic()
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception as fault:
            yield {"failed": name, "why": one_line(fault)}
            return
    from benchmarks.core.code_version import commit

    process.imported()
    yield {"seconds": round(time.monotonic() - begin, 1), "commit": commit()}


def device(seconds: float) -> Iterator[Facts]:
    """What torch can compute on."""
    import torch

    found: Facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": []}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        why = [str(warning.message) for warning in said]
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except Exception as fault:
            why.append(one_line(fault))
        yield {**found, "why_no_gpu": " ".join(" ".join(why).split())[:400]}
        return
    for number in range(torch.cuda.device_count()):
        free, whole = torch.cuda.mem_get_info(number)
        gpu: Facts = {
            "name": torch.cuda.get_device_name(number),
            "free_gb": free / 1e9,
            "whole_gb": whole / 1e9,
        }
        try:
            eye = torch.eye(64, device=f"cuda:{number}")
            gpu["works"] = float((eye @ eye).sum()) == 64.0
        except Exception as fault:  # a driver, a kernel that is not for this GPU, a full memory
            gpu |= {"works": False, "why": one_line(fault)}
        found["gpus"].append(gpu)
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    version: Any = torch.cuda.nccl.version() if nccl else None  # type: ignore[no-untyped-call]
    yield {**found, "nccl": version and ".".join(map(str, version)), "bf16": torch.cuda.is_bf16_supported()}


def path(seconds: float) -> Iterator[Facts]:
    """How a run would be computed here, by what a run makes of it."""
    from benchmarks.doctor.trial import path_taken

    yield path_taken()


def trial(seconds: float) -> Iterator[Facts]:
    """The self-test: each comparison as soon as it is done."""
    from benchmarks.doctor.trial import comparisons

    yield from comparisons(seconds)


def horovod(seconds: float) -> Iterator[Facts]:
    """Whether Horovod can be imported beside this torch, and what it was built with."""
    try:
        import horovod
        import horovod.torch as hvd
    except Exception as fault:
        yield {"why": one_line(fault)}
        return
    built = [
        name for name in ("nccl", "gloo", "mpi", "cuda", "ccl") if getattr(hvd, f"{name}_built", lambda: 0)()
    ]
    yield {"version": horovod.__version__, "built_with": built}


STAGES = {stage.__name__: stage for stage in (imports, device, path, trial, horovod)}


def one_line(fault: BaseException) -> str:
    """An exception in one line: its type and the first line of its message."""
    said = next((line for line in str(fault).splitlines() if line.strip()), "")
    return f"{type(fault).__name__}: {said.strip()}"[:300]


def events(names: list[str], seconds: float) -> Iterator[Facts]:
    """What the stages say, each with its beginning and its end; the first that fails is the last."""
    for name in names:
        yield {"stage": name, "event": "begin"}
        failed = False
        try:
            for facts in STAGES[name](seconds):
                failed = failed or "failed" in facts
                yield {"stage": name, "event": "found", **facts}
        except Exception as fault:
            import traceback

            traceback.print_exc()
            yield {"stage": name, "event": "found", "failed": name, "why": one_line(fault)}
            failed = True
        yield {"stage": name, "event": "end"}
        if failed:
            return


def main(argv: list[str]) -> None:
    """Write what the stages find."""
    descriptor, seconds, *names = argv
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as output:
        for event in events(names, float(seconds)):
            print(json.dumps(event), file=output, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
    process.ends(0)
