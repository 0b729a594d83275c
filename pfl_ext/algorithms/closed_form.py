"""Heads in closed form: each user sends sums once, and the server computes the last layer from their total.

All layers but the last are frozen; they compute an image's features. A user sends sums over its images. The
server adds them up over users and computes the last layer from the total, without any gradient. The order of
users is drawn once, and each round asks the next ones: after the last round each user was asked once.

Sums are float64, so how users are divided among rounds and workers changes the head by rounding alone.

Privacy, where the class does not refuse it: a user sends one vector, once, and it is clipped to the bound.
Removing one user changes the sum by at most the bound. (Local privacy: any two vectors that a user may send
differ by at most twice the bound.) The mechanism adds noise for this sensitivity once, in a single round of
all users. The head is computed from the noisy sums and the noise's standard deviation, which does not depend
on data. So this is post-processing.

Shape letters: B images of a batch, D features of an image, K labels.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pfl.aggregate.weighting import WeightByUser
from pfl.context import CentralContext
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics
from pydantic import Field, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from dataset.arrays import IntArray
from pfl_ext.algorithms.algorithm import Algorithm, RunContext, Setup, Traffic
from pfl_ext.backend import CentrallyEvaluatedBackend, cohort_line, training_context
from pfl_ext.configs import STRICT
from pfl_ext.data.user_images import Batch, UserImages
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.features import Split, entering
from pfl_ext.models.memory import refuse_beyond_memory
from pfl_ext.models.trained import head_of
from pfl_ext.privacy.central import noisy_mean_in
from pfl_ext.randomness import stream
from pfl_ext.rules import PRIVACY_NOT_ARGUED, Refusals

FLOAT, WIDE = 4, 8  # bytes of a number that is sent, and of one that is added up
RIDGE = 0.01  # the authors'
NOISE = "noise"
"""Key in the sums of a private run: the standard deviation of the noise on each of their numbers."""
Sums = dict[str, Tensor]
"""What users sent, added up, by name; float64 on the CPU."""


@dataclass(frozen=True, config=STRICT)
class HeadOptions:
    """Options that all closed forms share."""

    unit_features: bool = False
    """Whether each image's features are divided by their L2 norm before they are summed."""
    temperature: PositiveFloat = 1.0
    """Divides the head's weights and so its outputs; below 1 for a head that is trained further."""


@dataclass(frozen=True, config=STRICT)
class RidgeOptions(HeadOptions):
    """`HeadOptions` and a ridge."""

    ridge: Annotated[float, Field(ge=0)] | None = None
    """Lambda, which is added to the diagonal of the sum of z z' over all images; none: 0.01, and with privacy
    the largest eigenvalue that noise alone is expected to give this sum."""
    normalise: bool = True
    """Whether each label's weights and bias are divided by the L2 norm of the weights."""


