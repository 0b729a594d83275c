"""SCAFFOLD: its invariants, the engine beside pfl's loop, and pfl's own beside ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from pfl_ext.algorithms.algorithm import Setup
from pfl_ext.algorithms.scaffold import (
    CHANGE,
    Correction,
    Option,
    Renewal,
    Scaffold,
    ScaffoldOptions,
)
from pfl_ext.backend import training_context
from pfl_ext.data.federated_dataset import FederatedImageDataset
from tests.campaigns import scaffold_toy
from tests.pfl_ext.algorithms.test_fednova import Passes
from tests.pfl_ext.engine.setting import SIDE, NoisyStore, Setting, distance, inexact_settings, norm, private
from tests.pfl_ext.samplings import local_sampling
from tests.pfl_ext.test_backend import Linear


class Ended(NamedTuple):
    """What a round of SCAFFOLD leaves."""

    sums: tuple[dict[str, Tensor], dict[str, Tensor]]
    """Sums of updates, and of changes of c_i."""
    controls: Tensor
    """All c_i, ``[users, P]``."""
    weight: float


SAMPLING = local_sampling(2, 4, 9, straddle=True, input_size=10)


@settings(max_examples=4)
@given(
    sizes=st.lists(st.integers(1, 14), min_size=2, max_size=4),
    form=st.tuples(st.sampled_from(["I", "II"]), st.sampled_from(["gradient", "step"])),
    clipping=st.sampled_from([("none", 0.0), ("variable", 0.05), ("global", 0.2)]),
    by_images=st.booleans(),
    lanes=st.integers(1, 3),
    local=st.sampled_from([(0.0, 0.0, 1.0), (0.6, 0.05, 1.0), (0.3, 0.0, 4.0)]),
)
def test_the_engine_trains_as_pfls_loop_and_c_is_the_mean_of_all_c_i(
    sizes: list[int],
    form: tuple[Option, Correction],
    clipping: tuple[str, float],
    by_images: bool,
    lanes: int,
    local: tuple[float, float, float],
) -> None:
    """Over three rounds of all users but one; a network with layers of every kind and dead taps."""
    setting = Setting(sizes, SAMPLING, *clipping, learning_rate=0.05, by_images=by_images, rounds=3)
    setting.scaffold, setting.cohort = form, len(sizes) - 1
    setting.momentum, setting.weight_decay, setting.head_rate = local
    setting.layer_decay = 1.0 if setting.head_rate == 1 else 0.5

    def end(setting: Setting, engine: bool) -> Ended:
        """What the last round leaves, checked: c is the mean of all c_i."""
        sums, weight, _ = setting.run(engine, **({"lanes": lanes} if engine else {}))
        assert setting.controls is not None
        control = torch.stack([setting.controls.control(user) for user in range(len(sizes))]).double()
        p = torch.tensor([float(min(n, 9)) if by_images else 1.0 for n in sizes]).double()
        mean = (p[:, None] * control).sum(0) / p.sum()
        # Each round adds the mean of the users' changes, each at most two c_i long: a product and a sum each.
        roundings = setting.rounds * 2 * 2 * len(sizes)
        largest = control.norm(dim=1).max()
        assert (setting.controls.server.double() - mean).norm() < roundings * 2**-24 * largest
        assert int((control.norm(dim=1) > 0).sum()) >= len(sizes) - 1
        changes = {n: t for n, t in sums.items() if n.startswith(CHANGE)}
        assert len(changes) == len(sums) / 2
        return Ended(({n: t for n, t in sums.items() if n not in changes}, changes), control, weight)

    theirs, ours = (end(setting, engine) for engine in (False, True))
    exact, *moved = (end(each, False) for each in inexact_settings(setting))
    assert ours.weight == theirs.weight
    # An update is a difference of weights, with their roundings; option II divides it by the learning rate.
    weights = norm(dict(setting.backbone().named_parameters()))
    rounding = setting.rounds * 2**-24 * weights
    for part, rate in ((0, 1.0), (1, setting.learning_rate)):
        apart = max(distance(other.sums[part], exact.sums[part]) for other in moved)
        allowed = 2 * apart + rounding / rate * ours.weight / norm(exact.sums[part])
        assert distance(ours.sums[part], theirs.sums[part]) <= allowed
    apart = max(float((other.controls - exact.controls).norm()) for other in moved)
    assert (ours.controls - theirs.controls).norm() <= 2 * apart + rounding / setting.learning_rate


@pytest.mark.parametrize("engine", [False, True])
def test_users_without_images_keep_what_they_have(engine: bool) -> None:
    form: tuple[Option, Correction] = ("I", "gradient")
    setting = Setting([3, 0, 5], SAMPLING, clipping="none", by_images=False, rounds=2, scaffold=form)
    setting.run(engine)
    assert setting.controls is not None
    assert not setting.controls.control(1).any()
    assert setting.controls.control(2).any()


def test_a_gradient_counts_as_often_as_momentum_makes_it_count() -> None:
    """Constant gradients g: option II must find g itself, whatever the momentum; after the step, the mean of
    what the optimiser stepped on.
    """
    g, rate, steps = torch.tensor([2.0, -1.0]), 0.1, 7
    server, control = torch.tensor([0.5, 0.25]), torch.tensor([1.0, -3.0])
    for momentum in (0.0, 0.9):
        for correction, expected in (("gradient", g), ("step", None)):
            y, v, total = torch.zeros(2), torch.zeros(2), torch.zeros(2)
            for _ in range(steps):
                v = momentum * v + g + ((server - control) if correction == "gradient" else 0)
                y = y - rate * v - (rate * (server - control) if correction == "step" else 0)
                total += v
            form = Renewal("II", correction, rate, momentum)  # type: ignore[arg-type]
            new = control + form.change(server, control, y, steps, None)
            torch.testing.assert_close(new, total / steps if expected is None else expected)


def test_pfls_scaffold_ends_elsewhere_and_ours_at_the_optimum() -> None:
    """The README's table. When pfl fixes its own, this says so."""
    rate = 0.05
    assert scaffold_toy.end("FedAvg", rate) == pytest.approx(0.6899, abs=1e-4)
    assert scaffold_toy.end("pfl, option I", rate) == pytest.approx(2.0170, abs=1e-3)
    assert scaffold_toy.end("pfl, option II", rate) > 1e6
    assert scaffold_toy.end("pfl with c_i - c, option II", rate) == pytest.approx(0.8, abs=2e-4)
    for option in ("I", "II"):
        ours = scaffold_toy.end(f"ours, option {option}", rate)
        assert ours == pytest.approx(scaffold_toy.direct(rate, option), abs=1e-5)
        assert ours == pytest.approx(0.8, abs=2e-4)


