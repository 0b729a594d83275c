"""The rows of NIID-Bench and MOON do what a plain loop of torch does, written from the protocols alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.core.config.benchmark import Run
from benchmarks.core.experiment import build_model
from benchmarks.core.federated import run_context, setup, training_data
from benchmarks.published.rows import read_row
from benchmarks.visual_classification.config import VISION, Config
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.models.small import lenet, moon_cnn
from pfl_ext.tasks.single_label import SingleLabel

SIZES = (70, 64, 20)
RATE, MOMENTUM, DECAY, ROUNDS = 0.01, 0.9, 1e-5, 2
MU = 1.0
"""FedProx's mu here: what the rows' own mu changes in two rounds is hardly more than rounding."""
UNIT = 2.0**-24
SMALL = (
    f"--federated.num_rounds={ROUNDS}",
    "--federated.cohort_size=3",
    "--local.num_epochs=2",
    "--data.partition=none",
)
ROWS = {
    "fedavg": "niid-fedavg-dirichlet-fn",
    "fedprox": "niid-fedprox-dirichlet-fn",
    "fednova": "niid-fednova-dirichlet-fn",
    "scaffold": "niid-scaffold-dirichlet-fn",
    "moon": "moon-moon-dirichlet",
}
MORE = {"fedprox": [f"--federated.mu={MU}"], "moon": ["--model.normalisation=none"]}
"""The images of `Store` have no mean and deviation of their own."""


@dataclass
class Store:
    """Images that are a function of the row, in ten classes."""

    user_ids: Sequence[str] = tuple(f"user-{u}" for u in range(len(SIZES)))
    user_offsets: Any = field(default_factory=lambda: np.cumsum([0, *SIZES]).astype(np.int64))

    def read(self, rows: Any) -> tuple[Any, Any]:
        draws = [np.random.default_rng(row).integers(0, 256, (32, 32, 3)).astype(np.uint8) for row in rows]
        return np.array(draws, np.uint8).reshape(-1, 32, 32, 3), self.targets(rows)

    def targets(self, rows: Any) -> Any:
        return np.eye(10, dtype=np.uint8)[np.asarray(rows) * 7 % 10]


def trained(run: Run[Config]) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], FederatedImageDataset]:
    """The weights before the first round, those after each, and the users."""
    task = SingleLabel()
    module = build_model(run.config, 10, None, task)
    users = training_data(run, Store(), task)
    start = {name: p.detach().clone() for name, p in module.backbone.named_parameters()}
    algorithm = run.config.federated.chosen.start(
        run_context(run, setup(run.config, module, users), lambda model: None)
    )
    state, after = algorithm.init(run.config.seed), []
    for number in range(ROUNDS):
        state, _ = algorithm.round(state, number)
        after.append({name: p.detach().clone() for name, p in module.backbone.named_parameters()})
    if algorithm.engine is not None:
        algorithm.engine.close()
    return start, after, users


def seen(images: Tensor, crops: Tensor) -> Tensor:
    """Reflected by four pixels, cropped, mirrored; in 0..1 without mean and deviation."""
    padded = F.pad(images.permute(0, 3, 1, 2).double() / 255, (4, 4, 4, 4), "reflect")
    out = []
    for image, (top, left, height, width, mirrored, upside_down) in zip(padded, crops.long().tolist()):
        assert (height, width, upside_down) == (32, 32, 0)
        part = image[:, top + 4 : top + 36, left + 4 : left + 36]
        out.append(part.flip(2) if mirrored else part)
    return torch.stack(out)


def contrastive(net: nn.Module, received: nn.Module, before: nn.Module, x: Tensor) -> Tensor:
    """The authors' term: the cross-entropy of the cosines over tau, of which the first is right."""
    networks = ([*network.children()][:-1] for network in (net, received, before))
    z, *others = (nn.Sequential(*layers)(x) for layers in networks)
    logits = torch.stack([F.cosine_similarity(z, other.detach(), dim=1) / 0.5 for other in others], 1)
    return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


