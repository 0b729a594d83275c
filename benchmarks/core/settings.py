"""From YAML files and a command line to a checked, frozen config: what each benchmark's config.py is made of.

Values come from, weakest first: the defaults of the fields, the YAML file, the command line. A *recipe* is a
set of switches that counts as if its fields stood first at the place, YAML or command line, where it is
named (several are joined by ``+``); a *scale*, which is a YAML file, likewise.

What a run is made of is the *resolved* config: fields without effect (`benchmarks.core.effects`) stand at
their defaults, and values that follow from others (FedProx's mu, the hash of the weights file) are filled in.
A value that somebody gives and that would not stand in the resolved config is refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from benchmarks.core.effects import Idle, Reasons, idle_in_runtime, idle_in_training, reason_for, reasons
from benchmarks.core.privacy_matrix import check_privacy
from benchmarks.core.sections import (
    REPETITION,
    FederatedConfig,
    LocalPrivacySection,
    PrivacySection,
    Runtime,
    TrainingConfig,
    dotted,
)
from benchmarks.core.weights import weights_sha256

Tree = dict[str, Any]
Node = TypeVar("Node")
C_co = TypeVar("C_co", bound=TrainingConfig, covariant=True)
SomeConfig = TypeVar("SomeConfig", bound=TrainingConfig)


def merge(base: Tree, over: Tree) -> Tree:
    """``over`` laid over ``base``, section by section."""
    out = dict(base)
    for key, value in over.items():
        out[key] = (
            merge(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
        )
    return out


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe YAML in which a repeated key and an alias (ten lines of them make gigabytes) are errors."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases are not allowed here", self.get_mark())
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Tree:
    """A YAML mapping.

    :raises ValueError: when the file is missing, is not YAML, or is not a mapping.
    """
    try:
        tree = yaml.load(path.read_text(), _UniqueKeyLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as fault:
        raise ValueError(f"{path} is not readable YAML: {fault}") from fault
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ValueError(f"{path} must hold a mapping of config keys, not a {type(tree).__name__}")
    return tree


def _explain(fault: Any, kind: type[Any]) -> str:
    """One fault of pydantic's, in one line that names the key and what to do."""
    name = ".".join(map(str, fault["loc"]))
    if fault["type"] in ("missing", "missing_argument"):  # its input is all that surrounds the key
        return f"{name} is missing"
    if fault["type"] != "unexpected_keyword_argument":
        return f"{name} is {fault['input']!r}: {fault['msg'][0].lower()}{fault['msg'][1:]}"
    for section in fault["loc"][:-1]:
        hint = get_type_hints(kind)[section]
        kind = next((part for part in get_args(hint) if part is not type(None)), hint)
    known = [f.name for f in dataclasses.fields(kind)]
    near = difflib.get_close_matches(str(fault["loc"][-1]), known, 1)
    prefix = "".join(f"{part}." for part in fault["loc"][:-1])
    return f"there is no config key {name}; " + (
        f"did you mean {prefix}{near[0]}?" if near else f"the keys here are {', '.join(known)}"
    )


def build(kind: type[Node], tree: Mapping[str, Any], where: str) -> Node:
    """A dataclass from a tree: every key must be a field, every value of its type.

    :raises ValueError: one line that names the first wrong key, what it may be, and ``where`` it stands.
    """
    try:
        return TypeAdapter(kind).validate_python(dict(tree))
    except ValidationError as faults:
        raise ValueError(f"{where}: {_explain(faults.errors()[0], kind)}") from faults


def _check_scaffold(federated: FederatedConfig) -> None:
    """Refuse cohorts for which SCAFFOLD's c is no mean, and its keys where there is no SCAFFOLD."""
    if federated.algorithm != "scaffold":
        for key in ("scaffold_option", "scaffold_correction"):
            if getattr(federated, key) is not None:
                raise ValueError(
                    f"federated.{key} is of scaffold, but federated.algorithm is {federated.algorithm}: "
                    f"leave federated.{key} out, or set federated.algorithm to scaffold"
                )
        return
    if federated.replacement:
        raise ValueError(
            "scaffold keeps one control variate for each user, who must not come twice in a cohort: set "
            "federated.replacement to false"
        )
    if federated.sampling != "uniform":
        raise ValueError(
            "scaffold's mean control variate is that of users drawn alike: set federated.sampling to uniform"
        )


