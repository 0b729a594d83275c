"""The engine's parts by themselves: users' gradients from one pass, padding, memory, vectors."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from pfl_ext.engine.gradients import Explicit, Gradient, Users, Weight, squared_norm
from pfl_ext.engine.graphs import StepGraphs, padded
from pfl_ext.engine.lane import Lane
from pfl_ext.engine.layout import Layout
from pfl_ext.engine.one_step import Sums, _Adding
from pfl_ext.engine.probe import activation_bytes, group_size
from pfl_ext.engine.short_weights import ShortWeights
from pfl_ext.engine.tape import TapedNetwork
from pfl_ext.engine.training import Batch, LocalTraining
from pfl_ext.engine.trim import Trimmed, _cut, _same_outputs, live_taps
from pfl_ext.models.classifier import ImageClassifier, build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.privacy.mechanisms import LARGEST, Clipping
from pfl_ext.tasks.multi_label import MultiLabel
from pfl_ext.tasks.task import Task
from tests.closeness import assert_close_as_vector
from tests.pfl_ext.engine.setting import (
    LABELS,
    SIDE,
    TASKS,
    in_float64,
    small_backbone,
    targets_for,
    without_noise,
)

HOW = LocalTraining(0.1, 2, 4, "variable", 0.5, 0.0, None)
UNIT = 2.0**-24
RESNET18 = 2 * 20 * 68
"""Roundings of twenty layers on two sides, a sum of 4,608 terms counting its square root."""


def resnet(norm: str) -> nn.Module:
    weights = torch.Generator().manual_seed(1)
    return build_backbone(
        ModelConfig(input_size=64, init="keras", pretrained=norm == "frozen_batch"), LABELS, weights
    )


@pytest.mark.parametrize("norm, side, channels_last", [("group", 32, True), ("frozen_batch", 64, False)])
def test_users_gradients_come_out_of_one_pass(norm: str, side: int, channels_last: bool) -> None:
    """The pass is in float64, so that no ReLU depends on rounding; the loss and the users' sums are not."""
    backbone = resnet(norm).double()
    images = torch.randn(6, 3, side, side, generator=torch.Generator().manual_seed(2)).double()
    if channels_last:
        backbone = backbone.to(memory_format=torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)
    targets = (torch.arange(6 * LABELS).view(6, LABELS) % 3 == 0).float()
    users = Users((0, 1, 3, 6), torch.device("cpu"))
    weights = torch.tensor([1, 1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3])
    found: dict[str, Gradient] = {}
    losses = partial(MultiLabel().image_losses, targets=targets)
    net = TapedNetwork(backbone)
    net.run(images, losses, users, weights, found.__setitem__, contextlib.nullcontext())
    names = [name for name, _ in backbone.named_parameters()]
    of_users = [
        torch.autograd.grad(
            MultiLabel().loss(backbone(images[span]), targets[span]), list(backbone.parameters())
        )
        for span in users.spans
    ]
    ways = {gradient.by_gram for gradient in found.values() if isinstance(gradient, Weight)}
    assert ways == {True, False}, "both ways to a norm are meant to be tried"
    coefficients = torch.tensor([0.5, -2.0, 1.0], dtype=torch.float64)
    roundings = (
        2 * 4 + (3 * (side // 2) ** 2) ** 0.5
    )  # the losses of both; a sum over three images' positions
    for i, name in enumerate(names):
        theirs = torch.stack([user[i] for user in of_users])
        norms = theirs.flatten(1).norm(dim=1)
        bounds = found[name].norm_bounds()
        assert bounds is None or bool((bounds >= norms * (1 - roundings * UNIT)).all())
        gaps = (found[name].squared_norms().detach().sqrt() - norms).abs()
        assert bool((gaps <= (2.0**-16 + roundings * UNIT) * norms).all()), name  # as squared_norm promises
        expected = (coefficients.view(3, *[1] * (theirs.ndim - 1)) * theirs).sum(0)
        total = torch.zeros_like(expected, dtype=torch.float32)
        found[name].add_to(total, coefficients)
        assert_close_as_vector(total, expected, roundings)


@pytest.mark.parametrize("positions", [1, 2, 3])
def test_norms_of_users_with_one_image_by_gram_matrices(positions: int) -> None:
    draw = torch.Generator().manual_seed(positions)
    x, e = (torch.randn(5, positions, n, generator=draw) for n in (30, 40))
    gradient = Weight(nn.Linear(30, 40, bias=False), x, e, Users(tuple(range(6)), x.device))
    assert gradient.by_gram
    expected = torch.einsum("upo,upi->uoi", e.double(), x.double()).flatten(1).norm(dim=1)
    assert_close_as_vector(gradient.squared_norms().sqrt(), expected, 30 + 40)


def test_taping_leaves_the_network_and_its_gradients_alone() -> None:
    backbone = small_backbone()
    before = [p.detach().clone() for p in backbone.parameters()]
    net = TapedNetwork(backbone)
    x = torch.rand(2, 3, 10, 10)
    users, ones = Users((0, 2), x.device), torch.ones(2) / 2
    net.run(
        x, lambda outputs: outputs.square().sum(1), users, ones, lambda *_: None, contextlib.nullcontext()
    )
    assert all(torch.equal(a, b) for a, b in zip(before, backbone.parameters()))
    assert all(p.grad is None and p.requires_grad for p in backbone.parameters())
    with torch.no_grad():
        next(iter(backbone.parameters())).zero_()
    assert not net.backbone[0].weight.any(), "the copy shares the weights"  # type: ignore[index]


@pytest.mark.parametrize("last", ["linear", "norm"])
def test_under_autocast_a_taped_network_computes_what_the_network_does(last: str) -> None:
    """To the bit: its layers are called by themselves, where autocast does not see them."""
    autocast = torch.autocast("cpu", torch.bfloat16)
    norm_at_the_end = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Flatten())
    backbone = small_backbone() if last == "linear" else norm_at_the_end
    x = torch.rand(2, 3, 10, 10)
    with autocast:
        expected = backbone(x)
    seen = []

    def losses(outputs: torch.Tensor) -> torch.Tensor:
        seen.append(outputs.detach())
        return outputs.float().sum(1)

    TapedNetwork(backbone).run(x, losses, Users((0, 2), x.device), torch.ones(2), lambda *_: None, autocast)
    assert seen[0].dtype == expected.dtype == torch.bfloat16
    assert torch.equal(seen[0], expected)


def weight_gradients(norms: list[float], draw: torch.Generator) -> Weight:
    """Gradients of a linear layer's weight, one image a user, with exactly these norms."""
    directions = [torch.nn.functional.normalize(torch.randn(len(norms), n, generator=draw)) for n in (3, 4)]
    x, e = directions[0] * torch.tensor(norms)[:, None], directions[1]
    users = Users(tuple(range(len(norms) + 1)), x.device)
    return Weight(nn.Linear(3, 4, bias=False), x, e, users)


def sums_of(**shapes: tuple[int, ...]) -> Sums:
    views = {f"backbone.{name}": torch.zeros(shape) for name, shape in shapes.items()}
    return Sums(torch.zeros(1), views, [])


@pytest.mark.parametrize("norms", [[0.1, 10], [10, 0.1], [0.1, 0.2], [10, 20], [0.2, 10, 0.3], [9, 0.1, 9]])
def test_each_users_clipping_depends_on_its_own_norm_alone(norms: list[float]) -> None:
    """A bound on the norms saves them only where no user of the group can exceed ``max_norm``, here 0.5."""
    draw = torch.Generator().manual_seed(len(norms))
    gradient = weight_gradients(norms, draw)
    bounds = gradient.norm_bounds()
    assert bounds is not None
    assert bool(((bounds > 0.5) == (torch.tensor(norms) > 0.5)).all()), "the bounds are on both sides"
    weights = 1 + torch.rand(len(norms), generator=draw, dtype=torch.float64)
    sums = sums_of(w=(4, 3))
    _Adding(HOW, weights, None, sums).add("w", gradient)
    each = torch.einsum("ud,up->udp", gradient.e.double(), gradient.x.double())
    factors = (0.5 / torch.tensor(norms, dtype=torch.float64)).clamp(max=1)
    expected = -HOW.learning_rate * torch.einsum("u,udp->dp", weights * factors, each)
    gap = (sums.views["backbone.w"].double() - expected).norm()
    assert float(gap) <= 2**-18 * float(expected.norm())  # float32 products of a few numbers


class Refused(NamedTuple):
    users: float
    refused: float


def counted(sums: Sums) -> Refused:
    """Users and refused users of the tallies."""
    tally = torch.stack(sums.tally).sum(0)
    return Refused(float(tally[0]), float(tally[2]))


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("what", [float("inf"), float("-inf"), float("nan"), 2 * LARGEST])
@pytest.mark.parametrize("variable", ["w", "b"])
def test_one_variable_that_is_not_finite_refuses_its_user_and_nobody_else(
    variable: str, what: float, clipping: Clipping
) -> None:
    """All of that user's variables, as its norm is unknown; the others send what they send without it.

    A norm above `LARGEST` counts as not finite: its factor would lose digits as float32.
    """
    weights = torch.ones(3, dtype=torch.float64)

    def added(bad: bool) -> Sums:
        draw = torch.Generator().manual_seed(0)
        weight, bias = weight_gradients([1.0, 2.0, 3.0], draw), torch.rand(3, 4, generator=draw)
        if bad:
            (weight.x if variable == "w" else bias)[1, 2] = what
        else:
            weight.x[1], bias[1] = 0, 0
        sums = sums_of(w=(4, 3), b=(4,))
        adding = _Adding(HOW, weights, without_noise(0.01, clipping), sums)
        adding.keep("w", weight)
        adding.keep("b", Explicit(bias))
        adding.add_kept()
        return sums

    ours, without = added(True), added(False)
    assert counted(ours) == Refused(3, 1)
    assert counted(without) == Refused(3, 0)
    for name, total in without.views.items():
        assert total.any()
        assert torch.equal(ours.views[name], total), name


def lane_of(task: Task = TASKS[0]) -> tuple[Lane, ImageClassifier]:
    module = ImageClassifier(small_backbone(), input_size=10, exact_crops=True, task=task)
    layout = Layout.of(module)
    first = ShortWeights.of(module, layout, layout.gather(module), None)
    return Lane(module, layout, first, torch.float32), module


def lane_batch() -> Batch:
    """Three images of one step."""
    draw = torch.Generator().manual_seed(5)
    images = torch.randint(0, 256, (3, SIDE, SIDE, 3), dtype=torch.uint8, generator=draw)
    settled, shares = TASKS[0].settled(targets_for(TASKS[0], 3, draw))
    return Batch(images, settled, torch.tensor([[1.0, 2, 10, 10, 1, 0]]).repeat(3, 1), shares)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_user_without_images_sends_nothing_whoever_trained_in_the_lane_before(scaled: bool) -> None:
    lane, _ = lane_of()
    scaling = without_noise(0.01) if scaled else None
    lane.clear()
    lane.train([lane_batch(), lane_batch()], HOW)
    lane.add(1.0, scaling)
    before = lane.sums.vector.clone()
    assert before.any()
    lane.train([], HOW)
    lane.add(1.0, scaling)
    assert torch.equal(lane.sums.vector, before)
    lane.train([lane_batch()], HOW)
    lane.train([], HOW)
    assert not any(t.any() for t in lane.update().values())


def test_a_lane_refuses_a_user_with_one_variable_that_is_not_finite() -> None:
    lane, _ = lane_of()
    lane.clear()
    for position in (0, len(lane._local) - 1):
        lane.train([lane_batch()], HOW)
        lane._local[position] = float("inf")
        lane.add(1.0, without_noise(0.01))
    assert not lane.sums.vector.any()
    assert counted(lane.sums) == Refused(2, 2)


@pytest.mark.parametrize("size", range(1, 17))
def test_padding_a_batch_changes_no_step(size: int) -> None:
    task: Task = TASKS[size % 3]
    draw = torch.Generator().manual_seed(size)
    images = torch.randint(0, 256, (size, SIDE, SIDE, 3), dtype=torch.uint8, generator=draw)
    targets = targets_for(task, size, draw)
    crops = torch.tensor([[1.0, 2, 10, 10, 1, 0]]).repeat(size, 1)
    (plain, module), (graphed, _) = lane_of(task), lane_of(task)
    local = LocalTraining(0.1, 2, 16, "variable", 0.5, 0.2, None, momentum=0.5, weight_decay=0.01)
    graphed._graphs = StepGraphs(torch.device("cpu"), graphed._written)

    def first(n: int) -> Batch:
        settled, shares = task.settled(targets[:n])
        return Batch(images[:n], settled, crops[:n], shares)

    batch, short = first(size), first(1)
    graphed.rehearse(local, short)
    for lane in (plain, graphed):
        lane.train([batch, short, batch], local)
    assert_close_as_vector(graphed._local, plain._local, 2 * 3 * 9)  # three steps of sums of up to 72 terms
    assert size <= padded(size) <= max(1, 1.34 * size)
    again = [p.detach().clone() for p in module.parameters()]
    plain.train([batch], local)
    assert all(torch.equal(a, b) for a, b in zip(again, module.parameters())), "only local weights move"


def test_a_vector_holds_the_parameters_in_their_own_formats() -> None:
    module = resnet("group").to(memory_format=torch.channels_last)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    layout = Layout.of(module)
    vector = layout.gather(module)
    assert vector.numel() == layout.num_parameters == sum(p.numel() for p in before.values())
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.ndim != 4 or parameter.is_contiguous(memory_format=torch.channels_last)
    vector.zero_()
    assert not any(p.any() for p in module.parameters())


def test_a_group_is_what_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ImageClassifier(resnet("group"), task=MultiLabel(), input_size=64, exact_crops=True)
    kept = activation_bytes(module, HOW)
    assert 1e6 < kept < 1e7  # ResNet-18 at 64 pixels has some 2.5 MB of outputs; ReLUs work in place
    big = ImageClassifier(resnet("group"), task=MultiLabel(), input_size=128, exact_crops=True)
    assert activation_bytes(big, HOW) == pytest.approx(4 * kept, rel=0.2)
    assert 1 <= group_size(big, HOW, 1, 32) <= group_size(module, HOW, 1, 32)
    monkeypatch.setattr("pfl_ext.engine.probe.CPU_BYTES", kept)
    assert group_size(module, HOW, 1, 32) == 1


@given(
    st.integers(1, 9), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2), st.integers(1, 2), st.data()
)
def test_dead_taps_are_those_whose_weight_does_not_matter(
    size: int, kernel: int, stride: int, padding: int, dilation: int, data: st.DataObject
) -> None:
    assume(size + 2 * padding >= dilation * (kernel - 1) + 1)
    x, weight = torch.ones(1, 1, size), torch.ones(1, 1, kernel, requires_grad=True)
    total = nn.functional.conv1d(x, weight, None, stride, padding, dilation).sum()
    (gradient,) = torch.autograd.grad(total, [weight])
    live = [k for k in range(kernel) if gradient[0, 0, k]]
    found = live_taps(size, kernel, stride, padding, dilation)
    assert set(live) <= set(found)
    assert not live or (found[0], found[-1]) == (live[0], live[-1])


