"""Optimisers against numbers worked out by hand, brute force, torch's own, and Reddi et al.'s Algorithm 2."""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from pfl_ext.algorithms.optimizers import (
    AdamOptions,
    FedOpt,
    OptimizerConfig,
    ServerConfig,
)
from pfl_ext.engine.training import PerVariableClippedSGD
from tests.closeness import assert_close_as_vector

GRADIENTS = (0.5, -0.2, 0.03)
Adaptive = Literal["adam", "yogi", "adagrad"]


def run(optimizer: torch.optim.Optimizer, x: nn.Parameter, gradients: tuple[float, ...]) -> list[float]:
    """The value of a one-element parameter after each step."""
    path = []
    for g in gradients:
        x.grad = torch.full_like(x, g)
        optimizer.step()
        path.append(x.item())
    return path


def one(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value], dtype=torch.float64))


def adaptive(x: nn.Parameter, name: Any, **changes: Any) -> torch.optim.Optimizer:
    common: dict[str, Any] = {
        "learning_rate": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "epsilon": 0.01,
        "adam_form": "keras",
    }
    config = ServerConfig(optimizer=name, **{**common, **changes})
    return config.build([x], config)


def test_keras_adam_by_hand() -> None:
    # g = 0.5: m = .05, v = .0025 (beta2 .99); rate = .1 sqrt(.01)/.1 = .1; x = 1 - .1 * .05 / (.05 + .01)
    # g = -.2: m = .045 - .02 = .025, v = .002475 + .0004 = .002875; rate = .1 sqrt(.0199)/.19
    first = 1 - 0.1 * 0.05 / 0.06
    second = first - 0.1 * math.sqrt(0.0199) / 0.19 * 0.025 / (math.sqrt(0.002875) + 0.01)
    x = one()
    assert run(adaptive(x, "adam", adam_form="keras"), x, GRADIENTS[:2]) == pytest.approx(
        [first, second], abs=1e-12
    )


def test_torch_adam_by_hand_differs_from_keras_by_where_epsilon_stands() -> None:
    # Corrected moments of g = .5 are m = .5, v = .25: x = 1 - .1 * .5 / (.5 + .01)
    x = one()
    path = run(adaptive(x, "adam", adam_form="torch"), x, GRADIENTS[:1])
    assert path == pytest.approx([1 - 0.1 * 0.5 / 0.51], abs=1e-12)


@pytest.mark.parametrize(("beta1", "beta2", "epsilon"), [(0.9, 0.999, 0.01), (0.0, 0.9, 1e-8)])
def test_torch_adam_is_torch_optim_adam_in_every_step(beta1: float, beta2: float, epsilon: float) -> None:
    generator = torch.Generator().manual_seed(0)
    ours = [
        nn.Parameter(torch.randn(4, 3, generator=generator)),
        nn.Parameter(torch.randn(5, generator=generator)),
    ]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    config = OptimizerConfig("adam", learning_rate=0.1, beta1=beta1, beta2=beta2, epsilon=epsilon)
    a = config.build(ours)
    b = torch.optim.Adam(theirs, lr=0.1, betas=(beta1, beta2), eps=epsilon)
    for _ in range(7):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        a.step()
        b.step()
        assert_close_as_vector(ours, theirs, 7 * 20)  # at each of seven steps ten operations on each side


def test_the_moments_and_epsilon_are_torch_adams_if_nothing_else_is_asked_for() -> None:
    config, defaults = OptimizerConfig("adam"), torch.optim.Adam([one()]).defaults
    assert (config.beta1, config.beta2) == defaults["betas"]
    assert config.epsilon == defaults["eps"]


def test_keras_adam_is_torch_adam_with_an_epsilon_that_shrinks() -> None:
    x, y = one(), one()
    keras = adaptive(x, "adam", adam_form="keras", beta2=0.999)
    other = adaptive(y, "adam", adam_form="torch", beta2=0.999)
    for t, g in enumerate(GRADIENTS, 1):
        other.param_groups[0]["epsilon"] = 0.01 / math.sqrt(1 - 0.999**t)
        assert run(keras, x, (g,)) == pytest.approx(run(other, y, (g,)), abs=1e-12)


