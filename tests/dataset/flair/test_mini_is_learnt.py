"""What can be learnt from the mini data set, and what cannot."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score
from torch import nn

from dataset.arrays import BoolArray, ByteArray, Float32Array
from dataset.flair.mini import MiniSpec, draw_images, mini_index
from dataset.flair.mini_draw import _COLOURS
from dataset.store.index import DatasetIndex
from tests.dataset.flair.test_mini import dense


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Convolutions this small only get slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_small_network_learns_the_labels_but_no_rule_of_colour_does() -> None:
    spec = MiniSpec(800, 5, 90, seed=3, max_user_images=40)
    index = mini_index(spec)
    train, test = (images_and_labels(spec, index, name) for name in ("train", "test"))
    frequent = test[1].mean(0) > 0.1
    network = trained(*train)
    with torch.no_grad():
        scores = network(as_input(test[0])[:, :, 2:30, 2:30]).numpy()
    precision, prevalence = macro_ap(test[1], scores, frequent), float(test[1][:, frequent].mean())
    assert prevalence < 0.4
    assert precision > prevalence + 0.3
    # The right image has the right labels: a neighbour's are predicted far worse.
    assert macro_ap(np.roll(test[1], 1, 0), scores, frequent) < prevalence + 0.15
    colours = [as_input(images).mean((2, 3)).numpy() for images, _ in (train, test)]
    design = [np.concatenate([colour, colour**2, np.ones((len(colour), 1))], 1) for colour in colours]
    linear = design[1] @ np.linalg.lstsq(design[0], train[1], rcond=None)[0]
    assert macro_ap(test[1], linear, frequent) < precision - 0.2
    pixels = test[0].reshape(len(test[0]), -1, 3).astype(np.float32)
    nearest = np.stack([-np.abs(pixels - colour).sum(-1).min(1) for colour in _COLOURS], 1)
    assert macro_ap(test[1], nearest, frequent) < precision - 0.15  # though it knows the marks' colours


Images = ByteArray


def images_and_labels(spec: MiniSpec, index: DatasetIndex, name: str) -> tuple[Images, Images]:
    split = index.splits[name]
    return draw_images(spec, index, name, np.arange(split.num_images)), dense(split)


def as_input(images: Images) -> torch.Tensor:
    return (torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - 0.45) / 0.23


def macro_ap(labels: Images, scores: Float32Array, columns: BoolArray) -> float:
    return float(average_precision_score(labels[:, columns], scores[:, columns], average="macro"))


def trained(images: Images, labels: Images, epochs: int = 3) -> nn.Module:
    """Three convolutions, on random crops of 28 of 32 with both flips."""

    def block(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(before, after, 3, 2, 1), nn.GroupNorm(8, after), nn.ReLU())

    with torch.random.fork_rng():
        torch.manual_seed(0)  # the fork gives the generator back as it was
        blocks = [block(3, 24), block(24, 48), block(48, 96)]
        network = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 17))
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    draws = np.random.default_rng(0)
    targets = torch.from_numpy(labels).float()
    for _ in range(epochs):
        for rows in np.array_split(draws.permutation(len(images)), len(images) // 32):
            top, left = draws.integers(0, 5, 2)
            batch = as_input(images[rows])[:, :, top : top + 28, left : left + 28]
            batch = batch.flip([axis for axis in (2, 3) if draws.random() < 0.5])
            loss = nn.functional.binary_cross_entropy_with_logits(network(batch), targets[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return network
