"""The interface of every algorithm, and the registry of algorithms by name.

A new algorithm is one file in this folder with a class under ``@register("name")``: it is then chosen by
``federated.algorithm: name``, and each field of its ``options`` is set as ``federated.options.FIELD``, in
YAML or on the command line. The oldest algorithms have their options among the keys of ``federated`` itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.postprocessor.base import Postprocessor
from torch import Tensor

from pfl_ext.aggregation.norm_bound import BoundedUpdates, NormBound
from pfl_ext.aggregation.rule import AggregationRule, Mean
from pfl_ext.algorithms.channel import Channel
from pfl_ext.algorithms.own_images import OwnSplit
from pfl_ext.algorithms.spooled import SpooledRounds
from pfl_ext.attacks.attack import Attack, Attackers
from pfl_ext.backend import CentrallyEvaluatedBackend
from pfl_ext.compression.compressor import Compressor
from pfl_ext.configs import NoOptions
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.devices.config import DevicesConfig
from pfl_ext.devices.fleet import Traffic as Traffic
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.engine.cpu.kernels import CpuKernels
from pfl_ext.engine.selfcheck import SelfCheck
from pfl_ext.engine.tuning import Tuner
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.privacy.central import is_private
from pfl_ext.registry import Registry
from pfl_ext.rules import PRIVACY_NOT_ARGUED, Refusals, refuse
from pfl_ext.stage import Stage

State = TypeVar("State")


class UserState(Protocol):
    """State that a run needs to continue, besides the model and the server's optimiser."""

    def tensors(self) -> dict[str, Tensor]:
        """The state's tensors, for the checkpoint that is about to be written."""
        ...

    def saved(self) -> None:
        """Is called once the checkpoint with the last `tensors` has its final name."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state from the tensors of a checkpoint."""
        ...


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The run that an algorithm is chosen for."""

    options: Any
    """An instance of the algorithm's ``options``."""
    num_rounds: int
    cohort_size: int
    by_images: bool
    """Whether a user's weight is its number of images; else every user has the same weight."""
    private: bool
    """Whether what users send is clipped and noised, centrally or locally."""
    module: ImageClassifier
    users: FederatedImageDataset
    seed: int = 0
    rate_keys: tuple[str, ...] = ()
    """The keys of the config by which layers have different local learning rates."""
    clips_all: bool = False
    """Whether users clip the gradients of all variables together, by one norm."""
    is_sgd: bool = True
    """Whether a user's steps are those of SGD, maybe with momentum."""
    momentum: float = 0.0
    """That of a user's SGD."""
    pretrained: bool = False
    """Whether the first weights are those of a network that was trained before."""
    keeps_errors: bool = False
    """Whether each user keeps the error of compressing its updates."""
    devices: DevicesConfig | None = None
    """Slow or unreliable devices; None: every user does all of its work at once."""
    folder: Path | None = None
    """Where the run's checkpoints lie; None: the state of users goes to temporary files."""
    own: OwnSplit | None = None
    """The images of val or test that score users' own models; None: images held out from training do."""

    @property
    def touched(self) -> int:
        """The largest number of users who train at all in the run."""
        return min(self.users.num_users, self.cohort_size * self.num_rounds)


