"""q-FFL and tilted losses: their equations in float64, FedAvg as their limit, kills, workers, refusals.

test_by_loss DATA DIRECTORY          trains it, as one of the workers of a launcher
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.core.config.trees import merge
from benchmarks.core.federated import training_data
from benchmarks.flair.config import parse
from tests.benchmarks.conftest import Refused, Train, killed_and_resumed
from tests.benchmarks.core import quadratics
from tests.benchmarks.core.quadratics import CLASSES, Array, Batch, Direct, Users, run_of, trajectory, vector
from tests.benchmarks.run_files import lines, results


def tree(name: str, weighting: str = "users", **options: float) -> dict[str, Any]:
    return {"federated": {"algorithm": name, "weighting": weighting, "options": options}}


FEDAVG = {weighting: {"federated": {"weighting": weighting}} for weighting in ("users", "images")}
TREES = {
    "qffl 0.1": tree("qffl", q=0.1),
    "qffl 1": tree("qffl", q=1.0),
    "qffl 5, images": tree("qffl", "images", q=5.0),
    "qffl 2, L 3": tree("qffl", q=2.0, lipschitz=3.0),
    "qffl 1, a part": merge(tree("qffl", q=1.0), {"federated": {"cohort_size": 3}}),
    "qffl 1, falling": merge(
        tree("qffl", q=1.0), {"local": {"schedule": "exponential", "schedule_factor": 0.5}}
    ),
    "tilted 1": tree("tilted", tilt=1.0),
    "tilted 0.5, images": tree("tilted", "images", tilt=0.5),
    "tilted -2": tree("tilted", tilt=-2.0),
    "tilted 1, a part": merge(tree("tilted", tilt=1.0), {"federated": {"cohort_size": 3}}),
}


def loss(x: Array, images: Any) -> float:
    """Mean loss of a model over a user's images, each seen once."""
    matrix, total = np.hstack([x[:-CLASSES].reshape(CLASSES, -1), x[-CLASSES:, None]]), 0.0
    for batch in (Batch.of(*batch) for batch in images.once()):
        total += float(0.5 * np.square(batch.x @ matrix.T - batch.t).sum())
    return total / len(images)


def expected(of: dict[str, Any]) -> Array:
    """``[rounds, P]`` by the papers' equations as they are printed, with models and not updates."""
    config = (chosen := run_of(of)).config
    data, direct = training_data(chosen, Users(), quadratics.SquaredError()), Direct(chosen)
    x, seen, options = vector(quadratics.module()), [], dict(config.federated.options or {})
    direct.c = np.zeros_like(x)
    direct.own = dict.fromkeys(range(len(quadratics.SIZES)), direct.c)
    for number in range(config.federated.num_rounds):
        data.set_round(number)
        rate = config.local_rate(number)
        users = [(u, data.user_dataset(u)) for u in data.cohort(config.federated.cohort_size).tolist()]
        p = np.array([len(images) if config.federated.weighting == "images" else 1.0 for _, images in users])
        p = p / p.sum()
        F = np.array([loss(x, images) for _, images in users])
        after = [x + own(direct, x, u, i, rate) for u, i in users]
        if config.federated.algorithm == "qffl":
            q, big_l = options["q"], options["lipschitz"] or 1 / rate
            D = [big_l * (x - model) for model in after]
            h = [q * f ** (q - 1) * d @ d + big_l * f**q for f, d in zip(F, D)]
            x = x - sum(w * f**q * d for w, f, d in zip(p, F, D)) / (p @ np.array(h))
        else:
            tilted = p * np.exp(options["tilt"] * F)
            x = sum(w * model for w, model in zip(tilted / tilted.sum(), after))
        seen.append(x)
    return np.stack(seen)


def own(direct: Direct, x: Array, user: int, images: Any, rate: float) -> Array:
    """A user's update by SGD at this rate, without momentum or decay."""
    local, y = direct.run.config.local, x
    for _ in range(local.num_epochs):
        for batch in (Batch.of(*batch) for batch in images.iter(local.batch_size)):
            y = y - rate * batch.gradient(y)
    return np.asarray(y - x)


BY_PFLS_LOOP = ("qffl 1, a part", "tilted 0.5, images")
"""Engines train users alike, whatever the server makes of their updates and losses: one of each kind."""


