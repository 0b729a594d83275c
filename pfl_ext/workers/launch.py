"""Finds the launcher of this process, its rank among the workers, and its device.

Nothing here initialises CUDA or imports pfl.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Launch:
    """The place of this process among the workers of a job."""

    launcher: Literal["none", "torchrun", "horovod"] = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1


VARIABLES: Mapping[Literal["torchrun", "horovod"], tuple[str, str, str, str]] = {
    "horovod": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
}
"""The variables of each launcher: rank and number of workers, overall and within one machine."""


def find_launch(environment: Mapping[str, str]) -> Launch:
    """The launcher whose variables are all set, Horovod's first; else none.

    Raises:
        ValueError: when a variable is not a number.
    """
    for launcher, names in VARIABLES.items():
        if all(name in environment for name in names):
            try:
                return Launch(launcher, *(int(environment[name]) for name in names))
            except ValueError:
                found = ", ".join(f"{name}={environment[name]}" for name in names)
                raise ValueError(
                    f"{found}: not all numbers; start the job by torchrun or horovodrun"
                ) from None
    return Launch()


def place(launch: Launch, device: str) -> str:
    """The device of one of several workers, which also becomes CUDA's current device.

    horovodrun does not set LOCAL_RANK, by which pfl chooses the GPU. So the device is chosen here, before
    CUDA is initialised, and passed to pfl.
    """
    if device in ("auto", "cuda") and torch.cuda.is_available():
        device = f"cuda:{launch.local_rank % torch.cuda.device_count()}"
    elif device == "auto":
        device = "cpu"
    if device.startswith("cuda:") and torch.cuda.is_available():
        torch.cuda.set_device(device)
    return device