def check_training(config: TrainingConfig) -> None:
    """Refuse combinations that no run of any benchmark could mean.

    :raises ValueError: one line that names the key and what to do.
    """
    if config.model.input_size > config.data.image_size:
        raise ValueError(
            f"model.input_size is {config.model.input_size}, more than data.image_size = "
            f"{config.data.image_size}: the network's input is cut from the image"
        )
    server, num_rounds = config.server, config.federated.num_rounds
    if config.mode == "federated" and server.schedule != "constant" and server.warmup_rounds >= num_rounds:
        raise ValueError(
            f"server.warmup_rounds is {server.warmup_rounds}, not below federated.num_rounds = {num_rounds}: "
            "lower it"
        )
    _check_scaffold(config.federated)
    if config.mode == "federated" and config.local.virtual_size and config.federated.weighting != "users":
        raise ValueError("local.virtual_size makes all users of one size: set federated.weighting to users")


def config_tree(config: TrainingConfig) -> Tree:
    """A config as ``config.yaml`` holds it: plain values only.

    A field that is younger than the first runs is left out where it has no effect, so that the digests of
    such configs stay what they were.
    """
    tree: Tree = json.loads(json.dumps(dataclasses.asdict(config), allow_nan=False))
    if not config.model.pretrained:
        del tree["model"]["weights_sha256"]
    return tree


