"""The engine returns what pfl's loop returns; the loop is the oracle of every test here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pfl.metrics import Metrics, StringMetricName, Weighted
from pfl.postprocessor.base import Postprocessor
from torch import Tensor, nn

from pfl_ext.algorithms.on_pfl import OnPfl
from pfl_ext.data.federated_dataset import FederatedImageDataset, Member
from pfl_ext.data.sampling import LocalSampling
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.engine.plan import MAX_USERS, dealt, grouped, plan
from pfl_ext.engine.training import LocalTraining
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.privacy.accounting import Mechanism, PrivacyConfig
from pfl_ext.privacy.central import TALLY, metric_name, private_mean
from pfl_ext.privacy.mechanisms import Clipping
from pfl_ext.rules import Rule
from pfl_ext.tasks.losses import TrainingLoss
from pfl_ext.tasks.multi_label import MultiLabel
from pfl_ext.tasks.single_label import SingleLabel
from tests.pfl_ext.engine.setting import (
    BFLOAT16,
    LABELS,
    TASKS,
    Setting,
    distance,
    norm,
    private,
    rounding_of,
    small_backbone,
    without_noise,
)

OPTIONS: dict[str, Sequence[Any]] = {
    "num_epochs": (1, 2, 3),
    "batch_size": (1, 3, 4, 16),
    "max_images": (None, 1, 7, 30),
    "cap": ("random", "first"),
    "straddle": (False, True),
    "reshuffle": (False, True),
    "clipping": (("none", 0.0), ("variable", 0.05), ("variable", 9.0), ("global", 0.2)),
    "mu": (None, 0.3),
    "by_images": (False, True),
    "lanes": (1, 2, 3),
    "task": TASKS,
    "momentum": (0.0, 0.6),
    "weight_decay": (0.0, 0.05),
    "nova": (False, True),
    "sizes": ([1], [9, 2], [5, 1, 8], [1, 2, 3, 1, 10]),
    "head_rate": (1.0, 4.0),
}
NO_RUN: Any = None
CHOICES = [
    "2231113110010131", "0020001012101011", "1100012001211100", "1311100101100021", "2330003000001121",
    "0021111102210121", "2101110010200011", "0210102112011001", "2011012000101131", "1220010111011110",
    "0100003112110030", "0331010002110001", "1230001101201130", "2021013001201000", "1000011000011001",
    "0321102000200010", "0200112011101121", "1311103112210010", "2111001002011020", "1131002101210011",
    "2300011011200031", "0031010000200030", "2120001101110131",
]  # fmt: skip
"""A digit for each of `OPTIONS`: which of its values. Found by a greedy search."""


def test_any_two_values_of_two_options_are_tried_together() -> None:
    for (a, first), (b, second) in itertools.combinations(enumerate(OPTIONS.values()), 2):
        assert len({(row[a], row[b]) for row in CHOICES}) == len(first) * len(second)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_cohorts_sum_is_that_of_pfls_loop(choice: str) -> None:
    given = {name: values[int(digit)] for (name, values), digit in zip(OPTIONS.items(), choice, strict=True)}
    local, bound = given.pop("clipping")
    lanes, sizes = given.pop("lanes"), given.pop("sizes")
    of_sampling = {name: given.pop(name) for name in list(given)[:6]}
    rate = 0.05 if local == "none" else 0.2  # larger ones magnify rounding from step to step
    sampling = LocalSampling(**of_sampling, input_size=10)
    setting = Setting(sizes, sampling, local, bound, learning_rate=rate, **given)
    theirs, weight, metrics = setting.run(engine=False)
    ours, our_weight, our_metrics = setting.run(engine=True, lanes=lanes)
    assert our_weight == weight
    rounding = rounding_of(setting)
    assert distance(ours, theirs) <= rounding
    reported = {str(name): value for name, value in our_metrics if "learning" not in str(name)}
    expected = {str(name): value for name, value in metrics}
    assert reported.keys() == expected.keys()
    for name, value in expected.items():
        if name != "training loss":
            assert str(reported[name]) == str(value), name
        else:  # five layers err by the root of their 72 terms or fewer, and the trained weights by the above
            margin = 2 * 5 * 9 * 2**-24 + rounding
            assert reported[name].overall_value == pytest.approx(value.overall_value, rel=margin)
            assert reported[name].weight == value.weight


ADAM: dict[str, Any] = {"adam": "adam", "learning_rate": 0.005}
LOCAL_TRAININGS: list[dict[str, Any]] = [
    {"clipping": "none", "task": SingleLabel(TrainingLoss(label_smoothing=0.2))},
    {
        "clipping": "global",
        "task": MultiLabel(TrainingLoss(focal_gamma=1, absent_gamma=4, absent_margin=0.05)),
    },
    {"nova": True, "mu": 0.3},
    {"scaffold": ("II", "step"), "momentum": 0.5, "layer_decay": 0.5},
    {"dynamic": 0.3, "layer_decay": 0.5},
    {"adam": "adam", "weight_decay": 0.05, "mu": 0.3},
    {"adam": "adamw", "weight_decay": 0.5, "head_rate": 4.0, "layer_decay": 0.5, "clipping": "global"},
]


@pytest.mark.parametrize("training", LOCAL_TRAININGS, ids=lambda words: next(iter(words)))
def test_rounds_at_rates_of_their_own_are_trained_as_by_pfls_loop(training: dict[str, Any]) -> None:
    def setting(*rates: float) -> Setting:
        return Setting([3, 6], rounds=2, rates=rates, **training)

    chosen = setting(0.2, 0.05)
    theirs, ours = chosen.run(False)[0], setting(0.2, 0.05).run(True, lanes=1)[0]
    assert distance(ours, theirs) <= rounding_of(setting(0.2, 0.05))
    assert distance(setting(0.2, 0.2).run(True, lanes=1)[0], ours) > 0.1


@pytest.mark.parametrize(
    "kind, words, clipping",
    [
        ("gaussian", {}, "flat"),
        ("gaussian", ADAM, "flat"),
        ("gaussian", {}, "per_layer"),
        ("adaptive", {}, "per_layer"),
    ],
    ids=str,
)
def test_a_private_cohort_is_clipped_and_counted_as_by_pfls_loop(
    clipping: Clipping, kind: Mechanism, words: dict[str, Any]
) -> None:
    sizes = [1, 2, 1, 2, 3, 9]

    def setting() -> Setting:
        more = [private(len(sizes), kind, clipping, noisy=False)]
        return Setting(sizes, by_images=False, more=more, rounds=2, head_rate=0.5, layer_decay=0.7, **words)

    theirs, _, metrics = setting().run(engine=False)
    ours, _, our_metrics = setting().run(True, lanes=2)
    rounding = rounding_of(setting())
    assert TALLY not in ours
    assert distance(ours, theirs) <= rounding
    assert 0 < metrics[metric_name("fraction clipped")].overall_value < 1
    for name, value in metrics:
        if str(name).startswith("Central DP"):
            assert our_metrics[name].overall_value == pytest.approx(value.overall_value, rel=rounding), name


class Poisoned(nn.Module):
    """A backbone for which dark images overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_backbone()

    def forward(self, x: Tensor) -> Tensor:
        bad = (x.flatten(1)[:, 0] < -1.9).view(-1, 1, 1, 1)  # set by the test's store alone
        out: Tensor = self.net(torch.where(bad, x * float("inf"), x))
        return out


