"""Focal and asymmetric losses and weights of classes, compared with their papers' formulas in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torchvision.ops import sigmoid_focal_loss

from pfl_ext.tasks.detection import Detection
from pfl_ext.tasks.losses import PLAIN, LossConfig, TrainingLoss
from pfl_ext.tasks.multi_label import MultiLabel, WeightedMultiLabel
from pfl_ext.tasks.segmentation import VOID, Segmentation
from pfl_ext.tasks.single_label import SingleLabel
from pfl_ext.tasks.task import Task

CLASSES = ("sky", "road", "tree")
WEIGHTS = {"road": 2.5, "tree": 0.0}
ROUNDING = 64 * 2.0**-24
"""Some ten operations of float32, each of which is off by two units at most."""


def logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_one_class_out_of_several(gamma: float, weights: dict[str, float] | None) -> None:
    loss = TrainingLoss.of(LossConfig(focal_gamma=gamma, class_weights=weights), CLASSES)
    outputs, classes = logits(2, 3, 4, 5), torch.arange(40).reshape(2, 4, 5) % 3
    classes[0, 0, 0] = classes[1, 2, 3] = VOID
    found = loss.of_classes(outputs, classes, VOID).numpy()
    z = outputs.double().numpy()
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    factors = [(weights or {}).get(name, 1.0) for name in CLASSES]
    for b, i, j in np.ndindex(2, 4, 5):
        c = int(classes[b, i, j])
        if c == VOID:
            assert found[b, i, j] == 0
        else:
            q = p[b, c, i, j]
            assert found[b, i, j] == pytest.approx(
                -factors[c] * (1 - q) ** gamma * np.log(q), rel=ROUNDING, abs=ROUNDING
            )


@pytest.mark.parametrize("words", [
    {"focal_gamma": 2.0},
    {"focal_gamma": 0.5, "class_weights": WEIGHTS},
    {"absent_gamma": 4.0, "absent_margin": 0.05},
    {"focal_gamma": 1.0, "absent_gamma": 0.0, "absent_margin": 0.2, "class_weights": WEIGHTS},
    {"absent_margin": 0.3},
])  # fmt: skip
def test_labels_that_an_image_may_lack(words: dict[str, object]) -> None:
    loss = TrainingLoss.of(LossConfig(**words), CLASSES)  # type: ignore[arg-type]
    outputs, present = logits(50, 3, seed=1), (logits(50, 3, seed=2) > 0).float()
    q = 1 / (1 + np.exp(-outputs.double().numpy()))
    r = np.maximum(q - loss.absent_margin, 0)
    absent = loss.focal_gamma if loss.absent_gamma is None else loss.absent_gamma
    factors = [1.0, 2.5, 0.0] if "class_weights" in words else [1.0, 1.0, 1.0]
    there = -np.array(factors) * (1 - q) ** loss.focal_gamma * np.log(q)
    expected = np.where(present.numpy() > 0, there, -(r**absent) * np.log(1 - r))
    assert loss.of_labels(outputs, present).numpy() == pytest.approx(expected, rel=ROUNDING, abs=ROUNDING)


def test_other_libraries_agree() -> None:
    outputs, present = logits(50, 3), (logits(50, 3, seed=1) > 0).float()
    focal = TrainingLoss.of(LossConfig(focal_gamma=2), CLASSES)
    theirs = sigmoid_focal_loss(outputs, present, alpha=-1, gamma=2)
    assert torch.allclose(focal.of_labels(outputs, present), theirs, rtol=ROUNDING, atol=ROUNDING)
    weighted = TrainingLoss.of(LossConfig(class_weights=WEIGHTS), CLASSES)
    pos = F.binary_cross_entropy_with_logits(
        outputs, present, reduction="none", pos_weight=torch.tensor([1.0, 2.5, 0.0])
    )
    assert torch.equal(weighted.of_labels(outputs, present), pos)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("margin", [0.0, 0.05])
def test_slopes_are_finite_however_sure_the_network_is(gamma: float, margin: float) -> None:
    outputs = torch.tensor([[-300.0, 0.0, 300.0], [-20, 20, np.log(0.05 / 0.95)]], requires_grad=True)
    config = LossConfig(focal_gamma=gamma, absent_gamma=gamma / 4, absent_margin=margin)
    loss = TrainingLoss.of(config, CLASSES)
    for label in (0.0, 1.0):
        losses = loss.of_labels(outputs, torch.full((2, 3), label))
        (slopes,) = torch.autograd.grad(losses.sum(), outputs)
        assert torch.isfinite(losses).all()
        assert torch.isfinite(slopes).all()
    for label in range(3):
        losses = TrainingLoss(focal_gamma=gamma).of_classes(outputs, torch.full((2,), label))
        (slopes,) = torch.autograd.grad(losses.sum(), outputs)
        assert torch.isfinite(losses).all()
        assert torch.isfinite(slopes).all()


@pytest.mark.parametrize("task", [MultiLabel(), WeightedMultiLabel(), SingleLabel(), Segmentation(3)])
def test_training_has_the_loss_and_scores_are_plain(task: Task) -> None:
    focal = task.trained_by(TrainingLoss(focal_gamma=2))
    assert type(focal) is type(task)
    shape = (4, 3, 5, 5) if isinstance(task, Segmentation) else (4, 3)
    targets = torch.arange(100).reshape(4, 5, 5) % 3 if len(shape) == 4 else torch.eye(3)[[0, 1, 2, 0]]
    outputs, trained = logits(*shape), 2 * targets - 1 if isinstance(task, WeightedMultiLabel) else targets
    assert (focal.image_losses(outputs, trained) < task.image_losses(outputs, trained)).all()
    mean = focal.image_losses(outputs, trained).mean()
    assert focal.loss(outputs, trained).item() == pytest.approx(mean.item(), rel=ROUNDING)
    for ours, plain in zip(focal.scored(outputs, targets), task.scored(outputs, targets)):
        assert torch.equal(ours, plain)


def test_importance_weights_multiply_the_loss() -> None:
    loss = TrainingLoss(focal_gamma=2, absent_gamma=4, absent_margin=0.05)
    outputs, targets = logits(4, 3), torch.tensor([[2.0, -1, -1]] * 4)
    found = MultiLabel().trained_by(loss).reweighted().image_losses(outputs, targets)
    plain = loss.of_labels(outputs, (targets > 0).float())
    assert torch.equal(found, (plain * targets.abs()).mean(1))


class Seasons(MultiLabel):
    """A task of one's own, with an argument and scores of its own."""

    headline = ("seasons", "months")

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names

    def summarise(self, statistics: Any) -> dict[str, float]:
        return dict.fromkeys(self.headline, 1.0)