class ClosedForm(Algorithm[Sums]):
    """Base of closed forms. A subclass defines a user's sums (`of_batch`) and the head (`head`)."""

    options: ClassVar[type] = HeadOptions
    refusals: ClassVar[Refusals] = PRIVACY_NOT_ARGUED
    idle: ClassVar[str] = (
        "server. local.learning_rate local.effective_learning_rate local.head_rate_factor local.layer_decay "
        "local.schedule local.final_learning_rate local.schedule_power local.schedule_factor "
        "local.schedule_cycle local.schedule_from "
        "local.max_grad_norm local.clip_by local.optimizer local.momentum local.beta1 local.beta2 "
        "local.epsilon local.weight_decay local.num_epochs "
        "local.straddle local.shuffle local.reshuffle local.virtual_size augment.views "
        "augment.label_smoothing augment.mixup augment.cutmix loss. "
        "federated.weighting federated.reweight federated.sampling federated.replacement privacy.clipping"
    )
    sends: ClassVar[str] = "vector of sums"
    only_last: ClassVar[bool] = True
    once: ClassVar[bool] = True
    square_matrices: ClassVar[int] = 0
    """How many matrices of D x D numbers there are at once when the head is solved for."""
    idle_in_runtime: ClassVar[str] = "engine accumulate precision reduce"

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._backend = CentrallyEvaluatedBackend(
            context.users,
            seed=context.seed,
            postprocessors=[WeightByUser(), *context.postprocessors[1:]],  # the mechanism comes last
            accumulate=torch.float64,
            config_hash=context.config_hash,
        )

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse to train other layers than the last, and rounds that do not ask each user exactly once."""
        name = cls.__name__
        backbone = setup.module.backbone
        path, head = head_of(backbone)
        trained = {name for name, p in backbone.named_parameters() if p.requires_grad}
        if not isinstance(head, nn.Linear):
            raise ValueError(
                f"{name} computes a last linear layer, but this network ends in a convolution: choose "
                "another model.arch or federated.algorithm"
            )
        if trained != {f"{path}.{name}" for name, _ in head.named_parameters()}:
            raise ValueError(f"{name} computes only the last layer: set model.trained to head")
        try:
            Split(setup.module)
        except ValueError as fault:
            raise ValueError(
                f"{name} needs a last layer of one vector for each image, but {fault}: choose another "
                "model.arch or federated.algorithm"
            ) from None
        if not setup.users.has_labels:
            raise ValueError(
                f"{name} computes a head for labels, and these annotations are other numbers: choose another "
                "federated.algorithm"
            )
        refuse_beyond_memory(
            cls.square_matrices * WIDE * head.in_features**2,
            f"{name} solves for a layer of {head.in_features:,} features",
            "choose federated.algorithm fedncm, or lower model.random_features if it is set",
        )
        rounds = math.ceil(setup.users.num_users / setup.cohort_size)
        if setup.private and rounds > 1:
            raise ValueError(
                f"private {name} adds its noise only once, to the sum over all users: set "
                f"federated.num_rounds to 1 and federated.cohort_size to {setup.users.num_users}"
            )
        if setup.num_rounds != rounds:
            raise ValueError(
                f"{name} needs each of the {setup.users.num_users} users exactly once, with "
                f"{setup.cohort_size} in a round: set federated.num_rounds to {rounds}"
            )

    @abstractmethod
    def of_batch(self, features: Tensor, labels: Tensor) -> Sums:
        """A user's sums over some of its images.

        Args:
            features: ``[B, D]`` float64.
            labels: ``[B, K]`` float64: 1 for each label of an image, else 0.
        """

    @abstractmethod
    def head(self, total: Sums) -> tuple[Tensor, Tensor]:
        """Weights ``[K, D]`` and bias ``[K]`` from the sums over all images so far, before `temperature`."""

    def init(self, seed: int) -> Sums:
        """The sums before any user was asked: zeros."""
        noise = {NOISE: torch.zeros((), dtype=torch.float64)} if self.context.private else {}
        return self.zeros() | noise

    def zeros(self) -> Sums:
        """The sums of a user without images."""
        width, num_labels = self.layer.in_features, self.layer.out_features
        nothing = (torch.zeros(0, size, dtype=torch.float64) for size in (width, num_labels))
        return self.of_batch(*nothing)

    def round(self, state: Sums, number: int) -> tuple[Sums, dict[str, Any]]:
        """Ask the next users, and add what they send."""
        asked = self.asked(number)
        context = training_context(number, len(asked), self.context.local)
        with self.context.users.only(asked):
            sums, metrics = self._backend.gather_results(
                self.context.model, self.asking(), central_context=context
            )
        # pfl would also count the placeholder of a worker without users
        line = {**cohort_line(metrics), "users": len(asked)}
        sent = {name: sums[name].cpu() for name in sums}
        if (mechanism := noisy_mean_in(self.context.postprocessors)) is not None:
            line["privacy"] = mechanism.line(metrics)
            deviation = line["privacy"]["noise std. dev. on the mean"] * sums.weight
            sent[NOISE] = torch.tensor(deviation, dtype=torch.float64)
        return self.added(state, sent), line

    def asking(self) -> UserByUser:
        """The object that the backend asks for users' sums."""
        return UserByUser(self)

    def added(self, state: Sums, sums: Sums) -> Sums:
        """The total after a round's sums were added."""
        return {name: total + sums[name] for name, total in state.items()}

    def asked(self, number: int) -> IntArray:
        """The users of a round: a part of a permutation that the run's seed draws."""
        users = stream(self.context.seed, "users of closed forms").permutation(self.context.users.num_users)
        size = self.context.cohort_size
        return users[number * size : (number + 1) * size]

    @torch.no_grad()
    def model(self, state: Sums) -> PyTorchModel:
        """The run's model with the head of these sums."""
        weight, bias = self.head(state)
        temperature = self.context.options.temperature
        self.layer.weight.copy_(weight / temperature)
        if self.layer.bias is not None:
            self.layer.bias.copy_(bias / temperature)
        return self.context.model

    def is_finite(self, state: Sums) -> bool:
        """Whether all sums are finite, from which the head is not solved after each round."""
        return all(bool(tensor.isfinite().all()) for tensor in state.values())

    def tensors(self, state: Sums) -> dict[str, Tensor]:
        """The sums."""
        return dict(state)

    def load(self, state: Sums, tensors: Mapping[str, Tensor]) -> Sums:
        """The sums."""
        return {name: tensors[name].cpu() for name in state}

    def bytes(self, state: Sums) -> Traffic:
        """A user receives nothing in the round, and sends its sums as float32."""
        return Traffic(0, FLOAT * sum(total.numel() for total in self.zeros().values()))

    @property
    def layer(self) -> nn.Linear:
        """The head: the network's last layer."""
        layer = head_of(self.context.model.pytorch_model.backbone)[1]
        assert isinstance(layer, nn.Linear)
        return layer

    @property
    def wide(self) -> torch.device:
        """The device of the sums: the model's, or the CPU where that has no float64 (Apple's GPUs)."""
        device = self.layer.weight.device
        return device if device.type == "cuda" else torch.device("cpu")

    @torch.no_grad()
    def of_user(self, images: UserImages) -> Sums:
        """What a user sends."""
        total: Sums = {}
        for features, labels in self.rows(images):
            part = self.of_batch(features, labels)
            total = {name: total[name] + part[name] for name in part} if total else part
        return total or {name: zeros.to(self.wide) for name, zeros in self.zeros().items()}

    def rows(self, images: UserImages) -> Iterator[tuple[Tensor, Tensor]]:
        """`rows_of` each batch of a user's images."""
        batches = images.iter(self.context.local.local_batch_size) if len(images) else ()
        return map(self.rows_of, batches)

    @torch.no_grad()
    def rows_of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Features ``[B, D]`` and labels ``[B, K]`` of a batch of images, as `of_batch` takes them."""
        module: ImageClassifier = self.context.model.pytorch_model
        ready = [part.to(self.layer.weight.device) for part in batch]
        features, (_, targets) = entering(self.layer, partial(module.outputs, *ready))
        z = features.to(self.wide).double()
        z = F.normalize(z) if self.context.options.unit_features else z
        return z, (targets > 0).to(self.wide).double()


class UserByUser:
    """Gives pfl's backend the sums of one user at a time."""

    def __init__(self, algorithm: ClosedForm) -> None:
        self._algorithm, self.refusals = algorithm, algorithm.refusals

    def simulate_one_user(
        self, model: PyTorchModel, user_dataset: UserImages, central_context: CentralContext
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """The user's sums."""
        return MappedVectorStatistics(self._algorithm.of_user(user_dataset)), Metrics()


def solved(gram: Tensor, cross: Tensor, ridge: float = 0.0) -> Tensor:
    """The ``w`` of least norm among all that minimise ``w' (G + ridge I) w - 2 w' B``.

    Args:
        gram: G, ``[n, n]``; only its symmetric and positive part is used.
        cross: B, ``[n, K]``.
        ridge: at least 0. With 0 the solution is the pseudo-inverse of G times B.

    Returns:
        ``[n, K]``.
    """
    values, vectors = torch.linalg.eigh((gram + gram.T) / 2)
    values = values.clamp(min=0) + ridge
    smallest = values[-1:] * len(gram) * torch.finfo(values.dtype).eps
    inverse = torch.where(values > smallest, 1 / values.clamp(min=1e-300), 0.0)
    solution: Tensor = vectors @ (inverse[:, None] * (vectors.T @ cross))
    return solution