def fixed_point(option: Option, correction: Correction, rate: float, momentum: float) -> float:
    """Where two users with the losses ``w^2/2`` and ``4 (w - 1)^2`` end, by K = 10 steps a round."""
    curvature, aim = torch.tensor([1.0, 8.0]).double(), torch.tensor([0.0, 1.0]).double()
    x, server, control = torch.zeros(1).double(), torch.zeros(2).double(), torch.zeros(2).double()
    form = Renewal(option, correction, rate, momentum)
    for _ in range(200):
        y, v = x.repeat(2), torch.zeros(2).double()
        for _ in range(10):
            g = curvature * (y - aim) + (server - control if correction == "gradient" else 0)
            v = momentum * v + g
            y = y - rate * v - (rate * (server - control) if correction == "step" else 0)
        change = form.change(server, control, y - x, 10, curvature * (x - aim))
        x, server, control = x + (y - x).mean(), server + change.mean(), control + change
    return float(x)


@pytest.mark.parametrize("rate, after_the_step", [(0.01, 0.9350), (0.05, 0.8101)])
def test_the_optimum_is_a_fixed_point_if_momentum_acts_on_the_correction(
    rate: float, after_the_step: float
) -> None:
    assert fixed_point("II", "gradient", rate, 0.9) == pytest.approx(8 / 9, abs=1e-9)
    assert fixed_point("II", "step", rate, 0.0) == pytest.approx(8 / 9, abs=1e-9)
    assert fixed_point("II", "step", rate, 0.9) == pytest.approx(after_the_step, abs=1e-4)


