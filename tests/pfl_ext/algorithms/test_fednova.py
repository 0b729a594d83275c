"""FedNova: its coefficients against training on constant gradients, and its identity with FedAvg."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pfl.aggregate.weighting import WeightByDatapoints, WeightByUser
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.postprocessor.base import Postprocessor
from pfl.stats import MappedVectorStatistics
from torch import Tensor, nn

from pfl_ext.algorithms.fednova import STEPS, FedNova, Normaliser, coefficient_sum
from pfl_ext.backend import training_context
from tests.closeness import assert_close_as_vector
from tests.pfl_ext.engine.setting import Setting, distance, private, rounding_of
from tests.pfl_ext.samplings import local_sampling
from tests.pfl_ext.test_backend import Linear


class Passes(Postprocessor):
    """Does nothing, but as pfl's loop knows, it might."""


NO_RUN: Any = None
EACH_ONCE = local_sampling(1, 4, None, straddle=False, input_size=10)


@given(st.integers(0, 40))
def test_plain_sgd_counts_its_steps(steps: int) -> None:
    assert coefficient_sum(steps) == steps


@given(st.integers(0, 40), st.floats(0, 0.99), st.floats(0, 0.9))
def test_each_form_alone_is_the_papers_recurrence(steps: int, momentum: float, pull: float) -> None:
    """Wang et al. 2020, Section 4: momentum ``c <- rho c + 1, a <- a + c``; ``a <- a (1 - lr mu) + 1``."""
    c = a = proximal = 0.0
    for _ in range(steps):
        c = momentum * c + 1
        a += c
        proximal = proximal * (1 - pull) + 1
    assert coefficient_sum(steps, momentum) == pytest.approx(a, rel=1e-9)
    assert coefficient_sum(steps, 0.0, pull) == pytest.approx(proximal, rel=1e-9)


@given(st.integers(1, 12), st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.0, 0.2, 1.5, 3.0]))
def test_the_sum_is_the_l1_norm_of_what_each_gradient_counts_for(
    steps: int, momentum: float, pull: float
) -> None:
    """Each step's gradient on an axis of its own, by torch's SGD with the proximal gradient at rate 1."""
    x = nn.Parameter(torch.zeros(steps, dtype=torch.float64))
    optimizer = torch.optim.SGD([x], lr=1.0, momentum=momentum)
    for step in range(steps):
        x.grad = pull * x.detach()
        x.grad[step] += 1
        optimizer.step()
    expected = float(x.detach().abs().sum())
    assert coefficient_sum(steps, momentum, pull) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("momentum, mu", [(0.0, 0.0), (0.9, 0.0), (0.0, 0.5), (0.9, 0.5)])
@pytest.mark.parametrize("engine", [False, True])
def test_two_users_are_averaged_as_the_paper_says(engine: bool, momentum: float, mu: float) -> None:
    """By hand from each user's plain update: ``tau_eff sum p d``, d = update / |a|_1."""
    common: dict[str, Any] = {"clipping": "none", "momentum": momentum, "mu": mu or None}
    sizes = [3, 11]
    nova, weight, _ = Setting(sizes, EACH_ONCE, nova=True, **common).run(engine)
    steps = nova.pop(STEPS) / weight
    total = torch.zeros(())
    expected: dict[str, Tensor] = {}
    for user, (n, steps_made) in enumerate(zip(sizes, (1, 3))):
        alone = Setting(sizes, EACH_ONCE, more=[Only(user)], **common).run(False)[0]
        a = coefficient_sum(steps_made, momentum, 0.2 * mu)
        total = total + n / 14 * (steps_made if mu else a)
        for name, update in alone.items():
            expected[name] = expected.get(name, torch.zeros(())) + update / 14 / a
    assert weight == 14
    assert_close_as_vector(steps, total.reshape(1), 12)
    averaging = 2**-24 * 2 * len(sizes)  # a product and a sum for each user, on both sides
    allowed = rounding_of(Setting(sizes, EACH_ONCE, nova=True, **common)) + 2 * averaging
    assert distance({n: t / weight for n, t in nova.items()}, expected) <= allowed


