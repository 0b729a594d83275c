"""Whether compression, attack and aggregation rule of a run are functions of what they are given."""

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
from pfl_ext.compression.compressor import PLAIN
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.randomness import stream, torch_stream

FEW, COORDINATES = 16, 8
"""How many updates a rule is tried on, and numbers of each."""
APART = 1e-3
"""By how much rounding may let two results differ, relative to the largest number."""


def check_repeatable(config: TrainingConfig, module: ImageClassifier) -> None:
    """Refuse a compression, an attack or a rule of one's own that keeps something from one call to the next.

    A run that goes on would not have it, and several workers would have parts of it. In private training, one
    user would change what others send.

    Raises:
        ValueError: one line with the key.
    """
    shapes = [module.get_parameter(name).shape for name in trained_names(module)]
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
