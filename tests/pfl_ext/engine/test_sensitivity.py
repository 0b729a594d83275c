"""No user's share of a private sum is longer than the bound, whatever its images are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pfl.common_types import Population  # noqa: F401  (makes torch the framework of pfl)
from torch import Tensor, nn

from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.engine.gradients import Explicit, Gradient, Users, Weight, squared_norm, squared_norms_of
from pfl_ext.engine.one_step import Sums, _Adding
from pfl_ext.engine.training import LocalTraining
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.tasks.multi_label import MultiLabel
from tests.pfl_ext.engine.setting import LABELS, Setting, norm, small_backbone, without_noise
from tests.pfl_ext.samplings import local_sampling

HOW = LocalTraining(1.0, 1, 16, "none", 0.0, 0.0, None)
SLACK = 1e-5
"""What a share may exceed the bound by, relative to it."""
LAYERS = {
    "linear": nn.Linear(600, 40, bias=False),
    "1 x 1": nn.Conv2d(300, 32, 1, bias=False),
    "3 x 3": nn.Conv2d(64, 96, 3, padding=1, bias=False),
    "strided": nn.Conv2d(64, 64, 3, stride=2, padding=1, bias=False),
    "many positions": nn.Conv2d(3, 8, 3, padding=1, bias=False),
}
BOUNDS = st.floats(-9, 1).map(lambda power: 10.0**power)


def length(tensor: Tensor) -> float:
    return math.sqrt(float(tensor.detach().double().square().sum()))


@torch.no_grad()
def added(
    gradient: Gradient, shape: torch.Size, users: int, bound: float, local: LocalTraining = HOW
) -> Sums:
    """The sum of one variable of these users, each clipped to ``bound``."""
    total = torch.zeros(shape)
    sums = Sums(total, {"backbone.w": total}, [])
    adding = _Adding(local, torch.ones(users, dtype=torch.float64), without_noise(bound), sums)
    adding.keep("w", gradient)
    adding.add_kept()
    return sums


def refused(sums: Sums) -> float:
    return float(torch.stack(sums.tally).sum(0)[2])


def cancelling(kind: str, images: int, left: float, sizes: tuple[float, float], seed: int) -> Weight:
    """One user's inputs and output gradients, which come in pairs that cancel but for the part ``left``."""
    layer = LAYERS[kind]
    draw = torch.Generator().manual_seed(seed)
    shape = (layer.in_features,) if isinstance(layer, nn.Linear) else (layer.in_channels, 4, 4)
    with torch.no_grad():
        x = torch.rand(images, *shape, generator=draw).repeat_interleave(2, 0)
        e = torch.randn(layer(x[::2]).shape, generator=draw).repeat_interleave(2, 0)
    e[1::2] *= -1
    x += left * torch.randn(x.shape, generator=draw)
    return Weight(layer, x * sizes[0], e * sizes[1], Users((0, len(x)), x.device))  # type: ignore[arg-type]


PAIRS: dict[str, Any] = {
    "kind": st.sampled_from(sorted(LAYERS)),
    "images": st.integers(1, 4),
    "left": st.sampled_from([0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0]),
    "seed": st.integers(0, 1000),
}


@settings(max_examples=120)
@given(**PAIRS, bound=BOUNDS, powers=st.tuples(st.floats(-3, 3), st.floats(-9, 3)))
def test_no_share_exceeds_the_bound_however_a_users_positions_cancel(
    kind: str, images: int, left: float, seed: int, bound: float, powers: tuple[float, float]
) -> None:
    gradient = cancelling(kind, images, left, (10 ** powers[0], 10 ** powers[1]), seed)
    sums = added(gradient, gradient.layer.weight.shape, 1, bound)
    share = length(sums.vector)
    assert refused(sums) == 0
    assert share <= bound * (1 + SLACK)
    exact = length(gradient._gradient(gradient.x.double(), gradient.e.double()))
    positions = gradient.e.numel() // len(gradient.layer.weight)
    bounds = gradient.norm_bounds()
    assert bounds is not None
    rounding = 2.0**-24 * 2 * (positions + 2) * float(bounds)  # of a sum over positions in any order
    assert min(exact - rounding, bound) * (1 - 2**-12) <= share <= (exact + rounding) * (1 + 2**-12)


