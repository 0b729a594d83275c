"""Transfers from the CPU to the device without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` in memory that a GPU fetches from by itself; as it is for other devices."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor``, of the CPU, on the device."""
    return pinned(tensor, device).to(device, non_blocking=True)
