"""A benchmark's type of config, its shipped settings, and the way from a command line to a checked run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from benchmarks.core.config.choices import without_others_options
from benchmarks.core.config.command_line import CommandLine
from benchmarks.core.config.digests import config_tree
from benchmarks.core.config.effects import (
    Idle,
    Reasons,
    check_training,
    idle_in_runtime,
    idle_in_training,
    reason_for,
    reasons,
)
from benchmarks.core.config.older_runs import CHANGED, YOUNGER, calls_all
from benchmarks.core.config.privacy_matrix import check_privacy
from benchmarks.core.config.privacy_rules import PRIVACY
from benchmarks.core.config.sections import PrivacySection, Runtime, TrainingConfig
from benchmarks.core.config.trees import Tree, build, dotted, merge, put, read_yaml, without
from benchmarks.core.own_code import with_own_code
from benchmarks.core.weights import with_traces, with_weights
from pfl_ext.models.config import ALL_TARGETS, CALLED

PATHS = ("data_path", "run_dir", "weights", "extend")
"""The options of a run that are paths."""
C_co = TypeVar("C_co", bound=TrainingConfig, covariant=True)


@dataclasses.dataclass(frozen=True)
class Run(Generic[C_co]):
    """One invocation: what, on which data, to where, how.

    Raises:
        ValueError: when an option does not go with privacy (`benchmarks.core.config.privacy_matrix`).
    """

    config: C_co
    runtime: Runtime
    data_path: Path | None = None
    run_dir: Path | None = None
    weights: Path | None = None
    extend: Path | None = None
    resume: Literal["auto", "never"] = "auto"
    benchmark: Benchmark[C_co] | None = None
    """The benchmark of the config; None where it was put together by hand and writes no run directory."""
    origin: Path | None = None
    """The ``config.yaml`` of a run, or a copy of one, that the config is; None: it is of no run."""

    def __post_init__(self) -> None:
        check_privacy(self.config, self.runtime)


AnyRun = Run[TrainingConfig]


def _derived(config: TrainingConfig) -> Tree:
    """Fields whose values follow from others, by their dotted keys."""
    federated = config.federated
    out: Tree = {}
    network = config.model
    if network.trained == "lora" and network.lora_targets == ALL_TARGETS and calls_all(network.arch):
        out["model.lora_targets"] = CALLED  # the same for this network, and what older runs did
    if config.mode != "federated":
        return out
    resolved = federated.chosen.resolved(federated.chosen_options)
    out |= {f"federated.{key}": value for key, value in resolved.items()}
    if config.local.effective_learning_rate is not None:
        out["local.learning_rate"] = config.local_learning_rate
    return out


def _unasked(*parts: Tree) -> list[str]:
    """The kinds of privacy for which no part of a config asks."""
    return [kind for kind in PRIVACY if not any(isinstance(part.get(kind), dict) for part in parts)]


@dataclasses.dataclass(frozen=True)
class Benchmark(Generic[C_co]):
    """One benchmark's config: its type, its shipped YAML files, and what it refuses.

    ``directory`` holds a YAML file for each setting, and ``scales/``. ``check`` raises or does nothing.
    """

    kind: type[C_co]
    directory: Path
    default: str
    """The setting that runs where none is named."""
    recipes: Mapping[str, Tree] = dataclasses.field(default_factory=dict)
    protocol: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What differs from the sections' own defaults."""
    check: Callable[[Any], None] = check_training
    idle: Callable[[Any], Iterator[Idle]] = idle_in_training
    """Which of a config's keys have no effect."""
    own: str = ""
    """The user's module with the experiment that trains by it, whose files a config counts; empty: ours."""
    retired: Sequence[str] = ()
    """Keys that earlier versions of the code had, which the config.yaml of an old run may still hold."""

    @cached_property
    def scales(self) -> Mapping[str, Path]:
        """The YAML files laid over settings, by name."""
        return {path.stem: path for path in sorted((self.directory / "scales").glob("*.yaml"))}

    @cached_property
    def settings(self) -> Sequence[str]:
        """The names of the shipped settings."""
        return sorted(path.stem for path in self.directory.glob("*.yaml"))

    def _layers(self, tree: Tree, where: str) -> tuple[Tree, Tree, Tree]:
        """What the macros ``recipe`` and ``scale`` of a tree stand for, and the tree without them."""
        keys, recipes = dict(tree), Tree()
        recipe, scale = keys.pop("recipe", None), keys.pop("scale", None)
        for name in [] if recipe is None else str(recipe).split("+"):
            if name not in self.recipes:
                raise ValueError(f"{where}: recipe is {recipe!r}: choose one of {', '.join(self.recipes)}")
            recipes = merge(recipes, dict(self.recipes[name]))
        if scale is not None and scale not in list(self.scales):
            raise ValueError(f"{where}: scale is {scale!r}: choose one of {', '.join(self.scales)}")
        return recipes, {} if scale is None else read_yaml(self.scales[scale]), keys

    def _merged(self, *layers: tuple[Tree, Tree, Tree]) -> Tree:
        """The protocol under these layers, the last of which is the strongest.

        The ``privacy`` of the protocol and of a scale is for private settings only: those in which a recipe,
        the YAML file or the command line asks for privacy. So is ``local_privacy``.
        """
        dropped = _unasked(*(part for recipes, _, keys in layers for part in (recipes, keys)))
        tree = without(self.protocol, dropped)
        for recipes, scale, keys in layers:
            tree = merge(merge(tree, recipes), without(scale, dropped))
            tree = merge(without_others_options(self.kind, tree, keys), keys)
        return tree

    def path(self, name: str) -> Path:
        """The file of a shipped setting (``fl-r-17``) or of a path to a YAML."""
        shipped = self.directory / f"{name}.yaml"
        if shipped.exists():
            return shipped
        if Path(name).is_file():
            return Path(name)
        names = ", ".join(self.settings)
        what = "a folder, not a file" if Path(name).is_dir() else "no such file"
        recipe = (
            f" (there is a recipe of this name: give --recipe {name} in addition to a config)"
            if name in self.recipes
            else ""
        )
        raise ValueError(
            f"--config {name}: {what}, and not the name of a config of this project{recipe}; the names "
            f"are {names}"
        )

    @cached_property
    def _command_line(self) -> CommandLine:
        shipped = f"A YAML file, or a shipped config: {', '.join(self.settings)}. By default {self.default}."
        recipe = f"Named sets of values, as A or A+B: {', '.join(self.recipes)}."
        scale = f"Changes of a config for little data on a CPU: {', '.join(self.scales)}."
        return CommandLine(
            build(self.kind, self.protocol, "the protocol"),
            {"config": shipped, "recipe": recipe, "scale": scale},
        )

    @cached_property
    def default_config(self) -> C_co:
        """The config without a setting, which is the protocol without privacy."""
        return build(self.kind, without(self.protocol, _unasked()), "the protocol")

    @cached_property
    def _defaults(self) -> Mapping[str, Any]:
        """`default_config` by dotted keys."""
        return dotted(dataclasses.asdict(self.default_config))

    def help(self, text: str, program: str) -> str:
        """What ``program --help`` prints: ``text``, then every key by section."""
        return self._command_line.help(text, program)

    def words(self, argv: Sequence[str]) -> dict[str, str]:
        """Every option and key of a command line and its word, see `CommandLine.words`."""
        return self._command_line.words(argv)

    def parse(self, argv: Sequence[str]) -> Run[C_co]:
        """The run that a command line asks for. Defaults < YAML < command line.

        Raises:
            ValueError: for an unknown key, a wrong type or a combination without meaning.
        """
        typed = self._command_line.parse(argv)
        plain = {n: typed.pop(n, None) for n in ("config", *PATHS, "resume")}
        for name, text in plain.items():
            if text == "":
                raise ValueError(f"--{name} is empty: give a value, or leave the option out")
        paths = {n: Path(text) if (text := plain[n]) else None for n in PATHS}
        path = self.path(plain["config"] or self.default)
        shipped = read_yaml(path)
        if of_a_run := self._is_of_a_run(path, shipped):
            shipped = dataclasses.asdict(self.read(shipped, str(path)))
        layers = self._layers(shipped, str(path)), self._layers(typed, "command line")
        tree = self._merged(*layers)
        for section in PRIVACY:
            if "seed" in typed and isinstance(tree.get(section), dict):
                tree[section].setdefault("noise_seed", "run")
        where = f"{path.name} and command line"
        runtime = build(Runtime, tree.pop("runtime", {}), where, "runtime.")
        config = build(self.kind, tree, where)
        resume = plain["resume"] or "auto"
        if resume not in ("auto", "never"):
            raise ValueError(f"--resume is {resume!r}: choose auto or never")
        origin = path if of_a_run else None
        run = Run(config, runtime, resume=resume, benchmark=self, origin=origin, **paths)  # type: ignore[arg-type]
        self.check(config)
        self._refuse_idle(config, runtime, layers[1][2], "--")
        if not of_a_run:
            self._refuse_idle_in(path, layers[0])
        resolved = with_traces(with_weights(self.resolved(config), paths["weights"]))
        return dataclasses.replace(run, config=with_own_code(resolved, self.own))

    def _is_of_a_run(self, path: Path, tree: Tree) -> bool:
        """Whether this is the ``config.yaml`` of a run directory, or a copy of one: no key is left out."""
        beside = (path.with_name(name) for name in ("checkpoint", "metrics.jsonl", "results.json"))
        if path.name == "config.yaml" and any(other.exists() for other in beside):
            return True  # of an early version, too
        parts = [key.split(".") for key in dotted(tree)]
        return self._first_keys <= {".".join(key[:end]) for key in parts for end in range(1, len(key) + 1)}

    @cached_property
    def _first_keys(self) -> Set[str]:
        return dotted(config_tree(self.default_config)).keys() - YOUNGER.keys()

    def read(self, tree: Tree, where: str) -> C_co:
        """The resolved config in the ``config.yaml`` of a run of this or of an earlier version.

        Raises:
            ValueError: for a key that no version had, or a wrong value.
        """
        base = merge(CHANGED, without(self.protocol, _unasked(tree)))
        for key in YOUNGER.keys() & dotted(base).keys():
            put(base, key, YOUNGER[key])  # which such a file leaves out, whatever the protocol has
        return self.resolved(build(self.kind, merge(base, without(tree, self.retired)), where))

    def name_of(self, config: TrainingConfig, joint: str = ", algorithm ") -> str:
        """The setting, and the algorithm where a config has another than the shipped setting of this name."""
        name = config.setting
        if config.mode != "federated" or name.lower() not in self.settings:
            return name
        path = self.path(name.lower())
        shipped = self._merged(self._layers(read_yaml(path), str(path))).get("federated", {})
        usual = shipped.get("algorithm", self.default_config.federated.algorithm)
        algorithm = config.federated.algorithm
        return name if algorithm == usual else f"{name}{joint}{algorithm}"

    def idle_keys(self, config: TrainingConfig, runtime: Runtime | None = None) -> Reasons:
        """Why each key or section without effect has none; of the runtime too, where one is given."""
        idle = reasons(self.idle(config))
        in_runtime = {} if runtime is None else reasons(idle_in_runtime(config, runtime))
        return idle | {f"runtime.{key}": why for key, why in in_runtime.items()}

    def _refuse_idle(self, config: TrainingConfig, runtime: Runtime, layer: Tree, prefix: str) -> None:
        """Refuse values of a layer that are not those of the resolved config.

        Raises:
            ValueError: one line with ``prefix`` before the key.
        """
        idle = self.idle_keys(config, runtime)
        without_effect = {key: why for key in dotted(layer) if (why := reason_for(key, idle)) is not None}
        if not without_effect:
            return
        wanted = dotted({**dataclasses.asdict(config), "runtime": dataclasses.asdict(runtime)})
        kept = dotted({**dataclasses.asdict(self.resolved(config)), "runtime": dataclasses.asdict(Runtime())})
        for key, why in without_effect.items():
            if wanted.get(key) != kept.get(key):
                raise ValueError(f"{prefix}{key} {why}")

    def _refuse_idle_in(self, path: Path, layers: tuple[Tree, Tree, Tree]) -> None:
        """`_refuse_idle` for a YAML file by itself: what the command line switches off was no mistake."""
        tree = self._merged(layers)
        try:
            runtime = build(Runtime, tree.pop("runtime", {}), "runtime")
            config = build(self.kind, tree, path.name)
        except ValueError:
            return  # only the command line makes it whole
        self._refuse_idle(config, runtime, layers[2], f"{path}: ")

    def resolved(self, config: TrainingConfig) -> C_co:
        """Idle fields at their defaults, and what follows from other fields filled in."""
        idle, tree = self.idle_keys(config), dataclasses.asdict(config)
        defaults = dict(self._defaults)
        if config.privacy is not None:
            values = {"epsilon": config.privacy.epsilon, **self.protocol.get("privacy", {})}
            defaults |= dotted({"privacy": dataclasses.asdict(PrivacySection(**values))})
        for key, default in defaults.items():
            if reason_for(key, idle) is not None:
                put(tree, key, default)
        for key, value in _derived(config).items():
            put(tree, key, value)
        return build(self.kind, tree, "the resolved config")