@settings(max_examples=60)
@given(
    **PAIRS,
    bound=BOUNDS,
    power=st.floats(-44, 37),
    other=st.floats(-44, 37),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_no_share_exceeds_the_bound_whatever_the_size_of_its_numbers(
    kind: str, images: int, left: float, seed: int, bound: float, power: float, other: float, dtype: Any
) -> None:
    """From numbers that are subnormal, or whose squares are zero, to those whose squares are infinite."""
    for local in (HOW, LocalTraining(1.0, 1, 16, "variable", 10.0, 0.0, None)):
        gradient = cancelling(kind, images, left, (10**power, 10**other), seed)
        gradient.x, gradient.e = gradient.x.to(dtype), gradient.e.to(dtype)
        sums = added(gradient, gradient.layer.weight.shape, 1, bound, local)
        assert length(sums.vector) <= bound * (1 + SLACK)
        if power + other > 22 and left == 1.0:
            assert refused(sums) == 1


@settings(max_examples=60)
@given(bound=BOUNDS, powers=st.lists(st.floats(-44, 37), min_size=2, max_size=6), seed=st.integers(0, 99))
def test_no_share_of_a_small_variable_exceeds_the_bound(bound: float, powers: list[float], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([10.0**power for power in powers], dtype=torch.float64)
    gradient = (torch.randn(300, len(sizes), generator=draw).double() * sizes).float()[None]
    assert length(added(Explicit(gradient), gradient.shape[1:], 1, bound).vector) <= bound * (1 + SLACK)


@settings(max_examples=60)
@given(powers=st.lists(st.floats(-44, 16), min_size=1, max_size=6), size=st.integers(1, 3000))
def test_a_norm_misses_less_than_any_bound_allows(powers: list[float], size: int) -> None:
    """An update's: numbers whose squares underflow are all that is missed, and they are short together."""
    draw = torch.Generator().manual_seed(size)
    sizes = torch.tensor([10.0**power for power in powers], dtype=torch.float64)
    numbers = (torch.randn(size, len(sizes), generator=draw).double() * sizes).float().flatten()
    exact = float(numbers.double().square().sum())
    for found in (float(squared_norm(numbers)), float(squared_norms_of([numbers])[0])):
        missed = len(numbers) * 2.0**-126
        assert exact * (1 - 2**-14) - missed <= found <= exact * (1 + 2**-14) + missed


def test_users_of_one_group_whose_positions_cancel_or_do_not_add_what_each_adds_alone() -> None:
    lefts, bound = (1.0, 0.0, 1e-6, 1.0, 1e-3), 1e-6
    alone = [cancelling("3 x 3", 2, left, (1.0, 1.0), seed) for seed, left in enumerate(lefts)]
    layer = alone[0].layer
    starts = tuple(range(0, 4 * len(lefts) + 1, 4))
    x, e = torch.cat([g.x for g in alone]), torch.cat([g.e for g in alone])
    together = Weight(layer, x, e, Users(starts, x.device))
    found = added(together, layer.weight.shape, len(lefts), bound)
    assert 0 < len(together._computed) < len(lefts), "both ways are meant to be tried"
    expected = sum(added(g, layer.weight.shape, 1, bound).vector.double() for g in alone)
    assert length(found.vector.double() - expected) <= 2**-12 * bound * len(lefts)


class Twins:
    """Users of two images that differ in one number by ``step``, one with all labels and one with none."""

    def __init__(self, users: int, step: int) -> None:
        self.user_ids = [f"user-{u}" for u in range(users)]
        self.user_offsets = 2 * np.arange(users + 1, dtype=np.int64)
        self._step = step

    def read(self, rows: Any) -> tuple[Any, Any]:
        images = np.empty((len(rows), 10, 10, 3), np.uint8)
        for i, row in enumerate(rows.tolist()):
            images[i] = np.random.default_rng(row // 2).integers(0, 250, images.shape[1:])
            images[i, 5, 5, 0] += row % 2 * self._step
        return images, self.targets(rows)

    def targets(self, rows: Any) -> Any:
        return np.repeat((rows % 2)[:, None], LABELS, 1).astype(np.float32)


def undecided(setting: Setting) -> nn.Module:
    """A network that gives the first user's labels a half each: its twins' gradients are opposites."""
    network = small_backbone()
    module = ImageClassifier(network, task=MultiLabel(), input_size=10, exact_crops=True)
    data = FederatedImageDataset(setting.store, setting.sampling, seed=3)
    (images, _, crops), *_ = data.read(data.members(1)[0]).iter(4)
    with torch.no_grad():
        network[-1].bias -= module(images, crops)[0]
    return network


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("log_bound", range(-9, 2))
def test_no_images_make_a_users_share_longer_than_the_bound(step: int, log_bound: int) -> None:
    bound = 10.0**log_bound
    sampling = local_sampling(1, batch_size=4, flip="none", input_size=10)
    setting = Setting([2], sampling, clipping="none", learning_rate=10.0, by_images=False)
    setting.store, setting.backbone = Twins(1, step), lambda: undecided(setting)
    setting.more = [without_noise(bound)]
    updates, _, _ = setting.run(engine=True, lanes=1, cpu_kernels=False)
    assert norm(updates) <= bound * (1 + SLACK)
