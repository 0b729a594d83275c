"""The parts of a run's config that every benchmark has, and `Runtime`, which affects no number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from benchmarks.core.config.augmentation import AugmentSection
from benchmarks.core.config.older_runs import by_today
from benchmarks.core.config.privacy_rules import Rule
from benchmarks.core.config.trees import build
from pfl_ext.aggregation.rule import MEAN, RULES
from pfl_ext.algorithms.algorithm import ALGORITHMS
from pfl_ext.algorithms.fedir import ImportanceOptions
from pfl_ext.algorithms.fedprox import ProximalOptions
from pfl_ext.algorithms.optimizers import SERVER_OPTIMIZERS, OptimizerConfig, ServerConfig
from pfl_ext.algorithms.scaffold import ScaffoldOptions
from pfl_ext.attacks.attack import ATTACKS, HONEST
from pfl_ext.averaging import AveragingConfig
from pfl_ext.compression.compressor import COMPRESSORS, PLAIN
from pfl_ext.configs import STRICT
from pfl_ext.data.sampling import BatchConfig, LocalSampling
from pfl_ext.devices.config import DevicesConfig
from pfl_ext.engine.training import LocalSGDConfig
from pfl_ext.models.config import Init, ModelConfig
from pfl_ext.models.decoders import draws
from pfl_ext.privacy.accounting import Noise, PrivacyConfig
from pfl_ext.privacy.local import LocalPrivacyConfig
from pfl_ext.registry import Registry
from pfl_ext.schedules import LEAST, DecayConfig, LayerDecayConfig
from pfl_ext.tasks.losses import LossConfig

BENCHMARKS = Path(__file__).parents[2]
Threads = Annotated[int, Field(ge=1, le=1024)]
"""A number of threads of one process, within what machines can start."""
REPETITION: Mapping[str, str] = {"two runs that differ only in this are": "repetitions of one experiment"}
"""Metadata of the fields that say which random numbers are drawn, and of those that are no part of a run's
scores on val and test. Reports merge runs whose other fields are all equal, and no other runs."""


@dataclass(frozen=True, config=STRICT)
class ImageConfig:
    """What is read; each benchmark adds its own fields."""

    image_size: PositiveInt = 256
    """Side to which images are resized when read, in pixels."""


@dataclass(frozen=True, config=STRICT)
class ModelSection(ModelConfig):
    """The network, and the file of its initial weights."""

    init: Annotated[Init, by_today("model.init")] = "torchvision"
    weights_sha256: str | None = None
    """SHA-256 of the file of pretrained weights; --weights fills it in. none: the network's known ones."""


@dataclass(frozen=True, config=STRICT)
class LocalConfig(BatchConfig, LocalSGDConfig):
    """Training on one user."""

    effective_learning_rate: PositiveFloat | None = None
    """If given, `learning_rate` becomes this times (1 - server.momentum) (Hsu et al. 2020, A.1)."""


@dataclass(frozen=True, config=STRICT)
class ChoosingSection:
    """A section with the name of one thing in a registry.

    The options of the oldest things are keys of the section. Those of any other are fields of its own
    dataclass, given as ``SECTION.options.FIELD``.
    """

    registry: ClassVar[Registry[Any]]
    options: Mapping[str, Any] | None = None
    """Options of the chosen algorithm, optimiser or kind, listed at the end of this help; none: no option."""

    def __post_init__(self) -> None:
        kind, where = self.chosen.options, f"{self.registry.key.partition('.')[0]}.options"
        known = [] if isinstance(self, kind) else [item.name for item in fields(kind)]
        for key in self.options or {}:
            if key not in known:
                keys, instead = ", ".join(known) or f"none under {where}", where.replace("options", key)
                read = key in {item.name for item in fields(self)} and instead not in self.chosen.idle.split()
                what = f"set {instead}" if read else "remove it"
                raise ValueError(f"{where}.{key} is not an option of {self.name}, which has {keys}: {what}")
        options: Any = build(kind, self.options or {}, self.name, f"{where}.")
        object.__setattr__(self, "options", asdict(options) if known else None)

    @property
    def name(self) -> str:
        """The name of what is chosen."""
        return str(getattr(self, self.registry.key.partition(".")[2]))

    @property
    def chosen(self) -> Any:
        """The thing itself."""
        return self.registry[self.name]

    @property
    def chosen_options(self) -> Any:
        """Its options: this section, where they are among its keys."""
        kind = self.chosen.options
        return self if isinstance(self, kind) else kind(**self.options or {})

    def readers(self) -> Mapping[str, Sequence[str]]:
        """Each key of this section, dotted, that only some things read, and their names."""
        section, found = self.registry.key.partition(".")[0], dict[str, list[str]]()
        for name in self.registry.names():
            kind = self.registry[name].options
            keys = [item.name for item in fields(kind)] if isinstance(self, kind) else []
            for key in (*keys, *getattr(self.registry[name], "reads", ())):
                found.setdefault(f"{section}.{key}", []).append(name)
        return found