@pytest.mark.parametrize("sizes", [[2, 1, 2, 1], [9, 1, 5, 2]])
def test_an_update_that_is_not_finite_is_refused_and_counted(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = FederatedImageDataset.read

    def blackened(data: FederatedImageDataset, member: Member) -> Any:
        user = read(data, member)
        user.raw_data[0][...] = 200
        if member.user in (0, 1):
            user.raw_data[0][...] = 0
        return user

    monkeypatch.setattr(FederatedImageDataset, "read", blackened)

    def setting() -> Setting:
        config = PrivacyConfig(epsilon=1e3, delta=1e-3, mechanism="gaussian", clipping_bound=0.05)
        private = private_mean(config.calibrate(len(sizes), len(sizes), 1), noise_seed=4)
        return Setting(sizes, by_images=False, more=[private], backbone=Poisoned)

    (theirs, _, metrics), (ours, _, our_metrics) = setting().run(False), setting().run(True)
    assert metrics[metric_name("refused updates")].overall_value == 2
    assert our_metrics[metric_name("refused updates")].overall_value == 2
    assert all(bool(torch.isfinite(t).all()) for t in ours.values())
    assert distance(ours, theirs) <= rounding_of(setting())


@settings(max_examples=15)
@given(size=st.integers(1, 9), rate=st.sampled_from([1e-3, 1.0, 1e3, 1e12]), per_layer=st.booleans())
def test_no_users_part_of_a_private_sum_exceeds_the_bound(size: int, rate: float, per_layer: bool) -> None:
    more = [without_noise(0.5, "per_layer" if per_layer else "flat")]
    setting = Setting([size], clipping="none", by_images=False, more=more, learning_rate=rate)
    updates, _, _ = setting.run(engine=True)
    assert norm(updates) <= 0.5


def test_the_result_is_bitwise_the_same_again_and_hardly_depends_on_lanes() -> None:
    setting = Setting([1, 3, 2, 8, 13, 1, 2, 12])
    first, again = setting.run(True, lanes=2)[0], setting.run(True, lanes=2)[0]
    assert all(torch.equal(first[name], again[name]) for name in first)
    wide = {lanes: setting.run(True, lanes=lanes, accumulate=torch.float64)[0] for lanes in (1, 3)}
    assert distance(wide[1], wide[3]) <= rounding_of(setting)


@pytest.mark.parametrize("sizes", [[9, 0, 3, 0], [0, 1, 1, 0]])
def test_users_without_images_change_no_sum(sizes: list[int]) -> None:
    """All in one lane, so that the empty ones come after full ones."""
    setting = Setting(sizes, by_images=False)
    theirs, weight, _ = setting.run(False)
    ours, our_weight, _ = setting.run(True, lanes=1)
    assert our_weight == weight
    assert distance(ours, theirs) <= rounding_of(setting)


class Tangled(nn.Module):
    """What the tape cannot take apart: a bare parameter, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Conv2d(3, 3, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(3, 1, 1))
        self.head = nn.Linear(3, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(x) * self.scale)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def tangled() -> nn.Module:
    torch_generator = torch.Generator().manual_seed(0)
    net = Tangled()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.empty_like(parameter).normal_(std=0.3, generator=torch_generator))
    return net


class PullsAndCounts(Rule):
    """Corrected local SGD whose updates are divided by their steps, and whose users send steps besides."""

    correction = "gradient"

    def __init__(self, pull: dict[str, Tensor]) -> None:
        super().__init__()
        self._pull = pull

    def scale(self, num_steps: int) -> float:
        return 1 / max(num_steps, 1)

    def zeros(self) -> dict[str, Tensor]:
        return {"steps": torch.zeros(1)}

    def user(self, user_id: str | None) -> Any:
        return SimpleNamespace(
            correction=self._pull,
            finish=lambda update, steps, gradient: {"steps": torch.tensor([float(steps)])},
        )


class PulledMean(OnPfl):
    """FedAvg's parameters with `PullsAndCounts`."""

    def rule(self, model: Any, context: Any) -> Rule:
        return PullsAndCounts({name: 0.01 * p.detach() for name, p in model.variable_map.items()})


@pytest.mark.parametrize("by_images", [False, True])
def test_what_a_corrected_user_sends_besides_is_weighted_and_not_scaled(by_images: bool) -> None:
    setting = Setting([9, 2, 5], by_images=by_images, algorithm=PulledMean(NO_RUN))
    (theirs, weight, _), (ours, same_weight, _) = (setting.run(engine) for engine in (False, True))
    steps = {9: 5, 2: 1, 5: 3}  # by images: of batches of 4, two epochs long
    sent = sum(number * (images if by_images else 1) for images, number in steps.items())
    assert theirs.pop("steps").item() == ours.pop("steps").item() == sent
    assert weight == same_weight
    assert distance(ours, theirs) <= rounding_of(setting)


def test_networks_that_cannot_be_taken_apart_are_trained_user_by_user() -> None:
    setting = Setting([1, 2, 9], backbone=tangled)
    engine = CohortEngine(ImageClassifier(tangled(), task=MultiLabel(), input_size=10, exact_crops=True))
    assert not engine._fusable
    assert CohortEngine(
        ImageClassifier(small_backbone(), task=MultiLabel(), input_size=10, exact_crops=True)
    )._fusable
    assert distance(setting.run(True)[0], setting.run(False)[0]) <= rounding_of(setting)


class Largest(Postprocessor):
    """Keeps each user's largest value: no sum of updates tells it."""

    def postprocess_one_user(self, *, stats: Any, user_context: Any) -> Any:
        top = max(float(t.abs().max()) for t in stats.values())
        return stats, Metrics([(StringMetricName("largest"), Weighted.from_unweighted(top))])


def test_a_postprocessor_that_must_see_each_user_sees_it() -> None:
    setting = Setting([1, 2, 9, 5], more=[Largest()])
    theirs, _, metrics = setting.run(False)
    ours, _, our_metrics = setting.run(True, lanes=2)
    name = StringMetricName("largest")
    rounding = rounding_of(Setting([1, 2, 9, 5]))
    numbers = sum(t.numel() for t in theirs.values())  # the norm is at most its root times the largest value
    largest = metrics[name].overall_value
    assert our_metrics[name].overall_value == pytest.approx(largest, rel=numbers**0.5 * rounding)
    assert metrics[name].weight == our_metrics[name].weight == 4
    assert distance(ours, theirs) <= rounding


@pytest.mark.parametrize("clipping", ["variable", "global"])
def test_bf16_deviates_by_no_more_than_its_own_rounding(clipping: str) -> None:
    """More than float32's (a thirtieth of a unit), so that it is bfloat16; see `rounding_of` on the bound."""
    setting = Setting([1, 2, 9, 5], clipping=clipping, max_norm=0.3)
    exact = setting.run(False)[0]
    setting.amp = torch.bfloat16
    ours = setting.run(True)[0]
    assert 2**-14 < distance(ours, exact) <= rounding_of(setting, *BFLOAT16)


members = st.builds(
    lambda n, steps: Member(0, 0, n, steps, 2 * n), st.integers(1, 60), st.sampled_from([1, 1, 1, 2, 9])
)


@given(st.lists(members, max_size=40), st.integers(1, 4), st.integers(1, 64), st.booleans())
def test_a_plan_holds_every_user_once_in_groups_that_fit(
    cohort: list[Member], lanes: int, most: int, fuse: bool
) -> None:
    cohort = [Member(i, 0, m.num_images, m.num_steps, m.num_passes) for i, m in enumerate(cohort)]
    tasks = grouped(cohort, most, fuse)
    planned = plan(tasks, lanes)
    assert len(planned.lanes) == lanes
    assert {id(t) for lane in [planned.wide, *planned.lanes] for t in lane} == {id(t) for t in tasks}
    assert sorted(m.user for task in tasks for m in task.members) == list(range(len(cohort)))
    for task in tasks:
        assert task.together == (fuse and task.members[0].num_steps == 1)
        assert len(task.members) <= (MAX_USERS if task.together else 1)
        assert len(task.members) == 1 or sum(m.num_passes for m in task.members) <= most
    assert not any(task.together for task in planned.wide)


def test_one_heavy_user_is_trained_on_all_cores_and_light_ones_side_by_side() -> None:
    heavy, light = Member(0, 0, 500, 63, 1000), [Member(u, 0, 16, 2, 32) for u in range(1, 9)]
    planned = plan(grouped([heavy, *light], 64, True), 2)
    assert [task.members[0].user for task in planned.wide] == [0]
    assert [len(lane) for lane in planned.lanes] == [4, 4]
    assert not plan(grouped(light, 64, True), 2).wide


def test_workers_with_less_memory_divide_their_own_groups_and_share_the_cohort_all_the_same() -> None:
    """A worker whose memory is short must not take other users than the others expect it to."""
    cohort = [Member(u, 0, 2, 1, 4) for u in range(40)]
    engines = [
        CohortEngine(ImageClassifier(small_backbone(), task=MultiLabel(), input_size=10, exact_crops=True))
        for _ in range(2)
    ]
    local = LocalTraining(0.1, 2, 4, "none", 0.0, 0.0, None)
    engines[1]._max_images[local] = 4
    shares = [dealt(engine.tasks(cohort, local), 2)[rank] for rank, engine in enumerate(engines)]
    trained = [m.user for share in shares for task in share for m in task.members]
    assert sorted(trained) == list(range(40))
    fitting = [engine._fitting(share, local) for engine, share in zip(engines, shares)]
    assert sorted(m.user for share in fitting for task in share for m in task.members) == list(range(40))
    assert max(len(task.members) for task in fitting[0]) > 1
    assert all(len(task.members) == 1 and task.together for task in fitting[1])


def test_sums_of_a_round_are_not_those_of_the_round_before() -> None:
    setting = Setting([1, 2, 9])
    setting.rounds = 2
    assert distance(setting.run(True)[0], setting.run(False)[0]) <= rounding_of(setting)
    once = Setting([1, 2, 9]).run(True)[0]
    assert np.isfinite(distance(once, setting.run(True)[0]))
