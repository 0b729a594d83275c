"""The interface of a task: how annotations become a loss and a score. Each task is one file in this package.

A task turns the annotations of a batch into targets. `Task.settled` then returns targets and shares for which
the loss of the batch is ``sum_b shares_b image_losses_b``. Anything that couples the images of a batch, such
as self-normalised importance weights, is computed there, from the targets alone. After that images are
independent, so images of many users can go through a network together (`pfl_ext.engine`).

Shape letters: B images of a batch, n images that are scored, N images of an evaluation set, H x W their
stored size, S the side of the network's input, K labels.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from pfl.metrics import MetricValue
from torch import Tensor

from dataset.arrays import Float32Array, FloatArray, IntArray
from pfl_ext.data.transforms import Framing, cropped, resize
from pfl_ext.tasks.losses import TrainingLoss
from pfl_ext.tasks.score_kinds import ScoreKinds

Outputs = Literal["image", "pixels", "boxes"]
"""Kinds of a network's outputs: for a whole image, for each pixel, or for many places where a box may be."""


class Task(ABC):
    """The loss and the score of a network's outputs, for annotations of one kind.

    Outputs and targets are tensors whose first axis is the batch; the other axes are the task's own.
    Everything outside this package uses a task through these methods alone.
    """

    headline: tuple[str, ...]
    """The columns of `summarise` by which models are judged, the first above all."""
    exclusive: ClassVar[bool] = False
    """Whether each image has exactly one label."""
    mixable: ClassVar[bool] = False
    """Whether the loss takes targets of `pfl_ext.data.mixing`, after `trained_by` a loss that ``mixes``."""
    outputs: ClassVar[Outputs] = "image"
    """The kind of outputs that a network must have."""
    lower_is_better: ClassVar[tuple[str, ...]] = ()
    """The columns of `summarise` that are the better the lower they are; the loss is so without this."""
    units: ClassVar[Mapping[str, str]] = {}
    """The unit of each column of `summarise` that is not in percent, such as degrees; empty for a plain
    number."""
    shares_of_images: ClassVar[tuple[str, ...]] = ()
    """The columns of `summarise` that are the share, in percent, of images with a correct prediction."""
    scored_together: ClassVar[int] = 256
    """Most images of an evaluation's batch; fewer where the outputs of an image take much memory."""

    @property
    def score_kinds(self) -> ScoreKinds:
        """What this class declares of its scores."""
        return ScoreKinds(self.lower_is_better, self.units)

    @property
    def user_headline(self) -> str:
        """The column of `user_columns` by which users are compared with each other."""
        return self.headline[0]

    def collate(self, annotations: Any) -> Tensor:
        """The targets of a batch, on the CPU, from annotations as a store holds them."""
        return torch.from_numpy(annotations)

    def pixels(self, images: Tensor, crops: Tensor | None, framing: Framing) -> Tensor:
        """The network's input before normalisation, float32 ``[B, 3, S, S]`` in 0..1. Nothing is drawn here.

        Args:
            images: uint8 ``[B, H, W, 3]``.
            crops: ``[B, 6]`` as `pfl_ext.data.transforms.draw_crops` draws them, or None for the whole image.
            framing: S, and the kind of crops.
        """
        if crops is None:
            return resize(images, framing.input_size)
        return cropped(images, crops, framing.input_size, exact=framing.exact, padding=framing.padding)

    def augment(
        self, images: Tensor, targets: Tensor, crops: Tensor | None, framing: Framing
    ) -> tuple[Tensor, Tensor]:
        """`pixels`, and the targets that belong to them; in training the targets are settled already.

        Here targets have no positions in the image and do not change. A task whose targets have positions
        applies the same crops and flips to them: `gathered` to masks, `boxes_cropped` to boxes
        (`pfl_ext.data.transforms`).
        """
        return self.pixels(images, crops, framing), targets

    def settled(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Targets in the form of `image_losses`, and each image's share of the batch's loss, ``[B]``.

        Each value must depend only on the batch's annotations, and not on where a crop moves them.
        """
        n = len(targets)
        return targets, torch.full((n,), 1 / n if n else 0.0, device=targets.device)

    @abstractmethod
    def image_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each image, ``[B]`` float32, from its own outputs and settled targets alone."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of a batch, float32, from targets that are not settled yet."""
        targets, shares = self.settled(targets)
        return (self.image_losses(outputs, targets) * shares).sum()

    @abstractmethod
    def scored(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The part of a batch's results that evaluation keeps, on the device.

        Args:
            outputs: the network's outputs.
            targets: targets from `collate`.

        Returns:
            Each image's loss, ``[B]`` float64, and the predictions that `statistics` needs, ``[B, ...]``.
        """

    def predicted(self, outputs: Tensor) -> Tensor:
        """What people read of a network's outputs, ``[B, ...]``; here the outputs themselves."""
        return outputs

    @abstractmethod
    def statistics(
        self, num_rows: int, rows: IntArray, predictions: Sequence[Tensor], annotations: Sequence[Any]
    ) -> MetricValue:
        """The score of some images as a statistic that adds up over batches and workers.

        Args:
            num_rows: N.
            rows: ``[n]``, the position of each image in the evaluation set.
            predictions: from `scored`, for consecutive batches of these images; empty if there are no images.
            annotations: the annotations of the same batches, as a store holds them; at least one array, which
                may be of no images.
        """

    @abstractmethod
    def summarise(self, statistics: Any) -> dict[str, float]:
        """The columns by name, from statistics that were added up.

        Raises:
            ValueError: when the outputs were not finite.
        """

    def user_columns(self, predictions: Tensor, annotations: Any) -> dict[str, float]:
        """The columns of one user's images. NaN where a column has no meaning for this user."""
        rows = np.arange(len(annotations), dtype=np.int64)
        return self.summarise(self.statistics(len(rows), rows, [predictions], [annotations]))

    def shown(self, column: str) -> str:
        """The name of a column of `summarise` for people."""
        return column

    def trained_by(self, loss: TrainingLoss) -> Task:
        """This task with another loss in training; `scored` is without it.

        Raises:
            ValueError: when the task does not support this loss.
        """
        raise ValueError(
            f"{type(self).__name__} has a loss of its own, which no option changes: leave "
            "augment.label_smoothing, augment.mixup, augment.cutmix and the keys of loss out"
        )

    def _with(self, loss: TrainingLoss) -> Self:
        """A copy that reads another loss, also of a task of one's own with other arguments."""
        task = copy.copy(self)
        vars(task)["_loss"] = loss
        return task

    def reweighted(self) -> WeightedTask:
        """This task with targets that contain importance weights.

        Raises:
            ValueError: when the task does not support this.
        """
        raise ValueError(
            f"{type(self).__name__} has no form with importance weights: set federated.reweight to none"
        )


class WeightedTask(Task):
    """A task whose targets contain importance weights, for annotations ``[K]``: 1 if an image has the label.

    An image's labels consist of events. Each event has a probability, and so a weight.
    """

    def reweighted(self) -> WeightedTask:
        """The task itself."""
        return self

    def event_shares(self, label_shares: FloatArray) -> FloatArray:
        """The share of images in which each event happens, from the share with each label, ``[K]``."""
        return label_shares

    def event(self, number: int, num_labels: int) -> tuple[str, int]:
        """An event as a verb and a label number, such as "has" and 3."""
        return "has", number

    def check_target(self, label_shares: FloatArray) -> None:
        """Refuse numbers that cannot be the share of images with each label.

        Raises:
            ValueError: one line with the reason.
        """
        if label_shares.ndim != 1 or not ((label_shares >= 0) & (label_shares <= 1)).all():
            raise ValueError("FedIR's target distribution must be one share in 0..1 for each label")

    @abstractmethod
    def weighted(self, annotations: npt.NDArray[Any], weights: FloatArray) -> Float32Array:
        """Targets ``[n, K]`` with the weights of the events that happened in each image."""

    def alike(self, annotations: npt.NDArray[Any]) -> Float32Array:
        """Targets ``[n, K]`` in which every event has the weight 1, so that the loss is the plain one."""
        return self.weighted(annotations, np.ones_like(self.event_shares(np.zeros(annotations.shape[1]))))


def mean_of_known(values: FloatArray) -> float:
    """The mean of the values that are not NaN; 0 without any."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else 0.0
