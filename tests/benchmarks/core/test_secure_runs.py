"""FedAvg over secure sums, as runs: its equations, lost users, killed and resumed, two workers, refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.core.config.trees import merge
from benchmarks.core.federated import training_data
from pfl_ext.algorithms import secure_aggregation, turbo_aggregate
from pfl_ext.algorithms.finite_field import PRIME, Elements
from pfl_ext.algorithms.secure_aggregation import SecureAggregation, pairwise_sum
from pfl_ext.algorithms.secure_sum import SecureSum, SumLost
from pfl_ext.algorithms.turbo_aggregate import TurboAggregate, circle_sum
from tests.benchmarks.conftest import Refused, Train, killed_and_resumed
from tests.benchmarks.core import quadratics
from tests.benchmarks.core.quadratics import Direct, Users, run_of, trajectory, vector
from tests.benchmarks.run_files import lines, results
from tests.pfl_ext.algorithms.test_secure_sums import Post, exact

NAMES = ("secure_aggregation", "turbo_aggregate")
KINDS: dict[str, type[SecureSum]] = {NAMES[0]: SecureAggregation, NAMES[1]: TurboAggregate}
HALF = 0.5


def tree_of(name: str, **options: Any) -> dict[str, Any]:
    return {"federated": {"algorithm": name, "options": options}}


def watched(name: str, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """A list to which each round adds the places in the cohort of those who are left."""
    seen: list[list[int]] = []
    total = KINDS[name].total

    def noted(self: Any, vectors: Mapping[int, Elements], users: int, number: int) -> Elements:
        seen.append(list(vectors))
        found = total(self, vectors, users, number)
        assert found.tolist() == exact(vectors), "the protocol adds up exactly"
        return found

    monkeypatch.setattr(KINDS[name], "total", noted)
    return seen


def expected(tree: dict[str, Any], left: list[list[int]], clip: float = np.inf) -> Any:
    """``[rounds, P]``: FedAvg over those who are left, in float64, each user's update clipped."""
    federated = {
        key: value for key, value in tree["federated"].items() if key not in ("algorithm", "options")
    }
    run = run_of({**tree, "federated": federated})
    data, direct = training_data(run, Users(), quadratics.SquaredError()), Direct(run)
    x = vector(quadratics.module())
    direct.c, direct.own = np.zeros_like(x), dict.fromkeys(range(len(quadratics.SIZES)), np.zeros_like(x))
    step, seen = quadratics.server(run.config), []
    for number, places in enumerate(left):
        data.set_round(number)
        users = data.cohort(run.config.federated.cohort_size)[places].tolist()
        sizes = [len(data.user_dataset(user)) for user in users]
        weights = sizes if run.config.federated.weighting == "images" else [1] * len(users)
        updates = [direct.user(x, user, data.user_dataset(user))[0] for user in users]
        total = np.sum([w * np.clip(u, -clip, clip) for w, u in zip(weights, updates)], axis=0)
        x = step(x, total / sum(weights))
        seen.append(x)
    return np.stack(seen)


MOMENTUM = {"server": {"momentum": 0.5, "learning_rate": 0.7}, "federated": {"weighting": "users"}}