@pytest.mark.parametrize("name", ["yogi", "adagrad"])
def test_yogi_and_adagrad_follow_algorithm_2(name: Adaptive) -> None:
    value, m, v, expected = 1.0, 0.0, 0.01**2, []
    for g in GRADIENTS:
        delta = -g  # the pseudo-gradient points the way to go
        m = 0.9 * m + 0.1 * delta
        if name == "adagrad":
            v = v + delta**2
        else:
            v = v - 0.01 * delta**2 * math.copysign(1, v - delta**2)
        value = value + 0.1 * m / (math.sqrt(v) + 0.01)
        expected.append(value)
    x = one()
    assert run(adaptive(x, name), x, GRADIENTS) == pytest.approx(expected, abs=1e-12)


def test_yogi_by_hand_moves_its_second_moment_both_ways() -> None:
    x = one()
    optimizer = adaptive(x, "yogi")
    run(optimizer, x, (0.5,))
    assert optimizer.state[x]["exp_avg_sq"].item() == pytest.approx(1e-4 + 0.01 * 0.25)
    run(optimizer, x, (0.01,))
    assert optimizer.state[x]["exp_avg_sq"].item() == pytest.approx(1e-4 + 0.01 * 0.25 - 0.01 * 1e-4)


def test_server_sgd_with_momentum_by_hand() -> None:
    x = one()
    optimizer = OptimizerConfig("sgd", learning_rate=0.1, momentum=0.5).build([x])
    # v = .5; then .25 - .2 = .05; then .025 + .03 = .055
    assert run(optimizer, x, GRADIENTS) == pytest.approx([0.95, 0.945, 0.9395])
    y = one()
    assert run(OptimizerConfig("sgd", learning_rate=1.0).build([y]), y, (0.5,)) == [0.5]


@pytest.mark.parametrize("name", ["adam", "yogi", "adagrad"])
def test_a_state_is_three_tensors_and_a_run_goes_on_from_them(name: Adaptive) -> None:
    x = one()
    first = adaptive(x, name)
    run(first, x, GRADIENTS)
    saved = {k: v.clone() for k, v in first.state_dict()["state"][0].items()}
    assert set(saved) == {"step", "exp_avg", "exp_avg_sq"}
    assert all(isinstance(v, Tensor) for v in saved.values())
    y = nn.Parameter(x.detach().clone())
    second = adaptive(y, name)
    second.load_state_dict({**second.state_dict(), "state": {0: saved}})
    assert run(second, y, GRADIENTS) == run(first, x, GRADIENTS)


def test_the_learning_rate_of_a_group_is_obeyed_and_zero_moves_nothing_but_moments() -> None:
    x = one()
    optimizer = adaptive(x, "adam")
    optimizer.param_groups[0]["lr"] = 0.0
    assert run(optimizer, x, (0.5,)) == [1.0]
    assert optimizer.state[x]["exp_avg"].item() == pytest.approx(0.05)


def test_parameters_without_gradient_are_left_alone() -> None:
    x, y = one(), one()
    for optimizer in (
        FedOpt([x, y], OptimizerConfig("adam", learning_rate=0.1, epsilon=0.01), AdamOptions("keras")),
        PerVariableClippedSGD([x, y], lr=0.1, max_norm=1.0),
    ):
        x.grad, y.grad = torch.ones_like(x), None
        optimizer.step()
        assert y.item() == 1.0
    assert x.item() != 1.0


