"""Hierarchical FedAvg, DSGD and push-sum as runs, held to their equations in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pfl_ext as pfl_ext  # before pfl, see there

# isort: split
import numpy as np
import pytest

from benchmarks.core.config.benchmark import Run
from benchmarks.core.config.trees import Tree, merge
from benchmarks.core.federated import training_data
from dataset.arrays import FloatArray
from pfl_ext.algorithms.dsgd import DSGD, DSGDOptions
from pfl_ext.algorithms.hierarchical import groups_of
from pfl_ext.algorithms.pushsum import PushSum, PushSumOptions
from tests.benchmarks.conftest import Refused, Train, killed_and_resumed
from tests.benchmarks.core import quadratics
from tests.benchmarks.core.quadratics import SIZES, USERS, Array, Direct, run_of, server, trajectory, vector
from tests.benchmarks.run_files import last_checkpoint, lines, results

N = len(SIZES)
ENGINES = ["stock", "fast"]


def engines(names: Iterable[str]) -> list[tuple[str, str]]:
    """Every case on the engine and one by pfl's loop, as who is averaged with whom is no matter of either."""
    every = list(names)
    return [*((name, "fast") for name in every), (every[0], "stock")]


def tree_of(name: str, **options: Any) -> Tree:
    return {"federated": {"algorithm": name, "options": options}}


def direct_of(tree: Tree) -> Direct:
    """FedAvg's users, by their equations."""
    start = vector(quadratics.module())
    direct = Direct(run_of(tree))
    direct.c, direct.own = np.zeros_like(start), dict.fromkeys(range(N), np.zeros_like(start))
    return direct


def at_rate_of(direct: Direct, run: Any, number: int) -> None:
    """Have users step at the learning rate of a round."""
    config = run.config
    local = replace(config.local, learning_rate=config.local_rate(number), schedule="constant")
    direct.run = Run(replace(config, local=local), run.runtime)


def decentralised_by_equations(tree: Tree, matrices: list[FloatArray]) -> Array:
    """``[rounds, P]``: the mean model after each round."""
    direct = direct_of(tree)
    data = training_data(direct.run, quadratics.Users(), quadratics.SquaredError())
    x, omega, seen = np.tile(vector(quadratics.module()), (N, 1)), np.ones(N), []
    for number, matrix in enumerate(matrices):
        data.set_round(number)
        z = x / omega[:, None]
        moved = [x[u] + direct.user(z[u], u, data.user_dataset(u))[0] for u in range(N)]
        x, omega = matrix @ np.stack(moved), matrix @ omega
        seen.append(x.mean(0))
    return np.stack(seen)


def around(*places: int) -> FloatArray:
    """Each of the users and those so many places before it count alike."""
    return np.asarray(sum(np.roll(np.eye(N), place, 0) for place in (0, *places)) / (1 + len(places)))


STAR = np.eye(N) * 0.8  # a fifth goes to the centre, which has 4 neighbours
STAR[0], STAR[:, 0] = 0.2, 0.2
CONSTANT = {
    "ring": (tree_of("dsgd"), around(1, -1)),
    "star": (tree_of("dsgd", graph="star"), STAR),
    "complete": (tree_of("dsgd", graph="complete"), around(1, 2, 3, 4)),
    "push around": (tree_of("pushsum", graph="ring"), around(1)),
    "push": (tree_of("pushsum"), around(1, 2, 4)),
}


@pytest.mark.parametrize(("name", "engine"), engines(CONSTANT))
def test_users_train_and_mix_as_the_equations_say(name: str, engine: str, tmp_path: Path) -> None:
    tree, matrix = CONSTANT[name]
    found = trajectory(run_of(tree, engine), tmp_path)
    expected = decentralised_by_equations(tree, [matrix] * len(found))
    assert quadratics.distances(found, expected).max() < quadratics.TOLERANCE


def test_push_sum_trains_from_x_over_omega_where_users_have_unequal_parts(tmp_path: Path) -> None:
    tree = tree_of("pushsum", graph="random", out_degree=2, time_varying=True)
    options = PushSumOptions(graph="random", out_degree=2, time_varying=True)
    matrices = [PushSum.matrix(options, N, 0, number) for number in range(quadratics.ROUNDS)]
    found = trajectory(run_of(tree, "fast"), tmp_path)
    expected = decentralised_by_equations(tree, matrices)
    assert abs(matrices[1] @ matrices[0] @ np.ones(N) - 1).max() > 0.1
    assert quadratics.distances(found, expected).max() < quadratics.TOLERANCE


@pytest.mark.parametrize("engine", ENGINES)
def test_on_a_complete_graph_dsgd_is_fedavg_of_users_who_weigh_alike(engine: str, tmp_path: Path) -> None:
    dsgd = trajectory(run_of(tree_of("dsgd", graph="complete"), engine), tmp_path / "dsgd")
    fedavg = trajectory(run_of(USERS, engine), tmp_path / "fedavg")
    assert quadratics.distances(dsgd, fedavg).max() < quadratics.TOLERANCE