class Only(Passes):
    """Lets one user's update through."""

    def __init__(self, user: int) -> None:
        self._name = f"user-{user}"

    def postprocess_one_user(self, *, stats: Any, user_context: Any) -> Any:
        if user_context.user_id != self._name:
            for name in stats:
                stats[name] = torch.zeros_like(stats[name])
        return stats, Metrics()


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("momentum, mu", [(0.0, 0.0), (0.9, 0.0)])
def test_for_equal_local_steps_it_is_fedavg(engine: bool, momentum: float, mu: float) -> None:
    """Users of 9 to 12 images make three steps of at most four; the weights differ, the steps do not."""
    sizes = [9, 12, 10, 11]
    common: dict[str, Any] = {"momentum": momentum, "weight_decay": 0.01}
    average, weight, _ = Setting(sizes, EACH_ONCE, **common).run(engine)
    nova, same_weight, _ = Setting(sizes, EACH_ONCE, nova=True, **common).run(engine)
    assert weight == same_weight == 42
    moved = step(nova, weight)
    assert distance(moved, step(average, weight)) < 32 * 2.0**-24  # sums of four, scaled some times
    unequal = [2, 12, 10, 30]
    average, weight, _ = Setting(unequal, EACH_ONCE, **common).run(engine)
    nova, _, _ = Setting(unequal, EACH_ONCE, nova=True, **common).run(engine)
    assert distance(step(nova, weight), step(average, weight)) > 0.05


def step(sums: dict[str, Tensor], weight: float) -> dict[str, Tensor]:
    """What the server's model moves by: FedAvg's or, where there are steps, FedNova's mean."""
    effective = sums.pop(STEPS, torch.ones(1) * weight) / weight
    return {name: total / weight * effective for name, total in sums.items()}


def test_the_server_moves_by_the_normalised_mean_through_its_own_optimiser() -> None:
    """With gmf, the server's momentum: ``v <- 0.9 v + g``; g = -tau_eff * mean."""
    module = Linear()
    start = module.weight.detach().clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    model = PyTorchModel(module, torch.optim.SGD, optimizer)
    algorithm = FedNova(NO_RUN)
    for _ in range(2):
        sums = {"weight": torch.full_like(start, 6.0), STEPS: torch.tensor([8.0])}
        stats = MappedVectorStatistics(sums, weight=4.0)
        algorithm.process_aggregated_statistics(None, Metrics(), model, stats)
    g = -2.0 * 1.5  # tau_eff 8 / 4 times mean 6 / 4
    expected = start - 0.5 * g - 0.5 * (0.9 * g + g)
    assert_close_as_vector(module.weight, expected, 16)


@settings(max_examples=4)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.booleans(), st.sampled_from([None, 0.3]))
def test_postprocessors_that_see_each_user_see_the_normalised_update(
    sizes: list[int], by_images: bool, mu: float | None
) -> None:
    """The engine's way of one user after another gives what pfl's loop gives, and what the sum gives."""
    setting = Setting(sizes, by_images=by_images, mu=mu, nova=True)
    together = setting.run(True)[0]
    setting.more = [Passes()]
    theirs, ours = setting.run(False)[0], setting.run(True)[0]
    allowed = rounding_of(setting)
    assert distance(ours, theirs) <= allowed
    assert distance(together, theirs) <= allowed


def test_a_user_without_steps_counts_for_nothing() -> None:
    sent = Normaliser(0.0, 0.0).statistics(MappedVectorStatistics({"x": torch.zeros(2)}), 0)
    assert not sent["x"].any()
    assert sent[STEPS].item() == 0


@pytest.mark.parametrize("engine", [False, True])
def test_private_training_is_refused(engine: bool) -> None:
    setting = Setting([2, 3], by_images=False, nova=True, more=[private(2)])
    with pytest.raises(ValueError, match="choose algorithm fedavg or fedprox"):
        setting.run(engine)


def test_a_local_optimiser_of_other_steps_is_refused() -> None:
    module = Linear()
    model = PyTorchModel(module, torch.optim.Adam, torch.optim.SGD(module.parameters(), lr=1.0))
    context = training_context(0, 1, NNTrainHyperParams(1, 0.1, 4))
    with pytest.raises(ValueError, match="only SGD, with or without momentum"):
        FedNova(NO_RUN).rule(model, context)


def test_the_weightings_are_pfls() -> None:
    """STEPS is weighted like every other tensor, so its mean is a mean with the same weights."""
    for weighting, expected in ((WeightByDatapoints(), 21.0), (WeightByUser(), 3.0)):
        stats = MappedVectorStatistics({STEPS: torch.tensor([3.0])})
        context: Any = type("User", (), {"num_datapoints": 7})
        done, _ = weighting.postprocess_one_user(stats=stats, user_context=context)
        assert done[STEPS].item() == expected