@dataclass(frozen=True, config=STRICT)
class ServerSection(ChoosingSection, ServerConfig):
    """What the server does with the mean update of a round."""

    registry = SERVER_OPTIMIZERS


@dataclass(frozen=True, config=STRICT)
class FederatedConfig(ChoosingSection, ScaffoldOptions, ProximalOptions, ImportanceOptions):
    """Rounds, cohorts and the algorithm of federated training."""

    registry = ALGORITHMS
    algorithm: str = "fedavg"
    """Name of an algorithm: fedavg, fedprox, fednova, scaffold, or any other of pfl_ext/algorithms."""
    num_rounds: PositiveInt = 100
    """Rounds of the whole run."""
    cohort_size: PositiveInt = 10
    """Users that train in a round."""
    replacement: bool = False
    """A user may be drawn several times for one round."""
    sampling: Literal["uniform", "proportional"] = "uniform"
    """Chance of a user to be drawn: the same for all, or proportional to its images (FedVC)."""
    weighting: Literal["images", "users"] = "images"
    """Weight of a user in the mean update: its images that took part, or 1."""


@dataclass(frozen=True, config=STRICT)
class CompressionSection(ChoosingSection):
    """Compression of users' updates before they are sent."""

    registry = COMPRESSORS
    kind: str = PLAIN
    """Name of a kind of pfl_ext/compression: top_k, random_k, uniform, sign, low_rank; float32: none."""


@dataclass(frozen=True, config=STRICT)
class AggregationSection(ChoosingSection):
    """How the server combines the updates of a round."""

    registry = RULES
    kind: str = MEAN
    """Name of a rule of pfl_ext/aggregation: mean, norm_bound, median, trimmed_mean, krum, and others."""


@dataclass(frozen=True, config=STRICT)
class AttackSection(ChoosingSection):
    """Simulated attackers, to test rules of aggregation."""

    registry = ATTACKS
    kind: str = HONEST
    """Name of an attack of pfl_ext/attacks: sign_flip, boost, gaussian, alie, label_flip; honest: none."""
    share: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    """Share of all training users who attack, the same ones in every round."""


@dataclass(frozen=True, config=STRICT)
class CentralisedConfig(LayerDecayConfig, DecayConfig, OptimizerConfig):
    """Training on all images in one place."""

    num_epochs: PositiveInt = 10
    """Passes over all images."""
    batch_size: PositiveInt = 64
    """Number of images in a step."""
    optimizer: Literal["adam", "sgd"] = "sgd"
    """Optimiser: adam with epsilon as in Keras, or gradient descent with momentum."""
    learning_rate: PositiveFloat = 0.1
    """Learning rate, without unit."""
    weight_decay: NonNegativeFloat = 0.0
    """Multiple of the parameters that is added to their gradient."""
    max_grad_norm: PositiveFloat | None = None
    """Maximum L2 norm of each variable's gradient; none: no limit."""
    warmup_epochs: NonNegativeInt = 0
    """Epochs until the learning rate is that of its schedule."""
    warmup_learning_rate: NonNegativeFloat = 0.0
    """Learning rate of the first epoch of a warm-up; then it rises linearly to `learning_rate`."""

    def scheduled(self, rate: float, step: int, num_steps: int) -> float:
        """The learning rate in epoch 0, 1, ...; after a warm-up that of `ScheduleConfig.scheduled`.

        Epoch e of W has ``f + (rate - f) e / W`` with the warm-up's first rate f. The schedule then goes on
        as if there had been no warm-up: it counts all epochs, as timm's do without ``warmup_prefix``.
        """
        if step >= self.warmup_epochs:
            return super().scheduled(rate, step, num_steps)
        first = self.warmup_learning_rate
        return first + (rate - first) * step / self.warmup_epochs

    def check_warmup(self) -> None:
        """Refuse a warm-up that never ends, or that begins with no learning rate or above the schedule's.

        Raises:
            ValueError: in one line.
        """
        if not self.warmup_epochs:
            return
        if self.warmup_epochs >= self.num_epochs:
            raise ValueError(
                f"centralised.warmup_epochs is {self.warmup_epochs}, but must be below "
                f"centralised.num_epochs = {self.num_epochs}: lower it, or set it to 0"
            )
        if not LEAST <= self.warmup_learning_rate * min(1.0, self.head_rate_factor) <= self.learning_rate:
            raise ValueError(
                f"centralised.warmup_learning_rate is {self.warmup_learning_rate:g}, but must be above "
                f"0 and at most centralised.learning_rate = {self.learning_rate:g}"
            )