@pytest.mark.parametrize(
    ("name", "engine"), [*((name, "fast") for name in TREES), *((name, "stock") for name in BY_PFLS_LOOP)]
)
def test_it_trains_as_its_equations_say(name: str, engine: str, tmp_path: Path) -> None:
    found = trajectory(run_of(TREES[name], engine), tmp_path)
    assert quadratics.distances(found, expected(TREES[name])).max() < quadratics.TOLERANCE


@pytest.mark.parametrize("weighting", FEDAVG)
def test_without_a_tilt_it_is_fedavg(weighting: str, tmp_path: Path) -> None:
    fedavg = trajectory(run_of(FEDAVG[weighting], "fast"), tmp_path / "fedavg")
    for name, option, nothing in (("qffl", "q", 0.0), ("tilted", "tilt", 0.0), ("tilted", "tilt", 1e-9)):
        chosen = run_of(tree(name, weighting, **{option: nothing}), "fast")
        found = trajectory(chosen, tmp_path / f"{name}{nothing}")
        assert quadratics.distances(found, fedavg).max() < quadratics.TOLERANCE
    more = trajectory(run_of(tree("qffl", weighting, q=1.0), "fast"), tmp_path / "more")
    assert quadratics.distances(more, fedavg).max() > 100 * quadratics.TOLERANCE


def test_a_great_tilt_follows_the_user_with_the_greatest_loss(tmp_path: Path) -> None:
    """And exponents do not overflow."""
    chosen = run_of(merge(tree("tilted", tilt=1000.0), {"federated": {"num_rounds": 1}}))
    found = trajectory(chosen, tmp_path)[0]
    data, x = training_data(chosen, Users(), quadratics.SquaredError()), vector(quadratics.module())
    data.set_round(0)
    users = [data.user_dataset(u) for u in range(len(quadratics.SIZES))]
    worst = int(np.argmax([loss(x, images) for images in users]))
    alone = x + own(Direct(chosen), x, worst, users[worst], 0.1)
    assert np.linalg.norm(found - alone) < quadratics.TOLERANCE * np.linalg.norm(alone)


QFFL = ("--federated.algorithm=qffl", "--federated.options.q=0.5")


@pytest.mark.parametrize("argv", [QFFL, ("--federated.algorithm=tilted",)], ids=["qffl", "tilted"])
def test_it_is_killed_and_goes_on_bit_for_bit(argv: tuple[str, ...], train: Train) -> None:
    argv = (*argv, "--federated.num_rounds=4", "--runtime.checkpoint_every=1", "--server.momentum=0.5")
    argv = (*argv, "--server.optimizer=sgd")
    _, directory = killed_and_resumed(train, 2, *argv)
    assert all(line["largest_user_loss"] > 0 for line in lines(directory)[:4])
    traffic = results(directory)["traffic"]
    assert traffic["up"] == traffic["down"] + 4


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--federated.options.q=-1"], "federated.options.q is '-1': "),
        (["--federated.options.lipschitz=0"], "federated.options.lipschitz is '0': "),
        (
            ["--federated.options.q=0", "--federated.options.lipschitz=3"],
            "federated.options.lipschitz has no effect if federated.options.q is 0",
        ),
        (["--federated.options.tilt=1"], "federated.options.tilt is not an option of qffl, which has q"),
        (["--federated.replacement=true"], "users are trained one by one, and a user that is drawn twice"),
        (["--local.head_rate_factor=2"], "or set federated.options.lipschitz"),
        (["--local.layer_decay=0.5"], "set local.layer_decay to 1, or set federated.options.lipschitz"),
        (
            ["--federated.reweight=fedir"],
            "--federated.reweight has no effect where federated.algorithm is qffl",
        ),
        (["--config=pfl-r-17"], "privacy refuses federated.algorithm = qffl"),
        (
            ["--federated.weighting=users", "--local_privacy.epsilon=4"],
            "local_privacy refuses federated.algo",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(argv: list[str], message: str, refused: Refused) -> None:
    refused(message, QFFL[0], *argv)


def test_a_loss_that_is_no_number_ends_the_run_in_one_line(tmp_path: Path) -> None:
    diverging = merge(TREES["tilted 1"], {"local": {"learning_rate": 1e30}})
    with pytest.raises(
        ValueError,
        match=r"^the loss of a user in round 1 is \S+: the model has diverged, lower local\.learning_rate$",
    ):
        trajectory(run_of(diverging), tmp_path)


def test_options_are_part_of_the_config() -> None:
    assert parse([*QFFL]).config.federated.options == {"q": 0.5, "lipschitz": None}
