"""Which points a sweep tries, that each arrives in its trial's config, and when one is given up."""

from __future__ import annotations

import math
import sys
import tracemalloc
from dataclasses import asdict
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

import benchmarks
from benchmarks import console
from benchmarks.console import train_commands
from benchmarks.core.config.digests import short_digest
from benchmarks.core.config.trees import Tree, dotted
from benchmarks.flair.config import parse
from benchmarks.sweep import command
from benchmarks.sweep.command import ranked_run, training_words
from benchmarks.sweep.parameter import Parameter
from benchmarks.sweep.space import SWEEPS, EarlyTerminate, Sweep, command_words, read_sweep
from dataset.files import OWN
from tests.benchmarks.core import rotation

COMMAND = ["${env}", "${interpreter}", "-m", "benchmarks.flair.train", "--config=fl-r-17", "${args}"]
METRIC = {"name": "val/C-AP", "goal": "maximize"}


def written(path: Path, parameters: Tree, **changes: Any) -> str:
    """A sweep file; its path as the command line gives it."""
    tree = {"method": "grid", "metric": METRIC, "parameters": parameters, "command": COMMAND, **changes}
    file = path / "sweep.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in tree.items() if value is not None}))
    return str(file)


def draw(sweep: Sweep, number: int, seed: int = 0) -> Tree:
    """The first point that a trial may try when there is no other."""
    return next(sweep.candidates(seed, number, []))[1]


@pytest.mark.parametrize("name", SWEEPS)
@pytest.mark.parametrize("scale", [[], ["--scale=mini"]], ids=["full", "mini"])
def test_every_trial_of_a_shipped_sweep_is_the_run_that_was_asked_for(name: str, scale: list[str]) -> None:
    """Predecessors 14: parameters of a sweep were ignored, so that all its runs were the same run."""
    sweep, _, _ = read_sweep(name)
    words = training_words(sweep, scale)
    points = (
        list(sweep.grid()) if sweep.method == "grid" else [draw(sweep, n) for n in range(sweep.run_cap or 0)]
    )
    configs = [sweep.experiment.benchmark.parse([*words, *command_words(point)]).config for point in points]
    assert len({short_digest(config) for config in configs}) == len(points) >= 10
    for config, point in zip(configs, points):
        got = dotted(asdict(config))
        assert {key: got[key] for key in point} == point


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
    assert list(read_sweep(file)[0].space) == ["local.num_epochs", "server.learning_rate"]


def test_the_rest_of_a_grid_is_not_listed_for_each_trial(tmp_path: Path) -> None:
    """All points were listed again for each trial: 250 MB for the 1,000,000 that are allowed."""
    sweep, _, _ = read_sweep(written(tmp_path, {"seed": {"min": 1, "max": 10**5}}))
    assert sweep.grid_size() == 10**5
    assert next(sweep.grid(7)) == {"seed": 8}
    tracemalloc.start()
    assert next(sweep.candidates(0, 999, []))[1] == {"seed": 1000}
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8e6, "the numbers themselves"


def test_a_point_is_written_as_wandbs_agent_writes_it() -> None:
    # Here, as it takes three seconds that only one of xdist's workers need spend.
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    point = {
        "local.learning_rate": 1e-05,
        "augment.flip": "none",
        "local.straddle": False,
        "local.max_images": None,
    }
    agents = create_sweep_command_args({"args": {key: {"value": value} for key, value in point.items()}})
    assert command_words(point) == agents["args"]
    tree = asdict(parse(["--config=fl-r-17", *command_words(point)]).config)
    assert tree["local"]["learning_rate"] == 1e-05
    assert tree["augment"]["flip"] == "none"
    assert tree["local"]["straddle"] is False
    assert tree["local"]["max_images"] is None


@settings(max_examples=60)
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
    space = parameter.space()
    assert isinstance(space, (FloatDistribution, IntDistribution))
    drawn = [space.low + share * (space.high - space.low) for share in sorted((u, v))]
    a, b = (parameter.at(round(x) if parameter.kind == "int_uniform" else x) for x in drawn)
    assert low * (1 - 1e-12) <= a <= b <= high * (1 + 1e-12)
    if parameter.q:
        assert a % parameter.q == 0
    if parameter.kind == "int_uniform":
        assert isinstance(a, int)


