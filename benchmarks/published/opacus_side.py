"""The private training of `opacus_work` by opacus: its gradients, clipping, noise, sampling and accountants.

    OPACUS_PYTHON -m benchmarks.published.opacus_side FOLDER

Prints what came out as JSON on the last line. It runs in an environment of its own (``make opacus-peer``),
which has opacus, and torch from the project's.
"""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import opacus
import torch
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import Tensor, nn

from benchmarks.published.opacus_work import Work, read
from dataset import process
from pfl_ext.randomness import torch_stream

AT_ONCE = 64
"""Images whose gradients opacus holds at a time: 40 MB for 10 classes of 15,552 features."""


class Trainer:
    """A model, and its steps by opacus."""

    def __init__(self, model: nn.Module, work: Work) -> None:
        descent = torch.optim.SGD(model.parameters(), work.rates[0], work.momentum)
        words: dict[str, Any] = {
            "noise_multiplier": work.noise_multiplier,
            "max_grad_norm": work.clipping_bound,
            "expected_batch_size": work.expected,
            "generator": torch_stream(work.seed, "opacus noise"),
        }
        if work.ghost:
            self.wrapped: Any = GradSampleModuleFastGradientClipping(
                model, max_grad_norm=work.clipping_bound, use_ghost_clipping=True
            )
            self.optimizer: Any = DPOptimizerFastGradientClipping(descent, **words)
            self.loss: Any = DPLossFastGradientClipping(self.wrapped, self.optimizer, nn.CrossEntropyLoss())
        else:
            self.wrapped, self.loss = opacus.GradSampleModule(model), nn.CrossEntropyLoss()
            self.optimizer = DPOptimizer(descent, **words)
        self._ghost = work.ghost

    def step(self, features: Any, classes: Tensor, drawn: list[int], rate: float) -> None:
        """A step on the images that were drawn; without ghost clipping in parts, as memory asks for."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        size = max(len(drawn), 1) if self._ghost else AT_ONCE
        parts = [drawn[i : i + size] for i in range(0, len(drawn), size)] or [[]]
        for number, part in enumerate(parts, 1):
            self.optimizer.signal_skip_step(number < len(parts))
            self.loss(self.wrapped(torch.from_numpy(features[part])), classes[part]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def trained(work: Work, arrays: Any) -> tuple[dict[int, float], float]:
    """Accuracy on test in percent after some of the steps, and the seconds of all steps without scoring."""
    features, classes = arrays["train_features"], torch.from_numpy(arrays["train_classes"].copy())
    model = nn.Linear(features.shape[1], len(arrays["bias"]))
    model.load_state_dict({name: torch.from_numpy(arrays[name].copy()) for name in ("weight", "bias")})
    trainer = Trainer(model, work)
    sampler = UniformWithReplacementSampler(
        num_samples=len(features),
        sample_rate=work.sampling_rate,
        generator=torch_stream(work.seed, "opacus sampling"),
        steps=len(work.rates),
    )
    curve, seconds = dict[int, float](), 0.0
    for step, (rate, drawn) in enumerate(zip(work.rates, sampler, strict=True), 1):
        begin = time.perf_counter()
        trainer.step(features, classes, drawn, rate)
        seconds += time.perf_counter() - begin
        if step % work.every == 0 or step == len(work.rates):
            curve[step] = accuracy(model, arrays)
    return curve, seconds


@torch.no_grad()
def accuracy(model: nn.Module, arrays: Any) -> float:
    """Percent of the test images whose class has the largest output."""
    features, classes = arrays["test_features"], torch.from_numpy(arrays["test_classes"].copy())
    blocks = range(0, len(classes), 1024)
    found: Tensor = torch.cat([model(torch.from_numpy(features[i : i + 1024].copy())) for i in blocks])
    return 100 * float((found.argmax(1) == classes).double().mean())


def epsilons(work: Work) -> dict[str, float | None]:
    """The epsilons at delta, by opacus' accountants; None where one has no number for these mechanisms."""
    found: dict[str, float | None] = {}
    for name, kind in (("rdp", RDPAccountant), ("prv", PRVAccountant)):
        accountant = kind()
        history = [(noise, 1.0, 1) for noise in work.releases]
        accountant.history = [*history, (work.noise_multiplier, work.sampling_rate, len(work.rates))]
        try:
            epsilon = float(accountant.get_epsilon(work.delta))
        except (ValueError, RuntimeError, OverflowError, ZeroDivisionError):
            epsilon = math.nan
        found[name] = epsilon if math.isfinite(epsilon) else None
    return found


def main(folder: str) -> None:
    """Train, and print."""
    process.imported()
    warnings.filterwarnings("ignore")
    work, arrays = read(Path(folder))
    curve, seconds = trained(work, arrays)
    out = {"curve": curve, "seconds": seconds, "epsilons": epsilons(work), "opacus": opacus.__version__}
    print(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