def plain(
    start: dict[str, Tensor], users: FederatedImageDataset, algorithm: str, off: float = 0.0
) -> list[dict[str, Tensor]]:
    """The server's weights after each round, in float64; ``off``: by which the first are wrong."""
    net = (moon_cnn if algorithm.startswith("moon") else lenet)(10, 32).double()
    before: dict[int, nn.Module] = {}
    draw = torch.Generator().manual_seed(1)
    at = {
        name: p.double() * (1 + off * (2 * torch.rand(p.shape, generator=draw, dtype=torch.float64) - 1))
        for name, p in start.items()
    }
    c = {name: torch.zeros_like(p) for name, p in at.items()}
    own = [{name: torch.zeros_like(p) for name, p in at.items()} for _ in SIZES]
    shares, after = [size / sum(SIZES) for size in SIZES], []
    for number in range(ROUNDS):
        users.set_round(number)
        moves, changes, counts = [], [], []
        for user in range(len(SIZES)):
            net.load_state_dict(at)
            received = copy.deepcopy(net)
            others = received, before.get(user, received)
            optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
            data, steps = users.user_dataset(user), 0
            for _ in range(2):
                for images, targets, crops in data.iter(64):
                    loss = F.cross_entropy(net(seen(images, crops)), targets.argmax(1))
                    if algorithm == "fedprox":
                        away = sum((p - at[name]).square().sum() for name, p in net.named_parameters())
                        loss = loss + MU / 2 * away
                    if algorithm == "moon":
                        loss = loss + 5.0 * contrastive(net, *others, seen(images, crops))
                    optimizer.zero_grad()
                    torch.autograd.backward([loss])
                    optimizer.step()
                    steps += 1
                    if algorithm == "scaffold":
                        with torch.no_grad():
                            for name, p in net.named_parameters():
                                p.sub_(RATE * (c[name] - own[user][name]))
            before[user] = copy.deepcopy(net)
            assert steps == 2 * math.ceil(SIZES[user] / 64), "the last smaller batch is kept"
            moves.append({name: at[name] - p.detach() for name, p in net.named_parameters()})
            changes.append({name: moves[-1][name] / (steps * RATE) - c[name] for name in at})
            counts.append((steps - MOMENTUM * (1 - MOMENTUM**steps) / (1 - MOMENTUM)) / (1 - MOMENTUM))
        scales = [1.0] * len(SIZES)
        if algorithm == "fednova":
            effective = sum(share * count for share, count in zip(shares, counts))
            scales = [effective / count for count in counts]
        for name in at:
            at[name] = at[name] - sum(s * k * m[name] for s, k, m in zip(shares, scales, moves))
            c[name] = c[name] + sum(share * change[name] for share, change in zip(shares, changes))
            for mine, change in zip(own, changes):
                mine[name] = mine[name] + change[name]
        after.append(dict(at))
    return after


def gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float((one[name].double() - other[name].double()).square().sum()) for name in one))


@pytest.mark.parametrize(("algorithm", "engine"), [*((name, "fast") for name in ROWS), ("scaffold", "stock")])
def test_rounds_are_those_of_a_plain_loop(algorithm: str, engine: str) -> None:
    """As far as rounding in float32 allows: what weights that are off by it would change (`rounding_of`)."""
    row = read_row(ROWS[algorithm])
    runtime = (f"--runtime.engine={engine}", "--runtime.device=cpu")
    run = VISION.parse([*row.words(0), *SMALL, *MORE.get(algorithm, []), *runtime])
    start, ours, users = trained(run)
    theirs = plain(start, users, algorithm)
    widest = max(m.weight[0].numel() for m in lenet(10, 32) if isinstance(m, nn.Conv2d | nn.Linear))
    wrong = plain(start, users, algorithm, off=math.sqrt(widest) * UNIT)
    zero = {name: torch.zeros_like(p) for name, p in start.items()}
    steps = 2 * sum(math.ceil(size / 64) for size in SIZES)
    for number, (mine, exact, moved) in enumerate(zip(ours, theirs, wrong), 1):
        allowed = 2 * gap(exact, moved) + 2 * math.sqrt(number * steps) * UNIT * gap(exact, zero)
        assert gap(mine, exact) <= allowed
    other = plain(start, users, {"fedavg": "fedprox", "moon": "moon without mu"}.get(algorithm, "fedavg"))[-1]
    assert gap(other, theirs[-1]) > allowed, "another algorithm would be seen"


def test_the_protocol_of_moon() -> None:
    rows = {name: read_row(f"moon-{name}-dirichlet") for name in ("fedavg", "fedprox", "moon")}
    configs = {name: VISION.parse(row.words(1)).config for name, row in rows.items()}
    niid = VISION.parse(read_row("niid-fedavg-dirichlet-nb").words(1)).config
    for name, config in configs.items():
        assert (config.local, config.augment, config.server) == (niid.local, niid.augment, niid.server)
        assert config.data.partition == niid.data.partition == "lda-legacy-0.5-clients-10-seed-1"
        assert (config.model.arch, config.model.normalisation) == ("moon_cnn", "data")
        assert (config.federated.num_rounds, config.federated.cohort_size) == (100, 10)
        assert (config.federated.algorithm, rows[name].scored) == (name, "last round")
    assert configs["fedprox"].federated.mu == 0.01
    options = configs["moon"].federated.options or {}
    assert (options["mu"], options["temperature"], options["held_out"]) == (5, 0.5, 0)