@dataclass(frozen=True, config=STRICT)
class EvaluationConfig(AveragingConfig):
    """The schedule of scoring on val, which model is scored, and the score that chooses the best one."""

    every_rounds: PositiveInt = 10
    """Rounds between two scores of val (federated)."""
    every_epochs: PositiveInt = 1
    """Epochs between two scores of val (centralised)."""
    best_by: str = "loss"
    """Score on val that chooses the best model, the earliest of equal ones; last: the last model."""


@dataclass(frozen=True, config=STRICT)
class NoiseSeed:
    """Whether the noise of a private run is secret."""

    noise_seed: Literal["entropy", "run"] = field(default="entropy", metadata=REPETITION)
    """Source of the noise: the system's entropy, or the run's seed, for research; --seed asks for run."""


@dataclass(frozen=True, config=STRICT)
class PrivacySection(NoiseSeed, PrivacyConfig):
    """Central differential privacy. Any of these keys turns it on; ``--privacy none`` turns it off."""

    noise: Annotated[Noise, by_today("privacy.noise")] = "calibrated"
    release: Literal["full", "public"] = field(default="full", metadata=REPETITION)
    """What is written and tracked. full: also exact figures, for research; public: what privacy covers."""


@dataclass(frozen=True, config=STRICT)
class LocalPrivacySection(NoiseSeed, LocalPrivacyConfig):
    """Local differential privacy: noise on each update, on its device; ``--local_privacy none``: off."""


