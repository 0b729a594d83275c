"""Transfers from the CPU to the device without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` in pinned memory, which a GPU reads by itself; unchanged for other devices."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The CPU tensor ``tensor`` copied to the device, without waiting."""
    return pinned(tensor, device).to(device, non_blocking=True)
