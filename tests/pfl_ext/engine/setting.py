"""A small federated problem, trained for one round by pfl's loop or by the engine."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from pfl.aggregate.weighting import WeightByDatapoints, WeightByUser
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from pfl_ext.algorithms.controls import Controls
from pfl_ext.algorithms.feddyn import FedDyn, FedDynOptions
from pfl_ext.algorithms.fednova import STEPS, FedNova
from pfl_ext.algorithms.fedprox import FedProx, ProximalOptions
from pfl_ext.algorithms.scaffold import Correction, Option, Scaffold, ScaffoldOptions
from pfl_ext.backend import CentrallyEvaluatedBackend, training_context
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.data.sampling import LocalSampling
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.engine.training import LocalSGDConfig
from pfl_ext.models.classifier import FrozenStatisticsBatchNorm2d, ImageClassifier
from pfl_ext.models.image_changes import ImageChanges
from pfl_ext.privacy.accounting import Mechanism, PrivacyConfig
from pfl_ext.privacy.central import TALLY, PrivateMean, private_mean
from pfl_ext.privacy.mechanisms import Clipping
from pfl_ext.tasks.multi_label import MultiLabel, WeightedMultiLabel
from pfl_ext.tasks.single_label import SingleLabel
from pfl_ext.tasks.task import Task
from tests.pfl_ext.samplings import local_sampling

SIDE, LABELS = 12, 5
BFLOAT16 = 2.0**-9, 3.0
"""For `rounding_of`: the unit of bfloat16, and that a layer's weights, its images and its output are rounded
to it. The sums of its products are float32, where `convolutions_sum_in_float32`."""


def convolutions_sum_in_float32() -> bool:
    """Whether torch's convolutions of bfloat16 do on this CPU, as a GPU's do.

    Without AVX-512 their gradients are summed in bfloat16: those of weights are then off by some units, the
    more so the more images there are.
    """
    draw = torch.Generator().manual_seed(0)
    shapes = (64, 16, 8, 8), (64, 16, 8, 8), (16, 16, 3, 3)
    e, x, weight = (torch.randn(shape, generator=draw).bfloat16() for shape in shapes)
    form = None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1, (False, True, False)
    ours, exact = (
        torch.ops.aten.convolution_backward(e.to(dtype), x.to(dtype), weight.to(dtype), *form)[1].double()
        for dtype in (torch.bfloat16, torch.float64)
    )
    return bool((ours - exact).norm() <= BFLOAT16[0] * exact.norm())


TASKS = (MultiLabel(), SingleLabel(), WeightedMultiLabel())


def targets_for(task: Task, n: int, draw: torch.Generator) -> Tensor:
    """Targets ``[n, LABELS]`` of the kind that a task takes, weighted where it takes weights."""
    labels, weights = (torch.rand(n, LABELS, generator=draw) for _ in range(2))
    if type(task) is MultiLabel:
        return (labels < 0.4).float()
    if isinstance(task, SingleLabel):
        return nn.functional.one_hot(labels.argmax(1), LABELS) * (weights + 0.1)
    return torch.where(labels < 0.4, 1.0, -1.0) * (weights + 0.1)


class NoisyStore:
    """Images and labels that are a function of the row."""

    def __init__(self, sizes: Sequence[int], task: Task = TASKS[0]) -> None:
        self.task = task
        self.user_ids = [f"user-{u}" for u in range(len(sizes))]
        self.user_offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def read(self, rows: Any) -> tuple[Any, Any]:
        images = np.empty((len(rows), SIDE, SIDE, 3), np.uint8)
        targets = np.empty((len(rows), LABELS), np.float32)
        for i, row in enumerate(rows.tolist()):
            rng = np.random.default_rng(row)
            images[i] = rng.integers(0, 256, (SIDE, SIDE, 3))
            if type(self.task) is MultiLabel:
                targets[i] = rng.random(LABELS) < 0.4
            else:
                targets[i] = targets_for(self.task, 1, torch.Generator().manual_seed(row))[0].numpy()
        return images, targets

    def targets(self, rows: Any) -> Any:
        return self.read(rows)[1]


@torch.no_grad()
def drawn(net: nn.Sequential, deviation: float, draw: torch.Generator) -> nn.Sequential:
    """Every parameter from a normal distribution, about 1 in norms and about 0 elsewhere."""
    for layer in net:
        for parameter in layer.parameters():
            parameter.normal_(float("Norm" in type(layer).__name__), deviation, generator=draw)
    return net


def small_backbone(seed: int = 0) -> nn.Sequential:
    """Every kind of layer that the tape knows, with and without bias, strides, groups and few positions."""
    torch_generator = torch.Generator().manual_seed(seed)
    frozen = FrozenStatisticsBatchNorm2d(8)
    frozen.running_mean.uniform_(-0.3, 0.3, generator=torch_generator)
    frozen.running_var.uniform_(0.5, 2.0, generator=torch_generator)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(4, 8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8, bias=False),
        frozen,
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 24, 3, stride=2, padding=1, bias=False),
        nn.GroupNorm(2, 24),
        nn.ReLU(inplace=True),
        nn.Conv2d(24, 48, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, LABELS),
    )
    return drawn(net, 0.2, torch_generator)


def wide_backbone() -> nn.Module:
    """With layers that are compiled: with and without bias, with strides, taped, trimmed and not."""
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False),
        nn.GroupNorm(8, 32),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 32, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, LABELS),
    )
    return drawn(net, 0.1, torch.Generator().manual_seed(2))


@torch.no_grad()
def move_weights(backbone: nn.Module, off: float, seed: int) -> None:
    """Multiply each weight by a draw from ``1 - off .. 1 + off``."""
    draw = torch.Generator().manual_seed(seed)
    for parameter in backbone.parameters():
        factors = 1 + off * (2 * torch.rand(parameter.shape, generator=draw, dtype=torch.float64) - 1)
        parameter.copy_(parameter.double() * factors)


def in_float64(backbone: nn.Module, off: float = 0.0, seed: int = 0) -> nn.Module:
    """The network in float64, with `move_weights`."""
    move_weights(backbone.double(), off, seed)
    backbone.register_forward_pre_hook(lambda _, images: (images[0].double(),))
    return backbone


@dataclass
class Setting:
    """One round of training; what differs from these defaults is what a test is about."""

    sizes: Sequence[int]
    sampling: LocalSampling = field(default_factory=lambda: local_sampling(input_size=10, batch_size=4))
    clipping: str = "variable"
    max_norm: float = 0.5
    mu: float | None = None
    learning_rate: float = 0.2
    by_images: bool = True
    more: Sequence[Any] = ()  # postprocessors after the weighting
    backbone: Callable[[], nn.Module] = small_backbone
    amp: torch.dtype | None = None
    rounds: int = 1
    task: Task = TASKS[0]
    store: Any = None
    reweight: Any = None
    sampler: Any = "fixed"
    cohort: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    adam: Literal["adam", "adamw"] | None = None
    """Not None: in the place of SGD."""
    epsilon: float = 1e-3
    """Adam's; the usual 1e-8 makes a step of lr of what is only a gradient's rounding."""
    head_rate: float = 1.0
    layer_decay: float = 1.0
    rates: Sequence[float] = ()
    """Learning rates of the rounds; empty: `learning_rate` in all."""
    nova: bool = False
    algorithm: Any = None
    """Another one whose parameters are FedAvg's."""
    scaffold: tuple[Option, Correction] | None = None
    dynamic: float | None = None
    """FedDyn's alpha."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """The changes of training images."""
    exact_crops: bool = True
    inexact: tuple[float, int] | None = None
    """Not None: in float64, from weights that are off by up to this part of them, as this seed draws."""
    check: Any = None
    """Check of the engine on a GPU."""
    tuner: Any = None
    controls: Controls | None = field(default=None, init=False)
    """SCAFFOLD's or FedDyn's, after a run."""

    def run(self, engine: bool, **options: Any) -> tuple[dict[str, Tensor], float, Metrics]:
        """Sum of updates by variable, its weight, and the metrics; of the last round."""
        backbone = self.backbone() if self.inexact is None else in_float64(self.backbone(), *self.inexact)
        module = ImageClassifier(
            backbone,
            input_size=10,
            exact_crops=self.exact_crops,
            task=self.task,
            changes=ImageChanges(**self.changes),
        )
        steps = LocalSGDConfig(
            optimizer=self.adam or "sgd",
            momentum=self.momentum,
            epsilon=self.epsilon,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_norm if self.clipping == "variable" else None,
            clip_by="variable",
        )

        def local(_: Any, lr: float) -> torch.optim.Optimizer:
            return steps.new_optimizer(module.rate_groups(lr, self.head_rate, self.layer_decay), lr)

        model = PyTorchModel(module, local, torch.optim.SGD(module.parameters(), lr=1.0), amp_dtype=self.amp)
        data = FederatedImageDataset(
            self.store or NoisyStore(self.sizes, self.task),
            self.sampling,
            seed=3,
            sampler=self.sampler,
            reweight=self.reweight,
        )
        cohort_size = self.cohort or len(self.sizes)
        backend = CentrallyEvaluatedBackend(
            data,
            seed=1,
            postprocessors=[WeightByDatapoints() if self.by_images else WeightByUser(), *self.more],
            engine=CohortEngine(module, rate_varies=bool(self.rates), **options) if engine else None,
            check=self.check,
            tuner=self.tuner,
        )
        train = NNTrainHyperParams(
            local_num_epochs=self.sampling.num_epochs,
            local_learning_rate=self.learning_rate,
            local_batch_size=self.sampling.batch_size,
            local_max_grad_norm=self.max_norm if self.clipping == "global" else None,
        )
        run: Any = SimpleNamespace(module=module, users=data, by_images=self.by_images, folder=None)
        algorithm = self.algorithm or FederatedAveraging()
        if self.nova or self.mu is not None:
            run.options = ProximalOptions(self.mu)
            algorithm = FedNova(run) if self.nova else FedProx(run)
        if self.scaffold is not None:
            run.options = ScaffoldOptions(*self.scaffold)
            algorithm = Scaffold(run)
        if self.dynamic is not None:
            run.options = FedDynOptions(self.dynamic)
            algorithm = FedDyn(run)
        self.controls = getattr(algorithm, "controls", None)
        for round_number in range(self.rounds):
            rate = self.rates[round_number] if self.rates else self.learning_rate
            of_round = replace(train, local_learning_rate=rate)
            context = training_context(round_number, cohort_size, of_round)
            if self.controls is not None:
                self.controls.begin(data.cohort(cohort_size, round_number))
            stats, metrics = backend.gather_results(model, algorithm, central_context=context)
            updates = {name: t.detach().clone().contiguous() for name, t in stats.items()}
            weight = float(stats.weight)
            if self.controls is not None:
                algorithm.process_aggregated_statistics(context, metrics, model, stats)
        return updates, weight, metrics


def private(
    num_users: int, mechanism: Mechanism = "gaussian", clipping: Clipping = "flat", *, noisy: bool = True
) -> Any:
    """A postprocessor that clips some of these users; not ``noisy``: what it adds is zeros."""
    config = PrivacyConfig(
        epsilon=50.0,
        delta=1e-3,
        mechanism=mechanism,
        clipping=clipping,
        clipping_bound=0.27 if clipping == "flat" else 0.5,
        indicator_std_fraction=0.2,
    )
    mean = private_mean(config.calibrate(num_users, num_users, 5), noise_seed=4)
    if not noisy:
        mean._noise = lambda context, size, users: (torch.zeros(size), 1e-9)  # type: ignore[method-assign]
    return mean


class _Silent(PrivateMean):
    def postprocess_server(self, *, stats: Any, central_context: Any, aggregate_metrics: Any) -> Any:
        stats.pop(TALLY)
        return stats, Metrics()


def without_noise(clipping_bound: float, clipping: Clipping = "flat") -> Any:
    """A postprocessor that clips each user's update as a private one does, and adds no noise."""
    config = PrivacyConfig(epsilon=2.0, clipping_bound=clipping_bound, clipping=clipping)
    return _Silent(config.calibrate(9, 9, 1))


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Distance of two sums of updates, relative to the second; FedNova's count of steps must be the same."""
    assert ours.keys() == theirs.keys()
    names = [n for n in theirs if n != STEPS]
    if STEPS in theirs:
        torch.testing.assert_close(ours[STEPS], theirs[STEPS])
    gap = sum(float((ours[n].double() - theirs[n].double()).square().sum()) for n in names)
    size = sum(float(theirs[n].double().square().sum()) for n in names)
    return float((gap / max(size, 1e-30)) ** 0.5)


