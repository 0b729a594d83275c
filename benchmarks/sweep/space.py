"""wandb's sweep schema, read strictly: which points a sweep tries, and when hyperband gives one up.

https://docs.wandb.ai/guides/sweeps/sweep-config-keys. The keys that mean something here are taken; any other
is an error, as is one that this project could not honour.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from importlib.util import find_spec
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from benchmarks.core.config.building import build
from benchmarks.core.config.sections import STRICT
from benchmarks.core.config.trees import Tree, read_yaml
from pfl_ext.randomness import seed32, stream

Distribution = Literal[
    "constant", "categorical", "categorical_w_probabilities", "int_uniform", "uniform", "q_uniform",
    "log_uniform", "log_uniform_values", "q_log_uniform_values", "normal", "log_normal",
]  # fmt: skip
SWEEPS = {path.stem: path for path in sorted(Path(__file__).parents[1].glob("*/sweeps/*.yaml"))}
"""The shipped sweeps of all benchmarks."""
TRAIN = re.compile(r"benchmarks\.\w+\.train")
"""The module that a sweep's command runs: a benchmark's own."""
DEFAULT_PROGRAM = "benchmarks.flair.train"
NOT_SWEPT = ("run_dir", "data_path", "weights", "resume")
TINY = 1e-12


@dataclass(frozen=True, config=STRICT)
class Metric:
    """What is looked for: a number of ``metrics.jsonl``, as ``val/C-AP``; a trial counts by its best."""

    name: str
    goal: Literal["minimize", "maximize"] = "minimize"


@dataclass(frozen=True, config=STRICT)
class EarlyTerminate:
    """Hyperband: at 1, eta, eta^2, ... times `min_iter` values of the metric, only the best 1/eta go on.

    Or, going down from `max_iter`, at `s` such places: ``max_iter / eta``, ``max_iter / eta^2``, ...
    """

    type: Literal["hyperband"]
    min_iter: PositiveInt | None = None
    max_iter: PositiveInt | None = None
    s: PositiveInt = 1
    eta: PositiveInt = 3

    def check(self) -> None:
        """Refuse what makes no sense."""
        if (self.min_iter is None) == (self.max_iter is None):
            raise ValueError("give either min_iter or max_iter (with s)")
        if self.eta < 2:
            raise ValueError("eta must be at least 2")

    def brackets(self, most: int) -> list[int]:
        """Numbers of values, at most ``most``, at which a trial is compared with the others."""
        if self.min_iter is not None:
            places = [self.min_iter * self.eta**power for power in range(64)]
        else:
            assert self.max_iter is not None
            places = sorted(self.max_iter // self.eta**power for power in range(1, self.s + 1))
        return [place for place in places if 1 <= place <= most]


def hopeless(histories: Mapping[int, Sequence[float]], trial: int, rule: EarlyTerminate) -> bool:
    """Whether hyperband stops a trial.

    :param histories: of each trial the values so far, to be minimised.
    """
    own = histories[trial]
    places = rule.brackets(len(own))
    if not places:
        return False
    place = places[-1]
    reached = sorted(min(values[:place]) for values in histories.values() if len(values) >= place)
    return min(own[:place]) > reached[math.ceil(len(reached) / rule.eta) - 1]


@dataclass(frozen=True, config=STRICT)
class Parameter:
    """The values that one config key may take."""

    value: Any = None
    values: list[Any] | None = None
    probabilities: list[float] | None = None
    distribution: Distribution | None = None
    min: float | int | None = None
    max: float | int | None = None
    q: float | int | None = None
    mu: float = 0.0
    sigma: float = 1.0

    def check(self) -> None:
        """Refuse what makes no sense."""
        kind = self.kind
        if kind.startswith("categorical") and not self.values:
            raise ValueError("values is missing or empty")
        if self.probabilities is not None and len(self.probabilities) != len(self.values or ()):
            raise ValueError("there must be as many probabilities as values")
        if "uniform" in kind:
            if self.min is None or self.max is None or not self.min < self.max:
                raise ValueError(f"{kind} needs min and max, min the smaller")
            if kind.endswith("log_uniform_values") and self.min <= 0:
                raise ValueError("min must be above 0 for a logarithmic scale")
            if kind == "int_uniform" and (self.min != int(self.min) or self.max != int(self.max)):
                raise ValueError("int_uniform needs whole numbers")
        if kind.startswith("q_") and not (self.q and self.q > 0):
            raise ValueError(f"{kind} needs q, the step, above 0")

    @property
    def kind(self) -> Distribution:
        """The distribution, as wandb infers it where it is not given."""
        if self.distribution is not None:
            return self.distribution
        if self.values is not None:
            return "categorical"
        if self.min is not None and self.max is not None:
            whole = isinstance(self.min, int) and isinstance(self.max, int)
            return "int_uniform" if whole else "uniform"
        return "constant"

    @property
    def logarithmic(self) -> bool:
        """Whether its picture wants a logarithmic axis."""
        numbers = [v for v in self.values or () if isinstance(v, (int, float)) and not isinstance(v, bool)]
        spread = len(numbers) == len(self.values or ()) > 1 and min(numbers) > 0
        return self.kind.startswith(("log", "q_log")) or (spread and max(numbers) >= 10 * min(numbers))

    def options(self) -> list[Any] | None:
        """Every value, where there are finitely many."""
        if self.kind == "constant":
            return [self.value]
        if self.values is not None:
            return list(self.values)
        if self.kind == "int_uniform":
            return list(range(int(self.min or 0), int(self.max or 0) + 1))
        if self.kind == "q_uniform":
            low, high, q = float(self.min or 0), float(self.max or 0), float(self.q or 1)
            return [_steps(low + i * q, q) for i in range(int((high - low) / q + 1e-9) + 1)]
        return None

    def quantile(self, u: float) -> Any:
        """The value below which a share ``u`` in [0, 1) of the distribution lies."""
        kind, low, high = self.kind, float(self.min or 0), float(self.max or 0)
        if kind == "constant":
            return self.value
        if self.values is not None:
            weights = self.probabilities or [1.0] * len(self.values)
            edges = itertools.accumulate(weight / math.fsum(weights) for weight in weights)
            return next((v for v, edge in zip(self.values, edges) if u < edge), self.values[-1])
        if kind == "int_uniform":
            return int(low + math.floor(u * (high - low + 1)))
        if kind in ("normal", "log_normal"):
            x = NormalDist(self.mu, self.sigma).inv_cdf(min(max(u, TINY), 1 - TINY))
            return math.exp(x) if kind == "log_normal" else x
        if kind.endswith("log_uniform_values"):
            x = math.exp(math.log(low) + u * (math.log(high) - math.log(low)))
        else:
            x = low + u * (high - low)
            x = math.exp(x) if kind == "log_uniform" else x
        if kind.startswith("q_"):
            return _steps(x, float(self.q or 1))
        return float(f"{x:.6g}")


def _steps(x: float, q: float) -> float | int:
    """``x`` rounded to a multiple of ``q``; an integer where ``q`` is one."""
    rounded = round(x / q) * q
    return int(rounded) if q == int(q) else float(f"{rounded:.10g}")


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
        return next(word for word in self.command if TRAIN.fullmatch(word))

    @property
    def varied(self) -> list[str]:
        """The parameters that can take more than one value."""
        return [name for name, p in self.parameters.items() if len(p.options() or (0, 1)) > 1]

    def grid(self) -> list[Tree]:
        """Every combination, the last parameter fastest.

        :raises ValueError: where a parameter has no finite list of values.
        """
        columns = []
        for name, parameter in self.parameters.items():
            options = parameter.options()
            if options is None:
                raise ValueError(f"parameters.{name} is {parameter.kind}: a grid needs values, or q_uniform")
            columns.append([(name, option) for option in options])
        return [dict(point) for point in itertools.product(*columns)]

    def random_unit(self, seed: int, number: int, attempt: int) -> dict[str, float]:
        """Point ``number`` in the unit cube; the same whenever it is drawn."""
        rng = stream(seed, "sweep point", number, attempt)
        return {name: float(rng.random()) for name in self.parameters}

    def point(self, unit: Mapping[str, float]) -> Tree:
        """The values at a place in the unit cube."""
        return {name: p.quantile(unit.get(name, 0.0)) for name, p in self.parameters.items()}


def suggestion(
    sweep: Sweep,
    seed: int,
    number: int,
    attempt: int,
    told: Sequence[tuple[Mapping[str, float], float | None]],
) -> dict[str, float]:
    """The next place by optuna's tree-structured Parzen estimator, in the unit cube.

    :param told: the places tried, each with its score to be minimised, None while it is running.
    """
    import optuna  # not at the top: it takes a second, and only bayes needs it

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {name: optuna.distributions.FloatDistribution(0.0, 1.0) for name in sweep.varied}
    sampler = optuna.samplers.TPESampler(
        seed=seed32(seed, "sweep suggestion", number, attempt), n_startup_trials=5, constant_liar=True
    )
    study = optuna.create_study(direction="minimize", sampler=sampler)
    states = optuna.trial.TrialState
    for unit, score in told:
        state = states.RUNNING if score is None else states.COMPLETE
        study.add_trial(
            optuna.trial.create_trial(
                params={name: unit[name] for name in space}, distributions=space, value=score, state=state
            )
        )
    return {name: min(float(u), 1 - TINY) for name, u in study.ask(space).params.items()}


def command_words(point: Mapping[str, Any]) -> list[str]:
    """A point as wandb's agent writes it."""
    return [f"--{name}={value}" for name, value in point.items()]


