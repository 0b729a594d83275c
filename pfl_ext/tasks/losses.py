"""What is minimised in training besides plain cross-entropy: focal, asymmetric, Dice loss; class weights.

Scores, and the loss among them, are plain: see `pfl_ext.tasks.task.Task.trained_by`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from pfl.internal.ops.pytorch_ops import get_default_device
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from pfl_ext.configs import STRICT, Fraction

Exponent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
LEAST = 1e-12
"""Smallest number that is raised to a power; below it, the slope of a power under 1 is not finite."""


@dataclass(frozen=True, config=STRICT)
class LossConfig:
    """What training minimises for each label, or pixel; scores are plain cross-entropy."""

    focal_gamma: Exponent = 0.0
    """Focal loss: (1 - p)^gamma times the cross-entropy, with p the probability of what is true; 0: plain."""
    absent_gamma: Exponent | None = None
    """Asymmetric loss: gamma of the labels that an image lacks, for several labels; none: focal_gamma."""
    absent_margin: Fraction = 0.0
    """Asymmetric loss: by how much the probability of a label that an image lacks is lowered before."""
    dice: Share = 0.0
    """Masks: share of the soft Dice loss in an image's loss; the rest is cross-entropy. 1: Dice alone."""
    class_weights: Mapping[str, Weight] | None = None
    """Factors by class (--loss.class_weights.road=2), else 1; with several labels, where it is present."""


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingLoss:
    """A `LossConfig` for known classes.

    With p the predicted probability of what is true, w its class's weight and g = ``focal_gamma``, a label or
    a pixel of one class out of several has the loss ``-w (1 - p)^g log p`` (Lin et al. 2017, arXiv
    1708.02002, equation 5). A label that may be present or absent has ``-w (1 - q)^g log q`` if it is
    present, and ``-r^a log(1 - r)`` if not, with q its probability, ``r = max(q - absent_margin, 0)`` and a =
    ``absent_gamma`` (Ridnik et al. 2021, arXiv 2009.14119, equations 4 to 7).
    """

    focal_gamma: float = 0.0
    absent_gamma: float | None = None
    """None: ``focal_gamma``."""
    absent_margin: float = 0.0
    weights: Tensor | None = None
    """``[K]`` float32, on the device of training; None: all are 1."""
    label_smoothing: float = 0.0
    """Share a of a label that is spread: the cross-entropy is to the distribution with ``a / K`` at each
    class and ``1 - a`` more at the label (Szegedy et al. 2016, arXiv 1512.00567, section 7)."""
    mixes: bool = False
    """Whether images are mixed in training, and their labels with them (`pfl_ext.data.mixing`)."""
    dice: float = 0.0
    """Share of `dice_losses` in the loss of an image with a mask."""

    @classmethod
    def of(
        cls, config: LossConfig, classes: Sequence[str], label_smoothing: float = 0.0, mixes: bool = False
    ) -> TrainingLoss:
        """The loss of a config for the classes in the order of the network's outputs.

        Raises:
            ValueError: when a weight's class does not exist, or no class has any weight; or for a focal loss
                together with labels that are spread or mixed, for which it is not defined.
        """
        weights = None
        if config.class_weights:
            for name in config.class_weights:
                if name not in classes:
                    few = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
                    raise ValueError(
                        f"loss.class_weights names the class {name!r}, which is not among the "
                        f"{len(classes):,} of the data: {few}"
                    )
            values = [config.class_weights.get(name, 1.0) for name in classes]
            if not any(values):
                raise ValueError("loss.class_weights gives each class 0: nothing would be learnt")
            weights = torch.tensor(values, dtype=torch.float32, device=get_default_device())
        if config.focal_gamma and label_smoothing:
            raise ValueError(
                "loss.focal_gamma and augment.label_smoothing both say what the loss of a label is: set one "
                "of them to 0"
            )
        if config.dice == 1 and (config.focal_gamma or label_smoothing or weights is not None):
            raise ValueError(
                "loss.dice is 1, so there is no cross-entropy for loss.focal_gamma, loss.class_weights and "
                "augment.label_smoothing: leave them out, or give a smaller share, as 0.5"
            )
        loss = cls(
            config.focal_gamma,
            config.absent_gamma,
            config.absent_margin,
            weights,
            label_smoothing,
            mixes,
            config.dice,
        )
        if mixes and (loss.focal_gamma or loss.is_asymmetric):
            raise ValueError(
                "loss.focal_gamma, absent_gamma and absent_margin are for labels that are true or not, but "
                "those of mixed images are true in part: leave them out, or set augment.mixup and "
                "augment.cutmix to none"
            )
        return loss

    def check_for_classes(self) -> None:
        """Refuse what only labels have that may be present or absent.

        Raises:
            ValueError: one line with the keys.
        """
        if self.is_asymmetric:
            raise ValueError(
                "loss.absent_gamma and loss.absent_margin are for labels that an image may lack, and here "
                "each has exactly one class: leave them out"
            )

    def check_for_images(self) -> None:
        """Refuse what only masks have.

        Raises:
            ValueError: one line with the key.
        """
        if self.dice:
            raise ValueError(
                "loss.dice compares areas of masks, and here labels are of whole images: leave it out"
            )

    def check_for_labels(self) -> None:
        """Refuse what only classes have that exclude each other.

        Raises:
            ValueError: one line with the key.
        """
        if self.label_smoothing:
            raise ValueError(
                "an image may have several labels, so there are no classes that exclude each other, over "
                f"which a label could be smoothed: set augment.label_smoothing, which is "
                f"{self.label_smoothing:g}, to 0"
            )

    @property
    def is_plain(self) -> bool:
        """Whether it is plain cross-entropy."""
        other = self.is_asymmetric or self.focal_gamma or self.label_smoothing or self.mixes or self.dice
        return not other and self.weights is None

    @property
    def is_asymmetric(self) -> bool:
        """Whether absent labels are treated otherwise than present ones."""
        return self.absent_gamma not in (None, self.focal_gamma) or self.absent_margin > 0

    def of_classes(self, logits: Tensor, classes: Tensor, void: int = -100) -> Tensor:
        """Losses of one class out of K.

        Args:
            logits: float32 ``[B, K, ...]``.
            classes: class numbers ``[B, ...]`` int64, or ``void``, where the loss is 0; or, if ``mixes``, the
                share of each class ``[B, K]`` float32, which add up to 1. These are then smoothed.

        Returns:
            ``[B, ...]``.
        """
        if not self.focal_gamma:
            return F.cross_entropy(
                logits,
                classes,
                self.weights,
                ignore_index=void,
                reduction="none",
                label_smoothing=self.label_smoothing,
            )
        plain = F.cross_entropy(logits, classes, ignore_index=void, reduction="none")
        losses = _power(-torch.expm1(-plain), self.focal_gamma) * plain
        if self.weights is None:
            return losses
        return losses * self.weights[classes.where(classes != void, 0)]

    def of_labels(self, logits: Tensor, present: Tensor) -> Tensor:
        """Losses ``[B, K]`` of labels of which each is present (1) or not (0), from ``[B, K]`` float32."""
        absent = self.focal_gamma if self.absent_gamma is None else self.absent_gamma
        if not (self.focal_gamma or absent or self.absent_margin):
            return F.binary_cross_entropy_with_logits(
                logits, present, reduction="none", pos_weight=self.weights
            )
        there = -_power(torch.sigmoid(-logits), self.focal_gamma) * F.logsigmoid(logits)
        if self.weights is not None:
            there = there * self.weights
        lowered = torch.sigmoid(logits) - self.absent_margin
        rest = F.logsigmoid(-logits)
        if self.absent_margin:
            rest = torch.where(lowered > 0, torch.log(1 - lowered.clamp(min=0)), 0.0)
        lacking = -_power(lowered, absent) * rest
        return torch.where(present > 0, there, lacking)


