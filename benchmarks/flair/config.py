"""What a run is: every constant that affects a result is a field of `Config`; `Runtime` affects none.

Values come from, weakest first: the defaults below (the paper's protocol as ml-flair implements it),
the YAML file, the command line. A *recipe* is a set of switches (flair.md A8) that counts as if its
fields stood first at the place, YAML or command line, where it is named; a *scale* likewise.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import yaml
from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from pfl_ext.privacy_accounting import PrivacyConfig
from pfl_ext.privacy_local import LocalPrivacyConfig

Tree = dict[str, Any]
Node = TypeVar("Node")
Fraction = Annotated[float, Field(ge=0, lt=1)]
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Which task is learnt from which images."""

    taxonomy: Literal["labels", "fine_grained_labels"] = "labels"
    """17 coarse labels, or 1,628 fine-grained ones."""
    binary_label: str | None = None
    """Learn this one label, of either taxonomy, as a binary task."""
    image_size: PositiveInt = 256
    """Side to which images are brought when read, in pixels."""
    partition: Literal["user", "iid"] = "user"
    """Real users, or the same images dealt at random to as many users of the mean size."""


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The network; `input_size` is the side of what it sees, cut from `data.image_size`."""

    arch: str = "resnet18"
    input_size: PositiveInt = 224
    pretrained: bool = False
    """True: ImageNet weights, BatchNorm statistics frozen. False: from scratch, GroupNorm."""
    groups: PositiveInt = 32
    init: Literal["paper", "torchvision"] = "paper"


@dataclass(frozen=True, config=STRICT)
class AugmentConfig:
    """Training transform, drawn anew for each image."""

    crop: Literal["crop", "resized"] = "crop"
    flip: Literal["none", "horizontal", "both"] = "both"


@dataclass(frozen=True, config=STRICT)
class LocalConfig:
    """Training on one user."""

    learning_rate: PositiveFloat = 0.1
    num_epochs: PositiveInt = 2
    batch_size: PositiveInt = 16
    max_images: PositiveInt | None = 512
    cap: Literal["random", "first"] = "random"
    straddle: bool = True
    reshuffle: bool = True
    max_grad_norm: PositiveFloat | None = 10.0
    clip_by: Literal["variable", "global"] = "variable"


@dataclass(frozen=True, config=STRICT)
class ServerConfig:
    """What the server does with the mean update."""

    optimizer: Literal["adam", "yogi", "adagrad", "sgd"] = "adam"
    learning_rate: PositiveFloat = 0.1
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    epsilon: PositiveFloat = 0.01
    adam_form: Literal["keras", "torch"] = "keras"
    momentum: Fraction = 0.0
    schedule: Literal["constant", "warmup_linear"] = "constant"
    warmup_rounds: NonNegativeInt = 30
    final_learning_rate: NonNegativeFloat = 0.02


@dataclass(frozen=True, config=STRICT)
class FederatedConfig:
    """Rounds, cohorts and the algorithm of federated training."""

    algorithm: Literal["fedavg", "fedprox", "scaffold"] = "fedavg"
    num_rounds: PositiveInt = 5000
    cohort_size: PositiveInt = 200
    replacement: bool = False
    weighting: Literal["images", "users"] = "images"
    mu: NonNegativeFloat = 0.01
    """FedProx's proximal weight."""
    max_state_gb: PositiveFloat = 16.0
    """SCAFFOLD keeps a copy of the model for every user; above this it refuses to start."""


@dataclass(frozen=True, config=STRICT)
class CentralisedConfig:
    """Training on all images in one place (the C rows): Adam at a constant rate."""

    num_epochs: PositiveInt = 100
    batch_size: PositiveInt = 512
    learning_rate: PositiveFloat = 5e-4
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    epsilon: PositiveFloat = 1e-7
    max_grad_norm: PositiveFloat | None = 10.0


