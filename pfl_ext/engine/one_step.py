"""Training of users who make a single local step, many at once.

The update of such a user is ``-lr`` times its clipped gradient at the central model. So the weighted sum of
many updates can be computed without weights or updates of single users (`tape`).

Shape letters: U users, B images, V variables, P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from pfl_ext.data.transfer import sent
from pfl_ext.engine.gradients import Gradient, Users
from pfl_ext.engine.tape import TapedNetwork
from pfl_ext.engine.training import Batch, LocalTraining
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.dropout import dropping
from pfl_ext.privacy.central import ScalesUpdates
from pfl_ext.privacy.mechanisms import LARGEST


@dataclass
class Sums:
    """The sums in which one lane adds up its users' updates."""

    vector: Tensor  # [P]
    views: dict[str, Tensor]
    tally: list[Tensor]  # each [5]: see `pfl_ext.privacy.central.tally_of`
    losses: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    """``[2]``: the sum of all images' losses, each at the step with that image, and their number."""


@dataclass(frozen=True)
class CohortSum:
    """The sum of what a worker's share of a cohort sends."""

    update: dict[str, Tensor]  # by variable; views that the next round overwrites
    num_users: int
    num_images: int
    tally: Tensor | None  # [5]
    besides: dict[str, Tensor] = field(default_factory=dict)
    """The sum of what users send besides their updates."""


def train_one_step(
    net: TapedNetwork,
    model: ImageClassifier,
    batch: Batch,
    sizes: Sequence[int],
    weights: Sequence[float],
    local: LocalTraining,
    scaling: ScalesUpdates | None,
    sums: Sums,
) -> None:
    """Add ``weights[u] * scale_u * update_u`` of U users to ``sums``.

    ``batch`` holds the users' images one user after another; user u has ``sizes[u]`` of them.
    """
    device = model.mean.device
    images, targets, crops, shares = batch.on(device)
    users = Users(tuple(accumulate(sizes, initial=0)), device)
    adding = _Adding(local, sent(torch.tensor(weights, dtype=torch.float64), device), scaling, sums)
    at_once = scaling is None and local.clipping != "global" and device.type == "cpu"
    x, targets = model.prepare(images, targets, crops)
    with dropping(crops):
        losses = net.run(
            x,
            partial(model.task.image_losses, targets=targets),
            users,
            shares,
            adding.add if at_once else adding.keep,
            local.autocast(device),
        )
    of_batch = torch.tensor(sizes, dtype=shares.dtype).repeat_interleave(torch.tensor(sizes))
    sums.losses[0] += (losses * shares * sent(of_batch, device)).sum()
    sums.losses[1] += len(images)
    if not at_once:
        adding.add_kept()


class _Adding:
    def __init__(
        self, local: LocalTraining, weights: Tensor, scaling: ScalesUpdates | None, sums: Sums
    ) -> None:
        self._local, self._weights, self._scaling, self._sums = local, weights, scaling, sums
        self._kept: dict[str, Gradient] = {}
        self._factors = dict(zip(sums.views, local.each_factor(len(sums.views))))

    def add(self, name: str, gradient: Gradient) -> None:
        """Add one variable's gradient, if its clipping depends on no other variable."""
        steps = -self._local.learning_rate * self._factors["backbone." + name] * self._weights
        total = self._sums.views["backbone." + name]
        if self._local.clipping == "none" or self._surely_small(gradient):
            gradient.add_evenly(total, steps)
            return
        norms = gradient.squared_norms().sqrt()
        gradient.add_to(total, steps * (self._local.max_norm / norms.clamp(min=self._local.max_norm)))

    def _surely_small(self, gradient: Gradient) -> bool:
        bounds = gradient.norm_bounds()
        return bounds is not None and bool((bounds <= self._local.max_norm).all())

    def keep(self, name: str, gradient: Gradient) -> None:
        """Keep one variable's gradient until all are known."""
        self._kept["backbone." + name] = gradient

    @torch.no_grad()
    def add_kept(self) -> None:
        """Add the kept gradients of all variables, with scales from all their norms."""
        names = list(self._sums.views)
        norms = torch.stack([self._kept[name].squared_norms() for name in names], 1)  # [U, V]
        if self._scaling is not None:  # larger factors would lose digits in float32
            norms = torch.where(norms <= LARGEST**2, norms, torch.inf)
        factors = -self._local.learning_rate * local_clipping(norms, self._local)
        if self._local.factors:
            factors = factors * sent(torch.tensor(self._local.factors, dtype=factors.dtype), factors.device)
        scaled = self._weights[:, None] * factors
        if self._scaling is not None:
            scales, tally = self._scaling.user_scales(names, norms * factors.square())
            self._sums.tally.append(tally.sum(0))
            refused = (~torch.isfinite(norms).all(1)).nonzero().flatten().tolist()
            scaled = torch.where(scales == 0, 0.0, scaled * scales)
            for name in names if refused else []:
                self._kept[name].refuse(refused)
        for column, name in enumerate(names):
            self._kept[name].add_to(self._sums.views[name], scaled[:, column])


def local_clipping(squared_norms: Tensor, local: LocalTraining) -> Tensor:
    """Clipping factors ``[U, V]`` of one step's gradients, from their squared norms ``[U, V]``, float64."""
    if local.clipping == "variable":
        return local.max_norm / squared_norms.sqrt().clamp(min=local.max_norm)
    if local.clipping == "global":
        whole = squared_norms.sum(1, keepdim=True).sqrt()
        return (local.max_norm / (whole + 1e-6)).clamp(max=1.0).expand_as(squared_norms)
    return torch.ones_like(squared_norms)
