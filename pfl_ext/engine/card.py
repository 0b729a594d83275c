"""Helpers for work on a GPU: releasing its memory, setting its arithmetic, and preparing threads."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

RESERVE = 0.1
"""Share of a GPU's memory that recorded steps leave free for evaluation and for sums between workers."""
LACKING = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)
"""Parts of the messages of torch, cuBLAS, cuDNN and CUDA graphs when memory ran out."""


def is_out_of_memory(fault: BaseException) -> bool:
    """Whether a computation failed because a device's memory was full."""
    if isinstance(fault, torch.OutOfMemoryError):
        return True
    return isinstance(fault, RuntimeError) and any(text in str(fault) for text in LACKING)


def fits(work: Callable[..., None], *job: Any) -> bool:
    """Do this work. Returns whether memory was enough."""
    try:
        work(*job)
    except RuntimeError as fault:
        if not is_out_of_memory(fault):
            raise
        return False
    return True


def release(device: torch.device) -> None:
    """Release the memory of an abandoned computation, once nothing on the device still uses it.

    The caller must have left the ``except`` that caught the error: a traceback keeps every frame's tensors.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def has_room(device: torch.device) -> bool:
    """Whether the `RESERVE` of a GPU is still free."""
    torch.cuda.empty_cache()
    free, whole = torch.cuda.mem_get_info(device)
    return free >= RESERVE * whole


def begin_thread(device: torch.device) -> None:
    """Set up a new thread that prepares work for ``device``: compute on one core and select this GPU.

    Each thread has its own current GPU. Without this, pinning memory would initialise GPU 0 in every worker,
    and copies into pinned memory would start further threads for each thread that makes them.
    """
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextlib.contextmanager
def ieee_float32(device: torch.device) -> Iterator[None]:
    """In this context float32 on a GPU is IEEE float32; torch's default for convolutions is TF32 (10 bits).

    With TF32 clipped norms and sums would not keep their bound. ``bf16`` is the fast precision.
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