def rounding_of(setting: Setting, unit: float = 2.0**-24, roundings: float | None = None) -> float:
    """How far two computations of a round may be apart by rounding, relative to the sum of updates.

    A layer's sum of n rounded products is the exact sum for weights that are each off by ``sqrt(n) unit``,
    whatever its order (Higham and Mary 2019: by n at most, but roundings go up as often as down). The round
    is therefore computed in float64, exactly and from weights that are off by so much: what that changes is
    what rounding may change. It holds how the steps magnify an error, and the ReLUs on whose other side an
    error brings a value, as a count of roundings would not. Each of the two computations may be off by that.
    In addition pfl subtracts the weights after training from those before, which were rounded at each step:
    a rounding of the size of the weights, and not of the updates.

    Args:
        setting: a round that has not been computed yet; its ``amp`` is left out.
        unit: of rounding.
        roundings: instead of ``sqrt(n)`` of the layer with most products.
    """
    exact, *moved = (each.run(False) for each in inexact_settings(setting, unit, roundings))
    apart = max(distance(updates, exact[0]) for updates, *_ in moved)
    steps = setting.sampling.num_epochs * -(-max(setting.sizes) // setting.sampling.batch_size)
    weights: float = norm(dict(setting.backbone().named_parameters()))
    return 2 * apart + 2 * math.sqrt(steps) * 2.0**-24 * exact[1] * weights / max(norm(exact[0]), 1e-30)


def inexact_settings(
    setting: Setting, unit: float = 2.0**-24, roundings: float | None = None
) -> list[Setting]:
    """The round in float64, and from weights that are off; for `rounding_of`.

    bfloat16's few and large roundings have effects that differ by a factor of two from draw to draw, so that
    it has four draws and not two.
    """
    layers = [m for m in setting.backbone().modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    off = unit * (roundings or math.sqrt(max(layer.weight[0].numel() for layer in layers)))
    return [
        replace(setting, amp=None, more=copy.deepcopy(setting.more), inexact=inexact)
        for inexact in ((0.0, 0), *((off, draw) for draw in range(1, 3 if unit <= 2.0**-24 else 5)))
    ]


def norm(tensors: dict[str, Tensor]) -> float:
    """L2 norm of all tensors as one vector, without FedNova's count of steps."""
    squares = sum(float(t.detach().double().square().sum()) for name, t in tensors.items() if name != STEPS)
    return float(squares**0.5)
