"""wandb's sweep schema, read strictly, and the points that a sweep tries.

https://docs.wandb.ai/guides/sweeps/sweep-config-keys. Keys that this project cannot honour are refused.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.pruners import SuccessiveHalvingPruner
from optuna.trial import FrozenTrial, TrialState
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from benchmarks.console import train_commands
from benchmarks.core.config.trees import Tree, build, read_yaml
from benchmarks.core.experiment import Experiment
from benchmarks.reporting.known import of_own_modules
from benchmarks.sweep.parameter import MOST_VALUES, Parameter
from dataset.files import imported, own_modules
from pfl_ext.configs import STRICT
from pfl_ext.randomness import seed32
from pfl_ext.tasks.score_kinds import LOSS, ScoreKinds

SWEEPS = {path.stem: path for path in sorted(Path(__file__).parents[1].glob("*/sweeps/*.yaml"))}
"""The shipped sweeps of all benchmarks."""
TRAIN = re.compile(r"benchmarks(\.\w+)+\.train")
"""How the module that a sweep's command runs is called: a training of this project's."""
DEFAULT_PROGRAM = "benchmarks.flair.train"
NOT_SWEPT = ("run_dir", "data_path", "weights", "extend", "resume")
MOST_DRAWS = 50


@dataclass(frozen=True, config=STRICT)
class Metric:
    """A number of ``metrics.jsonl``, as ``val/C-AP``; a trial counts by its best."""

    name: str
    goal: Literal["minimize", "maximize"] = "minimize"

    @property
    def sign(self) -> int:
        """-1 where the greatest value is the best, else 1: the best is the least of values times this."""
        return -1 if self.goal == "maximize" else 1


@dataclass(frozen=True, config=STRICT)
class EarlyTerminate:
    """wandb's hyperband. It has one bracket, so that it is optuna's successive halving, not its hyperband.

    A trial is compared at its ``min_iter * eta**k``-th value of the metric, k = 0, 1, ...; with ``max_iter``
    and ``s`` instead at its ``max_iter / eta**k``-th, k = s, ..., 1. It goes on if its best value so far is
    among the best ``1 / eta`` (rounded down, but at least one) of what all trials had so far at that place.
    wandb's server rounds up, and compares again whenever another trial gets there.
    """

    type: Literal["hyperband"]
    min_iter: PositiveInt | None = None
    max_iter: PositiveInt | None = None
    s: PositiveInt = 1
    eta: PositiveInt = 3

    def __post_init__(self) -> None:
        if (self.min_iter is None) == (self.max_iter is None):
            raise ValueError("early_terminate: give either min_iter or max_iter (with s)")
        if self.eta < 2:
            raise ValueError("early_terminate: eta must be at least 2")
        if self.max_iter is not None and self.max_iter % self.eta**self.s:
            multiple = f"give a multiple of eta**s, {self.eta**self.s}"
            raise ValueError(f"early_terminate: max_iter is {self.max_iter}: {multiple}")

    def pruner(self) -> SuccessiveHalvingPruner:
        """optuna's, for trials that report their best value so far after each value of theirs."""
        return SuccessiveHalvingPruner(self.min_iter or self.max_iter // self.eta**self.s, self.eta)

    def compares(self, num_values: int) -> bool:
        """Whether a trial with so many values can still be stopped: optuna also compares at ``max_iter``."""
        return self.max_iter is None or num_values < self.max_iter


@dataclass(frozen=True, config=STRICT)
class Sweep:
    """A sweep as its YAML says."""

    method: Literal["grid", "random", "bayes"]
    command: list[str]
    metric: Metric | None = None
    early_terminate: EarlyTerminate | None = None
    run_cap: PositiveInt | None = None
    name: str | None = None
    description: str | None = None
    project: str | None = None
    entity: str | None = None
    program: str | None = None
    parameters: dict[str, Parameter] = field(default_factory=dict)

    @property
    def program_module(self) -> str:
        """The module that trains: the one of the command that is a benchmark's."""
        return _programs(self.command)[0]

    @property
    def experiment(self) -> type[Experiment[Any]]:
        """What `program_module` trains."""
        found: type[Experiment[Any]] | None = getattr(imported(self.program_module), "EXPERIMENT", None)
        for known in of_own_modules() if found is None else ():
            if known.name == self.program_module:
                return known.experiment()
        if found is None:
            raise ValueError(
                f"{self.program_module} does not say what it trains: set EXPERIMENT there to your class"
            )
        return found

    @property
    def ranking(self) -> Metric:
        """The metric by which trials are compared, or else the benchmark's headline score on val."""
        score = self.experiment.headline[0]
        return self.metric or Metric(
            f"val/{score}", "minimize" if self.kinds.is_lower_better(score) else "maximize"
        )

    @property
    def on_test(self) -> str:
        """The score on test beside the ranking: the same one, or the headline where trials are ranked by the
        loss."""
        score, headline = self.ranking.name.removeprefix("val/"), self.experiment.headline
        return score if score in {*headline, *self.experiment.scores} - {LOSS} else headline[0]

    @property
    def kinds(self) -> ScoreKinds:
        """How the scores of the trials are read."""
        return self.experiment.score_kinds(self.experiment.benchmark.default_config)

    @property
    def space(self) -> dict[str, BaseDistribution]:
        """The distribution of each parameter that can take more than one value, for optuna."""
        varied = {name: p for name, p in self.parameters.items() if len(p.options() or (0, 1)) > 1}
        if self.method == "grid":
            return {name: CategoricalDistribution(list(p.options() or ())) for name, p in varied.items()}
        return {name: p.space() for name, p in varied.items()}

    def _columns(self) -> list[Sequence[Any]]:
        """The values of each parameter of a grid.

        Raises:
            ValueError: where a parameter has no finite list of values, and for too many points.
        """
        for name, parameter in self.parameters.items():
            if parameter.options() is None:
                raise ValueError(f"parameters.{name} is {parameter.kind}: a grid needs values, or q_uniform")
        columns = [parameter.options() or () for parameter in self.parameters.values()]
        points = math.prod(map(len, columns))
        if points > MOST_VALUES:
            raise ValueError(
                f"the grid has {points:,} points, more than {MOST_VALUES:,}: set method to random"
            )
        return columns

    def grid_size(self) -> int:
        """How many points the grid has; raises as `grid` does."""
        return math.prod(map(len, self._columns()))

    def grid(self, first: int = 0) -> Iterator[Tree]:
        """The combinations from number ``first`` on, the last parameter fastest; none is kept.

        Raises:
            ValueError: where a parameter has no finite list of values, and for too many points.
        """
        points = itertools.islice(itertools.product(*self._columns()), first, None)
        return (dict(zip(self.parameters, values)) for values in points)

    def candidates(
        self, seed: int, number: int, trials: Sequence[FrozenTrial]
    ) -> Iterator[tuple[Tree, Tree]]:
        """What trial `number` may try; the first new one is taken: a draw from `space`, and its point.

        A draw is a function of the seed, the number, its place here and, for ``bayes``, of the trials. It is
        made in a study of its own, so that the sweep's storage holds whole trials only. A grid does without
        optuna's GridSampler, which shuffles the grid, may give two workers the same point, and does not try
        again the point of a trial that failed.
        """
        space = self.space
        if self.method == "grid":
            yield from (({name: point[name] for name in space}, point) for point in self.grid(number))
            return
        useful = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
        for attempt in range(MOST_DRAWS):
            draw = seed32(seed, "sweep point", number, attempt)
            bayes = optuna.samplers.TPESampler(seed=draw, n_startup_trials=5, constant_liar=True)
            sampler = bayes if self.method == "bayes" else optuna.samplers.RandomSampler(draw)
            study = optuna.create_study(direction=self.ranking.goal, sampler=sampler)
            study.add_trials([trial for trial in trials if trial.state in useful])
            drawn = study.ask(space).params
            point = {
                name: p.at(drawn[name]) if name in drawn else (p.options() or (None,))[0]
                for name, p in self.parameters.items()
            }
            yield drawn, point


def command_words(point: Tree) -> list[str]:
    """A point as wandb's agent writes it."""
    return [f"--{name}={value}" for name, value in point.items()]


def _programs(command: Sequence[str]) -> list[str]:
    """The modules that a command runs and that train: a benchmark's of this project, or the user's own."""
    own = {module.__name__ for module in own_modules()}
    pairs = itertools.pairwise(command)
    return [word for option, word in pairs if TRAIN.fullmatch(word) or (option == "-m" and word in own)]


def _module(name: str, where: str) -> str:
    """The training module that ``program`` names, as a module or, as wandb does, as a file."""
    module = name.removesuffix(".py").replace("/", ".")
    known = [*train_commands().values(), *(own.__name__ for own in own_modules())]
    if module in known:
        return module
    raise ValueError(f"{where} is {name!r}: choose one of {', '.join(known)}")


def _parameter(key: str, entry: object, path: Path) -> Parameter:
    if not isinstance(entry, dict) or "parameters" in entry:
        raise ValueError(f"{path}: parameters.{key}: write a dotted key with value, values, or min, max")
    if key in NOT_SWEPT or key.startswith("runtime."):
        raise ValueError(f"{path}: parameters.{key} does not change a run's numbers: remove it")
    return build(Parameter, entry, f"{path}: parameters.{key}")


def read_sweep(name: str, program: str | None = None) -> tuple[Sweep, Tree, Path]:
    """A shipped sweep (``learning-rates``) or a YAML file: the sweep, the file's tree, its path.

    Args:
        name: of the sweep or of the file.
        program: the module that trains, for a file that has neither ``command`` nor ``program``; else it must
            be the file's. None: FLAIR's.

    Raises:
        ValueError: one line that names the key and what to do.
    """
    path = SWEEPS.get(name, Path(name))
    if not path.is_file():
        names = ", ".join(SWEEPS)
        raise ValueError(f"sweep {name}: no such file and no shipped sweep; the shipped ones are {names}")
    tree = read_yaml(path)
    asked = None if program is None else _module(program, "--program")
    if "command" not in tree:
        module = _module(str(tree.get("program") or asked or DEFAULT_PROGRAM), f"{path}: program")
        tree["command"] = ["${env}", "${interpreter}", "-m", module, "${args}"]
    raw = tree.get("parameters")
    if not isinstance(raw, dict) or not raw:
        raise ValueError(f"{path}: parameters is missing: a mapping of config keys to their values")
    parameters = {str(key): _parameter(str(key), entry, path) for key, entry in raw.items()}
    sweep = build(Sweep, {**tree, "parameters": parameters}, str(path))
    try:
        _check(sweep)
    except ValueError as fault:
        raise ValueError(f"{path}: {fault}") from None
    if asked not in (None, sweep.program_module):
        raise ValueError(
            f"{path} is a sweep of {sweep.program_module}, but --program is {program}: leave --program "
            "out, or choose another sweep"
        )
    return sweep, tree, path


def _check_metric(sweep: Sweep, metric: Metric) -> None:
    """Refuse a score of test, and a goal that ranks a score the wrong way round; a file that names none has
    ``minimize``."""
    split, _, score = metric.name.partition("/")
    if split in ("tracked", "test"):
        raise ValueError(
            f"metric.name is {metric.name}, a test score, but hyperparameters must not be chosen "
            "on test: choose a score of val, such as val/accuracy (visual classification: "
            "--data.scored=val)"
        )
    if split != "val" or score not in (LOSS, *sweep.experiment.headline, *sweep.experiment.scores):
        return
    lower = sweep.kinds.is_lower_better(score)
    if lower != (metric.goal == "minimize"):
        raise ValueError(
            f"metric.goal is {metric.goal}, but a {'lower' if lower else 'higher'} val/{score} is better: "
            f"set it to {'minimize' if lower else 'maximize'}"
        )


def _check(sweep: Sweep) -> None:
    """Refuse what makes no sense or ranks by test."""
    if sweep.command.count("${args}") != 1 or len(_programs(sweep.command)) != 1:
        raise ValueError(
            f"command must hold -m {DEFAULT_PROGRAM} and, once, ${{args}}; without a command, that is what "
            "is run"
        )
    _module(sweep.program_module, "command")
    fixed = {word.removeprefix("--").split("=")[0] for word in sweep.command if word.startswith("--")}
    for key in fixed & sweep.parameters.keys():
        raise ValueError(
            f"--{key} is in command and in parameters, so every trial would be the same: remove it from "
            "one of them"
        )
    if sweep.metric is not None:
        _check_metric(sweep, sweep.metric)
    elif sweep.method == "bayes" or sweep.early_terminate:
        raise ValueError(f"metric is missing: {sweep.method} and hyperband need its name and goal")
    if sweep.method == "grid":
        sweep.grid_size()
    elif sweep.run_cap is None:
        raise ValueError(f"run_cap is missing: set it to the number of trials that {sweep.method} makes")
