"""The parts of a run's config that every benchmark has, and `Runtime`, which affects no number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, field, fields
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError
from pydantic.dataclasses import dataclass

from pfl_ext.algorithms.algorithm import STRICT as STRICT
from pfl_ext.algorithms.algorithm import Choice, algorithm_class
from pfl_ext.algorithms.fedir import ImportanceOptions
from pfl_ext.algorithms.fedprox import ProximalOptions
from pfl_ext.algorithms.fedvc import VirtualOptions
from pfl_ext.algorithms.scaffold import ScaffoldOptions
from pfl_ext.privacy.accounting import PrivacyConfig
from pfl_ext.privacy.local import LocalPrivacyConfig

Fraction = Annotated[float, Field(ge=0, lt=1)]
BestBy = Literal["loss", "C-AP", "accuracy", "last"]
REPETITION: Mapping[str, str] = {"two runs that differ only in this are": "repetitions of one experiment"}
"""Metadata of the fields that say which random numbers are drawn, and of those that are no part of a run's
scores on val and test. Reports merge runs whose other fields are all equal, and no other runs."""


@dataclass(frozen=True, config=STRICT)
class ImageConfig:
    """What is read; each benchmark adds its own fields."""

    image_size: PositiveInt = 256
    """Side to which images are brought when read, in pixels."""


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The network; `input_size` is the side of what it sees, cut from `data.image_size`."""

    arch: str = "resnet18"
    input_size: PositiveInt = 224
    pretrained: bool = False
    """True: ImageNet weights, BatchNorm statistics frozen. False: from scratch, GroupNorm."""
    groups: PositiveInt = 32
    bottleneck: PositiveInt | None = None
    """Width of one more linear layer before the classifier; None: there is none."""
    trained: Literal["all", "two_layers"] = "all"
    """two_layers: bottleneck and classifier learn, everything before them stays as it was loaded."""
    weights_sha256: str | None = None
    """Of the file that a pretrained network starts from; ``--weights`` fills it in. None: torchvision's."""
    init: Literal["paper", "torchvision"] = "paper"


@dataclass(frozen=True, config=STRICT)
class AugmentConfig:
    """Training transform, drawn anew for each image."""

    crop: Literal["crop", "padded", "resized"] = "crop"
    flip: Literal["none", "horizontal", "both"] = "both"


@dataclass(frozen=True, config=STRICT)
class LocalConfig(VirtualOptions):
    """Training on one user."""

    learning_rate: PositiveFloat = 0.1
    effective_learning_rate: PositiveFloat | None = None
    """If given, ``learning_rate`` becomes this times (1 - server.momentum) (Hsu et al. 2020, A.1)."""
    num_epochs: PositiveInt = 2
    batch_size: PositiveInt = 16
    max_images: PositiveInt | None = 512
    cap: Literal["random", "first"] = "random"
    straddle: bool = True
    reshuffle: bool = True
    max_grad_norm: PositiveFloat | None = 10.0
    clip_by: Literal["variable", "global"] = "variable"
    momentum: Fraction = 0.0
    weight_decay: NonNegativeFloat = 0.0


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
class FederatedConfig(ScaffoldOptions, ProximalOptions, ImportanceOptions):
    """Rounds, cohorts and the algorithm of federated training.

    The options of the oldest algorithms are keys of this section. Those of any other algorithm of
    `pfl_ext.algorithms` are fields of its own dataclass, given as ``federated.options.FIELD``.
    """

    algorithm: str = "fedavg"
    """A name under `pfl_ext.algorithms`."""
    options: Mapping[str, Any] | None = None
    """Those of an algorithm that has its own, each with its default once built; None for the others."""
    num_rounds: PositiveInt = 5000
    cohort_size: PositiveInt = 200
    replacement: bool = False
    sampling: Literal["uniform", "proportional"] = "uniform"
    """proportional: users are drawn with a probability proportional to their images (FedVC)."""
    weighting: Literal["images", "users"] = "images"

    def __post_init__(self) -> None:
        kind = self.algorithm_class
        inherited = isinstance(self, kind.options)
        known = [] if inherited else [item.name for item in fields(kind.options)]
        for key in self.options or {}:
            if key not in known:
                keys = ", ".join(known) or "none under federated.options"
                raise ValueError(
                    f"federated.options.{key} is no option of {self.algorithm}, which has {keys}: remove it"
                )
        if known:
            try:
                object.__setattr__(self, "options", asdict(kind.options(**self.options or {})))
            except ValidationError as faults:
                fault = faults.errors()[0]
                key = ".".join(map(str, fault["loc"]))
                raise ValueError(f"federated.options.{key} is {fault['input']!r}: {fault['msg']}") from faults

    @property
    def algorithm_class(self) -> type[Choice]:
        """The algorithm itself."""
        return algorithm_class(self.algorithm)

    @property
    def algorithm_options(self) -> Any:
        """The algorithm's options: this section, where they are among its keys."""
        kind = self.algorithm_class.options
        return self if isinstance(self, kind) else kind(**self.options or {})