@dataclass(frozen=True, config=STRICT)
class EvaluationConfig:
    """When the model is scored on val, and by what the best one is chosen."""

    every_rounds: PositiveInt = 10
    every_epochs: PositiveInt = 1
    best_by: Literal["loss", "C-AP"] = "loss"
    per_user: bool = False
    """At the end, score each test user by itself as well (FLAIR paper, Figure 5): per_user.json."""
    few_shot_below: PositiveInt = 20
    """Classes with fewer training images than this are reported apart as few-shot (FLAIR paper, 6.1)."""


@dataclass(frozen=True, config=STRICT)
class PersonalConfig:
    """Local fine-tuning of the final model on part of each test user's images, scored on the others."""

    num_epochs: NonNegativeInt = 0
    """0: none."""
    learning_rate: PositiveFloat = 0.01
    batch_size: PositiveInt = 16
    max_grad_norm: PositiveFloat | None = 10.0
    train_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    min_images: Annotated[int, Field(ge=2)] = 4
    """Users with fewer are left out."""
    split_seed: NonNegativeInt = 0
    """Not the run's seed: every run is to be scored on the same images."""


@dataclass(frozen=True, config=STRICT)
class PrivacySection(PrivacyConfig):
    """Private training (the PFL rows): pfl_ext's `PrivacyConfig`, and where the noise comes from."""

    noise_seed: Literal["entropy", "run"] = "entropy"
    """The operating system's entropy, so that no seed in a file undoes the noise; or the run's ``seed``, for
    runs that can be repeated and are for research only. ``--seed`` on the command line asks for ``run``."""


@dataclass(frozen=True, config=STRICT)
class LocalPrivacySection(LocalPrivacyConfig):
    """Every update noised on its device: pfl_ext's `LocalPrivacyConfig`, and where the noise comes from."""

    noise_seed: Literal["entropy", "run"] = "entropy"
    """As for `PrivacySection`."""