class Doubled(MultiLabel):
    def image_losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 2 * super().image_losses(outputs, targets)


def test_a_task_of_ones_own_keeps_its_class_with_importance_weights() -> None:
    """Before, `WeightedMultiLabel` took its place, with the scores of `MultiLabel`."""
    task = Seasons(("spring", "autumn")).trained_by(TrainingLoss(focal_gamma=2)).reweighted()
    assert isinstance(task, Seasons)
    assert isinstance(task, WeightedMultiLabel)
    assert task.reweighted() is task
    assert (task.names, task.headline) == (("spring", "autumn"), ("seasons", "months"))
    assert task.summarise(None) == {"seasons": 1.0, "months": 1.0}
    outputs, targets = logits(4, 3), torch.tensor([[2.0, -1, -1]] * 4)
    expected = WeightedMultiLabel(TrainingLoss(focal_gamma=2)).loss(outputs, targets)
    assert torch.equal(task.loss(outputs, targets), expected)
    with pytest.raises(ValueError, match=r"Doubled has its own image_losses, .* set federated.reweight"):
        Doubled().reweighted()


@pytest.mark.parametrize(
    "task, words, reason",
    [
        (SingleLabel(), {"absent_gamma": 4.0}, "here each has exactly one class: leave them out"),
        (Segmentation(3), {"absent_margin": 0.1}, "here each has exactly one class: leave them out"),
        (
            SingleLabel(),
            {"dice": 0.5},
            "here labels are of whole images: leave it out",
        ),
        (MultiLabel(), {"dice": 0.5}, "loss.dice compares areas of masks"),
        (Detection(3), {"focal_gamma": 2.0}, "Detection has a loss of its own, which no option changes"),
        (
            MultiLabel(),
            {"class_weights": {"sea": 2.0}},
            "'sea', which is not among the 3 of the data",
        ),
        (MultiLabel(), {"class_weights": dict.fromkeys(CLASSES, 0.0)}, "gives each class 0"),
    ],
)
def test_what_cannot_be_is_one_line(task: Task, words: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        task.trained_by(TrainingLoss.of(LossConfig(**words), CLASSES))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_the_dice_loss_of_an_image_is_its_definition() -> None:
    """By hand, for two classes: probabilities of lesion 0.9, 0.2, 0.6 and a void pixel; truth 1, 0, 1."""
    given = torch.tensor([[[0.9, 0.2, 0.6, 0.5]]], dtype=torch.float64)
    outputs = torch.stack([(1 - given).log(), given.log()], 1).float()
    masks = torch.tensor([[[1, 0, 1, VOID]]], dtype=torch.uint8)
    lesion = 1 - (2 * (0.9 + 0.6) + 1) / (1.7 + 2 + 1)
    rest = 1 - (2 * 0.8 + 1) / (1.3 + 1 + 1)
    dice, cross = (lesion + rest) / 2, -(math.log(0.9) + math.log(0.8) + math.log(0.6)) / 3
    for share in (0.25, 1.0):
        task = Segmentation(2).trained_by(TrainingLoss.of(LossConfig(dice=share), ["rest", "lesion"]))
        expected = share * dice + (1 - share) * cross
        assert task.image_losses(outputs, masks).item() == pytest.approx(expected, rel=ROUNDING)
        assert task.scored(outputs, masks)[0].item() == pytest.approx(cross, rel=ROUNDING)


def test_the_dice_loss_of_void_is_0_and_falls_where_a_class_is_missing() -> None:
    masks = torch.zeros(2, 3, 3, dtype=torch.uint8)
    masks[1] = VOID
    outputs = torch.zeros(2, 2, 3, 3, requires_grad=True)
    losses = Segmentation(2).trained_by(TrainingLoss(dice=1.0)).image_losses(outputs, masks)
    (slopes,) = torch.autograd.grad(losses.sum(), outputs)
    assert losses[1].item() == 0
    assert not slopes[1].any()
    assert (slopes[0, 1] > 0).all()  # the lower the class that no pixel has, the lower the loss


@pytest.mark.parametrize("more", [{"focal_gamma": 2.0}, {"class_weights": {"sea": 2.0}}])
def test_what_is_of_cross_entropy_goes_with_a_share_of_dice_only(more: dict[str, Any]) -> None:
    TrainingLoss.of(LossConfig(dice=0.5, **more), ["sea", "land"])
    with pytest.raises(ValueError, match=r"loss\.dice is 1, so there is no cross-entropy"):
        TrainingLoss.of(LossConfig(dice=1.0, **more), ["sea", "land"])


def test_smoothing_and_focusing_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"loss.focal_gamma and augment.label_smoothing both say"):
        TrainingLoss.of(LossConfig(focal_gamma=2), CLASSES, label_smoothing=0.1)


