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
import torch.nn.functional as F
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.optimizers import DPOptimizer
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import Tensor, nn

from benchmarks.published.opacus_work import Work, read
from pfl_ext.randomness import torch_stream

AT_ONCE = 256
"""Images whose gradients opacus holds at a time: 160 MB for 10 classes of 15,552 features."""


def trained(work: Work, arrays: Any) -> tuple[dict[int, float], float]:
    """Accuracy on test in percent after some of the steps, and the seconds of all steps without scoring."""
    features, classes = arrays["train_features"], torch.from_numpy(arrays["train_classes"].copy())
    model = nn.Linear(features.shape[1], len(arrays["bias"]))
    model.load_state_dict({name: torch.from_numpy(arrays[name].copy()) for name in ("weight", "bias")})
    wrapped = opacus.GradSampleModule(model)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), work.rates[0], work.momentum),
        noise_multiplier=work.noise_multiplier,
        max_grad_norm=work.clipping_bound,
        expected_batch_size=work.expected,
        generator=torch_stream(work.seed, "opacus noise"),
    )
    sampler = UniformWithReplacementSampler(
        num_samples=len(features),
        sample_rate=work.sampling_rate,
        generator=torch_stream(work.seed, "opacus sampling"),
        steps=len(work.rates),
    )
    curve, seconds = dict[int, float](), 0.0
    for step, (rate, drawn) in enumerate(zip(work.rates, sampler, strict=True), 1):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate
        parts = [drawn[i : i + AT_ONCE] for i in range(0, len(drawn), AT_ONCE)] or [[]]
        for part in parts:
            optimizer.signal_skip_step(part is not parts[-1])
            outputs = wrapped(torch.from_numpy(features[part]))
            F.cross_entropy(outputs, classes[part]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
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
    """At delta, by opacus' accountants; None where one has no number for these mechanisms."""
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
    warnings.filterwarnings("ignore")
    work, arrays = read(Path(folder))
    curve, seconds = trained(work, arrays)
    out = {"curve": curve, "seconds": seconds, "epsilons": epsilons(work), "opacus": opacus.__version__}
    print(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
