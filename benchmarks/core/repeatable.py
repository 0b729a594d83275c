"""Whether compression, attack and aggregation rule of a run are functions of what they are given, and whether
a checkpoint has all that the server's optimiser keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.core.config.sections import TrainingConfig
from pfl_ext.aggregation.rule import MEAN
from pfl_ext.aggregation.spool import Spool
from pfl_ext.algorithms.personal_parts import trained_names
from pfl_ext.attacks.attack import HONEST
from pfl_ext.checkpoint import optimizer_tensors, restore_optimizer
from pfl_ext.compression.compressor import PLAIN
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.randomness import stream, torch_stream

FEW, COORDINATES = 16, 8
"""How many updates a rule is tried on, and numbers of each."""
LARGE = 10_000
"""Variables with more numbers than this are left out of what is tried, to save time."""
STEPS = 6
"""Steps of an optimiser that is tried."""
APART = 1e-3
"""By how much rounding may let two results differ, relative to the largest number."""


def check_repeatable(config: TrainingConfig, module: ImageClassifier) -> None:
    """Refuse a compression, an attack or a rule of one's own that keeps something from one call to the next.

    The same goes for an optimiser that keeps something outside of its parameters' states.

    A run that goes on would not have it, and several workers would have parts of it. In private training, one
    user would change what others send.

    Raises:
        ValueError: one line with the key.
    """
    if not torch.equal(_trained(config, goes_on=True), _trained(config, goes_on=False)):
        raise ValueError(
            f"server.optimizer {config.server.optimizer} steps in another way after its state was saved and "
            "loaded, so a resumed run would differ: keep all that it needs in self.state of the parameters, "
            "in their type"
        )
    shapes = [module.get_parameter(name).shape for name in trained_names(module)]
    shapes = [shape for shape in shapes if shape.numel() <= LARGE] or shapes
    section, cohort = config.compression, config.federated.cohort_size
    if section.kind != PLAIN:
        compressor = section.chosen(section.chosen_options)
        _check(f"compression.kind {section.kind}", _of_users(shapes, compressor.decoded))
    attack = config.attack
    if attack.kind != HONEST:
        chosen = attack.chosen(attack.chosen_options)
        _check(f"attack.kind {attack.kind}", _of_users(shapes, lambda *of: chosen.update(*of, cohort)))
    rule = config.aggregation
    if rule.kind != MEAN:
        combines, n = rule.chosen(rule.chosen_options), min(cohort, FEW)
        n = n if combines.works_with(n) else cohort
        if combines.works_with(n):
            _check(
                f"aggregation.kind {rule.kind}",
                lambda number: [combines.aggregate(_spool(n, number), np.arange(n))],
            )


def _trained(config: TrainingConfig, goes_on: bool) -> Tensor:
    """Parameters after some steps of the server's optimiser, of which a checkpoint may be between two."""
    draw = torch_stream(0, "tried steps")
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in ((4, 3), (3,))]

    def build() -> torch.optim.Optimizer:
        return config.server.build([{"params": parameters}], config.server.chosen_options)

    optimizer = build()
    for number in range(STEPS):
        if goes_on and number == STEPS // 2:
            kept, optimizer = optimizer_tensors(optimizer), build()
            restore_optimizer(optimizer, kept)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def _of_users(
    shapes: list[torch.Size], changed: Callable[[list[Tensor], np.random.Generator], Any]
) -> Callable[[int], Any]:
    def of_user(user: int) -> Any:
        draw = torch_stream(0, "tried update", user)
        return changed([torch.randn(shape, generator=draw) for shape in shapes], stream(0, "tried", user))

    return of_user


def _spool(n: int, number: int) -> Spool:
    spool, draws = Spool(n, COORDINATES), stream(0, "tried updates", number)
    for row in range(n):
        spool.write(row, draws.standard_normal(COORDINATES), 1.0)
    return spool


@torch.no_grad()
def _check(key: str, call: Callable[[int], Any]) -> None:
    before, _, after = (
        np.concatenate([np.ravel(part).astype(np.float64) for part in call(number)]) for number in (0, 1, 0)
    )
    margin = APART * np.abs(before[np.isfinite(before)]).max(initial=0)
    if not np.allclose(before, after, rtol=0, atol=margin, equal_nan=True):
        raise ValueError(
            f"{key} gives another result after it had another update, so it keeps something. A resumed run "
            "would not have that, and in private training one user would change what others send: let the "
            "result depend on the arguments alone"
        )