def test_with_one_step_on_all_images_it_is_gradient_descent_on_the_mean_loss(tmp_path: Path) -> None:
    local = {"local": {"batch_size": 64, "num_epochs": 1}}
    tree = merge(tree_of("dsgd", graph="complete"), local)
    found, run = trajectory(run_of(tree, "fast"), tmp_path), run_of(tree)
    data, x = training_data(run, quadratics.Users(), quadratics.SquaredError()), vector(quadratics.module())
    for number, ours in enumerate(found):
        data.set_round(number)
        batches = [quadratics.Batch.of(*next(iter(data.user_dataset(u).iter(64)))) for u in range(N)]
        x = x - run.config.local.learning_rate * np.mean([batch.gradient(x) for batch in batches], axis=0)
        assert np.linalg.norm(ours - x) <= quadratics.TOLERANCE * np.linalg.norm(x)


def hierarchical_by_equations(tree: Tree) -> Array:
    """``[rounds, P]``."""
    run, direct = run_of(tree), direct_of(tree)
    options, step = tree["federated"]["options"], server(run.config)
    data = training_data(run, quadratics.Users(), quadratics.SquaredError())
    group, x, seen = groups_of(N, options["groups"], run.config.seed), vector(quadratics.module()), []
    for number in range(run.config.federated.num_rounds):
        at_rate_of(direct, run, number)
        cohort, inner_rounds = data.cohort(run.config.federated.cohort_size, number), options["inner_rounds"]
        total, moved = 0.0, np.zeros_like(x)
        for members in ([u for u in cohort.tolist() if group[u] == g] for g in range(options["groups"])):
            y = x
            weights = [
                float(SIZES[u]) if run.config.federated.weighting == "images" else 1.0 for u in members
            ]
            for inner in range(inner_rounds):
                data.set_round(number * inner_rounds + inner)
                updates = [direct.user(y, u, data.user_dataset(u))[0] for u in members]
                if members:
                    y = y + np.average(updates, axis=0, weights=weights)
            total, moved = total + sum(weights), moved + sum(weights) * (y - x)
        x = step(x, moved / total)
        seen.append(x)
    return np.stack(seen)


INNER = tree_of("hierarchical", groups=2, inner_rounds=3)
GROUPED = {
    "by images": INNER,
    "by users": merge(INNER, USERS),
    "some users": merge(INNER, {"federated": {"cohort_size": 2}}),
    "falling rate": merge(INNER, {"local": {"schedule": "exponential", "schedule_factor": 0.8}}),
    "adam": merge(INNER, {"server": {"optimizer": "adam", "learning_rate": 0.05, "epsilon": 0.05}}),
}


@pytest.mark.parametrize(("name", "engine"), engines(GROUPED))
def test_groups_average_as_the_equations_say(name: str, engine: str, tmp_path: Path) -> None:
    found = trajectory(run_of(GROUPED[name], engine), tmp_path)
    expected = hierarchical_by_equations(GROUPED[name])
    # three times the rounds that the tolerance is for
    assert quadratics.distances(found, expected).max() < 3 * quadratics.TOLERANCE


@pytest.mark.parametrize(
    "more", [{}, USERS, {"federated": {"cohort_size": 3}}, {"server": {"momentum": 0.5}}]
)
def test_with_one_inner_round_it_is_fedavg(more: Tree, tmp_path: Path) -> None:
    tree = merge(tree_of("hierarchical", groups=3, inner_rounds=1), more)
    found = trajectory(run_of(tree, "fast"), tmp_path / "groups")
    fedavg = trajectory(run_of(more, "fast"), tmp_path / "fedavg")
    assert quadratics.distances(found, fedavg).max() < quadratics.TOLERANCE


def test_groups_are_of_nearly_equal_size_and_functions_of_the_seed() -> None:
    group = groups_of(11, 3, 5)
    assert sorted(np.bincount(group)) == [3, 4, 4]
    assert (group == groups_of(11, 3, 5)).all()
    assert (group != groups_of(11, 3, 6)).any()


WORDS = {
    "hierarchical": ("--federated.options.groups=3", "--federated.options.inner_rounds=2"),
    "dsgd": ("--federated.options.graph=erdos_renyi", "--federated.options.time_varying=true"),
    "pushsum": ("--federated.options.graph=random", "--federated.options.time_varying=true"),
}
SGD = ("--server.optimizer=adam", "--server.learning_rate=0.01")


def words(name: str) -> list[str]:
    of_server = SGD if name == "hierarchical" else ()
    return [f"--federated.algorithm={name}", *WORDS[name], *of_server]