def test_a_trimmed_network_is_the_same_with_a_third_of_the_weights() -> None:
    central = ImageClassifier(in_float64(resnet("group")), task=MultiLabel(), input_size=32, exact_crops=True)
    trimmed = Trimmed(central)
    trimmed.refresh()
    x = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert_close_as_vector(trimmed.model.backbone(x), central.backbone(x), RESNET18)
    sizes = [sum(p.numel() for p in m.parameters()) for m in (trimmed.model, central)]
    assert sizes[0] < 0.4 * sizes[1]
    losses = central.backbone(x).square().sum()
    theirs = dict(
        zip(dict(central.named_parameters()), torch.autograd.grad(losses, list(central.parameters())))
    )
    losses = trimmed.model.backbone(x).square().sum()
    names = [name for name, _ in trimmed.model.named_parameters()]
    ours = dict(zip(names, torch.autograd.grad(losses, list(trimmed.model.parameters()))))
    whole = trimmed.expand(ours)
    for name, gradient in theirs.items():
        assert_close_as_vector(whole[name], gradient, 3 * RESNET18)  # there, back, and a sum over positions
    wide = ImageClassifier(resnet("group"), task=MultiLabel(), input_size=64, exact_crops=True)
    assert Trimmed(wide).model is wide, "at 64 pixels every tap is live"