@dataclass(frozen=True, kw_only=True)
class RunContext(Setup):
    """What a run gives its algorithm to train and to score with."""

    model: PyTorchModel
    """The run's network with the server's optimiser."""
    local: NNTrainHyperParams
    """Users' local training; `local_in` gives that of one round."""
    score: Callable[[PyTorchModel], Metrics]
    server_rate: Callable[[int], float]
    """The server's learning rate in a round."""
    local_rate: Callable[[int], float] | None = None
    """The users' learning rate in a round; None: that of `local` in every round."""
    postprocessors: Sequence[Postprocessor]
    """A weighting of users, and the mechanism of a private run."""
    engine: CohortEngine | None
    """The engine that trains users; None: pfl's own loop does."""
    kernels: CpuKernels | None = None
    """Compiled layers for users whom the engine does not train; None: torch computes."""
    accumulate: torch.dtype
    """Data type of sums over users."""
    config_hash: str
    check: SelfCheck | None = None
    """The check of the engine on a GPU."""
    tuner: Tuner | None = None
    """What arranges the engine of an algorithm that trains whole cohorts with it."""
    compressor: Compressor | None = None
    """What compresses updates; None: they are sent as they are."""
    rule: AggregationRule = Mean(NoOptions())  # noqa: RUF009  # the default is never changed
    """Combines the users' updates into one."""
    attack: Attack | None = None
    """What attackers send; None: there are no attackers."""
    attack_share: float = 0.0
    """Share of all users who attack."""
    applied: set[str] = field(default_factory=set)
    """The config sections that the algorithm applies: `stages` and `channel` note theirs, and who reads
    `devices` adds that."""

    def check_applied(self) -> None:
        """Refuse a run whose algorithm leaves out what it `Choice.takes`.

        Raises:
            ValueError: one line with the section.
        """
        chosen = {
            "compression": self.compressor is not None,
            "aggregation": not isinstance(self.rule, Mean),
            "attack": self.attack is not None,
            "devices": self.devices is not None,
        }
        for section in (name for name, is_chosen in chosen.items() if is_chosen and name not in self.applied):
            stages = "give Clients the RunContext.stages of the variables that are sent, or "
            raise ValueError(
                f"federated.algorithm takes {section}, but does not apply it: "
                f"{'' if section == 'devices' else stages}remove it from takes"
            )

    def local_in(self, number: int) -> NNTrainHyperParams:
        """Users' training in a round."""
        if self.local_rate is None:
            return self.local
        return replace(self.local, local_learning_rate=self.local_rate(number))

    def channel(self, names: Sequence[str]) -> Channel | None:
        """The compression of updates of these variables; None: they are sent as they are."""
        self.applied.add("compression")
        if self.compressor is None or not names:
            return None
        module = self.model.pytorch_model
        return Channel(self.compressor, self.users, module, names, self.seed, self.folder)

    def stages(self, names: Sequence[str]) -> list[Stage]:
        """What is done to updates of these variables before they are weighted.

        Attackers change theirs, all are compressed, and a rule other than the mean collects them.
        """
        self.applied.update(("aggregation", "attack"))
        module, attackers = self.model.pytorch_model, None
        if self.attack is not None:
            attackers = Attackers(self.attack, self.users, self.attack_share, names, self.seed)
        colludes = self.attack is not None and self.attack.colludes
        last: Stage | None = None
        if isinstance(self.rule, NormBound) and not colludes:
            last = BoundedUpdates(self.rule.chosen.bound)
        elif colludes or not isinstance(self.rule, Mean):
            last = SpooledRounds(
                self.rule,
                self.users,
                module,
                names,
                attackers if colludes else None,
                seed=self.seed,
                by_images=self.by_images,
                folder=self.folder,
            )
        return [stage for stage in (attackers, self.channel(names), last) if stage is not None]

    def backend(
        self, before: Sequence[Postprocessor] = (), tuner: Tuner | None = None
    ) -> CentrallyEvaluatedBackend:
        """The backend that trains a cohort. ``before`` is applied to each update before it is weighted."""
        return CentrallyEvaluatedBackend(
            self.users,
            seed=self.seed,
            postprocessors=[*before, *self.postprocessors],
            engine=self.engine,
            accumulate=self.accumulate,
            config_hash=self.config_hash,
            check=self.check,
            tuner=tuner,
        )