@pytest.mark.parametrize("name", WORDS)
def test_it_is_killed_and_goes_on_bit_for_bit(name: str, train: Train) -> None:
    argv = (*words(name), "--federated.num_rounds=4", "--runtime.checkpoint_every=1")
    _, directory = killed_and_resumed(train, 2, *argv)
    kept = last_checkpoint(directory)
    traffic = results(directory)["traffic"]
    if name == "hierarchical":
        size = sum(w.numel() * 4 for key, w in kept.items() if key.startswith("model/"))
        assert traffic == {"down": 2 * size, "up": 2 * size}
        assert all(line["trainings"] == 2 * line["users"] for line in lines(directory)[:-1])
        once = lines(train("--federated.num_rounds=1", name="once"))[0]
        assert lines(directory)[0]["images"] == 2 * once["images"]
        return
    x = {key: w for key, w in kept.items() if key.startswith("x/")}
    size, n = sum(w[0].numel() * 4 for w in x.values()), len(kept["omega"])
    assert any(bool((w[0] != w[1]).any()) for w in x.values())
    assert math.isclose(float(kept["omega"].sum()), n)
    assert all(line["consensus_distance"] > 0 for line in lines(directory)[:-1])
    if name == "pushsum":
        assert bool((kept["omega"] != 1).any())
        assert traffic == {"down": 2 * (size + 8), "up": 2 * (size + 8)}
    else:
        graphs = [DSGD.matrix(DSGDOptions("erdos_renyi", None, True), n, 0, t) for t in range(4)]
        links = sum(np.count_nonzero(graph) - n for graph in graphs)
        assert traffic == {"down": round(links * size / (4 * n)), "up": round(links * size / (4 * n))}


def test_a_network_is_of_some_users_where_a_cohort_is(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = train(*words("dsgd"), "--federated.num_rounds=3")
    assert "DSGD: the network has 4 users; 8 other users do not take part" in capsys.readouterr().err
    assert len({line["images"] for line in lines(directory)[:-1]}) == 1, "the same users in each round"


COHORT = "--federated.cohort_size"


@pytest.mark.parametrize(
    "argv, message",
    [
        (["hierarchical", "--federated.options.groups=13"], "federated.options.groups is 13, but there are"),
        (["hierarchical", "--federated.options.groups=0"], "federated.options.groups is '0': "),
        (["hierarchical", "--federated.options.inner_rounds=x"], "federated.options.inner_rounds is 'x': "),
        (["dsgd", "--federated.options.graph=square"], "federated.options.graph is 'square': "),
        (["dsgd", "--federated.options.probability=2"], "federated.options.probability is '2': "),
        (["dsgd", "--federated.options.probability=0.5"], "probability has no effect on the graph ring: "),
        (["dsgd", "--federated.options.graph=torus", f"{COHORT}=7"], "7 users cannot be arranged in the"),
        (
            ["dsgd", "--federated.options.graph=complete", "--federated.options.time_varying=true"],
            "a complete graph is the same in every round",
        ),
        (["dsgd", "--federated.weighting=users"], "--federated.weighting has no effect where federated."),
        (["dsgd", "--server.momentum=0.5"], "--server.momentum has no effect where federated.algorithm is d"),
        (
            ["pushsum", "--federated.options.out_degree=2"],
            "out_degree has no effect on the graph exponential",
        ),
        (["pushsum", "--federated.options.graph=random", "--federated.options.out_degree=4"], "lower it"),
        (
            [
                "pushsum",
                "--federated.options.graph=one_peer_exponential",
                "--federated.options.time_varying=1",
            ],
            "one_peer_exponential already changes in every round: set",
        ),
        (["dsgd", "--config=pfl-r-17"], "privacy refuses federated.algorithm = dsgd"),
        (["pushsum", "--config=pfl-r-17"], "privacy refuses federated.algorithm = pushsum"),
        (["hierarchical", "--config=pfl-r-17"], "privacy refuses federated.algorithm = hierarchical"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(argv: list[str], message: str, refused: Refused) -> None:
    refused(message, f"--federated.algorithm={argv[0]}", *argv[1:])


def test_the_graph_that_is_checked_is_the_runs(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that cannot be drawn from the run's seed is refused before anything is written."""
    real, seeds = DSGD.matrix, set()

    def matrix(options: DSGDOptions, n: int, seed: int, number: int) -> FloatArray:
        seeds.add(seed)
        return real(options, n, seed, number)

    monkeypatch.setattr(DSGD, "matrix", staticmethod(matrix))
    train(*words("dsgd"), "--federated.options.graph=erdos_renyi", "--seed=3", "--federated.num_rounds=1")
    assert seeds == {3}


def test_models_that_have_no_room_are_refused(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfl_ext.models.memory.physical_memory", lambda: 100_000)
    refused("DSGD keeps a model for each of 4 users, which needs up to 0.0 GB of memory", *words("dsgd"))


def test_a_network_larger_than_the_population_is_refused_where_cohorts_may_be() -> None:
    """As where they are drawn with replacement."""
    setup: Any = SimpleNamespace(
        options=DSGDOptions(), cohort_size=13, users=SimpleNamespace(num_users=12), module=quadratics.module()
    )
    with pytest.raises(ValueError, match="but DSGD needs different users and there are only 12: set it to"):
        DSGD.check(setup)