def test_a_kernel_is_trimmed_on_each_side_by_itself() -> None:
    """The middle row and the middle three columns of a kernel of 3 x 5 taps are kept."""
    layer = nn.Conv2d(1, 1, (3, 5), padding=(1, 2))
    sides = (slice(1, 2), slice(1, 4))
    taps = _cut(layer, sides)
    assert (taps.kernel_size, taps.padding) == ((1, 3), (0, 1))
    assert torch.equal(taps.weight, layer.weight[:, :, 1:2, 1:4])


@pytest.mark.parametrize("size", [1, 1023, 1024, 5000])
def test_norms_are_exact_to_their_margin(size: int) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(size))
    exact = float(x.double().square().sum())
    assert float(squared_norm(x)) == pytest.approx(exact, rel=2.0**-15)
    x[size // 2] = float("nan")
    assert torch.isnan(squared_norm(x))


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel", [3, 5])
def test_taps_are_cut_where_the_outputs_stay_as_many(kernel: int, stride: int, dilation: int) -> None:
    seen = set()
    for size in range(1, 9):
        for padding in range(1, dilation * (kernel - 1) + 1):
            if size + 2 * padding < dilation * (kernel - 1) + 1:
                continue
            layer = nn.Conv2d(1, 1, kernel, stride, padding, dilation)
            taps = live_taps(size, kernel, stride, padding, dilation)
            side = slice(taps[0], taps[-1] + 1)
            less, x = padding - side.start * dilation, torch.zeros(1, 1, size, size)
            weight = layer.weight[:, :, side, side]
            same = weight.shape != layer.weight.shape and less >= 0
            if same:
                cut = nn.functional.conv2d(x, weight, None, stride, less, dilation)
                same = cut.shape == layer(x).shape
            assert _same_outputs(layer, (size, size), (side, side)) == same
            seen.add(same)
    assert True in seen
