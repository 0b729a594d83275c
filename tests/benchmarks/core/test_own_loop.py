"""A new algorithm with a loop of its own, which is all in this file: what it gets from the house."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pfl_ext as pfl_ext  # before pfl, see there

# isort: split
import numpy as np
import pytest
import torch
from pfl.model.pytorch import PyTorchModel
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from benchmarks.core.config.digests import digest
from benchmarks.core.config.sections import FederatedConfig
from benchmarks.core.config.trees import merge
from benchmarks.core.federated import training_data
from benchmarks.flair.config import parse
from pfl_ext.algorithms.algorithm import Algorithm, RunContext, register
from pfl_ext.algorithms.clients import Clients, Weights
from pfl_ext.configs import STRICT
from tests.benchmarks.conftest import Refused, Train, killed_and_resumed
from tests.benchmarks.core import quadratics
from tests.benchmarks.core.quadratics import Direct, Users, run_of, trajectory, vector
from tests.benchmarks.run_files import last_checkpoint, results


@dataclass(frozen=True, config=STRICT)
class GossipOptions:
    mixing: Annotated[float, Field(ge=0, le=0.5)] = 0.25
    """How far each model moves towards the other after a round."""


@register("gossip")
class Gossip(Algorithm[list[Weights]]):
    """Two models, each trained by half of the cohort, tell each other where they are."""

    options = GossipOptions

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.clients, self.mixing = Clients(context), context.options.mixing

    def init(self, seed: int) -> list[Weights]:
        return [self.clients.weights(), self.clients.weights()]

    def round(self, state: list[Weights], number: int) -> tuple[list[Weights], dict[str, Any]]:
        cohort, moved, line = self.clients.cohort(number), [], {"users": 0, "images": 0}
        for place, weights in enumerate(state):
            update, seen = self.clients.mean_update(weights, cohort[place::2], number)
            moved.append({name: w + update[name] for name, w in weights.items()})
            line = {key: line[key] + seen[key] for key in line}
        return [{n: torch.lerp(a[n], b[n], self.mixing) for n in a} for a, b in (moved, moved[::-1])], line

    def model(self, state: list[Weights]) -> PyTorchModel:
        return self.clients.model({name: (state[0][name] + state[1][name]) / 2 for name in state[0]})

    def tensors(self, state: list[Weights]) -> dict[str, Tensor]:
        return {f"{place}/{name}": w for place, weights in enumerate(state) for name, w in weights.items()}

    def load(self, state: list[Weights], tensors: Mapping[str, Tensor]) -> list[Weights]:
        return [{n: tensors[f"{i}/{n}"].to(w.device) for n, w in ws.items()} for i, ws in enumerate(state)]


GOSSIP = ("--federated.algorithm=gossip", "--federated.options.mixing=0.125")


def expected(tree: dict[str, Any]) -> Any:
    """``[rounds, P]``: gossip in float64, from each user's steps by the equations."""
    run = run_of(tree)
    config, data, direct = run.config, training_data(run, Users(), quadratics.SquaredError()), Direct(run)
    start = vector(quadratics.module())
    direct.c, direct.own = (
        np.zeros_like(start),
        dict.fromkeys(range(len(quadratics.SIZES)), np.zeros_like(start)),
    )
    pair, seen = [start, start], []
    for number in range(config.federated.num_rounds):
        data.set_round(number)
        cohort, moved = data.cohort(config.federated.cohort_size).tolist(), []
        for place, x in enumerate(pair):
            users = [(u, data.user_dataset(u)) for u in cohort[place::2]]
            total = sum(len(images) for _, images in users)
            moved.append(x + sum(len(images) / total * direct.user(x, u, images)[0] for u, images in users))
        mixing = tree["federated"]["options"]["mixing"]
        pair = [(1 - mixing) * a + mixing * b for a, b in (moved, moved[::-1])]
        seen.append((pair[0] + pair[1]) / 2)
    return np.stack(seen)


@pytest.mark.parametrize("engine", ["stock", "fast"])
def test_it_trains_as_its_equations_say(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = {"federated": {"algorithm": "gossip", "options": {"mixing": 0.125}}}
    tree = merge(tree, {"federated": {"cohort_size": 4}})
    found = trajectory(run_of(tree, engine), tmp_path)
    assert quadratics.distances(found, expected(tree)).max() < quadratics.TOLERANCE
    assert "pfl's own loop" not in capsys.readouterr().err


def test_it_is_killed_and_goes_on_bit_for_bit(train: Train) -> None:
    argv = (*GOSSIP, "--federated.num_rounds=4", "--runtime.checkpoint_every=1")
    _, directory = killed_and_resumed(train, 2, *argv)
    kept = last_checkpoint(directory)
    assert any((kept[f"1/{name[2:]}"] != w).any() for name, w in kept.items() if name.startswith("0/"))
    size = sum(w.numel() * 4 for name, w in kept.items() if name.startswith("0/"))
    assert results(directory)["traffic"] == {"down": size, "up": size}


def test_its_options_are_set_in_yaml_and_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "gossip.yaml"
    path.write_text("federated:\n  algorithm: gossip\n  options:\n    mixing: 0.375\n")
    assert parse([f"--config={path}"]).config.federated.options == {"mixing": 0.375}
    for form in (["--federated.options.mixing=0.5"], ["--federated.options.mixing", "0.5"]):
        assert parse([f"--config={path}", *form]).config.federated.options == {"mixing": 0.5}
    assert parse([GOSSIP[0]]).config.federated == FederatedConfig(
        **{**vars(parse([]).config.federated), "algorithm": "gossip", "options": {"mixing": 0.25}}
    )


def test_options_that_no_algorithm_reads_leave_the_digest_alone(tmp_path: Path) -> None:
    path = tmp_path / "gossip.yaml"
    path.write_text("federated:\n  algorithm: gossip\n  options:\n    mixing: 0.375\n")
    assert digest(parse([f"--config={path}", "--mode=centralised"]).config) == digest(
        parse(["--mode=centralised"]).config
    )
    path.write_text("federated:\n  options: {}\n")
    assert digest(parse([f"--config={path}"]).config) == digest(parse([]).config)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--federated.options.mixing=0.9"], "federated.options.mixing is '0.9': "),
        (
            ["--federated.options.mixin=0.1"],
            "federated.options.mixin is not an option of gossip, which",
        ),
        (["--federated.mu=0.1"], "--federated.mu has no effect where federated.algorithm is gossip"),
        (
            ["--mode=centralised", "--federated.options.mixing=0.1"],
            "has no effect where mode is centralised: remove it, or set mode to federated",
        ),
        (["--config=pfl-r-17"], "privacy refuses federated.algorithm = gossip"),
        (
            ["--federated.weighting=users", "--local_privacy.epsilon=4"],
            "local_privacy refuses federated.algo",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(argv: list[str], message: str, refused: Refused) -> None:
    refused(message, *GOSSIP[:1], *argv)