@dataclass(frozen=True, config=STRICT)
class TrainingConfig:
    """The config of a run: all that decides its numbers."""

    privacy_rules: ClassVar[Mapping[str, Rule]] = {}
    """What each key that a benchmark adds may be in a private run: `benchmarks.core.config.privacy_rules`."""
    setting: str = ""
    """Row of the paper's table that this run is compared with."""
    mode: Literal["federated", "centralised"] = "federated"
    """Training on users in rounds, or on all images in one place."""
    seed: NonNegativeInt = field(default=0, metadata=REPETITION)
    """Seed of initial weights, cohorts, crops and order. If given, the noise of a private run is public."""
    data: ImageConfig = field(default_factory=ImageConfig)
    model: ModelSection = field(default_factory=ModelSection)
    augment: AugmentSection = field(default_factory=AugmentSection)
    loss: LossConfig = field(default_factory=LossConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    server: ServerSection = field(default_factory=ServerSection)
    federated: FederatedConfig = field(default_factory=FederatedConfig)
    compression: CompressionSection = field(default_factory=CompressionSection)
    aggregation: AggregationSection = field(default_factory=AggregationSection)
    attack: AttackSection = field(default_factory=AttackSection)
    centralised: CentralisedConfig = field(default_factory=CentralisedConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    privacy: PrivacySection | None = None
    """Central differential privacy; none: no privacy."""
    local_privacy: LocalPrivacySection | None = None
    """Local differential privacy; none: no local privacy."""
    devices: DevicesConfig | None = None
    """The users' devices; none: every user does all its work, in no time."""
    own_code: str | None = None
    """Digest of your own files (FL_IMPORT) that the run uses; it is filled in automatically."""

    @property
    def is_private(self) -> bool:
        """Whether a guarantee is given, centrally or locally."""
        return self.privacy is not None or self.local_privacy is not None

    @property
    def unit(self) -> Literal["round", "epoch"]:
        """What a step of training is."""
        return "round" if self.mode == "federated" else "epoch"

    @property
    def num_steps(self) -> int:
        """How many rounds or epochs the run has."""
        return self.federated.num_rounds if self.mode == "federated" else self.centralised.num_epochs

    @property
    def every(self) -> int:
        """Steps between two scores of val."""
        return self.evaluation.every_rounds if self.mode == "federated" else self.evaluation.every_epochs

    @property
    def keys(self) -> bool:
        """Whether training images bring keys, by which units are dropped and images changed."""
        return draws(self.model) or self.augment.keyed

    @property
    def sampling(self) -> LocalSampling:
        """How a user's images become batches of augmented images."""
        return LocalSampling.of(self.local, self.augment, self.model.input_size, self.keys)

    @property
    def local_learning_rate(self) -> float:
        """Learning rate of users' steps in the first round."""
        effective = self.local.effective_learning_rate
        return self.local.learning_rate if effective is None else effective * (1 - self.server.momentum)

    def local_rate(self, number: int) -> float:
        """Learning rate of users' steps in a round."""
        return self.local.scheduled(self.local_learning_rate, number, self.federated.num_rounds)


@dataclass(frozen=True, config=STRICT)
class Runtime:
    """How a run is computed. Results do not depend on it beyond floating-point tolerance."""

    device: str = "auto"
    """Device as torch names it (cpu, cuda:0); auto: the best available."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of local training; sums over users, norms and noise are float32 or better."""
    engine: Literal["fast", "stock"] = "fast"
    """fast: the engine trains a cohort's users together (pfl_ext/engine); stock: pfl's own loop."""
    cpu_kernels: bool = True
    """Use convolutions and norms compiled at the first start (fast engine, CPU with a C++ compiler)."""
    lanes: Threads | None = None
    """Users that the fast engine trains at a time; none: one for each CPU thread, 4 on a GPU."""
    deterministic: bool = False
    """On a GPU, use torch's deterministic algorithms, if it has them, to repeat a run bit for bit; slower."""
    check_engine: bool = True
    """On a GPU, compare the fast engine with pfl's loop on a few users before the first round."""
    tune: bool | None = None
    """Time the first cohort to choose lanes (GPU) or groups (CPU); none: on a GPU, unless private."""
    fuse: bool | None = None
    """The fast engine trains users with one step in one pass; none: on a CPU, not on a GPU."""
    threads: Threads | None = None
    """CPU threads of torch in one process; none: torch's own choice."""
    reader_threads: Threads = 2
    """Threads that read and decode images, for each lane at the start; more on a GPU whose lanes wait."""
    prefetch: NonNegativeInt = 8
    """Users (batches, when centralised) that are read ahead."""
    cache_gb: Annotated[float, Field(ge=0, le=1e6)] = 4.0
    """Memory for decoded images of all splits together, in GB."""
    cache_features: bool = True
    """Cache the output of frozen layers for images that do not change: on disk, or for a round."""
    checkpoint_every: PositiveInt = 20
    """Rounds (epochs, when centralised) between two checkpoints."""
    checkpoint_minutes: PositiveFloat = 2.0
    """Age of the last checkpoint, in minutes, at which another is written after the round."""
    keep_checkpoints: bool = False
    """Keep the checkpoints, several times the size of the model, when the run has ended."""
    progress: bool = True
    """Show a progress bar."""
    accumulate: Literal["fp32", "fp64"] = "fp32"
    """Precision of sums over users; fp64: equal to 1e-15 on any number of workers, for twice the bytes."""
    reduce: Literal["exact", "bf16"] = "exact"
    """Sums between workers; bf16: half the bytes, rounded to 8 bits, for slow networks only."""
    worker_timeout_s: PositiveFloat = 120.0
    """Seconds without progress of one worker after which the job ends on all of them."""
    track: Literal["none", "wandb", "tensorboard"] = "none"
    """Tracker to which the lines of metrics.jsonl are sent; wandb is offline if there is no key."""
    project: str = "flair"
    """Project of the wandb run."""
    entity: str | None = None
    """Team or user of the wandb run; none: wandb's own choice."""
    name: str | None = None
    """Name of the wandb run; none: the run directory's."""
    artifact: bool = False
    """Send the final model to wandb."""


def config_modules() -> list[str]:
    """The names of the modules that hold the benchmarks' configs."""
    found = sorted((*BENCHMARKS.glob("*/config.py"), *BENCHMARKS.glob("*/*/config.py")))
    return [".".join(("benchmarks", *path.relative_to(BENCHMARKS).with_suffix("").parts)) for path in found]