@pytest.mark.parametrize("engine", ["stock", "fast"])
@pytest.mark.parametrize("drop_out", [0.0, HALF])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_fedavg_of_those_who_are_left(
    name: str, drop_out: float, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = MOMENTUM if engine == "fast" else {}
    tree, left = merge(tree_of(name, drop_out=drop_out), more), watched(name, monkeypatch)
    found = trajectory(run_of(tree, engine), tmp_path)
    assert [len(places) for places in left] == [5 - int(5 * drop_out)] * quadratics.ROUNDS
    assert len({tuple(places) for places in left}) > 1 or not drop_out, "others are lost in each round"
    assert quadratics.distances(found, expected(tree, left)).max() < quadratics.TOLERANCE


@pytest.mark.parametrize("bits", [0, 3, 8])
@pytest.mark.parametrize("name", NAMES)
def test_a_round_is_off_fedavg_by_no_more_than_rounding_says(
    name: str, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U / (2 2^b sum w), and what float32 adds; most of it is there, so that the bound is no empty one."""
    clip = 0.25
    tree = tree_of(name, fraction_bits=bits, drop_out=0.4, clip=clip)
    tree = merge(tree, {"federated": {"num_rounds": 1}})
    left = watched(name, monkeypatch)
    found = trajectory(run_of(tree), tmp_path)[0]
    data = training_data(run_of(tree), Users(), quadratics.SquaredError())
    data.set_round(0)
    weight = sum(len(data.user_dataset(user)) for user in data.cohort(5)[left[0]].tolist())
    exactly = expected(tree, left, clip)[0]
    error, bound = np.abs(found - exactly).max(), len(left[0]) / (2 * 2**bits * weight)
    assert bound / 8 < error < bound + 1e-5 * np.abs(exactly).max()
    assert np.abs(expected(tree, left)[0] - exactly).max() > 0.01, "some numbers were clipped"


@pytest.mark.parametrize("name", NAMES)
def test_it_is_killed_and_goes_on_bit_for_bit(
    name: str, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--federated.options.drop_out=0.5", *GROUPS[name])
    argv = (f"--federated.algorithm={name}", *options, "--server.momentum=0.5", "--server.optimizer=sgd")
    whole, _ = killed_and_resumed(train, 2, *argv)  # masks are other ones, and leave nothing
    assert [(line["users"], line["lost"], line["skipped"]) for line in lines(whole)[:3]] == [(2, 2, 0)] * 3


GROUPS = {NAMES[0]: (), NAMES[1]: ("--federated.options.group_size=4",)}


def test_a_round_whose_sum_is_lost_leaves_the_model_as_it_is(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three of twelve users in four groups are lost at once, and in some rounds two of them share a group."""
    argv = ["--federated.algorithm=turbo_aggregate", "--federated.options.group_size=3"]
    argv += ["--federated.options.lost_of=cohort", "--federated.options.drop_out=0.25"]
    directory = train(*argv, "--federated.cohort_size=12", "--federated.num_rounds=4", "--seed=1")
    seen = lines(directory)
    skipped = [line["skipped"] for line in seen[:4]]
    assert 0 < sum(skipped) < 4
    said = capsys.readouterr().err
    assert said.count(" does not change the model: of a group of 3 users ") == sum(skipped)
    assert "round 0 " in said or not skipped[0]
    for number, is_skipped in enumerate(skipped):
        same = seen[number]["val"] == seen[number + 1]["val"]
        assert same == bool(is_skipped)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_sent_is_counted(name: str, train: Train) -> None:
    directory = train(
        f"--federated.algorithm={name}", "--federated.cohort_size=7", "--federated.num_rounds=1"
    )
    model = json.loads((directory / "results.json").read_text())["trainable_parameters"]
    post, zeros = Post(), {place: np.zeros(model + 1, np.int64) for place in range(7)}
    if name == "secure_aggregation":
        pairwise_sum(zeros, 7, 3, post)
    else:
        circle_sum(zeros, [list(range(7))], post)
    down, up = post.traffic()
    got = [4 * model + down[place] for place in range(7)], [up[place] for place in range(7)]
    found = results(directory)["traffic"]
    assert found == {"down": -(-sum(got[0]) // 7), "up": -(-sum(got[1]) // 7)}


SECURE, TURBO = (f"--federated.algorithm={name}" for name in NAMES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([SECURE, "--federated.options.fraction_bits=30"], "could overflow: set it to at most "),
        ([TURBO, "--federated.options.clip=1e9"], "does not fit below 2^31: lower clip, or set"),
        (
            [SECURE, "--federated.options.colluding=4"],
            "if users drop out, 4 of 4 are left, but with",
        ),
        ([SECURE, "--federated.options.drop_out=0.8"], "if users drop out, 1 of 4 are left, but with"),
        ([SECURE, "--federated.cohort_size=1"], "secure_aggregation hides a user among other users: set"),
        (
            [SECURE, "--federated.options.group_size=3"],
            "group_size is not an option of secure_aggregation, which",
        ),
        (
            [SECURE, "--runtime.reduce=bf16"],
            "runtime.reduce has no effect where federated.algorithm is secure",
        ),
        ([SECURE, "--federated.options.drop_out=1"], "federated.options.drop_out is '1': "),
        ([SECURE, "--federated.options.colluding=0"], "federated.options.colluding is '0': "),
        ([TURBO], "federated.options.group_size is 5, but a cohort has only 4 users: lower it, or raise"),
        (
            [TURBO, *GROUPS["turbo_aggregate"], "--federated.options.colluding=2"],
            (
                "a group of 4 users hides their updates from the server and up to 1 colluding users, "
                "not from 2: set federated.options.group_size to 5 or more"
            ),
        ),
        (
            [TURBO, "--federated.options.group_size=2"],
            (
                "a group of 2 users hides their updates from the server and up to 0 colluding users, "
                "not from 1"
            ),
        ),
        ([TURBO, *GROUPS["turbo_aggregate"], "--federated.options.drop_out=0.6"], "set it to at most 0.5"),
        (
            [TURBO, *GROUPS["turbo_aggregate"], "--federated.options.lost_of=cohort"],
            "federated.options.lost_of has no effect if federated.options.drop_out is 0",
        ),
        ([TURBO, "--federated.options.lost_of=all"], "federated.options.lost_of is 'all': "),
        (
            [TURBO, "--federated.replacement=true"],
            "must not be drawn twice in a cohort: set federated.replacement",
        ),
        ([SECURE, "--config=pfl-r-17"], "privacy refuses federated.algorithm = secure_aggregation ("),
        (
            [TURBO, "--federated.weighting=users", "--local_privacy.epsilon=4"],
            "local_privacy refuses federated.algorithm = turbo_aggregate (",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(words: list[str], message: str, refused: Refused) -> None:
    refused(message, *words)


def test_an_update_that_is_not_finite_is_one_line(refused: Refused) -> None:
    refused("a user's update has numbers that are not finite", SECURE, "--local.learning_rate=1e30")


@pytest.mark.parametrize("name", NAMES)
def test_masks_come_from_no_seed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sums of the same vectors send other messages."""
    whole = {place: np.full(50, PRIME - 1) for place in range(4)}
    posts = Post(), Post()
    for post in posts:
        if name == "secure_aggregation":
            pairwise_sum(whole, 4, 1, post)
        else:
            circle_sum(whole, [[0, 1, 2, 3]], post)
    kind = {"secure_aggregation": "masked update", "turbo_aggregate": "parts"}[name]
    first, second = ([content for *_, content in post.all(kind)] for post in posts)
    assert all((a != b).any() for a, b in zip(first, second))
    for module in (secure_aggregation, turbo_aggregate):
        assert not hasattr(module, "torch"), "no generator of torch's is in reach"
    assert issubclass(SumLost, Exception)