def _module(name: str, where: str) -> str:
    """The training module that ``program`` names, as a module or, as wandb does, as a file.

    Raises:
        ValueError: for anything but the training command of a benchmark.
    """
    module = name.removesuffix(".py").replace("/", ".")
    if not TRAIN.fullmatch(module) or find_spec(module) is None:
        raise ValueError(
            f"{where} is {name!r}: choose {DEFAULT_PROGRAM} or benchmarks.visual_classification.train"
        )
    return module


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
    parameters = {}
    for key, entry in raw.items():
        if not isinstance(entry, dict) or "parameters" in entry:
            raise ValueError(f"{path}: parameters.{key}: write a dotted key with value, values, or min, max")
        if key in NOT_SWEPT or str(key).startswith("runtime."):
            raise ValueError(f"{path}: parameters.{key} does not change a run's numbers: remove it")
        parameters[str(key)] = build(Parameter, entry, f"{path}: parameters.{key}")
    sweep = build(Sweep, {**tree, "parameters": parameters}, str(path))
    for where, part in (*sweep.parameters.items(), ("early_terminate", sweep.early_terminate)):
        try:
            if part is not None:
                part.check()
        except ValueError as fault:
            raise ValueError(f"{path}: {where}: {fault}") from None
    _check(sweep, path)
    if asked not in (None, sweep.program_module):
        raise ValueError(
            f"{path} is a sweep of {sweep.program_module}, and --program is {program}: choose one"
        )
    return sweep, tree, path