class Choice:
    """Base of every registered algorithm. What a class does not declare here is refused, or empty."""

    options: ClassVar[type] = NoOptions
    """The frozen dataclass of its options."""
    refusals: ClassVar[Refusals] = PRIVACY_NOT_ARGUED
    """What it cannot be combined with, and why."""
    idle: ClassVar[str] = ""
    """Config keys that it does not read, separated by blanks; a key that ends with a dot is a section."""
    idle_in_runtime: ClassVar[str] = ""
    """Fields of the runtime that it does not read."""
    tunes_engine: ClassVar[bool] = False
    """Whether it trains whole cohorts, by an engine that may be arranged by timing one."""
    sends: ClassVar[str] = "model update"
    """What is clipped in private training, in two or three words."""
    reads_length: ClassVar[bool] = False
    """Whether what a round does depends on how many rounds the run has; such a run cannot be made longer."""
    only_last: ClassVar[bool] = False
    """Whether only the last round's model has learnt from all users."""
    has_server_model: ClassVar[bool] = False
    """Whether the server has a model of which an average over rounds may be scored and saved
    (``evaluation.average``). `Algorithm.model` must then return the run's model without changing it."""
    has_user_models: ClassVar[bool] = False
    """Whether a user may have a model that is not the server's (`Algorithm.model_of`)."""
    once: ClassVar[bool] = False
    """Whether each user sends once in a run; all of them in the only round of a private one."""
    takes: ClassVar[tuple[str, ...]] = ()
    """Config sections that change updates on their way to the server, and that this class works with. It is
    not inherited, because a subclass may send something else."""
    files: ClassVar[tuple[str, ...]] = ()
    """Names of the files beside a run's checkpoints in which it keeps the state of users."""

    def __init_subclass__(cls) -> None:
        """A subclass inherits refusals. It inherits nothing that was only argued for its base class."""
        super().__init_subclass__()
        if "refusals" not in vars(cls):
            cls.refusals = {**PRIVACY_NOT_ARGUED, **cls.refusals}
        if "takes" not in vars(cls):
            cls.takes = ()

    @classmethod
    def resolved(cls, options: Any) -> dict[str, Any]:
        """Values for options that were left as none, by key."""
        return {}

    @classmethod
    def keeps_parts(cls, options: Any) -> bool:
        """Whether each user keeps some variables of its model, so that no user has the server's model."""
        return False

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse a run that cannot be trained, before anything is written.

        Raises:
            ValueError: one line with the reason.
        """

    @classmethod
    def state_bytes(cls, setup: Setup) -> int:
        """Bytes on disk of what it keeps besides a model: the states of all users who train, each of them
        once, and other models of the server."""
        return 0

    @classmethod
    def traffic(cls, module: ImageClassifier) -> Traffic:
        """The bytes that each user receives and sends in a round, as far as the network decides them.

        Here each user receives the trained variables once and sends as many back.
        """
        size = trained_bytes(module)
        return Traffic(size, size)

    @classmethod
    def start(cls, context: RunContext) -> Algorithm[Any]:
        """The algorithm for a run, with the loop that runs its rounds."""
        raise NotImplementedError


class Algorithm(Choice, ABC, Generic[State]):
    """An algorithm with a loop of its own: rounds that lead from one state to the next.

    The state is all that the next round needs. It must be a function of the config, the data and the number
    of rounds, so that a run which is killed and resumed ends as one that is not. With several workers each
    of them holds the same state, and `pfl_ext.algorithms.clients` divides the users among them.
    """

    def __init__(self, context: RunContext) -> None:
        refuse(self.refusals, privacy=any(map(is_private, context.postprocessors)))
        self.context = context

    @classmethod
    def start(cls, context: RunContext) -> Algorithm[Any]:
        """The algorithm itself."""
        return cls(context)

    @abstractmethod
    def init(self, seed: int) -> State:
        """The state before the first round."""

    @abstractmethod
    def round(self, state: State, number: int) -> tuple[State, dict[str, Any]]:
        """Run round ``number`` (from 0). Returns the state after it, and its line of ``metrics.jsonl``."""

    @abstractmethod
    def model(self, state: State) -> PyTorchModel:
        """The run's model with the weights that are scored, and that are saved at the end."""

    def model_of(self, state: State, user: int, number: int) -> PyTorchModel:
        """The run's model with the weights of a user's own model, as it is scored after ``number`` rounds.

        Raises:
            ValueError: one clause that says why the user has none.
        """
        raise NotImplementedError

    @abstractmethod
    def tensors(self, state: State) -> dict[str, Tensor]:
        """The tensors of the whole state, for a checkpoint."""

    @abstractmethod
    def load(self, state: State, tensors: Mapping[str, Tensor]) -> State:
        """The state in a checkpoint's `tensors`. ``state`` comes from `init` and may be changed in place."""

    def saved(self) -> None:
        """Is called once the checkpoint with the last `tensors` has its final name."""

    def is_finite(self, state: State) -> bool:
        """Whether all that is trained of the model is finite; a run ends after a round where it is not."""
        return is_finite(self.model(state))

    def evaluate(self, state: State) -> Metrics:
        """The scores of a state."""
        return self.context.score(self.model(state))

    def bytes(self, state: State) -> Traffic:
        """What a round sends. Here it is `traffic`."""
        return self.traffic(self.context.module)

    def findings(self, state: State) -> dict[str, Any]:
        """Results other than the model, for ``results.json``; the algorithm chooses the keys."""
        return {}

    @property
    def engine(self) -> CohortEngine | None:
        """The engine that trains users; None: pfl's own loop does."""
        return self.context.engine

    def arithmetic(self, precision: torch.dtype | None) -> str:
        """How training in this type, None being float32, is computed, in one line."""
        if self.engine is not None:
            return self.engine.arithmetic(precision)
        return f"{'float32' if precision is None else 'bfloat16'}, pfl's own loop"


@torch.no_grad()
def is_finite(model: PyTorchModel) -> bool:
    """Whether all variables that training changes are finite."""
    sums = [p.sum(dtype=torch.float32) for p in model.pytorch_model.parameters() if p.requires_grad]
    return not sums or bool(torch.stack(sums).isfinite().all())


def trained_bytes(module: ImageClassifier) -> int:
    """Size in bytes of the variables that training changes."""
    return sum(p.nbytes for p in module.parameters() if p.requires_grad)


ALGORITHMS: Registry[type[Choice]] = Registry("pfl_ext.algorithms", "federated.algorithm")
"""What ``federated.algorithm`` chooses by name."""
register = ALGORITHMS.register
"""Class decorator that registers an algorithm under the name by which ``federated.algorithm`` chooses it."""