@pytest.mark.parametrize("words", [{"focal_gamma": 2.0}, {"absent_gamma": 4.0}, {"absent_margin": 0.1}])
def test_mixed_labels_and_focusing_exclude_each_other(words: dict[str, float]) -> None:
    with pytest.raises(
        ValueError, match=r"labels that are true or not, .* set augment.mixup and augment.cutmix"
    ):
        TrainingLoss.of(LossConfig(**words), CLASSES, mixes=True)  # type: ignore[arg-type]


def test_several_mixed_labels_have_the_mixture_of_both_losses_and_no_weights_by_fedir() -> None:
    draw = torch.Generator().manual_seed(3)
    outputs = torch.randn(6, 3, generator=draw)
    labels, others, share = torch.randint(0, 2, (6, 3), generator=draw), torch.arange(5, -1, -1), 0.3
    weights = torch.tensor([1.0, 3.0, 0.5])
    task = MultiLabel().trained_by(TrainingLoss(weights=weights, mixes=True))
    own, other = (task.image_losses(outputs, targets) for targets in (labels, labels[others]))
    found = task.image_losses(outputs, share * labels + (1 - share) * labels[others])
    torch.testing.assert_close(found, share * own + (1 - share) * other)
    with pytest.raises(ValueError, match=r"federated.reweight weights present and absent labels differently"):
        task.reweighted()


def test_the_default_is_plain() -> None:
    assert TrainingLoss.of(LossConfig(), CLASSES).is_plain
    assert PLAIN.is_plain
    for words in ({"focal_gamma": 1.0}, {"absent_margin": 0.1}, {"class_weights": WEIGHTS}):
        assert not TrainingLoss.of(LossConfig(**words), CLASSES).is_plain
    assert not TrainingLoss.of(LossConfig(), CLASSES, mixes=True).is_plain
