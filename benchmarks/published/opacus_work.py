"""What `benchmarks.published.opacus_peer` hands to opacus: features, labels, first weights, and the training.

Only numpy is needed, so that the process with opacus can import it.

Shape letters: N training images, M test images, D features of an image, K classes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

NAMES = ("train_features", "train_classes", "test_features", "test_classes", "weight", "bias")
"""float32 ``[N, D]``, int64 ``[N]``, ``[M, D]``, ``[M]``, and float32 ``[K, D]`` and ``[K]``."""


@dataclass(frozen=True)
class Work:
    """Gradient descent on clipped gradients of single images, with noise (DP-SGD)."""

    rates: list[float]
    """Learning rate of each step, for the noisy sum over `expected`."""
    momentum: float
    clipping_bound: float
    """Bound on the L2 norm of one image's gradient."""
    noise_multiplier: float
    """Standard deviation of the noise on a step's sum, over `clipping_bound`."""
    sampling_rate: float
    """Probability of each image to take part in a step."""
    expected: int
    """Images of a step, on average."""
    releases: list[float]
    """Noise multipliers of what all images gave before training: a Gaussian mechanism each."""
    delta: float
    every: int
    """Steps between two scores of test."""
    seed: int
    ghost: bool
    """Whether opacus computes norms alone (ghost clipping), and no gradient of a single image."""


def write(folder: Path, work: Work) -> None:
    """The training; the arrays are written by whoever has them, as ``NAME.npy``."""
    (folder / "work.json").write_text(json.dumps(asdict(work)), encoding="utf-8")


def read(folder: Path) -> tuple[Work, dict[str, npt.NDArray[np.generic]]]:
    """The training, and the arrays by name, which stay on disk."""
    work = Work(**json.loads((folder / "work.json").read_text(encoding="utf-8")))
    return work, {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in NAMES}
