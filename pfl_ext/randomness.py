"""Randomness as a pure function of (seed, purpose, keys), usually (seed, purpose, round, user).

No stream is ever continued. Every draw names its purpose, so that cohorts, crops and noise depend neither on
the number of workers nor on where a run was interrupted.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def derive(seed: int, purpose: str, *keys: int | str) -> int:
    """A 128-bit integer that is a hash of its arguments; distinct arguments give independent values."""
    text = "\x1f".join([str(int(seed)), purpose, *(f"{type(key).__name__}:{key}" for key in keys)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def stream(seed: int, purpose: str, *keys: int | str) -> np.random.Generator:
    """A fresh NumPy generator (Philox) for one purpose."""
    return np.random.Generator(np.random.Philox(key=derive(seed, purpose, *keys)))


def torch_stream(seed: int, purpose: str, *keys: int | str) -> torch.Generator:
    """A fresh CPU torch generator for one purpose."""
    return torch.Generator().manual_seed(derive(seed, purpose, *keys) % 2**63)


def seed32(seed: int, purpose: str, *keys: int | str) -> int:
    """A 32-bit seed for the parts of pfl that take an integer."""
    return derive(seed, purpose, *keys) % 2**32
