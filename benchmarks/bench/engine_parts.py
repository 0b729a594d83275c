"""What each part of the engine gives on a CPU: rounds with all parts and without one, in turn, on one core.

    python -m benchmarks.bench.engine_parts [--pixels 224 64 32] [--users N] [--repeats 3]

The users' sizes are FLAIR's, batches are of 16 and users make two epochs: ResNet-18 with GroupNorm at each
of the sizes, and CIFAR's network at 32 pixels, with random images in memory. A time is the core's, of one
round: other work on the machine does not count. A ratio is the time without the part over that with it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.core.code_version import commit
from benchmarks.core.facts import hardware
from benchmarks.reporting.tables import print_row
from dataset.cli import OneLineParser
from dataset.cli import run as run_command
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.data.sampling import LocalSampling
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.engine.training import LocalTraining
from pfl_ext.models.classifier import ImageClassifier, build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.tasks.multi_label import MultiLabel

LABELS = 17
SIZES = (1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 5, 5, 7, 12, 25)
"""Images of 15 users in the proportions of FLAIR's, of which three quarters have five or fewer."""
NETWORKS = (("cifar_cnn", 32),)
"""Measured besides, with their pixels."""
PARTS: dict[str, dict[str, bool]] = {
    "all": {},
    "users with one step together": {"fuse": False},
    "no dead taps": {"whole": True},
    "compiled layers": {"cpu_kernels": False},
}
"""What is left out, and the options that leave it out."""


class RandomImages:
    """A store of users of these sizes."""

    def __init__(self, sizes: Sequence[int], pixels: int) -> None:
        rng = np.random.default_rng(0)
        self.user_ids = [str(user) for user in range(len(sizes))]
        self.user_offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._images = rng.integers(0, 256, (sum(sizes), pixels, pixels, 3), np.uint8)
        self._targets = (rng.random((sum(sizes), LABELS)) < 0.3).astype(np.uint8)

    def read(self, rows: Any) -> tuple[Any, Any]:
        """Images and labels."""
        return self._images[rows], self._targets[rows]

    def targets(self, rows: Any) -> Any:
        """Labels."""
        return self._targets[rows]


def round_of(arch: str, pixels: int, sizes: Sequence[int], options: dict[str, bool]) -> Callable[[], float]:
    """A round of local training; returns its seconds."""
    whole = options.get("whole", False)
    draw = torch.Generator().manual_seed(0)
    backbone = build_backbone(ModelConfig(arch, pixels, init="keras"), LABELS, draw)
    sampling = LocalSampling(num_epochs=2, batch_size=16, straddle=True, flip="both", input_size=pixels)
    data = FederatedImageDataset(RandomImages(sizes, pixels), sampling, seed=0)
    left = {name: value for name, value in options.items() if name != "whole"}
    model = ImageClassifier(backbone, task=MultiLabel(), input_size=pixels)
    engine = CohortEngine(model, lanes=1, prefetch=0, **left)  # type: ignore[arg-type]
    if whole:
        engine._build(True, engine._built[1])
    training = LocalTraining(0.01, 2, 16, "none", 0.0, 0.0, None)
    members = data.members(len(sizes))

    def work() -> float:
        begin = time.thread_time()
        engine.train(data, engine.tasks(members, training), training, lambda m: float(m.num_images), None)
        return time.thread_time() - begin

    return work


def measured(arch: str, pixels: int, sizes: Sequence[int], repeats: int) -> dict[str, list[float]]:
    """Seconds of each repetition, by what is left out."""
    works = {name: round_of(arch, pixels, sizes, options) for name, options in PARTS.items()}
    times: dict[str, list[float]] = {name: [] for name in works}
    for count in range(repeats + 1):
        for name, work in works.items():
            seconds = work()
            if count:
                times[name].append(seconds)
    return times


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    parser = OneLineParser(prog="python -m benchmarks.bench.engine_parts", description=__doc__)
    parser.add_argument("--pixels", type=int, nargs="*", default=[224, 64, 32])
    parser.add_argument("--users", type=int, default=len(SIZES))
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    if min([32, *args.pixels]) < 32 or args.repeats < 1 or args.users < 1:
        raise ValueError("--repeats and --users must be at least 1, and --pixels at least 32")
    torch.set_num_threads(1)
    picked = np.linspace(0, len(SIZES) - 1, args.users).round().astype(int)
    sizes = [SIZES[i] for i in picked]
    print(f"{hardware()}; torch {torch.__version__}; commit {commit()}; users' images {sizes}\n")
    names = [name for name in PARTS if name != "all"]
    print_row("network, pixels", "a round, s", *names)
    print_row(*["---"] * (2 + len(names)))
    for arch, pixels in [*(("resnet18", p) for p in args.pixels), *NETWORKS]:
        times = measured(arch, pixels, sizes, args.repeats)
        whole = times["all"]
        cells = []
        for name in names:
            ratios = [without / base for without, base in zip(times[name], whole, strict=True)]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        print_row(f"{arch}, {pixels}", f"{statistics.median(whole):.2f}", *cells)


if __name__ == "__main__":
    sys.exit(run_command(main))
