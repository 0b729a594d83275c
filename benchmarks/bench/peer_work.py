"""What every side of `benchmarks.bench.peers` trains: users' images in one file, a network, local steps.

Only torch and torchvision are needed, so that another simulator's processes can import it: the networks of
the two benchmarks as people write them by hand, and a user's epochs of plain SGD.

Shape letters: N images of all users, S pixels of a side, K labels.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn


@dataclass(frozen=True)
class Work:
    """A benchmark's local training."""

    network: str
    """lenet or resnet18, which has GroupNorm of 32 groups."""
    labels: int
    is_multi_label: bool
    """Whether targets are several labels (binary cross-entropy) or one class (cross-entropy)."""
    cohort: int
    """Users of a round."""
    epochs: int
    batch_size: int
    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0


class Users:
    """The images of all users: uint8 ``[N, 3, S, S]``, float32 targets ``[N, K]``, and who owns which."""

    def __init__(self, folder: Path) -> None:
        self.work = Work(**json.loads((folder / "work.json").read_text(encoding="utf-8")))
        self.images = np.load(folder / "images.npy", mmap_mode="r")
        self.targets = np.load(folder / "targets.npy", mmap_mode="r")
        self.offsets = np.load(folder / "offsets.npy")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def of(self, user: int) -> tuple[Tensor, Tensor]:
        """Images and targets of a user."""
        rows = slice(self.offsets[user], self.offsets[user + 1])
        return torch.from_numpy(self.images[rows].copy()), torch.from_numpy(self.targets[rows].copy())


def write(folder: Path, work: Work, images: Tensor, targets: Tensor, offsets: Tensor) -> None:
    """The files of `Users`, into a folder that is there."""
    (folder / "work.json").write_text(json.dumps(asdict(work)), encoding="utf-8")
    for name, tensor in (("images", images), ("targets", targets), ("offsets", offsets)):
        np.save(folder / f"{name}.npy", tensor.numpy())


def network(work: Work) -> nn.Module:
    """The network of a work, as people write it down, with torch's initialisation."""
    if work.network == "resnet18":
        norm = partial(nn.GroupNorm, 32)
        model: nn.Module = torchvision.models.resnet18(norm_layer=norm, num_classes=work.labels)
        return model
    assert work.network == "lenet"
    return nn.Sequential(
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, work.labels),
    )


def train_user(model: nn.Module, users: Users, user: int, seed: int) -> int:
    """A user's local epochs; its number of images."""
    work, (images, targets) = users.work, users.of(user)
    optimiser = torch.optim.SGD(
        model.parameters(), work.learning_rate, work.momentum, weight_decay=work.weight_decay
    )
    draw = torch.Generator().manual_seed(seed)
    for _ in range(work.epochs):
        for rows in torch.randperm(len(images), generator=draw).split(work.batch_size):  # type: ignore[no-untyped-call]
            logits = model(images[rows].float() / 255)
            if work.is_multi_label:
                loss = F.binary_cross_entropy_with_logits(logits, targets[rows])
            else:
                loss = F.cross_entropy(logits, targets[rows])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return len(images)


def plain_rounds(users: Users, rounds: int) -> list[float]:
    """Seconds of each round of a plain loop: users one after another, their mean weighted by images."""
    model, seconds = network(users.work), list[float]()
    for number in range(rounds):
        begin = time.perf_counter()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        total, weight = {name: torch.zeros_like(tensor) for name, tensor in before.items()}, 0
        draw = torch.Generator().manual_seed(number)
        for user in torch.randperm(len(users), generator=draw)[: users.work.cohort].tolist():
            model.load_state_dict(before)
            count = train_user(model, users, user, number)
            weight += count
            for name, tensor in model.state_dict().items():
                total[name] += count * tensor
        model.load_state_dict({name: tensor / weight for name, tensor in total.items()})
        seconds.append(time.perf_counter() - begin)
    return seconds