def test_known_values() -> None:
    assert Parameter(distribution="log_uniform_values", min=0.01, max=1.0).space() == FloatDistribution(
        0.01, 1.0, log=True
    )
    assert Parameter(values=["a", None]).space() == CategoricalDistribution(["a", None])
    assert Parameter(distribution="q_uniform", min=10, max=100, q=25).options() == [0, 25, 50, 75, 100]
    assert Parameter(distribution="q_uniform", min=10, max=100, q=25).at(40.0) == 50
    assert Parameter(value=None).options() == [None]
    assert Parameter(distribution="normal").at(0.8413447) == pytest.approx(1, 1e-4)
    weighted = Parameter(values=["a", "b"], probabilities=[0.9, 0.1])
    assert [weighted.at(u) for u in (0, 0.89, 0.91, 1.0)] == ["a", "a", "b", "b"]
    assert Parameter(distribution="normal", mu=3, sigma=2).at(0.5) == pytest.approx(3)
    log_normal = Parameter(distribution="log_normal", mu=0, sigma=1)
    assert log_normal.at(0.8413447) == pytest.approx(math.e, 1e-4)


@pytest.mark.parametrize(
    "parameters, changes, message",
    [
        ({"x": {"valeus": [1]}}, {}, "parameters.x: there is no config key valeus; did you mean values?"),
        ({"x": {"parameters": {"y": {"value": 1}}}}, {}, "parameters.x: write a dotted key"),
        ({"x": {"values": []}}, {}, "x: values is missing or empty"),
        ({"x": {}}, {}, "x: value is missing: give value, values, or min and max"),
        ({"x": {"min": 3}}, {}, "x: uniform needs min and max"),
        ({"x": {"value": 3, "values": [1, 2]}}, {}, "x: value has no effect on a parameter"),
        ({"x": {"value": None, "values": [1, 2]}}, {}, "x: value has no effect on a parameter"),
        (
            {"x": {"values": [1, 2], "distribution": "uniform", "min": 5, "max": 9}},
            {},
            "x: values has no effect on a parameter that is uniform, which uses min and max: remove values",
        ),
        ({"x": {"min": 0, "max": 1, "q": 0.25}}, {}, "x: q has no effect on a parameter that is int_uniform"),
        ({"x": {"value": 1, "mu": 2.0}}, {}, "x: mu has no effect on a parameter that is"),
        ({"x": {"values": [1, 2], "probabilities": [-1, 2]}}, {}, "x: probabilities must be 0 or above"),
        ({"x": {"values": [1, 2], "probabilities": [0, 0]}}, {}, "x: probabilities must be 0 or above"),
        ({"x": {"values": [1], "distribution": "categorical_w_probabilities"}}, {}, "x: probabilities is"),
        ({"x": {"distribution": "normal", "sigma": -1}}, {}, "x: sigma is -1: normal needs one above 0"),
        ({"x": {"distribution": "log_uniform", "min": 0, "max": 1000}}, {}, "x: log_uniform is given by"),
        ({"x": {"distribution": "log_normal", "mu": 900}}, {}, "x: log_normal is given by logarithms"),
        ({"x": {"values": [[1], 2]}}, {}, "x: a value must be a number, a word, true, false or null"),
        ({"x": {"value": {"y": 1}}}, {}, "x: a value must be a number, a word, true, false or null"),
        ({"x": {"min": 2, "max": 1}}, {}, "x: int_uniform needs min and max, min the smaller"),
        ({"x": {"min": 0, "max": 10**30}}, {}, "x: int_uniform needs numbers up to 9007199254740992"),
        ({"x": {"min": 0, "max": 10**9}}, {}, "the grid has 1,000,000,001 points, more than 1,000,000"),
        (
            {"x": {"distribution": "q_uniform", "min": 0.0, "max": 1.0, "q": 1e-9}},
            {"method": "random", "run_cap": 2},
            "x: q_uniform has more than 1,000,000 values: choose a larger q",
        ),
        ({"x": {"distribution": "beta"}}, {}, "parameters.x: distribution is 'beta'"),
        ({"x": {"distribution": "log_uniform_values", "min": 0, "max": 1}}, {}, "x: min must be above 0"),
        ({"x": {"min": 0.0, "max": 1.0}}, {}, "parameters.x is uniform: a grid needs values"),
        ({"runtime.precision": {"values": ["fp32", "bf16"]}}, {}, "runtime.precision does not change"),
        ({"run_dir": {"values": ["a", "b"]}}, {}, "run_dir does not change"),
        ({"config": {"values": ["fl-r-17", "fl-f-17"]}}, {}, "--config is in command and in parameters, so"),
        ({}, {}, "parameters is missing"),
        ({"x": {"value": 1}}, {"command": ["python", "train.py"]}, "command must hold -m"),
        ({"x": {"value": 1}}, {"command": None, "program": "train.py"}, "program is 'train.py': choose"),
        (
            {"x": {"value": 1}},
            {"command": ["python", "-m", "benchmarks.no.train", "${args}"]},
            "command is 'benchmarks.no.train': choose",
        ),
        ({"x": {"value": 1}}, {"method": None}, "sweep.yaml: method is missing"),
        ({"x": {"value": 1}}, {"method": "random"}, "run_cap is missing"),
        ({"x": {"value": 1}}, {"method": "bayes", "run_cap": 2, "metric": None}, "metric is missing"),
        ({"x": {"value": 1}}, {"method": "anneal"}, "method is 'anneal'"),
        ({"x": {"value": 1}}, {"metrik": {}}, "there is no config key metrik; did you mean metric?"),
        ({"x": {"value": 1}}, {"early_terminate": {"type": "hyperband"}}, "give either min_iter or max_iter"),
        (
            {"x": {"value": 1}},
            {"early_terminate": {"type": "hyperband", "max_iter": 10, "s": 2}},
            "max_iter is 10: give a multiple of eta**s, 9",
        ),
    ],
    ids=lambda value: value[:28] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_sweep_that_cannot_be_honoured_is_refused(
    parameters: Tree, changes: Tree, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"sweep\.yaml") as caught:
        read_sweep(written(tmp_path, parameters, **changes))
    assert message in str(caught.value)


def test_a_draw_from_many_whole_numbers_lists_none_of_them(tmp_path: Path) -> None:
    """A list of them took over 60 GB."""
    parameters = {"seed": {"min": 0, "max": 2**31 - 1}}
    sweep = read_sweep(written(tmp_path, parameters, method="random", run_cap=2))[0]
    tracemalloc.start()
    drawn, point = next(sweep.candidates(0, 0, []))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert drawn == point
    assert peak < 1e7


@pytest.mark.parametrize(
    "program, asked, module",
    [
        (None, None, "benchmarks.flair.train"),
        ("benchmarks/visual_classification/train.py", None, "benchmarks.visual_classification.train"),
        *((None, name, name) for name in train_commands().values()),
    ],
)
def test_without_a_command_a_benchmarks_training_is_run(
    program: str | None, asked: str | None, module: str, tmp_path: Path
) -> None:
    """Issue 17.46."""
    file = written(tmp_path, {"seed": {"value": 1}}, command=None, program=program, metric=None)
    sweep = read_sweep(file, asked)[0]
    assert sweep.program_module == module
    assert sweep.ranking.name.removeprefix("val/") in sweep.experiment.scores
    assert module.removesuffix(".train").removeprefix("benchmarks.") in (command.__doc__ or "")


@pytest.mark.parametrize(
    "metric, goal, shown", [("val/Dice", "maximize", "Dice"), ("val/loss", "minimize", "mIoU")]
)
def test_the_score_on_test_is_the_one_that_ranks(metric: str, goal: str, shown: str, tmp_path: Path) -> None:
    changes = {"program": "benchmarks.fedcv.segmentation.train", "metric": {"name": metric, "goal": goal}}
    file = written(tmp_path, {"local.learning_rate": {"value": 0.1}}, command=None, **changes)
    sweep = read_sweep(file)[0]
    assert sweep.on_test == shown


def test_a_benchmark_without_a_config_py_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top = tmp_path / "benchmarks"
    for name, text in (("one", "from benchmarks.flair.train import EXPERIMENT"), ("none", "")):
        (top / f"of_{name}").mkdir(parents=True)
        (top / f"of_{name}" / "train.py").write_text(text)
    monkeypatch.setattr(console, "ROOT", top)
    monkeypatch.setattr(benchmarks, "__path__", [*benchmarks.__path__, str(top)])
    for name in ("one", "none"):
        program = f"benchmarks.of_{name}.train"
        file = written(tmp_path, {"seed": {"value": 1}}, command=None, program=program, metric=None)
        sweep = read_sweep(file)[0]
        if name == "one":
            assert sweep.ranking.name == "val/C-AP"
        else:
            with pytest.raises(ValueError, match=r"of_none\.train does not say what it trains: "):
                sweep.ranking  # noqa: B018


def test_a_benchmark_in_a_module_of_ones_own_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, {"seed": {"value": 1}}, command=None, program=rotation.__name__, metric=None)
    with pytest.raises(ValueError, match=r"program is 'tests\.benchmarks\.core\.rotation': choose one of"):
        read_sweep(file)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(OWN, rotation.__name__)
    sweep = read_sweep(file)[0]
    assert sweep.program_module == rotation.__name__
    assert sweep.experiment is rotation.Rotation