@dataclass(frozen=True, config=STRICT)
class CentralisedConfig:
    """Training on all images in one place, at a constant rate."""

    num_epochs: PositiveInt = 100
    batch_size: PositiveInt = 512
    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rate: PositiveFloat = 5e-4
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    epsilon: PositiveFloat = 1e-7
    momentum: Fraction = 0.0
    """Of sgd."""
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat | None = 10.0


@dataclass(frozen=True, config=STRICT)
class EvaluationConfig:
    """When the model is scored on val, and by what the best one is chosen."""

    every_rounds: PositiveInt = 10
    every_epochs: PositiveInt = 1
    best_by: BestBy = "loss"
    """The column of val that chooses; of rounds that score the same, the earliest. ``last``: no choice
    is made, the last model is the result."""


@dataclass(frozen=True, config=STRICT)
class PrivacySection(PrivacyConfig):
    """Central differential privacy; any of these keys gives it, and ``--privacy none`` takes it away."""

    noise_seed: Literal["entropy", "run"] = field(default="entropy", metadata=REPETITION)
    """The operating system's entropy, so that no seed in a file undoes the noise; or the run's ``seed``, for
    runs that can be repeated and are for research only. ``--seed`` on the command line asks for ``run``."""
    release: Literal["full", "public"] = field(default="full", metadata=REPETITION)
    """``full`` writes and tracks exact figures besides the model (norms, cohort sizes, times, counts), for
    research. ``public`` writes and tracks only what is differentially private or does not depend on the
    training images."""


@dataclass(frozen=True, config=STRICT)
class LocalPrivacySection(LocalPrivacyConfig):
    """Local differential privacy, every update noised on its device; ``--local_privacy none``: not so."""

    noise_seed: Literal["entropy", "run"] = field(default="entropy", metadata=REPETITION)
    """As for `PrivacySection`."""


@dataclass(frozen=True, config=STRICT)
class TrainingConfig:
    """All that decides a run's numbers."""

    setting: str = ""
    """The row of the paper's table that this run is compared with."""
    mode: Literal["federated", "centralised"] = "federated"
    seed: NonNegativeInt = field(default=0, metadata=REPETITION)
    data: ImageConfig = field(default_factory=ImageConfig)
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

    @property
    def unit(self) -> Literal["round", "epoch"]:
        """What a step of training is."""
        return "round" if self.mode == "federated" else "epoch"

    @property
    def num_steps(self) -> int:
        """How many rounds or epochs the run has."""
        return self.federated.num_rounds if self.mode == "federated" else self.centralised.num_epochs

    @property
    def local_learning_rate(self) -> float:
        """Of users' steps."""
        effective = self.local.effective_learning_rate
        return self.local.learning_rate if effective is None else effective * (1 - self.server.momentum)


@dataclass(frozen=True, config=STRICT)
class Runtime:
    """How a run is carried out. Results do not depend on it beyond floating-point tolerance."""

    device: str = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    engine: Literal["fast", "stock"] = "fast"
    """``fast`` trains a cohort's users together (pfl_ext/engine), ``stock`` by pfl's own loop."""
    cpu_kernels: bool = True
    """Of the fast engine on a CPU: convolutions and norms compiled at the first start, about twice as fast as
    torch's, which are used where there is no C++ compiler. For bf16 the processor decides, layer by layer; a
    line at the start says how."""
    lanes: PositiveInt | None = None
    """Of the fast engine: users trained at a time; by default one for each CPU thread, 8 on a GPU."""
    fuse: bool | None = None
    """Of the fast engine: users with one local step in one pass; by default on a CPU, not on a GPU."""
    threads: PositiveInt | None = None
    """CPU threads of torch in one process; by default torch's own choice."""
    reader_threads: PositiveInt = 2
    prefetch: NonNegativeInt = 8
    cache_gb: NonNegativeFloat = 4.0
    """Decoded images are kept in memory until those of all splits together fill this."""
    checkpoint_every: PositiveInt = 20
    """Rounds (epochs, when centralised) between checkpoints."""
    checkpoint_minutes: PositiveFloat = 2.0
    """A checkpoint is also written at the end of a round when the last one is so old."""
    keep_checkpoints: bool = False
    """Keep the checkpoints, several times the size of the model, when the run has ended."""
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