@dataclass(frozen=True, config=STRICT)
class Config:
    """All that decides a run's numbers."""

    setting: str = "FL-R-17"
    """Row of the paper's Table 1 that this run is compared with."""
    mode: Literal["federated", "centralised"] = "federated"
    seed: NonNegativeInt = 0
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    federated: FederatedConfig = field(default_factory=FederatedConfig)
    centralised: CentralisedConfig = field(default_factory=CentralisedConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    privacy: PrivacySection | None = None
    """None: no privacy."""
    local_privacy: LocalPrivacySection | None = None
    """None: no local privacy."""
    personal: PersonalConfig = field(default_factory=PersonalConfig)


@dataclass(frozen=True, config=STRICT)
class Runtime:
    """How a run is carried out. Results do not depend on it beyond floating-point tolerance."""

    device: str = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    engine: Literal["fast", "stock"] = "fast"
    """``fast`` trains a cohort's users together (pfl_ext/engine), ``stock`` by pfl's own loop."""
    lanes: PositiveInt | None = None
    """Of the fast engine: users trained at a time; by default one for each CPU thread, 8 on a GPU."""
    threads: PositiveInt | None = None
    """CPU threads of torch in one process; by default torch's own choice."""
    reader_threads: PositiveInt = 2
    prefetch: NonNegativeInt = 8
    cache_gb: NonNegativeFloat = 4.0
    """Decoded images are kept in memory when the whole split fits into this."""
    checkpoint_every: PositiveInt = 20
    """Rounds (epochs, when centralised) between checkpoints."""
    progress: bool = True
    accumulate: Literal["fp32", "fp64"] = "fp32"
    """Precision of sums over users. fp64: the same to 1e-15 on any number of workers, for twice the bytes."""
    reduce: Literal["exact", "bf16"] = "exact"
    """bf16 halves the bytes between workers and rounds the model's sums to 8 bits: for slow networks only."""
    worker_timeout_s: PositiveFloat = 120.0
    """A worker that is silent or makes no progress for so long ends the job on all workers."""
    track: Literal["none", "wandb", "tensorboard"] = "none"
    """Where else the lines of metrics.jsonl are shown; wandb is offline where there is no key."""
    project: str = "flair"
    entity: str | None = None
    name: str | None = None
    """Of the wandb run; by default the run directory's."""
    artifact: bool = False
    """Send the final model to wandb."""


RECIPES: Mapping[str, Tree] = {
    "paper": {},
    "pfl": {
        "server": {"beta2": 0.99, "adam_form": "torch", "schedule": "warmup_linear"},
        "augment": {"crop": "resized", "flip": "horizontal"},
        "local": {"clip_by": "global", "cap": "first", "reshuffle": False, "straddle": False},
        "federated": {"weighting": "users", "replacement": True},
        "model": {"init": "torchvision"},
        "evaluation": {"every_rounds": 20, "best_by": "C-AP"},
    },
}
"""flair.md A8. Not offered, being defects: one crop for a whole batch, and a population of 10,000,000."""

CONFIGS = Path(__file__).parent / "configs"
SCALES: Mapping[str, Path] = {path.stem: path for path in sorted((CONFIGS / "scales").glob("*.yaml"))}


def merge(base: Tree, over: Tree) -> Tree:
    """``over`` laid over ``base``, section by section."""
    out = dict(base)
    for key, value in over.items():
        out[key] = (
            merge(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
        )
    return out


def expand(tree: Tree, where: str) -> Tree:
    """Replace the macros ``recipe`` and ``scale`` by the fields they stand for, under the tree's own."""
    tree = dict(tree)
    macros: Tree = {}
    recipe, scale = tree.pop("recipe", None), tree.pop("scale", None)
    if recipe is not None:
        if recipe not in RECIPES:
            raise ValueError(f"{where}: recipe is {recipe!r}: choose one of {', '.join(RECIPES)}")
        macros = merge(macros, dict(RECIPES[recipe]))
    if scale is not None:
        if scale not in SCALES:
            raise ValueError(f"{where}: scale is {scale!r}: choose one of {', '.join(SCALES)}")
        macros = merge(macros, read_yaml(SCALES[scale]))
    return merge(macros, tree)


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


def config_path(name: str) -> Path:
    """The file of a shipped config (``fl-r-17``) or of a path to a YAML."""
    shipped = CONFIGS / f"{name}.yaml"
    if shipped.exists():
        return shipped
    if Path(name).is_file():
        return Path(name)
    names = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
    raise ValueError(f"--config {name}: no such file and no shipped config; the shipped ones are {names}")


def _explain(fault: Any, kind: type[Any]) -> str:
    """One fault of pydantic's, in one line that names the key and the mend."""
    name = ".".join(map(str, fault["loc"]))
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


def _check_privacy(config: Config) -> None:
    """Refuse what neither central nor local privacy covers."""
    if config.privacy is None and config.local_privacy is None:
        return
    section = "privacy" if config.privacy is not None else "local_privacy"
    if config.privacy is not None and config.local_privacy is not None:
        raise ValueError(
            "privacy and local_privacy are both set, and no accounting here is for both: set one to none"
        )
    if config.mode != "federated":
        raise ValueError(f"{section} is for federated training: remove the section, or set mode to federated")
    if config.federated.replacement:
        raise ValueError(f"{section} needs cohorts without replacement: set federated.replacement to false")
    if config.federated.weighting != "users":
        raise ValueError("private training weights every user alike: set federated.weighting to users")
    if config.federated.algorithm == "scaffold":
        raise ValueError(f"scaffold keeps state of each user on the server, which {section} does not cover")


def check(config: Config) -> Config:
    """Refuse combinations that no run could mean."""
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
    _check_privacy(config)
    if config.federated.algorithm == "scaffold":
        if config.local.straddle:
            raise ValueError(
                "federated.algorithm=scaffold counts steps by epochs: set local.straddle to false"
            )
        if config.federated.weighting != "users":
            raise ValueError(
                "federated.algorithm=scaffold averages over users: set federated.weighting to users"
            )
    return config


def digest(config: Config) -> str:
    """SHA-256 of the resolved config in a fixed form."""
    text = json.dumps(dataclasses.asdict(config), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def short_digest(config: Config) -> str:
    """What ``{digest}`` in ``--run_dir`` stands for: a name of a directory that no other config shares."""
    return digest(config)[:12]


@dataclasses.dataclass(frozen=True)
class Run:
    """One invocation: what, on which data, to where, how."""

    config: Config
    runtime: Runtime
    data_path: Path | None = None
    run_dir: Path | None = None
    weights: Path | None = None
    resume: Literal["auto", "never"] = "auto"


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


def _is_choice(dotted: str, text: str) -> bool:
    """Whether a key's type is a choice of words with this one among them, as ``none`` of ``augment.flip``."""
    section, _, rest = dotted.partition(".")
    kind: Any = Runtime if section == "runtime" else Config
    for part in rest.split(".") if kind is Runtime else dotted.split("."):
        kind = get_type_hints(kind).get(part) if dataclasses.is_dataclass(kind) else None
    return text in get_args(kind)


def parse(argv: Sequence[str]) -> Run:
    """The run that a command line asks for. Defaults < YAML < command line.

    :raises ValueError: for an unknown key, a wrong type or a combination without meaning.
    """
    given = arguments(argv)
    plain = {name: given.pop(name, None) for name in ("config", "data_path", "run_dir", "weights", "resume")}
    typed: Tree = {}
    for dotted, text in given.items():
        node = typed
        *sections, leaf = dotted.split(".")
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise ValueError(f"--{dotted}: --{section} was given a value of its own")
        node[leaf] = None if text.lower() in ("none", "null") and not _is_choice(dotted, text) else text
    path = config_path(plain["config"] or "fl-r-17")
    shipped, explicit, fixed_seed = read_yaml(path), set(typed), "seed" in typed
    tree = merge(expand(shipped, str(path)), expand(typed, "command line"))
    if not isinstance(shipped.get("privacy"), dict) and "privacy" not in explicit:
        tree.pop("privacy", None)  # a scale's privacy is for private settings only
    for section in ("privacy", "local_privacy"):
        if fixed_seed and isinstance(tree.get(section), dict):
            tree[section].setdefault("noise_seed", "run")
    runtime = build(Runtime, tree.pop("runtime", {}), "runtime")
    config = check(build(Config, tree, f"{path.name} and command line"))
    resume = plain["resume"] or "auto"
    if resume not in ("auto", "never"):
        raise ValueError(f"--resume is {resume!r}: choose auto or never")
    paths = {n: Path(plain[n]) if plain[n] else None for n in ("data_path", "run_dir", "weights")}  # type: ignore[arg-type]
    return Run(config, runtime, resume=resume, **paths)  # type: ignore[arg-type]


def usage() -> str:
    """Every key with its default, for ``--help``."""
    lines = [
        "  --config NAME_OR_YAML    a shipped config: "
        + ", ".join(sorted(p.stem for p in CONFIGS.glob("*.yaml"))),
        "  --data_path FILE         an HDF5 file of dataset.flair.download_preprocess",
        "  --run_dir DIR            where the run's files go; {digest} in it stands for the config",
        "  --weights FILE           ImageNet weights (.pth or .safetensors) for fine-tuning",
        "  --resume auto|never      go on from the directory's checkpoint, or refuse a directory in use",
        f"  --recipe {'|'.join(RECIPES)}  --scale {'|'.join(SCALES)}   sets of switches, see config.py",
    ]

    def walk(kind: Any, prefix: str) -> None:
        for item in dataclasses.fields(kind):
            if item.name in ("privacy", "local_privacy"):
                lines.append(f"  --{item.name} none   ({item.type}; any key below gives one)")
                walk(PrivacySection if item.name == "privacy" else LocalPrivacySection, f"{item.name}.")
            elif item.default_factory is not dataclasses.MISSING:
                walk(item.default_factory, f"{prefix}{item.name}.")
            else:
                lines.append(f"  --{prefix}{item.name} {item.default}   ({item.type})")

    walk(Config, "")
    walk(Runtime, "runtime.")
    return "\n".join(lines)