def test_a_key_that_training_does_not_know_is_named_before_any_trial() -> None:
    sweep, _, _ = read_sweep("learning-rates")
    with pytest.raises(ValueError, match=r"did you mean local\.learning_rate\?"):
        ranked_run(sweep, ["--config=fl-r-17", *command_words({"local.learning_rat": 0.1})])


def test_a_swept_key_may_not_be_fixed_by_the_arguments() -> None:
    """The last of two wins, so every trial would be the same."""
    sweep, _, _ = read_sweep("learning-rates")
    with pytest.raises(ValueError, match=r"--server\.learning_rate is a parameter of the sweep"):
        training_words(sweep, ["--server.learning_rate=0.1"])


HISTORIES = ([9.0, 5.0, 1.0, 1.0], [8.0, 6.0, 6.0, 6.0], [7.0, 7.0, 7.0, 7.0], [9.5, 9.0, 8.0, 8.0])


def ends(rule: EarlyTerminate) -> list[int]:
    """With how many values each trial of `HISTORIES` ends, when they run side by side."""
    study = optuna.create_study(pruner=rule.pruner())
    trials = [study.ask() for _ in HISTORIES]
    out = [len(values) for values in HISTORIES]
    for step in range(1, 5):
        for trial, values in zip(trials, HISTORIES):
            if out[trial.number] >= step:
                trial.report(min(values[:step]), step)
                if rule.compares(step) and trial.should_prune():
                    out[trial.number] = step
    return out


