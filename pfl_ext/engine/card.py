"""What work on a GPU needs besides the work: its memory given back, its arithmetic, its threads."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

RESERVE = 0.1
"""Share of a GPU's memory that recorded steps leave free, for evaluation and for sums between workers."""
LACKING = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)
"""What messages of torch, cuBLAS, cuDNN and CUDA's graphs say where memory ran out."""


def is_out_of_memory(fault: BaseException) -> bool:
    """Whether a computation failed because a device's memory was full."""
    if isinstance(fault, torch.OutOfMemoryError):
        return True
    return isinstance(fault, RuntimeError) and any(text in str(fault) for text in LACKING)


def fits(work: Callable[..., None], *job: Any) -> bool:
    """Do this work; whether memory was enough for it."""
    try:
        work(*job)
    except RuntimeError as fault:
        if not is_out_of_memory(fault):
            raise
        return False
    return True


def release(device: torch.device) -> None:
    """Give back the memory of a computation that was given up, once nothing on the device still uses it.

    The caller must be out of the ``except`` that caught its fault: a traceback keeps every frame's tensors.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def has_room(device: torch.device) -> bool:
    """Whether the `RESERVE` of a GPU is still free."""
    torch.cuda.empty_cache()
    free, whole = torch.cuda.mem_get_info(device)
    return free >= RESERVE * whole


def begin_thread(device: torch.device) -> None:
    """In a new thread that prepares work for ``device``, compute on one core and select this GPU.

    The current GPU is each thread's own: without this, pinning memory would wake up GPU 0 from every worker.
    Copies into pinned memory would start threads of their own for every thread that makes them.
    """
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextlib.contextmanager
def ieee_float32(device: torch.device) -> Iterator[None]:
    """Within, float32 on a GPU is float32: torch's own choice for convolutions is TF32, with 10 bits.

    Norms that are clipped, and the clipped sums, would not keep their bound. ``bf16`` is what is fast.
    """
    if device.type != "cuda":
        yield
        return
    cudnn, cublas = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, cublas.allow_tf32
    cudnn.allow_tf32 = cublas.allow_tf32 = False
    try:
        yield
    finally:
        cudnn.allow_tf32, cublas.allow_tf32 = before