def test_option_i_after_the_step_is_refused_with_momentum() -> None:
    def check(**changed: Any) -> None:
        options = ScaffoldOptions(scaffold_option="I", scaffold_correction="step")
        words: Any = {"options": options, "momentum": 0.9, "cohort_size": 2, "num_rounds": 3, **changed}
        people: Any = SimpleNamespace(num_users=4)
        network: Any = nn.Linear(2, 2)
        Scaffold.check(Setup(users=people, module=network, by_images=False, private=False, **words))

    with pytest.raises(ValueError, match=r"set federated\.scaffold_option to II, federated\.scaffold_corr"):
        check()
    check(momentum=0.0)
    check(options=ScaffoldOptions(scaffold_option="I"))
    check(options=ScaffoldOptions(scaffold_correction="step"))


def test_a_pass_over_all_images_changes_no_draw_of_the_training() -> None:

    def user() -> Any:
        return FederatedImageDataset(NoisyStore([11]), SAMPLING, seed=1).user_dataset(0)

    plain, passed = user(), user()
    once = list(passed.once())
    assert [len(batch[0]) for batch in once] == [4, 4, 1]  # nine of eleven take part
    assert torch.equal(torch.cat([b[0] for b in once]), torch.from_numpy(passed.raw_data[0]))
    assert once[0][0].shape[1:] == (SIDE, SIDE, 3)
    for one, other in zip(plain.iter(4), passed.iter(4), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other))
    for again in (list(user().once()), list(passed.once())):
        assert all(torch.equal(a, b) for one, other in zip(once, again) for a, b in zip(one, other))
    plain, places = user(), np.arange(9)
    for one, other in zip(plain.part(places, 0).iter(4), passed.part(places, 0).iter(4), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other)), "nor of a part"


@pytest.mark.parametrize("engine", [False, True])
def test_what_would_make_the_control_variates_something_else_is_refused(engine: bool) -> None:
    for more in (private(2), Passes()):
        setting = Setting([2, 3], SAMPLING, by_images=False, more=[more], scaffold=("II", "gradient"))
        with pytest.raises(ValueError, match="not protected by privacy and not changed by postprocessors"):
            setting.run(engine)
    twice = Setting([2, 3], SAMPLING, sampler="replacement", cohort=9, scaffold=("II", "gradient"))
    with pytest.raises(ValueError, match="must not be drawn twice"):
        twice.run(engine)


@pytest.mark.parametrize(
    "optimizer, more, message",
    [
        (torch.optim.Adam, {}, "only SGD, with or without momentum"),
        (torch.optim.SGD, {"grad_accumulation_steps": 2}, "does not support gradient scaling, gradient"),
        (torch.optim.SGD, {"local_num_steps": 2, "local_num_epochs": None}, "local_num_steps"),
    ],
)
def test_local_training_of_other_steps_is_refused(optimizer: Any, more: Any, message: str) -> None:
    module: nn.Module = Linear()
    model = PyTorchModel(module, optimizer, torch.optim.SGD(module.parameters(), lr=1.0))
    words = {"local_num_epochs": 1, "local_learning_rate": 0.1, "local_batch_size": 4, **more}
    context = training_context(0, 1, NNTrainHyperParams(**words))
    users = SimpleNamespace(partition=SimpleNamespace(user_ids=["user"]))
    run: Any = SimpleNamespace(options=ScaffoldOptions(), module=module, users=users, folder=None)
    with pytest.raises(ValueError, match=message):
        Scaffold(run).rule(model, context)


@pytest.mark.parametrize("cohort, rounds, users", [(2, 3, 10), (4, 3, 10)])
def test_the_state_of_all_users_who_can_come_is_four_bytes_for_each_number(
    cohort: int, rounds: int, users: int
) -> None:
    module = nn.Sequential(nn.Linear(99, 10), nn.Linear(5, 5).requires_grad_(False))
    gigabytes = 4e-9 * 1000 * min(users, cohort * rounds)

    def check(most: float) -> None:
        people: Any = SimpleNamespace(num_users=users)
        network: Any = module
        setup = Setup(
            users=people,
            options=ScaffoldOptions(max_state_gb=most),
            module=network,
            cohort_size=cohort,
            num_rounds=rounds,
            by_images=False,
            private=False,
        )
        Scaffold.check(setup)

    check(1.001 * gigabytes)
    with pytest.raises(ValueError, match=r"above federated\.max_state_gb"):
        check(0.999 * gigabytes)