def _check(sweep: Sweep, path: Path) -> None:
    if sweep.command.count("${args}") != 1 or len([w for w in sweep.command if TRAIN.fullmatch(w)]) != 1:
        raise ValueError(
            f"{path}: command must hold -m benchmarks.flair.train and, once, ${{args}}; without "
            "a command, that is what is run"
        )
    fixed = {word.removeprefix("--").split("=")[0] for word in sweep.command if word.startswith("--")}
    for key in fixed & sweep.parameters.keys():
        raise ValueError(
            f"{path}: --{key} stands in command and in parameters: every trial would be the same"
        )
    if sweep.metric is not None and sweep.metric.name.partition("/")[0] in ("tracked", "test"):
        raise ValueError(
            f"{path}: metric.name is {sweep.metric.name}, which is of test: a sweep that ranks by it tunes "
            "on test; choose a number of val, as val/accuracy (visual classification: --data.scored=val)"
        )
    if sweep.metric is None and (sweep.method == "bayes" or sweep.early_terminate):
        raise ValueError(f"{path}: metric is missing: {sweep.method} and hyperband need its name and goal")
    if sweep.method == "grid":
        try:
            sweep.grid()
        except ValueError as fault:
            raise ValueError(f"{path}: {fault}") from None
    elif sweep.run_cap is None:
        raise ValueError(f"{path}: run_cap is missing: how many trials {sweep.method} makes")