@pytest.mark.parametrize(
    "rule, expected",
    [
        (EarlyTerminate("hyperband", min_iter=2, eta=2), [4, 2, 2, 2]),
        (EarlyTerminate("hyperband", min_iter=1, eta=4), [4, 4, 4, 1]),
        (EarlyTerminate("hyperband", min_iter=1, eta=3), [4, 3, 3, 1]),
        (EarlyTerminate("hyperband", min_iter=5, eta=3), [4, 4, 4, 4]),
        (EarlyTerminate("hyperband", max_iter=6, s=1, eta=3), [4, 2, 2, 2]),
        (EarlyTerminate("hyperband", max_iter=4, s=1, eta=2), [4, 2, 2, 2]),
        (EarlyTerminate("hyperband", max_iter=4, s=2, eta=2), [4, 2, 2, 1]),
    ],
    ids=[
        "at 2 and 4",
        "at 1 and 4",
        "at 1 and 3",
        "none there yet",
        "at 2 of 6",
        "at 2 of 4",
        "at 1 and 2 of 4",
    ],
)
def test_hyperband_keeps_the_best_share_at_each_place(rule: EarlyTerminate, expected: list[int]) -> None:
    """By hand: the bests are 9, 8, 7, 9.5, then 5, 6, 7, 9, then 1, 6, 7, 8; the first to come goes on."""
    assert ends(rule) == expected


def test_bayes_goes_where_the_scores_are_good_and_repeats_itself(tmp_path: Path) -> None:
    rates = {"local.learning_rate": {"min": 0.0, "max": 1.0}, "server.epsilon": {"value": 0.5}}
    metric = {"name": "val/loss", "goal": "minimize"}
    file = written(tmp_path, rates, method="bayes", run_cap=30, metric=metric)
    sweep, _, _ = read_sweep(file)

    def search(seed: int) -> list[float]:
        trials: list[optuna.trial.FrozenTrial] = []
        for number in range(25):
            drawn, point = next(sweep.candidates(seed, number, trials))
            assert point == {**drawn, "server.epsilon": 0.5}
            score = (point["local.learning_rate"] - 0.8) ** 2
            trials.append(create_trial(params=drawn, distributions=sweep.space, value=score))
        return [trial.params["local.learning_rate"] for trial in trials]

    found = search(0)
    assert found == search(0) != search(1)
    late = sorted(abs(rate - 0.8) for rate in found[10:])
    assert late[len(late) // 2] < 0.15  # of uniform draws half lie farther than 0.3
    params = {"local.learning_rate": 0.8}
    running = create_trial(state=TrialState.RUNNING, params=params, distributions=sweep.space)
    assert 0 <= next(sweep.candidates(0, 6, [running] * 6))[1]["local.learning_rate"] < 1


def test_a_random_point_is_a_function_of_seed_and_number(tmp_path: Path) -> None:
    parameters = {"local.learning_rate": {"min": 0.0, "max": 1.0}, "local.num_epochs": {"values": [1, 2, 3]}}
    sweep, _, _ = read_sweep(written(tmp_path, parameters, method="random", run_cap=5))
    points = [draw(sweep, number)["local.learning_rate"] for number in range(200)]
    assert points[7] == draw(sweep, 7)["local.learning_rate"] != draw(sweep, 7, seed=1)["local.learning_rate"]
    assert len(set(points)) == 200
    assert 0.42 < sum(points) / 200 < 0.58


def test_a_launchers_long_option_names_the_module_too(tmp_path: Path) -> None:
    command = ["torchrun", "--nproc_per_node=2", "--module", "benchmarks.flair.train", "${args}"]
    sweep = read_sweep(written(tmp_path, {"seed": {"value": 1}}, command=command))[0]
    assert sweep.program_module == "benchmarks.flair.train"