def tree_digest(tree: Mapping[str, Any]) -> str:
    """SHA-256 of the content of a ``config.yaml`` in a fixed form."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True, allow_nan=False).encode()).hexdigest()


def digest(config: TrainingConfig) -> str:
    """`tree_digest` of a resolved config."""
    return tree_digest(config_tree(config))


def _repetition_keys(kind: Any) -> tuple[str, ...]:
    """The dotted keys of a config's fields that are marked as `REPETITION`; a section's ends with a dot."""
    hints, out = get_type_hints(kind), []
    for item in dataclasses.fields(kind):
        sections = [
            part for part in (hints[item.name], *get_args(hints[item.name])) if dataclasses.is_dataclass(part)
        ]
        if item.metadata == REPETITION:
            out.append(item.name + ("." if sections else ""))
        else:
            out += [f"{item.name}.{key}" for part in sections for key in _repetition_keys(part)]
    return tuple(out)


def experiment(tree: Mapping[str, Any], kind: type[TrainingConfig]) -> Tree:
    """What runs that differ only in their seed have in common.

    Args:
        tree: a resolved config.
        kind: the benchmark's type of config.

    Returns:
        Every field by its dotted key, without those that their section marks as `REPETITION`.
    """
    apart = _repetition_keys(kind)
    return {
        key: value
        for key, value in dotted(tree).items()
        if not any(key.startswith(name) if name.endswith(".") else key == name for name in apart)
    }


def experiment_digest(tree: Mapping[str, Any], kind: type[TrainingConfig]) -> str:
    """SHA-256 of `experiment` in a fixed form."""
    text = json.dumps(experiment(tree, kind), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def short_digest(config: TrainingConfig) -> str:
    """What ``{digest}`` in ``--run_dir`` stands for: a name of a directory that no other config shares."""
    return digest(config)[:12]


@dataclasses.dataclass(frozen=True)
class Run(Generic[C_co]):
    """One invocation: what, on which data, to where, how.

    Raises:
        ValueError: when an option does not go with privacy (`benchmarks.core.privacy_matrix`).
    """

    config: C_co
    runtime: Runtime
    data_path: Path | None = None
    run_dir: Path | None = None
    weights: Path | None = None
    resume: Literal["auto", "never"] = "auto"
    benchmark: Benchmark[C_co] | None = None
    """Whose config this is; None for one that was put together by hand and writes no run directory."""

    def __post_init__(self) -> None:
        check_privacy(self.config, self.runtime)


AnyRun = Run[TrainingConfig]


def arguments(argv: Sequence[str]) -> dict[str, str]:
    """``--key value`` and ``--key=value`` pairs, the last of each key.

    :raises ValueError: for anything else.
    """
    out: dict[str, str] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key:
            raise ValueError(f"cannot read the argument {word!r}: write --key value or --key=value")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"--{key} needs a value: write --{key} value or --{key}=value")
            value = rest.pop(0)
        out[key] = value
    return out


def _put(tree: Tree, key: str, value: Any) -> None:
    """Set the leaf of a dotted key."""
    *sections, leaf = key.split(".")
    for section in sections:
        tree = tree[section]
    tree[leaf] = value


def _without(tree: Tree, keys: Sequence[str], prefix: str = "") -> Tree:
    """A tree without some dotted keys or whole sections."""
    out: Tree = {}
    for key, value in tree.items():
        if f"{prefix}{key}" not in keys:
            out[key] = _without(value, keys, f"{prefix}{key}.") if isinstance(value, dict) else value
    return out


def _derived(config: TrainingConfig) -> Tree:
    """Fields whose values follow from others, by their dotted keys."""
    federated = config.federated
    out: Tree = {}
    if config.mode != "federated":
        return out
    if federated.algorithm in ("fedprox", "fednova"):
        out["federated.mu"] = federated.proximal_weight
    if federated.algorithm == "scaffold":
        option, correction = federated.control_variates
        out |= {"federated.scaffold_option": option, "federated.scaffold_correction": correction}
    if config.local.effective_learning_rate is not None:
        out["local.learning_rate"] = config.local_learning_rate
    return out


def with_weights(config: SomeConfig, file: Path | None) -> SomeConfig:
    """The config with the hash of the weights file that ``--weights`` names.

    Raises:
        ValueError: when the network starts from scratch, there is no such file, or the config asks for
            another one.
    """
    if file is None:
        return config
    if not config.model.pretrained:
        raise ValueError(
            "--weights is for fine-tuning settings: add --model.pretrained=true, or choose such a config"
        )
    if not file.is_file():
        raise ValueError(f"--weights {file}: no such file")
    found, wanted = weights_sha256(config.model.arch, file), config.model.weights_sha256
    if wanted not in (None, found):
        raise ValueError(f"--weights {file} is not the file of the config, whose SHA-256 is {wanted}")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, weights_sha256=found))


def _is_of_a_run(path: Path) -> bool:
    """Whether this is the config.yaml of a run directory."""
    beside = (path.with_name(name) for name in ("checkpoint", "metrics.jsonl", "results.json"))
    return path.name == "config.yaml" and any(other.exists() for other in beside)


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
        own, recipes = dict(tree), Tree()
        recipe, scale = own.pop("recipe", None), own.pop("scale", None)
        for name in [] if recipe is None else str(recipe).split("+"):
            if name not in self.recipes:
                raise ValueError(f"{where}: recipe is {recipe!r}: choose one of {', '.join(self.recipes)}")
            recipes = merge(recipes, dict(self.recipes[name]))
        if scale is not None and scale not in self.scales:
            raise ValueError(f"{where}: scale is {scale!r}: choose one of {', '.join(self.scales)}")
        return recipes, {} if scale is None else read_yaml(self.scales[scale]), own

    def _merged(self, *layers: tuple[Tree, Tree, Tree]) -> Tree:
        """The protocol under these layers, the last of which is the strongest.

        A scale's ``privacy`` is for private settings only: those in which a recipe, the YAML file or the
        command line asks for privacy.
        """
        private = any(
            isinstance(part.get("privacy"), dict) for recipes, _, own in layers for part in (recipes, own)
        )
        tree = dict(self.protocol)
        for recipes, scale, own in layers:
            dropped = () if private else ("privacy",)
            kept = {key: value for key, value in scale.items() if key not in dropped}
            tree = merge(merge(merge(tree, recipes), kept), own)
        return tree

    def path(self, name: str) -> Path:
        """The file of a shipped setting (``fl-r-17``) or of a path to a YAML."""
        shipped = self.directory / f"{name}.yaml"
        if shipped.exists():
            return shipped
        if Path(name).is_file():
            return Path(name)
        names = ", ".join(self.settings)
        raise ValueError(f"--config {name}: no such file and no shipped config; the shipped ones are {names}")

    def _is_choice(self, dotted: str, text: str) -> bool:
        """Whether a key's type is a choice of words with this among them, as ``none`` of ``augment.flip``."""
        section, _, rest = dotted.partition(".")
        kind: Any = Runtime if section == "runtime" else self.kind
        for part in rest.split(".") if kind is Runtime else dotted.split("."):
            kind = get_type_hints(kind).get(part) if dataclasses.is_dataclass(kind) else None
        return text in get_args(kind)

    def _typed(self, given: Mapping[str, str]) -> Tree:
        """The tree of dotted keys."""
        tree: Tree = {}
        for key, text in given.items():
            node = tree
            *sections, leaf = key.split(".")
            for section in sections:
                node = node.setdefault(section, {})
                if not isinstance(node, dict):
                    raise ValueError(f"--{key}: --{section} was given a value of its own")
            absent = text.lower() in ("none", "null") and not self._is_choice(key, text)
            node[leaf] = None if absent else text
        return tree

    def parse(self, argv: Sequence[str]) -> Run[C_co]:
        """The run that a command line asks for. Defaults < YAML < command line.

        :raises ValueError: for an unknown key, a wrong type or a combination without meaning.
        """
        given = arguments(argv)
        plain = {n: given.pop(n, None) for n in ("config", "data_path", "run_dir", "weights", "resume")}
        for name, text in plain.items():
            if text == "":
                raise ValueError(f"--{name} is empty: give a value, or leave the option out")
        paths = {n: Path(text) if (text := plain[n]) else None for n in ("data_path", "run_dir", "weights")}
        typed = self._typed(given)
        path = self.path(plain["config"] or self.default)
        shipped, of_a_run = read_yaml(path), _is_of_a_run(path)
        if of_a_run:
            shipped = config_tree(self.read(shipped, str(path)))
        layers = self._layers(shipped, str(path)), self._layers(typed, "command line")
        tree = self._merged(*layers)
        for section in ("privacy", "local_privacy"):
            if "seed" in typed and isinstance(tree.get(section), dict):
                tree[section].setdefault("noise_seed", "run")
        runtime = build(Runtime, tree.pop("runtime", {}), "runtime")
        config = build(self.kind, tree, f"{path.name} and command line")
        resume = plain["resume"] or "auto"
        if resume not in ("auto", "never"):
            raise ValueError(f"--resume is {resume!r}: choose auto or never")
        run = Run(config, runtime, resume=resume, benchmark=self, **paths)  # type: ignore[arg-type]
        self.check(config)
        self._refuse_idle(config, runtime, layers[1][2], "--")
        if not of_a_run:
            self._refuse_idle_in(path, layers[0])
        return dataclasses.replace(run, config=with_weights(self.resolved(config), paths["weights"]))

    def read(self, tree: Tree, where: str) -> C_co:
        """The resolved config in the ``config.yaml`` of a run, be it of this or of an earlier version.

        Raises:
            ValueError: for a key that no version had, or a wrong value.
        """
        return self.resolved(build(self.kind, _without(tree, self.retired), where))

    def idle_keys(self, config: TrainingConfig, runtime: Runtime | None = None) -> Reasons:
        """Why each key or section without effect has none; of the runtime too, where one is given."""
        idle = reasons(self.idle(config))
        in_runtime = {} if runtime is None else reasons(idle_in_runtime(config, runtime))
        return idle | {f"runtime.{key}": why for key, why in in_runtime.items()}

    def _refuse_idle(self, config: TrainingConfig, runtime: Runtime, given: Tree, prefix: str) -> None:
        """Refuse values that somebody gave and that are not those of the resolved config.

        Raises:
            ValueError: one line with ``prefix`` before the key.
        """
        idle = self.idle_keys(config, runtime)
        wanted = dotted({**dataclasses.asdict(config), "runtime": dataclasses.asdict(runtime)})
        kept = dotted({**dataclasses.asdict(self.resolved(config)), "runtime": dataclasses.asdict(Runtime())})
        for key in dotted(given):
            why = reason_for(key, idle)
            if why is not None and wanted.get(key) != kept.get(key):
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
        defaults = dotted(dataclasses.asdict(build(self.kind, self.protocol, "the protocol")))
        if config.privacy is not None:
            defaults |= dotted({"privacy": dataclasses.asdict(PrivacySection())})
        for key in dotted(tree):
            if reason_for(key, idle) is not None:
                _put(tree, key, defaults[key])
        for key, value in _derived(config).items():
            _put(tree, key, value)
        return build(self.kind, tree, "the resolved config")

    def usage(self) -> str:
        """Every key with its default, for ``--help``."""
        recipes = f"  --recipe A or A+B        sets of switches: {', '.join(self.recipes)}"
        lines = [
            f"  --config NAME_OR_YAML    a YAML file, or a shipped config: {', '.join(self.settings)}",
            "  --data_path FILE         an HDF5 file that this benchmark's download_preprocess made",
            "  --run_dir DIR            where the run's files go; {digest} in it stands for the config",
            "  --weights FILE           ImageNet weights (.pth or .safetensors) for fine-tuning",
            "  --resume auto|never      go on from the directory's checkpoint, or refuse a directory in use",
            *([recipes] if self.recipes else []),
            f"  --scale {'|'.join(self.scales):<17}laid over a config for little data on a CPU",
        ]
        indent = " " * 27
        lines = [textwrap.fill(line, 112, subsequent_indent=indent, break_on_hyphens=False) for line in lines]

        own = dotted(self.protocol)

        def walk(kind: Any, prefix: str) -> None:
            for item in dataclasses.fields(kind):
                default = own.get(f"{prefix}{item.name}", item.default)
                if item.name in ("privacy", "local_privacy"):
                    lines.append(f"  --{item.name} none   ({item.type}; any key below gives one)")
                    walk(PrivacySection if item.name == "privacy" else LocalPrivacySection, f"{item.name}.")
                elif item.default_factory is not dataclasses.MISSING:
                    walk(item.default_factory, f"{prefix}{item.name}.")
                else:
                    lines.append(f"  --{prefix}{item.name} {default}   ({item.type})")

        walk(self.kind, "")
        walk(Runtime, "runtime.")
        return "\n".join(lines)