def test_each_variable_is_clipped_by_itself() -> None:
    generator = torch.Generator().manual_seed(1)
    shapes, scales = [(3, 4), (5,), (2, 2, 2), (1,)], [10.0, 0.01, 1.0, 0.0]
    parameters = [nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
    before = [p.detach().clone() for p in parameters]
    gradients = [torch.randn(s, generator=generator) * scale for s, scale in zip(shapes, scales)]
    for p, g in zip(parameters, gradients):
        p.grad = g.clone()
    PerVariableClippedSGD(parameters, lr=0.1, max_norm=1.5).step()
    assert [bool(g.norm() > 1.5) for g in gradients] == [True, False, True, False]
    clipped = [g * 1.5 / g.norm() if g.norm() > 1.5 else g for g in gradients]
    expected = [start - 0.1 * g for start, g in zip(before, clipped)]
    assert_close_as_vector(parameters, expected, 30)  # the norm of twelve values on each side


def test_a_gradient_within_the_bound_keeps_every_bit() -> None:
    x, y = one(), one()
    path = run(PerVariableClippedSGD([x], lr=0.1, max_norm=0.7), x, GRADIENTS)
    assert path == run(torch.optim.SGD([y], lr=0.1), y, GRADIENTS)


def test_clipping_never_reads_a_norm_back() -> None:
    x = nn.Parameter(torch.empty(3, device="meta"))  # without data: a look at a value raises
    x.grad = torch.empty(3, device="meta")
    PerVariableClippedSGD([x], lr=0.1, max_norm=1.0).step()


def schedule(round: int, name: Any = "warmup_linear", *, num_rounds: int = 5000, **changes: Any) -> float:
    common: dict[str, Any] = {"learning_rate": 0.1, "final_learning_rate": 0.02, "warmup_rounds": 30}
    return ServerConfig(schedule=name, **{**common, **changes}).rate(round, num_rounds)


def test_the_schedule_of_pfl_research_is_met_at_its_corners() -> None:
    assert schedule(0) == 0.0
    assert schedule(15) == pytest.approx(0.05)
    assert schedule(30) == pytest.approx(0.1)
    assert schedule(2515) == pytest.approx(0.06)
    assert schedule(5000) == schedule(9000) == pytest.approx(0.02)
    assert schedule(0, warmup_rounds=0) == pytest.approx(0.1)


def test_the_schedule_rises_then_falls_in_a_straight_line() -> None:
    rates = [schedule(r) for r in range(5001)]
    steps = [b - a for a, b in itertools.pairwise(rates)]
    assert steps[:30] == pytest.approx([0.1 / 30] * 30)
    assert steps[30:] == pytest.approx([-0.08 / 4970] * 4970)


def test_the_paper_keeps_the_server_rate() -> None:
    assert {schedule(r, "constant") for r in (0, 1, 5000)} == {0.1}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("adam", {"beta1": 1.0}, "beta1\n.* less than 1 .*input_value=1.0"),
        ("adam", {"beta2": -0.1}, "beta2\n.* greater than or equal to 0 .*input_value=-0.1"),
        ("yogi", {"epsilon": 0.0}, "epsilon\n.* greater than 0 .*input_value=0.0"),
        ("adam", {"learning_rate": -1.0}, "learning_rate\n.* greater than 0 .*input_value=-1.0"),
        ("sgd", {"learning_rate": float("nan")}, "learning_rate\n.* finite number .*input_value=nan"),
        ("sgd", {"momentum": 1.0}, "momentum\n.* less than 1 .*input_value=1.0"),
        ("adam", {"adam_form": "jax"}, "adam_form\n.* 'keras' or 'torch' .*input_value='jax'"),
        ("lamb", {}, "server.optimizer is 'lamb': choose one of adagrad, adam, sgd, yogi"),
    ],
)
def test_values_out_of_range_are_named(name: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adaptive(one(), name, **changes)


def test_schedule_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"warmup_rounds is 30, .* = 20"):
        schedule(0, num_rounds=20)
    with pytest.raises(ValueError, match=r"schedule\n.* 'constant', .* or 'cyclic'"):
        schedule(0, "step")