def dice_losses(logits: Tensor, classes: Tensor, void: int) -> Tensor:
    """Soft Dice losses ``[B]`` of masks, from logits ``[B, K, S, S]`` and class numbers ``[B, S, S]``.

    With the probabilities p and the truth t in 0 and 1, over the pixels of an image that have a class, the
    loss of class k is ``1 - (2 sum p t + 1) / (sum p + sum t + 1)``. An image's loss is the mean over all
    classes: for two classes the loss DL2 of Sudre et al. 2017 (arXiv 1707.03237, section 2.1), up to the
    constants that keep a denominator from being 0. A class that an image lacks has a loss too, which falls
    with the probability that is given to it.
    """
    known = (classes != void).unsqueeze(1)
    truth = F.one_hot(classes.where(classes != void, 0), logits.shape[1]).movedim(-1, 1) * known
    given = logits.softmax(1) * known
    both, areas = (given * truth).sum((2, 3)), given.sum((2, 3)) + truth.sum((2, 3))
    return (1 - (2 * both + 1) / (areas + 1)).mean(1)


def _power(base: Tensor, exponent: float) -> Tensor | float:
    """``base ** exponent``, with a finite slope everywhere."""
    return base.clamp(min=LEAST) ** exponent if exponent else 1.0


PLAIN = TrainingLoss()
