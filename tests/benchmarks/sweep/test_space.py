"""Which points a sweep tries, that each arrives in its trial's config, and when one is given up."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

from benchmarks.core.config.trees import Tree
from benchmarks.sweep.command import training_words
from benchmarks.sweep.local import asked, resolved
from benchmarks.sweep.space import (
    SWEEPS,
    EarlyTerminate,
    Parameter,
    command_words,
    hopeless,
    read_sweep,
    suggestion,
)

COMMAND = ["${env}", "${interpreter}", "-m", "benchmarks.flair.train", "--config=fl-r-17", "${args}"]
METRIC = {"name": "val/C-AP", "goal": "maximize"}


def written(path: Path, parameters: Tree, **changes: Any) -> str:
    """A sweep file; its path as the command line gives it."""
    tree = {"method": "grid", "metric": METRIC, "parameters": parameters, "command": COMMAND, **changes}
    file = path / "sweep.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in tree.items() if value is not None}))
    return str(file)


@pytest.mark.parametrize("name", SWEEPS)
@pytest.mark.parametrize("scale", [[], ["--scale=mini"]], ids=["full", "mini"])
def test_every_trial_of_a_shipped_sweep_is_the_run_that_was_asked_for(name: str, scale: list[str]) -> None:
    """Predecessors 14: parameters of a sweep were ignored, so that all its runs were the same run."""
    sweep, _, _ = read_sweep(name)
    words = training_words(sweep, scale)
    points = (
        sweep.grid()
        if sweep.method == "grid"
        else [sweep.point(sweep.random_unit(0, number, 0)) for number in range(sweep.run_cap or 0)]
    )
    trials = [resolved(sweep.program_module, words, point) for point in points]
    assert len({trial["digest"] for trial in trials}) == len(points) >= 10
    for trial, point in zip(trials, points):
        for key, wanted, got in asked(trial["config"], point):
            assert got == wanted, key


def test_a_grid_is_every_combination_in_the_order_of_the_file(tmp_path: Path) -> None:
    parameters = {
        "local.num_epochs": {"min": 1, "max": 2},
        "server.learning_rate": {"values": [0.1, 0.2]},
        "seed": {"value": 7},
    }
    file = written(tmp_path, parameters)
    (tmp_path / "sweep.yaml").write_text(
        yaml.safe_dump(yaml.safe_load((tmp_path / "sweep.yaml").read_text()), sort_keys=False)
    )
    got = [tuple(sorted(point.items())) for point in read_sweep(file)[0].grid()]
    wanted = [
        {"local.num_epochs": e, "server.learning_rate": r, "seed": 7} for e in (1, 2) for r in (0.1, 0.2)
    ]
    assert sorted(got) == sorted(tuple(sorted(point.items())) for point in wanted)
    assert read_sweep(file)[0].varied == ["local.num_epochs", "server.learning_rate"]


def test_a_point_is_written_as_wandbs_agent_writes_it() -> None:
    point = {
        "local.learning_rate": 1e-05,
        "augment.flip": "none",
        "local.straddle": False,
        "local.max_images": None,
    }
    agents = create_sweep_command_args({"args": {key: {"value": value} for key, value in point.items()}})
    assert command_words(point) == agents["args"]
    tree = resolved("benchmarks.flair.train", ["--config=fl-r-17"], point)["config"]
    assert tree["local"]["learning_rate"] == 1e-05
    assert tree["augment"]["flip"] == "none"
    assert tree["local"]["straddle"] is False
    assert tree["local"]["max_images"] is None


@settings(max_examples=60, deadline=None)
@given(u=st.floats(0, 1, exclude_max=True), v=st.floats(0, 1, exclude_max=True))
@pytest.mark.parametrize(
    "parameter",
    [
        Parameter(min=3, max=9),
        Parameter(min=0.5, max=2.0),
        Parameter(distribution="q_uniform", min=0, max=100, q=25),
        Parameter(distribution="log_uniform_values", min=1e-4, max=1.0),
        Parameter(distribution="q_log_uniform_values", min=8, max=512, q=8),
        Parameter(distribution="log_uniform", min=-3, max=2),
    ],
    ids=lambda p: p.kind,
)
def test_a_distribution_keeps_its_bounds_and_order(parameter: Parameter, u: float, v: float) -> None:
    low, high = float(parameter.min or 0), float(parameter.max or 0)
    if parameter.kind == "log_uniform":
        low, high = math.exp(low), math.exp(high)
    a, b = parameter.quantile(min(u, v)), parameter.quantile(max(u, v))
    assert low * (1 - 1e-5) <= a <= b <= high * (1 + 1e-5)
    if parameter.q:
        assert a % parameter.q == 0
    if parameter.kind == "int_uniform":
        assert isinstance(a, int)


def test_known_quantiles() -> None:
    assert Parameter(distribution="log_uniform_values", min=0.01, max=1.0).quantile(0.5) == 0.1
    assert [Parameter(min=1, max=4).quantile(u) for u in (0, 0.24, 0.26, 0.51, 0.99)] == [1, 1, 2, 3, 4]
    weighted = Parameter(values=["a", "b"], probabilities=[0.9, 0.1])
    assert [weighted.quantile(u) for u in (0, 0.89, 0.91, 0.999)] == ["a", "a", "b", "b"]
    assert Parameter(distribution="normal", mu=3, sigma=2).quantile(0.5) == pytest.approx(3)
    assert Parameter(distribution="log_normal", mu=0, sigma=1).quantile(0.8413447) == pytest.approx(
        math.e, 1e-4
    )


@pytest.mark.parametrize(
    "parameters, changes, message",
    [
        ({"x": {"valeus": [1]}}, {}, "parameters.x: there is no config key valeus; did you mean values?"),
        ({"x": {"parameters": {"y": {"value": 1}}}}, {}, "parameters.x: write a dotted key"),
        ({"x": {"values": []}}, {}, "x: values is missing or empty"),
        ({"x": {"min": 2, "max": 1}}, {}, "x: int_uniform needs min and max, min the smaller"),
        ({"x": {"distribution": "beta"}}, {}, "parameters.x: distribution is 'beta'"),
        ({"x": {"distribution": "log_uniform_values", "min": 0, "max": 1}}, {}, "x: min must be above 0"),
        ({"x": {"min": 0.0, "max": 1.0}}, {}, "parameters.x is uniform: a grid needs values"),
        ({"runtime.precision": {"values": ["fp32", "bf16"]}}, {}, "runtime.precision does not change"),
        ({"run_dir": {"values": ["a", "b"]}}, {}, "run_dir does not change"),
        ({"config": {"values": ["fl-r-17", "fl-f-17"]}}, {}, "--config stands in command and in parameters"),
        ({}, {}, "parameters is missing"),
        ({"x": {"value": 1}}, {"command": ["python", "train.py"]}, "command must hold -m"),
        ({"x": {"value": 1}}, {"command": None, "program": "train.py"}, "program is 'train.py': choose"),
        ({"x": {"value": 1}}, {"method": None}, "sweep.yaml: method is missing"),
        ({"x": {"value": 1}}, {"method": "random"}, "run_cap is missing"),
        ({"x": {"value": 1}}, {"method": "bayes", "run_cap": 2, "metric": None}, "metric is missing"),
        ({"x": {"value": 1}}, {"method": "anneal"}, "method is 'anneal'"),
        ({"x": {"value": 1}}, {"metrik": {}}, "there is no config key metrik; did you mean metric?"),
        ({"x": {"value": 1}}, {"early_terminate": {"type": "hyperband"}}, "give either min_iter or max_iter"),
    ],
    ids=lambda value: value[:28] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_sweep_that_cannot_be_honoured_is_refused(
    parameters: Tree, changes: Tree, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"sweep\.yaml") as caught:
        read_sweep(written(tmp_path, parameters, **changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "program, asked, module",
    [
        (None, None, "benchmarks.flair.train"),
        ("benchmarks/visual_classification/train.py", None, "benchmarks.visual_classification.train"),
        (None, "benchmarks.visual_classification.train", "benchmarks.visual_classification.train"),
    ],
)
def test_without_a_command_a_benchmarks_training_is_run(
    program: str | None, asked: str | None, module: str, tmp_path: Path
) -> None:
    """Issue 17.46."""
    file = written(tmp_path, {"seed": {"value": 1}}, command=None, program=program)
    assert read_sweep(file, asked)[0].program_module == module


def test_a_key_that_training_does_not_know_is_named_before_any_trial() -> None:
    with pytest.raises(ValueError, match=r"did you mean local\.learning_rate\?"):
        resolved("benchmarks.flair.train", ["--config=fl-r-17"], {"local.learning_rat": 0.1})


def test_a_swept_key_may_not_be_fixed_by_the_arguments() -> None:
    """The last of two wins, so every trial would be the same."""
    sweep, _, _ = read_sweep("learning-rates")
    with pytest.raises(ValueError, match=r"--server\.learning_rate is swept"):
        training_words(sweep, ["--server.learning_rate=0.1"])


HISTORIES = {0: [9.0, 5.0, 1.0, 1.0], 1: [8.0, 6.0], 2: [7.0, 7.0], 3: [9.5, 9.0, 8.0]}


@pytest.mark.parametrize(
    "rule, expected",
    [
        (EarlyTerminate("hyperband", min_iter=2, eta=2), [False, False, True, True]),
        (EarlyTerminate("hyperband", min_iter=2, eta=4), [False, True, True, True]),
        (EarlyTerminate("hyperband", min_iter=1, eta=3), [False, False, False, True]),
        (EarlyTerminate("hyperband", min_iter=5, eta=3), [False] * 4),
        (EarlyTerminate("hyperband", max_iter=6, s=1, eta=3), [False, False, True, True]),
    ],
    ids=["half at 2", "best at 2", "trial 3 alone at 3", "nobody there yet", "down from 6"],
)
def test_hyperband_keeps_the_best_share_at_a_bracket(rule: EarlyTerminate, expected: list[bool]) -> None:
    """By hand. With min_iter 2 and eta 2 the bests after two values are 5, 6, 7, 9: two of four go on."""
    assert [hopeless(HISTORIES, trial, rule) for trial in HISTORIES] == expected


def test_brackets_grow_by_eta_or_shrink_from_the_end() -> None:
    assert EarlyTerminate("hyperband", min_iter=4, eta=3).brackets(40) == [4, 12, 36]
    assert EarlyTerminate("hyperband", max_iter=27, s=2, eta=3).brackets(40) == [3, 9]


def test_bayes_goes_where_the_scores_are_good_and_repeats_itself(tmp_path: Path) -> None:
    parameters = {"server.learning_rate": {"distribution": "log_uniform_values", "min": 0.001, "max": 1.0}}
    sweep, _, _ = read_sweep(written(tmp_path, parameters, method="bayes", run_cap=30))

    def search(seed: int) -> list[float]:
        told: list[tuple[dict[str, float], float | None]] = []
        for number in range(25):
            unit = suggestion(sweep, seed, number, 0, told)
            told.append((unit, (unit["server.learning_rate"] - 0.8) ** 2))
        return [unit["server.learning_rate"] for unit, _ in told]

    found = search(0)
    assert found == search(0) != search(1)
    late = sorted(abs(u - 0.8) for u in found[10:])
    assert late[len(late) // 2] < 0.15  # of uniform draws half lie farther than 0.3
    running = suggestion(sweep, 0, 6, 0, [({"server.learning_rate": 0.8}, None)] * 6)
    assert 0 <= running["server.learning_rate"] < 1


def test_a_random_point_is_a_function_of_seed_and_number(tmp_path: Path) -> None:
    parameters = {"local.learning_rate": {"min": 0.0, "max": 1.0}, "local.num_epochs": {"values": [1, 2, 3]}}
    sweep, _, _ = read_sweep(written(tmp_path, parameters, method="random", run_cap=5))
    points = [sweep.random_unit(0, number, 0)["local.learning_rate"] for number in range(200)]
    assert points[7] == sweep.random_unit(0, 7, 0)["local.learning_rate"]
    assert len(set(points)) == 200
    assert 0.42 < sum(points) / 200 < 0.58
